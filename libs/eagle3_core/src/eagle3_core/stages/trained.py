"""Loads the drafter that train committed, for evaluate and package, and refuses any other."""

from __future__ import annotations

from safetensors.torch import load_file

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.export import ExportMismatch
from eagle3_core.drafter.model import CONFIG_FILE, TENSORS_FILE, Drafter
from eagle3_core.drafter.verifier_parts import VerifierParts
from eagle3_core.objects.manifest import Manifest
from eagle3_core.stages.context import StageContext


def trained_drafter(ctx: StageContext, trained: Manifest, parts: VerifierParts) -> Drafter:
    """Train's drafter in float32. Raises ExportMismatch where it is not the one that train's result names."""
    config = DrafterConfig.model_validate_json(ctx.fetch(trained.file(CONFIG_FILE)).read_text())
    drafter = Drafter.from_state(config, load_file(ctx.fetch(trained.file(TENSORS_FILE))), parts)
    have, want = drafter.digest(), ctx.result("train")["digest"]
    if have != want:
        raise ExportMismatch(
            f"the drafter's files digest to {have[:16]}, train's result says {want[:16]}", remedy="run train again"
        )
    return drafter
