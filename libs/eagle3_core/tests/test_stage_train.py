"""The stages around the trainer: real shards in, a drafter out, a package that loads."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.drafter.export import ExportMismatch
from eagle3_core.drafter.model import Drafter
from eagle3_core.evaluate.report import combine
from eagle3_core.evaluate.served import folder_digest
from eagle3_core.jobs.refusals import Preempted
from eagle3_core.jobs.spec import parse_job
from eagle3_core.jobs.wire import Commit
from eagle3_core.objects.manifest import read_manifest
from eagle3_core.stages.package import package
from eagle3_core.stages.train import train
from eagle3_core.testing import RecordingReporter, tiny_verifier
from eagle3_core.train.feed import NoSupervision
from eagle3_core.train.testing import RandomStates
from eagle3_core.verifier.contract import ContractMismatch
from eagle3_core.verifier.folder import VerifierChanged
from eagle3_core.verifier.identity import inspect

LINES = ["0001111", "00111111", "0000", "00011111", "001111", "0011111111", "00111", "0000111"] * 2


class Bench(RandomStates):
    """A job on its way from states to a package."""

    def __init__(self, folder: Path, lines: list[str] = LINES, **training: Any) -> None:
        super().__init__(folder, lines, **training)

    def trained(self) -> Commit:
        commit = train(self.context("train"))
        self.inputs["train"] = [commit.output.manifest]
        self.results["train"] = commit.output.result
        return commit

    def evaluated(self, served_digest: str | None = None) -> None:
        """Measured; with a digest also by an engine that served a drafter of these files."""
        rows = [
            {"id": f"p{i}", "task": "words", "tokens": 12, "calls": 6, "proposed": [6, 4, 2], "accepted": [4, 2, 0],
             "lossless": True, "near_tie": False, "looping": False, "seen_ngrams": 1, "ngrams": 5, "answer_tokens": 13}
            for i in range(3)
        ]  # fmt: skip
        servings: list[dict[str, Any]] = []
        if served_digest is not None:
            servings = [
                {"engine": "SGLang 0.5.23", "device": "cpu", "dtype": "float32", "drafter": served_digest, "exact": True,
                 "speedup": [{"in_flight": 4, "plain_tokens_per_s": 50.0, "drafted_tokens_per_s": 60.0, "factor": 1.2}]}
            ]  # fmt: skip
            part = {"tokens": 12, "calls": 6, "by_right": [2, 2, 2], "lossless": True, "near_tie": False}
            rows = [{**row, "served": part} for row in rows]
        self.results["evaluate"] = combine(rows, parse_job(self.document).evaluation, servings=servings)
        self.inputs["evaluate"] = [self.writer("evaluate").commit({}, contract=self.contract.model_dump(mode="json"))]


def test_train_makes_a_drafter_of_the_states_and_says_what_it_left_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    commit = bench.trained()

    result, manifest = commit.output.result, read_manifest(bench.store, commit.output.manifest)
    assert result["dropped_samples"] == 2
    assert result["samples"] + result["held_out_samples"] == 14
    assert manifest.contract == bench.contract.model_dump(mode="json")
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("drafter.safetensors", "drafter.json"):
        (folder / name).write_bytes(bench.store.get_bytes(manifest.file(name).key))
    assert Drafter.load(folder, tmp_path / "verifier").digest() == result["digest"]


def test_a_training_too_short_to_teach_anything_is_said_before_it_begins(tmp_path: Path) -> None:
    def warned(name: str, **training: Any) -> bool:
        ctx = Bench(tmp_path / name, **training).context("train")
        train(ctx)
        assert isinstance(ctx.reporter, RecordingReporter)
        return any("a drafter needs hundreds" in line.text for line in ctx.reporter.lines if line.level == "warning")

    assert warned("short", epochs=2)
    assert not warned("long", epochs=20, batch_tokens=16)
    assert not warned("as short as asked for", epochs=2, max_steps=3)


ALONE = """
import sys
from pathlib import Path
from eagle3_core.jobs.wire import Assignment
from eagle3_core.objects.local import LocalStore
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.registry import run
from eagle3_core.testing import RecordingReporter

folder = Path(sys.argv[1])
assignment = Assignment.model_validate_json(sys.stdin.read())
run(StageContext(assignment, LocalStore(folder / "store"), folder / "scratch", RecordingReporter(), (folder,)))
sys.stdout.write(" ".join({"torch", "transformers", "speculators"} & set(sys.modules)))
"""


def test_a_training_process_imports_torch_and_neither_transformers_nor_speculators(tmp_path: Path) -> None:
    """Both together cost 12 s of CPU, which a training that was killed would pay again before its first step."""
    assignment = Bench(tmp_path).context("train").assignment.model_dump_json()

    done = subprocess.run(
        [sys.executable, "-c", ALONE, tmp_path], input=assignment, capture_output=True, text=True, check=True
    )

    assert done.stdout == "torch"


def test_a_stopped_training_goes_on_in_the_next_attempt_and_commits_the_same_content(tmp_path: Path) -> None:
    whole = Bench(tmp_path / "whole").trained()
    bench = Bench(tmp_path / "cut")
    ctx = bench.context("train")
    reporter = ctx.reporter
    assert isinstance(reporter, RecordingReporter)
    tell = reporter.metric

    def stop_soon(metric: Any) -> None:
        tell(metric)
        if metric.step == 3:
            ctx.stop.set()

    reporter.metric = stop_soon
    with pytest.raises(Preempted):
        train(ctx)

    commit = bench.trained()

    assert commit.output.manifest.content == whole.output.manifest.content


def test_states_of_another_verifier_are_refused_with_both_names(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    captured = bench.contract.verifier
    bench.contract = bench.contract.model_copy(update={"verifier": "0" * 64})

    with pytest.raises(ContractMismatch, match=f"from verifier {captured[:16]} .* posted for 0000000000000000"):
        train(bench.context("train"))


def replaced(folder: Path) -> str:
    """Put another checkpoint where the verifier is; what both are called in a refusal."""
    posted = inspect(folder / "verifier").digest
    tiny_verifier(folder / "verifier", seed=1)
    return f"is verifier {inspect(folder / 'verifier').digest[:16]}, the job was posted for {posted[:16]}"


def replace_after(monkeypatch: pytest.MonkeyPatch, where: str, folder: Path) -> list[str]:
    """Replace the verifier right after `where` (module.name) has returned; what `replaced` says then."""
    said: list[str] = []
    module, name = f"eagle3_core.{where}".rsplit(".", 1)
    call = getattr(importlib.import_module(module), name)

    def called(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        said.append(replaced(folder))
        return result

    monkeypatch.setattr(f"eagle3_core.{where}", called)
    return said


def test_a_verifier_replaced_before_training_is_refused_with_both_digests(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    both = replaced(tmp_path)

    with pytest.raises(VerifierChanged, match=both):
        train(bench.context("train"))


@pytest.mark.parametrize("after", ["build", "new_drafter"])
def test_a_verifier_replaced_while_training_reads_it_is_refused_with_both_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """Within the read of the first weights, and between that and the read of the teacher."""
    bench, said = Bench(tmp_path), replace_after(monkeypatch, f"stages.train.{after}", tmp_path)

    with pytest.raises(VerifierChanged) as refused:
        train(bench.context("train"))

    assert said[0] in str(refused.value)


def test_states_without_supervision_end_the_job(tmp_path: Path) -> None:
    with pytest.raises(NoSupervision):
        Bench(tmp_path, ["0000", "0100"]).trained()


def test_the_package_holds_both_directories_the_report_and_a_card_to_serve_from(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    digest = bench.trained().output.result["digest"]
    bench.evaluated()

    commit = package(bench.context("package"))

    manifest = read_manifest(bench.store, commit.output.manifest)
    names = {entry.name for entry in manifest.files}
    assert {
        "sglang/config.json", "sglang/model.safetensors", "speculators/config.json", "speculators/model.safetensors",
        "card.md", "report.json", "contract.json",
    } <= names  # fmt: skip
    result = commit.output.result
    assert (result["digest"], result["report"]) == (digest, bench.results["evaluate"])
    card = bench.store.get_bytes(manifest.file("card.md").key).decode()
    assert "| **all, pooled over tokens** | 3 | **2.000** | 2.000 to 2.000 |" in card
    assert "--speculative-algorithm EAGLE3" in card
    assert '--model-path "$VERIFIER"' in card
    assert """'{"model": "./speculators", "method": "eagle3", "num_speculative_tokens": 3}'""" in card
    assert str(tmp_path) not in card
    config = json.loads(bench.store.get_bytes(manifest.file("sglang/config.json").key))
    assert f"`sglang/config.json` says {config['eagle_config']['eagle_aux_hidden_state_layer_ids']}" in card
    assert "The gate asked for: interval above 1, lossless." in card
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in card
    assert "0.667 / 0.500 / 0.000" in card
    assert json.loads(bench.store.get_bytes(manifest.file("contract.json").key)) == manifest.contract


def test_the_package_names_a_verifier_posted_as_a_uri_by_its_path(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "a b")
    bench.document["verifier"]["model"] = (tmp_path / "a b/verifier").as_uri()
    bench.trained()
    bench.evaluated()

    manifest = read_manifest(bench.store, package(bench.context("package")).output.manifest)

    config = json.loads(bench.store.get_bytes(manifest.file("speculators/config.json").key))
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "a b/verifier")


def test_files_that_no_engine_served_are_not_packaged_where_one_measured(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.trained()
    bench.evaluated(served_digest="0" * 64)

    with pytest.raises(
        ExportMismatch, match=r"sglang/ digests to \w{16}, the files that SGLang 0\.5\.23 served to 0000"
    ):
        package(bench.context("package"))


def test_the_card_shows_what_was_promised_and_what_was_served_side_by_side(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.trained()
    bench.evaluated()
    exported = read_manifest(bench.store, package(bench.context("package")).output.manifest)
    folder = tmp_path / "exported"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(bench.store.get_bytes(exported.file(f"sglang/{name}").key))
    bench.inputs.pop("evaluate")
    bench.evaluated(served_digest=folder_digest(folder))

    commit = package(bench.context("package"))

    card = bench.store.get_bytes(read_manifest(bench.store, commit.output.manifest).file("card.md").key).decode()
    assert "| 95 % interval over prompts | served by SGLang 0.5.23 |" in card
    assert "| **all, pooled over tokens** | 3 | **2.000** | 2.000 to 2.000 | 2.000 |" in card
    assert "the same tokens in the same verify calls on 3 of 3 prompts" in card
    assert "on a CPU: no figure for GPUs: 1.20 with 4 in flight (50 to 60 tokens/s)" in card


def test_a_drafter_that_is_not_the_one_train_reported_is_not_packaged(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.trained()
    bench.evaluated()
    bench.results["train"]["digest"] = "0" * 64

    with pytest.raises(ExportMismatch, match="train's result says 0000"):
        package(bench.context("package"))


def test_a_verifier_replaced_after_the_measurement_is_not_packaged(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.trained()
    bench.evaluated()
    both = replaced(tmp_path)

    with pytest.raises(VerifierChanged, match=both):
        package(bench.context("package"))


@pytest.mark.parametrize("after", ["require_same", "write_card"])
def test_a_verifier_replaced_while_the_package_is_made_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """At the last read of the folder, and behind it while the files are stored."""
    bench = Bench(tmp_path)
    bench.trained()
    bench.evaluated()
    said = replace_after(monkeypatch, f"stages.package.{after}", tmp_path)

    with pytest.raises(VerifierChanged) as refused:
        package(bench.context("package"))

    assert said[0] in str(refused.value)


def test_a_drafter_measured_under_another_contract_is_not_packaged(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.trained()
    bench.contract = bench.contract.model_copy(update={"aux_layers": (1, 4, 5)})
    bench.evaluated()

    with pytest.raises(ContractMismatch, match="aux_layers"):
        package(bench.context("package"))
