"""Passes on what a unit's process asks of the object store, with the attempt's token, which the process never sees.

So a process of a worker without a key to the store holds nothing that opens anything: it has a socket that answers as
long as its attempt lasts, and requests that the API signed one by one. While the API is away it waits.
"""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from aerie_worker.claim import Control
from aerie_worker.patience import insist
from eagle3_core.errors import AerieError
from eagle3_core.jobs.refusals import Unreachable
from eagle3_core.jobs.wire import Assignment, ObjectAsk
from eagle3_core.objects.lent_desk import LINE_BYTES, DeskReply, reachable


class AskGarbled(AerieError):
    """A line that is no request came over the socket of a unit's process."""

    code, status = "object.ask", 400


class _Desk(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers at a socket until it is closed."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, place: str, control: Control, assignment: Assignment) -> None:
        self.control, self.assignment = control, assignment
        self.closed = threading.Event()
        super().__init__(place, _Clerk)

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: whoever asked went away, and asks again if need be."""


class _Clerk(socketserver.StreamRequestHandler):
    """Answers one connection, line by line."""

    server: _Desk  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle(self) -> None:
        while (line := self.rfile.readline(LINE_BYTES)).endswith(b"\n"):
            reply = self._reply(line)
            if reply is None:
                return
            self.wfile.write(reply.model_dump_json(exclude_defaults=True).encode() + b"\n")

    def _reply(self, line: bytes) -> DeskReply | None:
        """The API's answer; None where the attempt ended before there was one."""
        desk = self.server
        try:
            ask = ObjectAsk.model_validate_json(line)
        except ValidationError:
            garbled = AskGarbled("not a request for an object", remedy="run worker and child from one version")
            return DeskReply(problem=garbled.problem())
        try:
            return DeskReply(answer=insist(lambda: desk.control.objects(desk.assignment, ask), desk.closed.wait))
        except Unreachable:
            return None
        except AerieError as error:
            return DeskReply(problem=error.problem())


@contextmanager
def lending(control: Control, assignment: Assignment, place: Path | None) -> Generator[None]:
    """Answer at the socket `place` (None: nobody asks) what `assignment`'s process may do, during the block."""
    if place is None:
        yield
        return
    place.unlink(missing_ok=True)
    with reachable(place) as name:
        desk = _Desk(name, control, assignment)
    place.chmod(0o600)
    thread = threading.Thread(target=desk.serve_forever, args=(0.05,), name="objects", daemon=True)
    thread.start()
    try:
        yield
    finally:
        desk.closed.set()
        desk.shutdown()
        desk.server_close()
        place.unlink(missing_ok=True)
