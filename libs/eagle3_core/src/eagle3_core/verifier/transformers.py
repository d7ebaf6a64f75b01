"""The verifier on Hugging Face transformers: any causal language model, run over our own cache and attention.

Loads a local checkpoint and nothing else (safetensors only, no remote code), finds where states are captured, and
proves on a few tokens that it captures what the contract says and computes what the model's own attention computes.

Shapes: B rows, n tokens a row, T tokens of one sequence, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from eagle3_core.jobs.spec import VerifierSpec
from eagle3_core.verifier.attention import NAME
from eagle3_core.verifier.base import Captured, Decoding, Generated, Progressed, SelfCheckFailed, contract_of_run
from eagle3_core.verifier.cache import Placement, SlotCache, placed
from eagle3_core.verifier.contract import CaptureContract
from eagle3_core.verifier.device import pick_device
from eagle3_core.verifier.folder import UnsupportedVerifier, VerifierConfig, VerifierFault, number_in, refusal
from eagle3_core.verifier.generation import Pass, generate
from eagle3_core.verifier.identity import Identity, inspect
from eagle3_core.verifier.kinds import KNOWN_LAYER_TYPES
from eagle3_core.verifier.layers import resolve_layers
from eagle3_core.verifier.probe import Probe, find_parts, prove_norm, require_numbers

CHECK_TOKENS = 12
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest relative difference of the final states (Frobenius) between our attention and the model's own."""


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal language model in `folder`.

    Raises VerifierConfig when transformers takes no such config, UnsupportedVerifier when weights are missing or it is no such
    model. What the folder says of sampling is not read: answers are greedy, and their ends come from the identity.
    """
    transformers.utils.logging.disable_progress_bar()  # a worker's log is no terminal
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with _blaming(VerifierConfig, folder / "config.json", "repair that field, or download the file again"):
        config = AutoConfig.from_pretrained(folder, **options)
    config.return_dict = True  # passes are read by the names of their parts
    with _blaming(UnsupportedVerifier, folder, "point verifier.model at the folder of a Hugging Face language model"):
        kind: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
        model, report = kind.from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, attn_implementation=NAME,
            output_loading_info=True, generation_config=transformers.GenerationConfig(), **options,
        )  # fmt: skip
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedVerifier(
            f"the weights in {folder} lack {len(missing)} tensors, first {missing[0]}",
            remedy="download the checkpoint again; a random tensor would make every state worthless",
            pointer="/verifier/model",
        )
    if spare := sorted(name for name in report["unexpected_keys"] if ".layers." in name):
        raise UnsupportedVerifier(
            f"the weights in {folder} hold {len(spare)} layer tensors that its config has no place for, first {spare[0]}",
            remedy="put the config.json and the weights of one model together: a model cut short answers, but worthlessly",
            pointer="/verifier/model",
        )
    return model.eval().requires_grad_(False).to(device)


@contextmanager
def _blaming(fault: type[VerifierFault], what: Path, remedy: str) -> Generator[None]:
    """Raise `fault` for whatever the library raises of `what`: any part of it may stumble, and each does in its own way."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MemoryError) or "memory" in str(error):
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
        raise refusal(fault, f"transformers {transformers.__version__} cannot load {what}: {said}", remedy) from error


class TransformersVerifier:
    """A loaded verifier that generates, captures, and runs single passes for the chain decoder."""

    keeps_states = True

    def __init__(
        self,
        folder: Path,
        spec: VerifierSpec,
        aux_layers: tuple[int, ...] | None = None,
        identity: Identity | None = None,
    ) -> None:
        """Load and check. Raises UnsupportedVerifier, VerifierWeights, StatesNotFinite, SelfCheckFailed, LayerChoice."""
        self.identity = identity or inspect(folder)
        self.revision = spec.revision
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.device = torch.device(pick_device(spec.device))
        self.aux_layers = resolve_layers(aux_layers, self.identity.num_layers)
        self.model = load_model(folder, self.dtype, self.device)
        self._refuse_unknown_layers()
        self.parts = find_parts(self.model, self.identity.num_layers, self.identity.hidden_size)
        prove_norm(self.parts, number_in(self.identity.text_config, "rms_norm_eps", 1e-6))
        self.probe = Probe(self.parts, self.aux_layers)
        self.self_check()

    def _refuse_unknown_layers(self) -> None:
        kinds = set(getattr(self.model.config.get_text_config(), "layer_types", None) or ())
        if odd := sorted(kinds - KNOWN_LAYER_TYPES):
            raise UnsupportedVerifier(
                f"the verifier has layers of type {', '.join(odd)}; this engine computes {', '.join(sorted(KNOWN_LAYER_TYPES))}",
                remedy="use a verifier with softmax attention in every layer",
                pointer="/verifier/model",
            )

    def contract(self, capture_pass: Literal["decode", "prefill"]) -> CaptureContract:
        """How this engine captures in a pass of that kind."""
        return contract_of_run(
            self.identity,
            revision=self.revision,
            aux_layers=self.aux_layers,
            dtype=str(self.dtype).removeprefix("torch."),
            kv_cache_dtype=str(self.dtype).removeprefix("torch."),
            attention=NAME,
            engine="transformers",
            engine_version=transformers.__version__,
            capture_pass=capture_pass,
        )

    def cache(self, rows: int, capacity: int) -> SlotCache:
        """An empty cache for `rows` sequences of `capacity` tokens; it grows when they become longer."""
        return SlotCache(self.identity.num_layers, rows, capacity)

    @torch.no_grad()
    def forward(
        self,
        ids_Rn: Tensor,
        slots_Rn: Tensor,
        cache: SlotCache | None,
        *,
        rows_R: Tensor | None = None,
        last_R: Tensor | None = None,
        states: bool = False,
    ) -> Pass:
        """Run tokens `ids_Rn` (int64) at slots = positions `slots_Rn`; keys and values go to `cache`.

        Logits: [R, V] of token `last_R` of each row (never the rest: prompts are long), or [R, n, V] of every token.
        With `states`, those of all tokens [R, n, ...] in the verifier's dtype.
        """
        placement = Placement.of(slots_Rn, rows_R)
        if cache is not None:
            cache.reserve(placement.length)
        self.probe.on = states
        with placed(placement):
            normed = self.parts.decoder(
                input_ids=ids_Rn, position_ids=slots_Rn, past_key_values=cache, use_cache=cache is not None
            ).last_hidden_state
        if last_R is not None:
            normed = normed[torch.arange(len(last_R), device=normed.device), last_R]
        return Pass(self.parts.head(normed), self.probe.take() if states else None)

    def generate(self, prompts: Sequence[Sequence[int]], how: Decoding, on_progress: Progressed) -> Iterator[Generated]:
        """Greedy answers, each yielded when it is finished; states in `STORED_DTYPE`, in main memory."""
        return generate(self, prompts, how, on_progress)

    def capture(
        self, sequences: Sequence[Sequence[int]], *, batch_tokens: int, on_progress: Progressed
    ) -> Iterator[Captured]:
        """States of given sequences, prefilled in batches of at most `batch_tokens` padded tokens (or one sequence)."""
        order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
        done = tokens = 0
        while done < len(order):
            width = len(sequences[order[done]])
            batch = order[done : done + max(1, batch_tokens // width)]
            rows = [list(sequences[i]) for i in batch]
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.device)
            slots = torch.arange(width, device=self.device).expand(len(rows), -1)
            out = self.forward(ids, slots, None, last_R=torch.zeros_like(ids[:, 0]), states=True)
            assert out.states is not None
            states = out.states.stored()
            for r, index in enumerate(batch):
                yield Captured(index, states.row(r, len(rows[r])))
            done, tokens = done + len(batch), tokens + sum(map(len, rows))
            on_progress(done=done, tokens=tokens)

    def self_check(self) -> None:
        """Prove, on a few tokens, what is captured and that our cache and attention compute what the model's own do.

        Raises SelfCheckFailed, StatesNotFinite.
        """
        ids = (torch.arange(CHECK_TOKENS, device=self.device) * 7919 % self.identity.vocab_size)[None]
        slots = torch.arange(CHECK_TOKENS, device=self.device)[None]
        self.probe.on = True
        with torch.no_grad(), placed(Placement.of(slots)):
            told = self.model(input_ids=ids, position_ids=slots, use_cache=False, output_hidden_states=True)
            self.probe.prove(told.hidden_states, told.logits)
            self.model.set_attn_implementation("eager")
            self.parts.decoder(input_ids=ids, position_ids=slots, use_cache=False)
            self.model.set_attn_implementation(NAME)
            want = self.probe.take().final
        cache, half = self.cache(2, 4), CHECK_TOKENS // 2
        row = torch.ones(1, dtype=torch.int64, device=self.device)
        passes = [
            self.forward(ids[:, part], slots[:, part], cache, rows_R=row, states=True).states
            for part in (slice(0, half), slice(half, CHECK_TOKENS - 1), slice(CHECK_TOKENS - 1, CHECK_TOKENS))
        ]
        have = torch.cat([states.final for states in passes if states is not None], 1)
        require_numbers("the input of the final norm", want)
        require_numbers("the input of the final norm over our cache", have)
        if not (size := want.float().norm()):
            raise SelfCheckFailed(
                f"every state that {self.identity.name} computes is zero, as of weights that were never loaded",
                remedy="point verifier.model at a checkpoint with trained weights",
            )
        off = float((have - want).float().norm() / size)
        if not off <= CHECK_TOLERANCE[self.dtype]:
            raise SelfCheckFailed(
                f"states over our cache differ from the model's own attention by {off:.2g} (allowed {CHECK_TOLERANCE[self.dtype]})",
                remedy="this model's attention does something the transformers backend does not; report its model_type",
            )
