"""SpecForge's training step, where that package is installed: its own model, teacher, loss and optimizer, as it ships.

It is not among our dependencies (its wheel pins another torch); `aerie bench train` measures it where it can be
imported, on a GPU. Its objective differs (0.8^k step weights, mean over all tokens, full-vocabulary teacher), so its
loss and gradients are not compared with ours, only its time.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_core.bench.cases import Work
from eagle3_core.drafter.rope import llama_config


def installed() -> bool:
    """Whether it can be measured here."""
    return importlib.util.find_spec("specforge") is not None


class SpecForge:
    """One step of SpecForge 0.3's EAGLE-3 strategy on one GPU, not wrapped in FSDP (which favours it)."""

    name = "specforge (flex)"

    def __init__(self, work: Work, device: torch.device, *, compact: bool) -> None:
        """`compact`: with its streamed teacher."""
        self.name = f"specforge (flex{', compact teacher' if compact else ''})"
        strategies = importlib.import_module("specforge.training.strategies.base")
        model, draft = _model(work, device)
        self._backend = _backend(model, draft)
        self._strategy = strategies.Eagle3TrainStrategy(
            model, target_head=_target_head(work, device), compact_teacher=compact
        )
        self._batch = _batch(work, device)

    def step(self) -> Tensor:
        """Forward, backward, optimizer."""
        out = self._strategy.forward_loss(self._batch)
        self._backend.backward(out.loss)
        self._backend.step()
        return out.loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """None that could be compared."""
        return {}


def _model(work: Work, device: torch.device) -> tuple[Any, Any]:
    eagle3 = importlib.import_module("specforge.algorithms.eagle3.model")
    llama = importlib.import_module("specforge.modeling.draft.llama3_eagle")
    config = llama_config(work.drafter.config)
    config.draft_vocab_size, config.pretraining_tp = work.case.draft_vocab, 1
    with torch.device(device):
        draft = llama.LlamaForCausalLMEagle3(config, attention_backend="flex_attention")
    draft = draft.to(device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(work.drafter.embedding_VH)
        draft.lm_head.weight.copy_(work.drafter.weights["lm_head.weight"])
        draft.t2d.copy_(work.drafter.t2d_V)
        draft.d2t.copy_(work.drafter.d2t_Vd)
    draft.vocab_mapping_loaded = True
    draft.freeze_embedding()
    model = eagle3.OnlineEagle3Model(draft_model=draft, length=work.case.steps, attention_backend="flex_attention")
    model = model.to(device=device, dtype=torch.bfloat16)
    model.train()
    return model, draft


def _target_head(work: Work, device: torch.device) -> Any:
    """The verifier's head over the whole vocabulary; rows outside the draft vocabulary are small, as on real text."""
    target = importlib.import_module("specforge.modeling.target.target_head")
    case = work.case
    described = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": case.hidden, "vocab_size": case.vocab,
        "num_hidden_layers": 32, "num_attention_heads": case.heads, "num_key_value_heads": case.kv_heads,
        "intermediate_size": case.inner,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, torch.device(device):
        (Path(folder) / "config.json").write_text(json.dumps(described))
        head = target.TargetHead(folder)
    head = head.to(device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        head.fc.weight.normal_(0.0, 0.005)
        head.fc.weight[work.drafter.t2d_V] = work.teacher.head_VdH.to(device, torch.bfloat16)
    head.freeze_weights()
    return head.eval()


def _backend(model: Any, draft: Any) -> Any:
    backends = importlib.import_module("specforge.training.backend")
    optimizers = importlib.import_module("specforge.optimizer")
    backend = backends.FSDPTrainingBackend(
        backends.ParallelConfig(),
        optimizer_factory=lambda m: optimizers.BF16Optimizer(
            m, lr=1e-4, max_grad_norm=0.5, total_steps=10000, warmup_ratio=0.0, lr_scheduler="constant"
        ),
    )
    backend.prepare_model(model, wrap=False, optimizer_target=draft)
    return backend


def _batch(work: Work, device: torch.device) -> Any:
    contracts = importlib.import_module("specforge.runtime.contracts")
    (sample,) = work.samples.samples
    length = len(sample.input_ids)
    final = torch.zeros(1, length, work.case.hidden, dtype=sample.final.dtype, device=device)
    final[0, sample.final_index.long().to(device)] = sample.final
    return contracts.TrainBatch(
        sample_ids=["0"], strategy="eagle3", metadata={"target_repr": "hidden_state"},
        tensors={
            "input_ids": sample.input_ids.long()[None], "loss_mask": sample.loss_mask.long().to(device)[None],
            "hidden_state": sample.aux[None], "target": final,
            "attention_mask": torch.ones(1, length, dtype=torch.long, device=device),
        },
    )  # fmt: skip
