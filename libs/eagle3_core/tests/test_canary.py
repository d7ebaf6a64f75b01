"""Ten samples through every later stage: what is cut down, what is kept, and what a broken job dies of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_core.data.tokensets import TokenSet
from eagle3_core.drafter.export import ExportMismatch
from eagle3_core.engine.settings import EngineMissing
from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import Slice, unit_key
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.spec import parse_job
from eagle3_core.jobs.wire import Commit
from eagle3_core.objects.local import LocalStore
from eagle3_core.stages import registry
from eagle3_core.stages.canary import Whisper, canary, ten_of, tiny
from eagle3_core.stages.chain import Chain
from eagle3_core.stages.context import StageContext
from eagle3_core.testing import RecordingReporter, stage_context, tiny_job


def context(folder: Path, document: dict[str, Any]) -> StageContext:
    """The canary's context after a real prepare."""
    spec = parse_job(document)
    sources = preflight(spec, [folder]).sources
    store = LocalStore(folder / "objects")
    prepared = Chain(spec, store, folder / "chain", [folder], tenant="tenant", sources=sources).run("prepare")
    return stage_context(
        folder, "canary", spec, sources=sources, store=store, results={"prepare": prepared.result},
        inputs={"prepare": [output.manifest for output in prepared.outputs]},
    )  # fmt: skip


def samples(*lengths: int) -> TokenSet:
    return TokenSet.build((f"s{i}", "task", [7] * n, [1] * n) for i, n in enumerate(lengths))


def test_the_longest_sample_is_always_among_the_ten():
    chosen = ten_of(samples(*range(1, 10), 3, 99, 5))

    assert chosen.lengths.tolist() == [*range(1, 10), 99]


def test_a_small_set_is_taken_whole():
    assert ten_of(samples(4, 2)).lengths.tolist() == [4, 2]


def test_what_can_break_is_kept_and_what_costs_time_is_cut(tmp_path):
    document = tiny_job(tmp_path)
    document["training"] |= {"ttt_steps": 5, "batch_tokens": 4096, "accumulation": 2, "threads": 3}
    document["data"]["regenerate"]["max_new_tokens"] = 500

    small = tiny(parse_job(document))

    assert (small.training.ttt_steps, small.training.batch_tokens, small.training.accumulation) == (5, 4096, 2)
    assert small.training.max_steps == 2
    assert small.data.regenerate.max_new_tokens == 16
    assert small.evaluation.gate.min_mean is None


def test_the_keys_of_two_jobs_that_differ_only_in_length_share_one_canary(tmp_path):
    document = tiny_job(tmp_path)
    longer = {**document, "training": {**document["training"], "epochs": 9}}

    one, other = (
        unit_key("canary", parse_job(posted), Slice(0, 0, 1), {"prepare": ["p"]}, {"verifier": "v"}, "tenant")
        for posted in (document, longer)
    )

    assert one == other


def test_nested_progress_moves_one_bar_and_nested_curves_are_dropped():
    reporter = RecordingReporter()
    whisper = Whisper(reporter, 2, 6, "train")
    from eagle3_core.jobs.wire import LogLine, Metric, Progress

    whisper.progress(Progress(done=1, total=2, note="epoch 1", tokens_per_s=70))
    whisper.metric(Metric(name="loss", value=9.0, step=1))
    whisper.log(LogLine(at=0, text="hello"))

    assert (reporter.said[0].done, reporter.said[0].total, reporter.said[0].note) == (2.5, 6, "train epoch 1")
    assert reporter.said[0].tokens_per_s == 70
    assert reporter.metrics == []
    assert reporter.lines[0].text == "train: hello"


def test_what_a_nested_stage_warns_of_is_the_ten_samples_and_not_the_jobs():
    from eagle3_core.jobs.wire import LogLine

    reporter = RecordingReporter()
    whisper = Whisper(reporter, 2, 6, "vocab")

    whisper.log(LogLine(at=0, level="warning", text="70 draft tokens cover 80 % of the supervised tokens"))
    whisper.log(LogLine(at=0, level="error", text="broken"))

    assert [line.text for line in reporter.lines] == ["vocab: broken"]


def test_a_job_for_an_engine_that_this_worker_lacks_dies_before_any_stage_with_the_remedy(tmp_path, monkeypatch):
    document = tiny_job(tmp_path)
    document["verifier"] |= {"backend": "sglang"}
    ctx = context(tmp_path, document)
    monkeypatch.setenv("AERIE_SGLANG_PYTHON", str(tmp_path / "nowhere"))

    with pytest.raises(EngineMissing, match="nowhere is no interpreter") as died:
        canary(ctx)

    assert "AERIE_SGLANG_PYTHON" in died.value.remedy
    assert ctx.reporter.said == []  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_good_job_passes_every_later_stage_and_its_result_is_pure(tmp_path):
    ctx = context(tmp_path, tiny_job(tmp_path))

    first, second = canary(ctx), canary(ctx)

    names = ["generate", "extract", "vocab", "train", "evaluate", "package"]
    assert first.output.result == {"stages": [{"name": name} for name in names], "samples": 10}
    assert first.output.manifest.content == second.output.manifest.content
    assert list(ctx.warm.held)  # the verifier stays for the units that follow


@pytest.mark.slow
def test_a_job_that_cannot_succeed_dies_with_the_stage_that_it_dies_in(tmp_path):
    ctx = context(tmp_path, tiny_job(tmp_path))
    weights = tmp_path / "verifier" / "model.safetensors"
    _poison(weights)
    ctx.assignment.sources["verifier"] = preflight(ctx.spec, [tmp_path]).sources["verifier"]

    with pytest.raises(AerieError) as died:
        canary(ctx)

    assert died.value.context["canary_stage"] == "generate"
    assert any("the canary died in generate" in line.text for line in ctx.reporter.lines)  # type: ignore[attr-defined]


def test_every_later_stage_is_run_and_a_drafter_that_its_own_package_cannot_reload_ends_the_job(tmp_path, monkeypatch):
    ran: list[str] = []
    results: dict[str, dict[str, Any]] = {"extract": {"pass": "decode"}, "evaluate": {"rows": []}}

    def scripted(unit: StageContext) -> Commit:
        ran.append(unit.assignment.stage)
        if ran[-1] == "package":
            raise ExportMismatch("the drafter in sglang/ gives other logits", remedy="report it")
        result = results.get(ran[-1], {})
        return unit.done(unit.writer().commit(result), result)

    ctx = context(tmp_path, tiny_job(tmp_path))
    monkeypatch.setattr(registry, "run", scripted)

    with pytest.raises(ExportMismatch) as died:
        canary(ctx)

    assert ran == ["generate", "extract", "vocab", "train", "evaluate", "package"]
    assert died.value.context["canary_stage"] == "package"


def _poison(weights: Path) -> None:
    """Make the verifier's hidden states NaN from its first layer on."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(weights)
    tensors["model.layers.0.input_layernorm.weight"] = np.full_like(
        tensors["model.layers.0.input_layernorm.weight"], np.nan
    )
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.slow
def test_a_stop_between_stages_is_honoured(tmp_path):
    from eagle3_core.jobs.refusals import Preempted

    ctx = context(tmp_path, tiny_job(tmp_path))
    ctx.stop.set()

    with pytest.raises(Preempted):
        canary(ctx)
