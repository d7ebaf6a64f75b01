"""A job whose drafter is trained in seconds, and served by the real engine as a test asks.

A small random verifier repeats itself, so a drafter learns something of it at once, and there is something to accept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drafters import lean_on_its_layers

from eagle3_core.data.tokensets import TokenSet
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.verifier_parts import VerifierParts
from eagle3_core.jobs.graph import STAGES
from eagle3_core.jobs.spec import JobSpec, parse_job
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import Manifest, fetch_file, read_manifest
from eagle3_core.shards.manifest import contract_of
from eagle3_core.stages.chain import Chain, Outcome
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.generate import ANSWERS_FILE
from eagle3_core.stages.trained import trained_drafter
from eagle3_core.testing import tiny_job

PROMPTS, IN_FLIGHT = 8, [1, 4]


def job(folder: Path, prompts: int) -> dict[str, Any]:
    """A job whose drafter is trained in seconds and accepts something."""
    document = tiny_job(folder, train=64, held_out=prompts)
    document["data"] |= {"max_seq_len": 128, "unit_samples": 64}
    document["data"]["regenerate"] |= {"max_new_tokens": 40, "batch_size": 32}
    document["training"] |= {"epochs": 4, "lr": 5e-3, "batch_tokens": 512}
    document["vocab"]["draft_vocab_size"] = None
    document["evaluation"] |= {"max_new_tokens": 40, "unit_prompts": prompts, "batch_size": prompts}
    document["evaluation"]["speed_in_flight"] = IN_FLIGHT
    return document


class House:
    """One job whose drafter is trained once, and evaluated as a test asks."""

    def __init__(self, folder: Path, *, prompts: int = PROMPTS, dtype: str = "float32") -> None:
        self.folder, self.document = folder, job(folder, prompts)
        self.document["verifier"]["dtype"] = dtype
        self.store = LocalStore(folder / "store")
        self.trained = self.chain(parse_job(self.document))
        self.trained.run("train")

    def chain(self, spec: JobSpec) -> Chain:
        """The stages of `spec`, over what was committed before."""
        return Chain(spec, self.store, self.folder / "chain", (self.folder,))

    def served(self, **evaluation: Any) -> Outcome:
        """Evaluate's outcome through SGLang, with the stages before it as they are."""
        self.document["verifier"]["backend"] = "sglang"
        self.document["evaluation"] |= evaluation
        self.chain_served = self.chain(parse_job(self.document))
        for name in STAGES:
            if name not in ("canary", "evaluate", "package"):
                self.chain_served.seed(name, self.trained.run(name).outputs)
        return self.chain_served.run("evaluate")

    def leaning(self, ctx: StageContext, trained: Manifest, parts: VerifierParts) -> Drafter:
        """What was trained, made to lean on its own layers."""
        drafter = trained_drafter(ctx, trained, parts)
        answers = read_manifest(self.store, self.trained.run("generate").outputs[0].manifest).file(ANSWERS_FILE)
        texts = TokenSet.load(fetch_file(self.store, answers, self.folder))
        verifier = Path(self.document["verifier"]["model"])
        lean_on_its_layers(
            drafter, contract_of(trained).aux_layers, verifier, [texts.sample(i)[0].tolist() for i in range(len(texts))]
        )
        return drafter

    def rows(self, outcome: Outcome) -> list[dict[str, Any]]:
        """Of `prompts.json`."""
        entry = read_manifest(self.store, outcome.outputs[0].manifest).file("prompts.json")
        return json.loads(fetch_file(self.store, entry, self.folder).read_bytes())
