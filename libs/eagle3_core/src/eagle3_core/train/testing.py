"""A job whose hidden states are random, on disk and whole, ready for the train stage: for tests and measurements.

states = RandomStates(folder, ["0001111"] * 20, epochs=2)       # masks, one sample each; settings of `training`
commit = train(states.context("train"))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3_core.jobs.wire import ManifestRef
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import UnitWriter
from eagle3_core.shards.writer import ShardWriter
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.generate import commit_states
from eagle3_core.testing import stage_context, tiny_job
from eagle3_core.verifier.base import States
from eagle3_core.verifier.contract import CaptureContract
from eagle3_core.verifier.identity import inspect

VOCAB, HIDDEN = 320, 32


class RandomStates:
    """Everything that the train stage of one job reads, in `folder`."""

    def __init__(self, folder: Path, masks: list[str], **training: Any) -> None:
        """`masks` are strings of 0 and 1; `training` are fields of the job's section of that name."""
        folder.mkdir(exist_ok=True)
        self.folder, self.store = folder, LocalStore(folder / "store")
        self.document = tiny_job(folder)
        self.document["training"] |= {"epochs": 2, "batch_tokens": 24, "checkpoint_every_steps": 2, **training}
        self.contract = contract_of(folder / "verifier", HIDDEN, VOCAB)
        self.inputs: dict[Any, list[ManifestRef]] = {"extract": [self._states(masks)], "vocab": [self._vocab()]}
        self.results: dict[Any, dict[str, Any]] = {
            "prepare": {"tasks": {"words": 3, "numbers": 1}},
            "vocab": {
                "draft_vocab_size": 64,
                "requested": 64,
                "clamped": False,
                "coverage": 0.9,
                "coverage_on": "held_out",
            },
        }

    def writer(self, stage: Any) -> UnitWriter:
        """Where a unit of `stage` writes."""
        return UnitWriter(self.store, tenant="tenant", job_id="job", stage=stage, unit=(0, 0, 1), unit_key="k", fence=1)

    def context(self, stage: Any) -> StageContext:
        """One attempt at `stage`."""
        return stage_context(
            self.folder, stage, self.document, inputs=self.inputs, results=self.results, store=self.store,
            sources={"verifier": self.contract.verifier},
        )  # fmt: skip

    def _states(self, masks: list[str]) -> ManifestRef:
        generator = torch.Generator().manual_seed(0)
        folder = self.folder / "shards"
        folder.mkdir()
        shards = ShardWriter(folder, self.contract, codec="raw", shard_bytes=1 << 20)
        for i, mask in enumerate(masks):
            ids = torch.randint(0, VOCAB, (len(mask),), generator=generator).tolist()
            aux = torch.randn(len(mask), 3 * HIDDEN, generator=generator)
            final = torch.randn(len(mask), HIDDEN, generator=generator)
            shards.add(f"s{i}", "t", ids, [int(c) for c in mask], States(aux, final).stored())
        ctx = stage_context(self.folder, "extract", self.document, store=self.store)
        return commit_states(ctx, shards, "e" * 64, 0.0).manifest

    def _vocab(self) -> ManifestRef:
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[::5] = True
        save_file({"d2t": t2d.nonzero().flatten() - torch.arange(64), "t2d": t2d}, self.folder / "vocab.safetensors")
        writer = self.writer("vocab")
        writer.add_file("vocab.safetensors", self.folder / "vocab.safetensors")
        return writer.commit({})


def contract_of(verifier: Path, hidden: int, vocab: int) -> CaptureContract:
    """A contract under which states of the checkpoint in `verifier` could have been captured."""
    identity = inspect(verifier)
    return CaptureContract(
        verifier=identity.digest, verifier_name="verifier", revision="local", config_digest=identity.config_digest,
        tokenizer_digest=identity.tokenizer_digest, chat_template_digest=identity.chat_template_digest,
        hidden_size=hidden, num_layers=8, vocab_size=vocab, aux_layers=(2, 4, 5), dtype="float32",
        stored_dtype="bfloat16", kv_cache_dtype="float32", attention="sdpa", engine="transformers",
        engine_version="5", capture_pass="decode",  # noqa: S106
    )  # fmt: skip
