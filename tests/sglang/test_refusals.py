"""Servers that would capture something else than they were asked for do not start, and say why."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import CPU_ARGS, SPAWNED, capture_to, cpu_server

from eagle3_core.engine.refusals import ServerFailed


def test_a_server_that_is_told_other_layers_ends_with_both_lists(verifier: Path, tmp_path: Path) -> None:
    other = (*CPU_ARGS, "--return-aux-hidden-state-layer-ids", "2", "4", "5")

    with (
        pytest.raises(ServerFailed, match=r"inputs of layers \[3, 5, 6\], the configuration wants \[2, 4, 5\]"),
        cpu_server(verifier, tmp_path / "log", SPAWNED, capture=capture_to(tmp_path / "sink"), engine_args=other),
    ):
        pass


def test_a_server_that_would_draft_while_it_captures_does_not_start(verifier: Path, tmp_path: Path) -> None:
    drafting = (*CPU_ARGS, "--speculative-draft-model-path", str(verifier))

    with (
        pytest.raises(ServerFailed, match="captures without a draft"),
        cpu_server(verifier, tmp_path / "log", SPAWNED, capture=capture_to(tmp_path / "sink"), engine_args=drafting),
    ):
        pass
