"""Where SGLang is on this machine: settings of the operator, read from the environment of whoever runs stages.

SGLang's packages conflict with everyone's, so it has an environment of its own, and only its interpreter's path is known
here. A job never names it, nor what its server is given to run with: a job is posted by somebody who could then run
any program of this machine. Whether the engine is there is asked before anything is computed for it.

    AERIE_SGLANG_PYTHON     interpreter of the engine's environment; default: `.venv-sglang/bin/python` beside this one
    AERIE_SGLANG_ENV        further environment variables of the server: a JSON object of strings
    AERIE_SGLANG_ARGS       further arguments of SGLang, as a shell would split them
    AERIE_SGLANG_START_S    longest time until a server serves, in seconds (1800)

Servers that others run are `engine.allowed`'s.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from eagle3_core import strict_json
from eagle3_core.engine.config import SUPPORTED, CaptureConfig, Drafter, EngineConfig, ServerConfig
from eagle3_core.errors import AerieError
from eagle3_core.jobs.sections.sources import VerifierSpec

PLUGINS, PLUGIN = "sglang.srt.plugins", "aerie_capture"
PROBE_S = 120.0
PROBE = f"""
import importlib.metadata as m, json
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
plugins = [e.dist.version for e in m.entry_points(group={PLUGINS!r}) if e.name == {PLUGIN!r}]
print(json.dumps({{"sglang": version("sglang"), "plugin": plugins[0] if plugins else None}}))
"""
"""Asks an interpreter for its packages, without importing any (SGLang alone takes 20 s)."""


class BadEngineSettings(AerieError):
    """A setting of the SGLang engine is wrong."""

    code, status = "engine.settings", 500


class EngineMissing(AerieError):
    """The job wants SGLang, and this worker has none that it could use."""

    code, status = "engine.missing", 409


class EngineSettings(EngineConfig):
    """SGLang on this machine."""

    python: Path
    """Interpreter of the environment that holds SGLang, the core and the plug-in."""
    environment: dict[str, str] = Field(default_factory=dict)
    """What the server's environment holds beside this process's own."""
    args: tuple[str, ...] = ()
    start_s: float = 1800.0
    scratch: Path
    """Folder for logs of servers and for states on their way."""

    def merged(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The environment of a server."""
        return {**environment, **self.environment}


def read_settings(environment: Mapping[str, str] = os.environ) -> EngineSettings:
    """The settings in `environment`. Raises BadEngineSettings that names the variable."""
    named = environment.get("AERIE_SGLANG_PYTHON", "").strip()
    return EngineSettings(
        python=Path(named) if named else Path(sys.prefix).parent / ".venv-sglang" / "bin" / "python",
        environment=_variables(environment.get("AERIE_SGLANG_ENV", "")),
        args=_words(environment.get("AERIE_SGLANG_ARGS", "")),
        start_s=_seconds(environment.get("AERIE_SGLANG_START_S", "")),
        scratch=Path(environment.get("AERIE_SCRATCH") or tempfile.gettempdir()),
    )


def _variables(text: str) -> dict[str, str]:
    try:
        stated: Mapping[str, Any] = strict_json.loads_object(text.encode()) if text.strip() else {}
    except ValueError as error:
        raise _bad("AERIE_SGLANG_ENV", str(error), "a JSON object of strings") from None
    if odd := [name for name, value in stated.items() if not isinstance(value, str)]:
        raise _bad("AERIE_SGLANG_ENV", f"{odd[0]} is no string", "a JSON object of strings")
    return dict(stated)


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise _bad("AERIE_SGLANG_ARGS", str(error), "arguments as a shell takes them") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text) if text.strip() else 1800.0
    except ValueError:
        seconds = 0.0
    if not (isfinite(seconds) and seconds > 0):
        raise _bad("AERIE_SGLANG_START_S", repr(text[:40]), "a number of seconds")
    return seconds


def _bad(name: str, what: str, wanted: str) -> BadEngineSettings:
    return BadEngineSettings(f"{name}: {what}", remedy=f"set it to {wanted}, or unset it")


class Installed(NamedTuple):
    """What an interpreter has."""

    version: str
    """Of SGLang."""
    plugin_version: str
    """Of the plug-in that captures."""


def require_engine(settings: EngineSettings) -> Installed:
    """The SGLang that `settings` lead to, ready to capture. Raises EngineMissing that says what lacks."""
    remedy = "run `make setup-sglang`, or let AERIE_SGLANG_PYTHON of the worker name an interpreter that has SGLang"
    if not os.access(settings.python, os.X_OK):
        raise EngineMissing(f"verifier.backend is sglang, and {settings.python} is no interpreter", remedy=remedy)
    try:
        asked = subprocess.run(  # noqa: S603 - the operator's interpreter, our program
            [str(settings.python), "-c", PROBE], env=settings.merged(), capture_output=True, timeout=PROBE_S, check=False
        )  # fmt: skip
        have = json.loads(asked.stdout)
        version, plugin = have["sglang"], have["plugin"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        raise EngineMissing(f"{settings.python} does not say what it has: {error}", remedy=remedy) from None
    if version not in SUPPORTED:
        found = f"has SGLang {version}" if version else "has no SGLang"
        raise EngineMissing(f"{settings.python} {found}; supported is {', '.join(SUPPORTED)}", remedy=remedy)
    if not plugin:
        raise EngineMissing(
            f"{settings.python} has SGLang {version} without the capture plug-in",
            remedy="install aerie_verifier and eagle3_core into that environment",
        )
    return Installed(str(version), str(plugin))


def require_backend(spec: VerifierSpec, settings: EngineSettings) -> None:
    """Raise EngineMissing unless this machine can run the verifier on the engine that `spec` names."""
    if spec.backend == "sglang":
        require_engine(settings)


def server_config(
    spec: VerifierSpec,
    model: Path,
    device: Literal["cuda", "cpu"],
    settings: EngineSettings,
    *,
    capture: CaptureConfig | None = None,
    drafter: Drafter | None = None,
) -> ServerConfig:
    """The server of a job: its verifier in folder `model`, run as the job and this machine say."""
    engine = spec.engine
    return ServerConfig(
        model=model,
        dtype=spec.dtype,
        device=device,
        tensor_parallel=spec.tensor_parallel,
        memory_fraction=engine.memory_fraction,
        chunked_prefill_tokens=engine.chunked_prefill_tokens,
        max_running_requests=engine.max_running_requests,
        max_total_tokens=engine.kv_cache_tokens,
        capture=capture,
        drafter=drafter,
        engine_args=settings.args,
        python=settings.python,
        start_s=settings.start_s,
    )
