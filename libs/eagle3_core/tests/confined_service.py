"""A service for the tests of confined processes. It is its own module, so that a process starts without pytest."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from eagle3_core.verifier.folder import VerifierTemplate, refusal

HOARD: list[bytearray] = []


def service(request, say):
    """What the tests ask for, by name."""
    say("something else", None, cpu_s=1e-3)
    say(f"doing {request['do']}", "/verifier/model", request.get("cpu_s"))
    return {
        "echo": lambda: request,
        "pid": os.getpid,
        "spin": _spin,
        "spin in C": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
        "eat": lambda: len(bytearray(1 << 40)),
        "eat slowly": lambda: [bytearray(1 << 20) for _ in range(1 << 20)],
        "hoard": lambda: len(HOARD.append(bytearray(150 << 20)) or HOARD),
        "need": lambda: len(bytearray(request["mib"] << 20)),
        "environment": lambda: dict(os.environ),
        "sleep": lambda: time.sleep(3600),
        "chatter": lambda: [(say("still there", None), time.sleep(0.1)) for _ in range(36000)],
        "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "refuse": _refuse,
        "raise": lambda: 1 // 0,
        "panic": _panic,
        "write": lambda: Path(request["path"]).write_bytes(b"x"),
        "answer in no JSON": lambda: {1, 2},
    }[request["do"]]()


def _spin():
    while True:
        pass


def _refuse():
    raise refusal(VerifierTemplate, "no such turn", "another template")


def _panic():
    class PanicException(BaseException):
        pass

    raise PanicException("index out of bounds")
