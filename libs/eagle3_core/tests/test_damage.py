"""What a stage reads may be damaged since it was committed: then it says which file, and commits nothing.

Every object that a stage reads is damaged in turn, in four ways, manifests included. A drafter made of damaged inputs
would look like any other, so there is no damage that may pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_capture_stages import Job
from test_stage_train import Bench

from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import STAGES, StageName
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.spec import parse_job
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import read_manifest
from eagle3_core.shards.manifest import contract_of
from eagle3_core.stages.chain import Chain
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.generate import generate
from eagle3_core.stages.registry import run
from eagle3_core.testing import stage_context, tiny_job


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def hollow(data: bytes) -> bytes:
    """The second half is zeros, as of a file of which not everything was written."""
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": flipped, "a lost end": lambda data: data[:-1], "a hollow half": hollow, "nothing left": lambda _: b"",
}  # fmt: skip


def training(folder: Path) -> Callable[[], StageContext]:
    bench = Bench(folder)
    return lambda: bench.context("train")


def packaging(folder: Path) -> Callable[[], StageContext]:
    bench = Bench(folder)
    bench.trained()
    bench.evaluated()
    return lambda: bench.context("package")


def generating(folder: Path) -> Callable[[], StageContext]:
    job = Job(folder)
    return lambda: job.context("generate", 0, 2)


def answered(folder: Path, stage: StageName) -> Callable[[], StageContext]:
    job = Job(folder)
    job.refs["generate"] = [generate(job.context("generate", 0, 6)).output.manifest]
    return lambda: job.context(stage, 0, 6)


def rehearsing(folder: Path) -> Callable[[], StageContext]:
    spec, store = parse_job(tiny_job(folder)), LocalStore(folder / "store")
    sources = preflight(spec, [folder]).sources
    prepared = Chain(spec, store, folder / "chain", [folder], tenant="tenant", sources=sources).run("prepare")
    return lambda: stage_context(
        folder, "canary", spec, sources=sources, store=store, results={"prepare": prepared.result},
        inputs={"prepare": [output.manifest for output in prepared.outputs]},
    )  # fmt: skip


def evaluating(folder: Path) -> Callable[[], StageContext]:
    job = Job(folder)
    ctx = job.context("generate", 0, 6)
    generated = generate(ctx)
    job.refs["generate"] = [generated.output.manifest]
    job.trained(contract_of(read_manifest(ctx.store, generated.also[0].manifest)))
    return lambda: job.context("evaluate", 0, 2)


READS: dict[StageName, tuple[Callable[[Path], Callable[[], StageContext]], dict[StageName, set[str]]]] = {
    "canary": (rehearsing, {"prepare": {"train.safetensors", "eval.safetensors"}}),
    "generate": (generating, {"prepare": {"train.safetensors"}}),
    "extract": (lambda folder: answered(folder, "extract"), {"generate": {"answers.safetensors"}}),
    "vocab": (lambda folder: answered(folder, "vocab"), {"generate": {"answers.safetensors"}}),
    "train": (training, {"extract": {"shard-00000.safetensors"}, "vocab": {"vocab.safetensors"}}),
    "evaluate": (
        evaluating,
        {"prepare": {"eval.safetensors"}, "generate": {"answers.safetensors"},
         "train": {"drafter.safetensors", "drafter.json"}},
    ),
    "package": (packaging, {"train": {"drafter.safetensors", "drafter.json"}, "evaluate": set()}),
}  # fmt: skip
"""How each stage comes to be run, and which files of which stages it reads besides their manifests."""


def objects(ctx: StageContext, reads: dict[StageName, set[str]]) -> Iterator[str]:
    """Keys of everything that a stage reads."""
    for stage, names in reads.items():
        for ref in ctx.assignment.inputs[stage]:
            yield ref.key
            listed = {entry.name: entry.key for entry in read_manifest(ctx.store, ref).files}
            assert names <= set(listed)
            yield from (listed[name] for name in names)


@pytest.mark.parametrize("stage", list(READS))
def test_whatever_a_stage_reads_is_damaged_it_names_the_file_and_commits_nothing(tmp_path: Path, stage: StageName):
    build, reads = READS[stage]
    again = build(tmp_path)
    ctx = again()
    for key in sorted(objects(ctx, reads)):
        place = tmp_path / "store" / key
        whole = place.read_bytes()
        for damage, of in DAMAGES.items():
            place.write_bytes(of(whole))
            before = {entry.key for entry in ctx.store.list("tenant")}

            with pytest.raises(AerieError) as refused:
                run(again())

            assert key in refused.value.detail, (damage, refused.value.detail)
            made = {entry.key for entry in ctx.store.list("tenant")} - before
            assert not [name for name in made if name.endswith("manifest.json")], damage
        place.write_bytes(whole)
    assert run(again()).output.stage == stage


def test_every_stage_that_reads_objects_has_them_damaged():
    assert set(READS) == {stage.name for stage in STAGES.values() if stage.reads}
