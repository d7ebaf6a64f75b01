"""How receipts come back: from the threads that write, in an engine's scheduler, to the process that answers requests.

A Unix datagram socket in a private folder: it needs no port, keeps messages whole, and works when the disk is full, which
is one of the things it has to report. The answer to a request waits here until its states are safe.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import MutableMapping
from typing import Any

from aerie_verifier.config import RECEIPTS_VARIABLE

LARGEST_MESSAGE = 1 << 16


def prepare_address(environment: MutableMapping[str, str] = os.environ) -> str:
    """The mailbox's address: the one that the server's first process made, or a new one that its children inherit."""
    if RECEIPTS_VARIABLE not in environment:
        environment[RECEIPTS_VARIABLE] = os.path.join(tempfile.mkdtemp(prefix="aerie-receipts-"), "socket")
    return environment[RECEIPTS_VARIABLE]


class Sender:
    """The writing end. Safe for many threads: one message is one system call."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def __call__(self, message: dict[str, Any]) -> None:
        """Send `message`; waits while the receiver's buffer is full."""
        self._socket.sendto(json.dumps(message).encode(), self._address)


class Mailbox:
    """The reading end, on the event loop that answers requests."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._expected: dict[str, asyncio.Future[dict[str, Any]]] = {}

    def expect(self, rid: str) -> asyncio.Future[dict[str, Any]]:
        """The message for request `rid`, when it comes. `forget` it afterwards."""
        loop = asyncio.get_running_loop()
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._socket.bind(self._address)
            loop.add_reader(self._socket.fileno(), self._read, self._socket)
        future: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._expected[rid] = future
        return future

    def forget(self, rid: str) -> None:
        """Nobody waits for `rid` any more."""
        self._expected.pop(rid, None)

    def _read(self, source: socket.socket) -> None:
        while True:
            try:
                message = json.loads(source.recv(LARGEST_MESSAGE))
            except BlockingIOError:
                return
            future = self._expected.get(message["rid"])
            if future is not None and not future.done():
                future.set_result(message)
