"""A worker says by its queues whether SGLang is on its machine."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from aerie_worker.__main__ import QUEUES, served_queues
from eagle3_core.engine.settings import BadEngineSettings, EngineMissing


def having(folder: Path, version: str) -> dict[str, str]:
    """The environment of a worker whose engine's interpreter answers that it has SGLang `version`."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho \'{{"sglang": "{version}", "plugin": true}}\'\n')
    python.chmod(0o755)
    return {"AERIE_SGLANG_PYTHON": str(python)}


def test_a_worker_without_sglang_serves_what_it_is_told_to_and_says_what_lacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    queues = served_queues(",".join(QUEUES), {"AERIE_SGLANG_PYTHON": sys.executable})  # asked for real: it has none

    assert queues == ["prep", "extract", "train", "evaluate"]
    assert "has no SGLang" in caplog.text
    assert "make setup-sglang" in caplog.text


def test_a_worker_with_sglang_serves_beside_its_queues_those_that_need_it(tmp_path: Path) -> None:
    environment = having(tmp_path, "0.5.23")

    assert served_queues(",".join(QUEUES), environment) == [*QUEUES, "extract-sglang", "evaluate-sglang"]
    assert served_queues("evaluate", environment) == ["evaluate", "evaluate-sglang"]
    assert served_queues("extract-sglang", environment) == ["extract-sglang"]
    assert served_queues("prep,train", environment) == ["prep", "train"]


def test_a_version_that_is_not_supported_is_as_none(tmp_path: Path) -> None:
    assert served_queues("extract", having(tmp_path, "0.4.1")) == ["extract"]


def test_a_queue_that_needs_sglang_cannot_be_asked_for_without_it() -> None:
    with pytest.raises(EngineMissing, match="has no SGLang"):
        served_queues("extract-sglang", {"AERIE_SGLANG_PYTHON": sys.executable})


def test_settings_that_do_not_read_stop_the_worker() -> None:
    with pytest.raises(BadEngineSettings, match="AERIE_SGLANG_ENV"):
        served_queues("extract", {"AERIE_SGLANG_ENV": "not json"})
