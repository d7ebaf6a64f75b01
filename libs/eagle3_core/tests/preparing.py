"""The stage prepare of a job as it was just posted: what its tests run, and how they see it refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3_core.errors import AerieError
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.spec import parse_job
from eagle3_core.stages import registry
from eagle3_core.stages.context import StageContext
from eagle3_core.testing import stage_context


def context(folder: Path, job: dict[str, Any], **more: Any) -> StageContext:
    """An attempt at prepare of `job`, whose files lie in `folder`."""
    return stage_context(folder, "prepare", job, sources=preflight(parse_job(job), [folder]).sources, **more)


def refusal(ctx: StageContext) -> AerieError:
    """The error that the stage ends with; it says what to do and leaves nothing in the store."""
    with pytest.raises(AerieError) as caught:
        registry.run(ctx)
    assert caught.value.remedy
    assert not list(ctx.store.list(""))
    return caught.value
