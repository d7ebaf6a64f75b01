"""One configuration becomes the engine's own arguments, layer numbers included; its server starts, and ends whole."""

import json
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from eagle3_core.engine.config import CaptureConfig, ServerConfig, arguments
from eagle3_core.engine.refusals import ServerFailed
from eagle3_core.engine.server import Server
from eagle3_core.verifier.layers import LayerChoice


def model(folder: Path, model_type: str = "llama") -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def ids_of(args: list[str]) -> list[str]:
    at = args.index("--return-aux-hidden-state-layer-ids")
    return args[at + 1 : at + 4]


@pytest.mark.parametrize(
    ("model_type", "layers", "ids"),
    [
        ("llama", (2, 30, 58), ["1", "29", "57"]),
        ("deepseek_v3", (2, 30, 58), ["1", "29", "57"]),
        ("deepseek_v3", (3, 31, 59), ["3", "31", "59"]),
        ("kimi_k25", (3, 31, 59), ["3", "31", "59"]),
    ],
)
def test_layers_are_named_in_the_engines_own_numbering(
    tmp_path: Path, model_type: str, layers: tuple[int, ...], ids: list[str]
) -> None:
    config = ServerConfig(
        model=model(tmp_path, model_type), capture={"sink": "file:///s", "aux_layers": layers}
    )  # fmt: skip

    assert ids_of(arguments(config, 30000)) == ids


def test_a_server_that_captures_computes_prompts_without_cuda_graphs_whose_replay_calls_no_hooks(
    tmp_path: Path,
) -> None:
    plain = ServerConfig(model=model(tmp_path))
    capturing = plain.model_copy(update={"capture": CaptureConfig(sink="file:///s", aux_layers=(2, 4, 5))})

    assert "--disable-prefill-cuda-graph" in arguments(capturing, 30000)
    assert "--disable-prefill-cuda-graph" not in arguments(plain, 30000)


def test_layers_that_the_engine_cannot_be_told_are_refused(tmp_path: Path) -> None:
    config = ServerConfig(model=model(tmp_path), capture={"sink": "file:///s", "aux_layers": (0, 4, 5)})

    with pytest.raises(LayerChoice, match="cannot be told"):
        arguments(config, 30000)


def test_a_server_that_captures_has_no_drafter(tmp_path: Path) -> None:
    capture = {"sink": "file:///s", "aux_layers": (2, 4, 5)}

    with pytest.raises(ValidationError, match="captures or drafts"):
        ServerConfig(model=tmp_path, capture=capture, drafter={"model": tmp_path})


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        ServerConfig.model_validate({"model": str(tmp_path), "modle": "x"})


def test_a_server_that_ends_at_once_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such engine >&2\nexit 3\n")
    python.chmod(0o755)

    with (
        pytest.raises(ServerFailed, match=r"status 3.*\n.*no such engine"),
        Server(ServerConfig(model=model(tmp_path), python=python), tmp_path / "log"),
    ):
        pass


def test_a_server_that_is_stopped_takes_its_processes_along(tmp_path: Path) -> None:
    config = ServerConfig(model=model(tmp_path), python=Path(sys.executable))
    server = Server(config, tmp_path / "log")

    server.stop()

    with pytest.raises(ServerFailed, match="ended"):
        server.check()
