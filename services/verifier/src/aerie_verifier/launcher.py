"""Starts SGLang from one typed configuration, waits until it serves, and stops all of its processes.

The configuration says what the house means (layers by their inputs, capture on or off, a drafter); the engine's own
arguments and numbering are made here and nowhere else. A server that was started to capture proves itself by a capture
before anyone else may use it: the receipt must name the layers and the norm that were asked for.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from aerie_verifier.config import VARIABLE, CaptureConfig
from aerie_verifier.frontdoor import RECEIPT_FIELD
from eagle3_core.errors import AerieError
from eagle3_core.verifier.layers import sglang_engine, to_engine
from eagle3_core.verifier.receipt import Receipt, prompt_digest

POLL_S = 0.25
STOP_S = 20.0
"""How long a server may take to end by itself before it is killed."""
LOG_TAIL_BYTES = 3000
PROOF = (1, 2, 3, 4, 5)
"""Token ids of the capture that proves a server."""


class ServerFailed(AerieError):
    """The verifier's server did not start, or ended."""

    code, status, retryable = "verifier.server", 502, True


class Drafter(BaseModel):
    """A drafter that serves with the verifier."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: Path
    """Folder of the drafter in SGLang's format."""
    num_steps: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens drafted per verify call, in one chain."""


class ServerConfig(BaseModel):
    """One SGLang server."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: Path
    """Folder of the verifier's checkpoint."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: Literal["cuda", "cpu"] = "cuda"
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    chunked_prefill_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest piece of a prompt that is computed in one pass; None leaves it to the engine."""
    max_running_requests: Annotated[int, Field(ge=1)] | None = None
    max_total_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens that the KV cache holds; None leaves it to the engine."""
    radix_cache: bool = True
    overlap: bool = True
    """Schedule the next pass while the last one runs."""
    capture: CaptureConfig | None = None
    """Capture hidden states; off by default."""
    drafter: Drafter | None = None
    """Decode speculatively."""
    engine_args: tuple[str, ...] = ()
    """Further arguments of SGLang, as they are."""
    python: Path = Path(sys.executable)
    """Interpreter of the environment that holds SGLang and this package."""
    start_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time until the server serves, in seconds."""

    @model_validator(mode="after")
    def _one_purpose(self) -> ServerConfig:
        if self.capture is not None and self.drafter is not None:
            raise ValueError("a server captures or drafts: states are captured by prefill, which no drafter speeds up")
        return self


def arguments(config: ServerConfig, port: int) -> list[str]:
    """SGLang's command line for `config`. Raises LayerChoice where the engine cannot be told to read the layers."""
    args = [
        "--model-path", str(config.model), "--host", config.host, "--port", str(port), "--dtype", config.dtype,
        "--device", config.device, "--tp-size", str(config.tensor_parallel), "--sleep-on-idle",
    ]  # fmt: skip
    for name, value in (
        ("--chunked-prefill-size", config.chunked_prefill_tokens),
        ("--max-running-requests", config.max_running_requests),
        ("--max-total-tokens", config.max_total_tokens),
    ):
        args += [] if value is None else [name, str(value)]
    args += [] if config.radix_cache else ["--disable-radix-cache"]
    args += [] if config.overlap else ["--disable-overlap-schedule"]
    if config.capture is not None:
        ids = to_engine(config.capture.aux_layers, sglang_engine(_model_type(config.model)))
        args += ["--speculative-algorithm", "EAGLE3", "--enable-return-aux-hidden-states"]
        args += ["--return-aux-hidden-state-layer-ids", *map(str, ids)]
    if config.drafter is not None:
        steps = config.drafter.num_steps
        args += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(config.drafter.model)]
        args += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"]
        args += ["--speculative-num-draft-tokens", str(steps + 1)]
    return [*args, *config.engine_args]


def _model_type(model: Path) -> str:
    return str(json.loads((model / "config.json").read_bytes()).get("model_type", ""))


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running server. Use it as a context, or call `stop`."""

    def __init__(self, config: ServerConfig, log: Path, environment: Mapping[str, str] = os.environ) -> None:
        """Start the processes; `wait` until they serve. Their output goes to `log`."""
        self.config, self.log, self._stopped = config, log, False
        self.port = config.port or free_port()
        command = [
            str(config.python), "-m", "eagle3_core.tether", str(os.getpid()),
            str(config.python), "-m", "sglang.launch_server", *arguments(config, self.port),
        ]  # fmt: skip
        env = {name: value for name, value in environment.items() if name != VARIABLE}
        if config.capture is not None:
            env[VARIABLE] = config.capture.model_dump_json()
        with log.open("wb") as out:
            self._process = subprocess.Popen(  # noqa: S603 - the arguments are made above, no shell reads them
                command, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://{self.config.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process and process group."""
        return self._process.pid

    def wait(self) -> Self:
        """Return when the server serves, and has proved its capture. Raises ServerFailed with the end of its log."""
        deadline = time.monotonic() + self.config.start_s
        while not self.healthy():
            self.check()
            if time.monotonic() > deadline:
                raise self._failure(f"the server does not serve after {self.config.start_s:g} s")
            time.sleep(POLL_S)
        if self.config.capture is not None:
            self._prove(self.config.capture)
        return self

    def check(self) -> None:
        """Raise ServerFailed if the server has ended."""
        if self._process.poll() is not None:
            raise self._failure(f"the server ended with status {self._process.returncode}")

    def healthy(self) -> bool:
        """Whether it answers, all of its warm-up done (503 until then)."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:  # noqa: S310 - our own server
                return answer.status == 200
        except OSError:
            return False

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 600.0) -> Any:
        """The JSON answer to a JSON request. Raises ServerFailed, and whatever error the capture plug-in answers with."""
        request = urllib.request.Request(  # noqa: S310 - our own server
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise answered_error(error.code, error.read()) from None
        except OSError as error:
            raise self._failure(f"{path} got no answer: {error}") from None

    def capture(self, ids: tuple[int, ...] | list[int]) -> Receipt:
        """Capture the states of one prompt. Raises what the server answers, and ServerFailed for a wrong receipt."""
        answer = self.post(
            "/generate",
            {
                "input_ids": list(ids),
                "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                "return_hidden_states": True,
            },
        )
        found = answer["meta_info"].get(RECEIPT_FIELD)
        if found is None:
            raise self._failure("the server answered without a receipt: its capture hooks are not attached")
        receipt = Receipt.model_validate(found)
        if receipt.tokens != len(ids) or receipt.prompt_digest != prompt_digest(ids):
            raise self._failure(f"the receipt is for another prompt, of {receipt.tokens} tokens")
        return receipt

    def _prove(self, capture: CaptureConfig) -> None:
        receipt = self.capture(PROOF)
        have, want = (receipt.aux_layers, receipt.final), (capture.aux_layers, capture.final)
        if have != want:
            raise self._failure(f"the server captures layers and final norm {have}, asked for were {want}")

    def _failure(self, what: str) -> ServerFailed:
        end = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return ServerFailed(
            f"{what}; the end of {self.log}:\n{end}", remedy="mend what its log names, then start it again"
        )

    def stop(self) -> None:
        """End the whole process group: first asked to, then killed. Once is enough: its number may be another's later."""
        if self._stopped:
            return
        self._stopped = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()

    def __enter__(self) -> Self:
        try:
            return self.wait()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def answered_error(status: int, body: bytes) -> AerieError:
    """The error that a server answered with: the plug-in's own where the message holds one."""
    text = body.decode(errors="replace")
    try:
        document = json.loads(text)
        message = document.get("message") or (document.get("error") or {}).get("message") or document.get("detail")
        return AerieError.from_problem(json.loads(message))
    except (ValueError, TypeError, AttributeError):
        return ServerFailed(f"the server answered {status}: {text[:500]}", remedy="mend the request, or the server")
