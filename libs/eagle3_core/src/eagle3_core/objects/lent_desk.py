"""Where a unit's process asks for what it may do in the store: a socket of the worker that runs it.

The worker passes each ask on to the API with the attempt's token, which this process never sees, so all that lies here is
requests that were signed one by one. The socket is a file that only this user may open, in the process's own folder.

    one line in     an `ObjectAsk`
    one line out    {"answer": ObjectAnswer} or {"problem": problem document}
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from eagle3_core.errors import AerieError
from eagle3_core.jobs.refusals import Unreachable
from eagle3_core.jobs.wire import ObjectAnswer, ObjectAsk

LINE_BYTES = 1 << 20
"""More than the longest answer: a thousand keys of a list."""


class DeskReply(BaseModel):
    """One line out: one of the two."""

    model_config = ConfigDict(extra="forbid")

    answer: ObjectAnswer | None = None
    problem: dict[str, Any] | None = None


@contextmanager
def reachable(path: Path) -> Generator[str]:
    """A name for the socket at `path` that fits into the 107 bytes that a socket's address may have, during the block."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class Desk:
    """Asks over the socket at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def ask(self, ask: ObjectAsk) -> ObjectAnswer:
        """The answer to `ask`; waits while the API is away. Raises what the API raised, and Unreachable without a worker."""
        try:
            with socket.socket(socket.AF_UNIX) as line, reachable(self.path) as name:
                line.connect(name)
                line.sendall(ask.model_dump_json(exclude_defaults=True).encode() + b"\n")
                with line.makefile("rb") as answers:
                    said = answers.readline(LINE_BYTES)
            if not said.endswith(b"\n"):
                raise ConnectionError("it was closed")
        except OSError as error:
            raise Unreachable(
                f"the worker's socket {self.path} does not answer: {error}",
                remedy="none needed: a unit whose worker is gone is tried again",
            ) from error
        reply = DeskReply.model_validate_json(said)
        if reply.answer is None:
            raise AerieError.from_problem(reply.problem or {})
        return reply.answer
