"""`aerie-verifier CONFIG.json`: run one SGLang server in the foreground, until it ends or is told to."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from eagle3_core.engine.config import ServerConfig
from eagle3_core.engine.server import Server
from eagle3_core.errors import AerieError, InvalidRequest


def read(path: Path) -> ServerConfig:
    """The configuration in the JSON file `path`. Raises InvalidRequest that names the field."""
    try:
        return ServerConfig.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise InvalidRequest(f"{path}: {error}", remedy="docs/sglang.md lists the fields") from None


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    made = argparse.ArgumentParser(prog="aerie-verifier", description=__doc__)
    made.add_argument("config", type=Path, help="JSON file with the fields of ServerConfig")
    made.add_argument("--log", type=Path, default=Path("aerie-verifier.log"), help="file for the engine's output")
    return made


class ToldToEnd(Exception):
    """A person or a supervisor ends the command."""


def main() -> int:
    """Start the server, say where it serves, stay until it is over. Exit status 0 when it was stopped, 1 when it failed."""
    asked = parser().parse_args()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())

    def go_on() -> None:
        if ended.is_set():
            raise ToldToEnd

    try:
        run(Server(read(asked.config), asked.log), go_on, ended)
    except AerieError as error:
        sys.stderr.write(error.text() + "\n")
        return 1
    return 0


def run(server: Server, go_on: Callable[[], None], ended: threading.Event) -> None:
    """Serve until `ended`; loading a large model takes minutes, and `go_on` cuts them short. Raises ServerFailed."""
    try:
        server.wait(go_on=go_on)
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        while not ended.wait(1):
            server.check()
    except ToldToEnd:
        pass
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
