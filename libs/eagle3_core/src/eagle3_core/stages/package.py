"""A trained and measured drafter -> directories that SGLang and speculators load, its card, and the proof of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle3_core.data.sources import path_of
from eagle3_core.drafter.card import CardFacts, write_card
from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.export import ExportMismatch, require_same, sglang_config, write_sglang, write_speculators
from eagle3_core.drafter.verifier_parts import Teacher, VerifierParts
from eagle3_core.evaluate.served import folder_digest
from eagle3_core.jobs.wire import Commit
from eagle3_core.objects.manifest import Manifest
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.posted import posted_verifier, reading_verifier
from eagle3_core.stages.trained import trained_drafter
from eagle3_core.train.checkpoint import Checkpoints
from eagle3_core.verifier.contract import CaptureContract, agree

PARTS = ("writing both packages", "reading them back", "storing them")
"""What the stage does, as its progress says it."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def package(ctx: StageContext) -> Commit:
    """Export the drafter in the verifier's precision, read it back, and write its card. Raises ExportMismatch, VerifierChanged."""
    ctx.begin("writing both packages", PARTS)
    (trained,) = ctx.manifests("train")
    contract = _contract(ctx, trained)
    dtype = DTYPES[ctx.spec.verifier.dtype]
    sglang, speculators = ctx.scratch / "sglang", ctx.scratch / "speculators"
    with reading_verifier(ctx) as folder:
        parts = VerifierParts(folder)
        drafter = trained_drafter(ctx, trained, parts)
        write_sglang(drafter, sglang, dtype)
        teacher = Teacher.read(parts, drafter.t2d_V, contract.final)
        write_speculators(drafter, speculators, dtype, str(path_of(ctx.spec.verifier.model)), teacher)
        ctx.begin("reading them back", PARTS)
        require_same(drafter, dtype, sglang, speculators, parts)
    ctx.log(f"both directories, read back in {ctx.spec.verifier.dtype}, give the trained drafter's logits")
    report = ctx.result("evaluate")
    _require_served(report, sglang)
    facts = CardFacts(
        spec=ctx.spec, config=drafter.config, contract=contract, digest=ctx.result("train")["digest"], report=report,
        vocab=ctx.result("vocab"), train=ctx.result("train"), prepare=ctx.result("prepare"),
        parameters=sum(w.numel() for w in drafter.weights.values()), sglang_layers=_sglang_layers(drafter.config, dtype),
    )  # fmt: skip
    return _commit(ctx, facts, sglang, speculators)


def _contract(ctx: StageContext, trained: Manifest) -> CaptureContract:
    """The contract that the drafter was trained under; evaluate's must be the same. Raises ContractMismatch."""
    sides = [("the training states", CaptureContract.model_validate(trained.contract))]
    for manifest in ctx.manifests("evaluate"):
        if manifest.contract is not None:
            sides.append((f"evaluate's unit {manifest.unit[0]}", CaptureContract.model_validate(manifest.contract)))
    return agree(sides)


def _sglang_layers(config: DrafterConfig, dtype: torch.dtype) -> list[int]:
    """The captured layers as the exported config names them."""
    return list(sglang_config(config, dtype)["eagle_config"]["eagle_aux_hidden_state_layer_ids"])


def _require_served(report: Mapping[str, Any], sglang: Path) -> None:
    """Raise ExportMismatch where the engine was measured with other files than the ones in `sglang`."""
    if (serving := report.get("serving")) is None:
        return
    if (have := folder_digest(sglang)) != serving["drafter"]:
        raise ExportMismatch(
            f"sglang/ digests to {have[:16]}, the files that {serving['engine']} served to {serving['drafter'][:16]}",
            remedy="run evaluate again: what is handed out must be what was measured",
        )


def _commit(ctx: StageContext, facts: CardFacts, sglang: Path, speculators: Path) -> Commit:
    ctx.begin("storing them", PARTS)
    writer = ctx.writer()
    for folder in (sglang, speculators):
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            writer.add_file(f"{folder.name}/{path.relative_to(folder).as_posix()}", path)
    writer.add_bytes("card.md", write_card(facts).encode())
    writer.add_json("report.json", dict(facts.report))
    contract = facts.contract.model_dump(mode="json")
    writer.add_json("contract.json", contract)
    result: dict[str, Any] = {
        "digest": facts.digest,
        "dtype": ctx.spec.verifier.dtype,
        "sglang": {
            "architecture": "LlamaForCausalLMEagle3",
            "layer_ids": list(facts.sglang_layers),
            "num_steps": ctx.spec.evaluation.num_steps,
            "algorithm": "EAGLE3",
        },
        "speculators": {"model_type": "eagle3"},
        "report": dict(facts.report),
    }
    posted_verifier(ctx)  # files may have been uploaded for minutes
    commit = ctx.done(writer.commit(result, contract=contract), result)
    _discard_checkpoints(ctx)
    return commit


def _discard_checkpoints(ctx: StageContext) -> None:
    """Train is committed, so nothing will resume it: its checkpoints (weights and optimizer states) go."""
    for trained in ctx.manifests("train"):
        Checkpoints(
            ctx.store, tenant=ctx.assignment.tenant, provenance=trained.unit_key, fence=trained.fence, keep=1,
            scratch=ctx.scratch, warn=lambda text: ctx.log(text, level="warning"),
        ).discard()  # fmt: skip
