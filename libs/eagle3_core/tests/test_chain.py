"""A job's stages in one process: order, keys, reuse. The stages are scripted; the keys and manifests are real."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3_core.errors import InvalidRequest
from eagle3_core.jobs.graph import Slice, unit_inputs, unit_key
from eagle3_core.jobs.refusals import Preempted
from eagle3_core.jobs.spec import JobSpec, parse_job
from eagle3_core.jobs.wire import Commit, Output
from eagle3_core.objects.local import LocalStore
from eagle3_core.stages import registry
from eagle3_core.stages.chain import Chain, Ledger, LedgerDamaged, NotInJob
from eagle3_core.stages.context import StageContext

SOURCES = {"verifier": "v", "file:///train.jsonl": "d", "file:///test.jsonl": "t"}
RESULTS = {"prepare": {"samples": 5, "eval_prompts": 3}, "extract": {"pass": "prefill", "samples": 1}}


def spec(**changes: object) -> JobSpec:
    document = {
        "name": "tiny",
        "verifier": {"model": "file:///verifier"},
        "datasets": [{"uri": "file:///train.jsonl"}],
        "data": {"unit_samples": 2},
        "evaluation": {"prompts": [{"uri": "file:///test.jsonl"}]},
    }
    return parse_job({**document, **changes})


class Script:
    """Stages that note what they were given, write one file and commit."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int]] = []
        self.read: dict[tuple[str, int], dict[str, list[int]]] = {}
        self.also: Callable[[StageContext, Commit], Commit] = lambda ctx, commit: commit

    def run(self, ctx: StageContext) -> Commit:
        unit = (ctx.assignment.stage, ctx.assignment.unit.index)
        self.ran.append(unit)
        self.read[unit] = {s: [m.unit[0] for m in ctx.manifests(s)] for s in ctx.assignment.inputs}
        result = {"unit": unit[1], **RESULTS.get(unit[0], {})}
        writer = ctx.writer()
        writer.add_json("out.json", result)
        return self.also(ctx, ctx.done(writer.commit(result), result))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(registry, "run", script.run)
    return script


def chain(folder: Path, job: JobSpec, **more: object) -> Chain:
    return Chain(job, LocalStore(folder / "objects"), folder, [folder], **{"sources": SOURCES, **more})  # type: ignore[arg-type]


def test_a_stage_runs_after_what_it_reads_unit_by_unit(script, tmp_path):
    outcome = chain(tmp_path, spec()).run("vocab")

    assert script.ran == [("prepare", 0), ("generate", 0), ("generate", 1), ("generate", 2), ("vocab", 0)]
    assert script.read["vocab", 0] == {"prepare": [0], "generate": [0, 1, 2]}
    assert (outcome.reused, len(outcome.outputs)) == (0, 1)


def test_a_unit_of_extract_reads_the_answers_of_its_own_slice(script, tmp_path):
    chain(tmp_path, spec()).run("extract")

    assert script.read["extract", 1] == {"generate": [1]}


def test_a_second_run_reuses_everything_from_the_ledger(script, tmp_path):
    chain(tmp_path, spec()).run("vocab")
    script.ran.clear()

    again = chain(tmp_path, spec()).run("vocab")

    assert script.ran == []
    assert again.reused == 1


def test_a_changed_setting_runs_only_the_stages_that_depend_on_it(script, tmp_path):
    chain(tmp_path, spec()).run("vocab")
    script.ran.clear()

    chain(tmp_path, spec(vocab={"draft_vocab_size": 64})).run("vocab")

    assert script.ran == [("vocab", 0)]


def test_changed_data_runs_everything_again(script, tmp_path):
    chain(tmp_path, spec()).run("generate")
    script.ran.clear()

    chain(tmp_path, spec(), sources={**SOURCES, "file:///train.jsonl": "other"}).run("prepare")

    assert script.ran == [("prepare", 0)]


def test_an_output_that_came_along_is_reused_by_the_stage_it_belongs_to(script, tmp_path):
    def with_states(ctx: StageContext, commit: Commit) -> Commit:
        if ctx.assignment.stage != "generate":
            return commit
        a = ctx.assignment
        inputs = unit_inputs("extract", a.spec, 0, {"generate": [commit.output.manifest.content], "prepare": []})
        unit = Slice(a.unit.index, a.unit.start, a.unit.stop)
        key = unit_key("extract", a.spec, unit, inputs, a.sources, a.tenant)
        ref = ctx.writer("extract", key).commit(RESULTS["extract"])
        return commit.model_copy(
            update={"also": [Output(stage="extract", key=key, manifest=ref, result=RESULTS["extract"])]}
        )

    script.also = with_states
    outcome = chain(tmp_path, spec()).run("extract")

    assert ("extract", 0) not in script.ran
    assert outcome.reused == 3


def test_a_result_whose_object_is_gone_is_made_again(script, tmp_path):
    first = chain(tmp_path, spec()).run("prepare")
    LocalStore(tmp_path / "objects").delete(first.outputs[0].manifest.key)

    chain(tmp_path, spec()).run("prepare")

    assert script.ran == [("prepare", 0)] * 2


def test_a_stage_that_fails_leaves_the_ledger_of_those_before_it(script, tmp_path):
    def fail(ctx: StageContext, commit: Commit) -> Commit:
        if ctx.assignment.unit.index == 1:
            raise InvalidRequest("no")
        return commit

    script.also = fail
    with pytest.raises(InvalidRequest):
        chain(tmp_path, spec()).run("generate")
    script.also = lambda ctx, commit: commit
    script.ran.clear()
    chain(tmp_path, spec()).run("generate")

    assert script.ran == [("generate", 1), ("generate", 2)]


def test_a_seeded_stage_is_not_run(script, tmp_path):
    prepared = chain(tmp_path / "first", spec()).run("prepare")
    script.ran.clear()
    second = Chain(spec(), LocalStore(tmp_path / "first/objects"), tmp_path / "second", [], sources=SOURCES)

    second.seed("prepare", prepared.outputs)
    second.run("generate")

    assert script.ran == [("generate", 0), ("generate", 1), ("generate", 2)]


def test_a_stop_reaches_the_running_stage(script, tmp_path):
    stop = threading.Event()
    stop.set()

    def honour(ctx: StageContext, commit: Commit) -> Commit:
        ctx.check()
        return commit

    script.also = honour
    with pytest.raises(Preempted):
        chain(tmp_path, spec(), stop=stop).run("prepare")


def test_a_job_without_regeneration_has_no_stage_generate(script, tmp_path):
    with pytest.raises(NotInJob, match="generate"):
        chain(tmp_path, spec(data={"regenerate": {"enabled": False}})).run("generate")


def test_scratch_folders_are_removed(script, tmp_path):
    chain(tmp_path, spec()).run("generate")

    assert sorted(p.name for p in tmp_path.iterdir()) == ["ledger.json", "objects"]


def test_preparing_needs_no_torch():
    import subprocess
    import sys

    code = "import sys; from eagle3_core.stages import registry; registry.load('prepare'); sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["prepare", "canary", "generate", "extract", "vocab", "train", "evaluate", "package"])
def test_every_stage_of_the_graph_has_its_function(name):

    assert registry.load(name).__name__ == name


@pytest.mark.parametrize("damage", ["", "[]", '{"a": 3}', '{"a": {}}', '{"a": NaN}', "\x00", '{"a":' * 9000, "\ufeff{"])
def test_a_damaged_ledger_is_named_and_need_only_be_deleted(tmp_path, damage):
    (tmp_path / "ledger.json").write_text(damage)

    with pytest.raises(LedgerDamaged, match=r"ledger\.json") as refused:
        Ledger(tmp_path / "ledger.json")

    assert "delete it" in refused.value.remedy
