"""Where SGLang is, is the operator's to say; a job that wants it is refused where it is not, before anything is computed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eagle3_core.engine.config import CaptureConfig, arguments
from eagle3_core.engine.settings import (
    BadEngineSettings,
    EngineMissing,
    EngineSettings,
    read_settings,
    require_engine,
    server_config,
)
from eagle3_core.errors import InvalidRequest
from eagle3_core.jobs.graph import Slice, StageName, unit_key
from eagle3_core.jobs.spec import EngineTuning, VerifierSpec, parse_job
from eagle3_core.testing import tiny_job, tiny_verifier


def test_settings_are_read_from_the_environment() -> None:
    environment = {
        "AERIE_SGLANG_PYTHON": "/opt/sglang/bin/python", "AERIE_SGLANG_ENV": '{"OMP_NUM_THREADS": "1"}',
        "AERIE_SGLANG_ARGS": "--attention-backend torch_native", "AERIE_SGLANG_START_S": "600",
        "AERIE_SCRATCH": "/scratch",
    }  # fmt: skip

    read = read_settings(environment)

    assert read == EngineSettings(
        python=Path("/opt/sglang/bin/python"), environment={"OMP_NUM_THREADS": "1"},
        args=("--attention-backend", "torch_native"), start_s=600,
        scratch=Path("/scratch"),
    )  # fmt: skip
    assert read.merged({"OMP_NUM_THREADS": "8", "HOME": "/x"}) == {"OMP_NUM_THREADS": "1", "HOME": "/x"}


def test_without_settings_the_engines_own_environment_beside_this_one_is_taken() -> None:
    assert read_settings({}).python == Path(sys.prefix).parent / ".venv-sglang" / "bin" / "python"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AERIE_SGLANG_ENV", "OMP_NUM_THREADS=1"),
        ("AERIE_SGLANG_ENV", '{"OMP_NUM_THREADS": 1}'),
        ("AERIE_SGLANG_ARGS", "--model 'half"),
        ("AERIE_SGLANG_START_S", "soon"),
        ("AERIE_SGLANG_START_S", "nan"),
        ("AERIE_SGLANG_START_S", "-1"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(name: str, value: str) -> None:
    with pytest.raises(BadEngineSettings, match=name):
        read_settings({name: value})


def interpreter(folder: Path, says: str) -> EngineSettings:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\necho '{says}'\n")
    python.chmod(0o755)
    return EngineSettings(python=python, scratch=folder)


def test_an_engine_that_is_not_there_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(EngineMissing, match="is no interpreter") as raised:
        require_engine(EngineSettings(python=tmp_path / "python", scratch=tmp_path))

    assert "make setup-sglang" in raised.value.remedy


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ('{"sglang": null, "plugin": null}', "has no SGLang"),
        ('{"sglang": "0.4.1", "plugin": "0.1.0"}', r"has SGLang 0\.4\.1; supported is 0\.5\.23"),
        ('{"sglang": "0.5.23", "plugin": null}', "without the capture plug-in"),
        ("Traceback", "does not say"),
        ("[]", "does not say"),
    ],
)
def test_an_interpreter_without_what_is_needed_is_an_error_that_says_what_lacks(
    tmp_path: Path, says: str, reason: str
) -> None:
    with pytest.raises(EngineMissing, match=reason):
        require_engine(interpreter(tmp_path, says))


def test_an_interpreter_with_the_engine_and_the_plug_in_is_taken(tmp_path: Path) -> None:
    assert require_engine(interpreter(tmp_path, '{"sglang": "0.5.23", "plugin": "0.1.0"}')) == ("0.5.23", "0.1.0")


def test_this_interpreter_is_asked_for_real_and_has_no_sglang(tmp_path: Path) -> None:
    with pytest.raises(EngineMissing, match="has no SGLang"):
        require_engine(EngineSettings(python=Path(sys.executable), scratch=tmp_path))


def test_a_jobs_server_is_what_job_and_machine_say(tmp_path: Path) -> None:
    model = tiny_verifier(tmp_path / "tiny")
    spec = VerifierSpec(
        model=str(model), dtype="float32", backend="sglang", tensor_parallel=2,
        engine=EngineTuning(memory_fraction=0.8, kv_cache_tokens=16384),
    )  # fmt: skip
    settings = EngineSettings(python=tmp_path / "python", scratch=tmp_path, args=("--grammar-backend", "none"))

    config = server_config(
        spec, model, "cpu", settings, capture=CaptureConfig(sink="file:///sink", aux_layers=(2, 4, 5))
    )

    said = " ".join(arguments(config, 30000))
    assert config.python == tmp_path / "python"
    for part in (
        "--dtype float32", "--device cpu", "--tp-size 2", "--mem-fraction-static 0.8", "--max-total-tokens 16384",
        "--return-aux-hidden-state-layer-ids 1 3 4", "--grammar-backend none",
    ):  # fmt: skip
        assert part in said


@pytest.mark.parametrize("change", [{"tensor_parallel": 2}, {"engine": {"kv_cache_tokens": 4096}}])
def test_a_job_without_the_engine_is_refused_settings_of_the_engine(tmp_path: Path, change: dict[str, object]) -> None:
    document = tiny_job(tmp_path)
    document["verifier"] |= change

    with pytest.raises(InvalidRequest, match="is for backend sglang"):
        parse_job(document)


@pytest.mark.parametrize(
    ("stage", "same"), [("prepare", True), ("vocab", True), ("generate", False), ("extract", False), ("canary", False)]
)
def test_another_engine_makes_other_states_but_prepares_the_same_samples(
    tmp_path: Path, stage: StageName, same: bool
) -> None:
    document = tiny_job(tmp_path)
    keys = set()
    for backend in ("transformers", "sglang"):
        document["verifier"] |= {"backend": backend}
        keys.add(unit_key(stage, parse_job(document), Slice(0, 0, 1), {}, {"verifier": "v"}, "tenant"))

    assert (len(keys) == 1) is same
