"""From a stage's name to the function that runs it.

Stages are imported when they run, by name: `prepare` needs no torch and must not wait for it (4 s, and 17 s with all
that packaging imports), and a command that only lists stages needs none of them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable

from eagle3_core.jobs.graph import STAGES, StageName
from eagle3_core.jobs.wire import Commit
from eagle3_core.stages.context import StageContext

StageFunction = Callable[[StageContext], Commit]

COMPUTE: frozenset[StageName] = frozenset({"canary", "generate", "extract", "train", "evaluate", "package"})
"""Stages that use torch."""


def load(name: StageName) -> StageFunction:
    """The function of stage `name`: module and function bear its name."""
    function: StageFunction = getattr(importlib.import_module(f"eagle3_core.stages.{name}"), name)
    return function


def run(ctx: StageContext) -> Commit:
    """Run the stage of `ctx.assignment`, on as many threads as it asks for; its commit says how long it took."""
    stage = ctx.assignment.stage
    started = time.perf_counter()
    function = load(stage)
    if stage in COMPUTE:
        importlib.import_module("torch").set_num_threads(ctx.threads(STAGES[stage].fans_out))
    commit = function(ctx)
    return commit.model_copy(update={"seconds": time.perf_counter() - started})
