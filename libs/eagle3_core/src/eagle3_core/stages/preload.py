"""Imports ahead of need: a child that waits for its first unit loads what compute stages import.

Everything together takes 17 s of CPU, of which a person who waits for a job's first stage sees nothing. Run as a program
this imports it once, so that every later process finds the bytecode written (22 s without).
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Sequence

from eagle3_core.jobs.wire import ChildMessage, LogLine
from eagle3_core.stages.reports import Sender

PRELOADED = (
    "torch", "eagle3_core.stages.generate", "eagle3_core.stages.evaluate", "eagle3_core.stages.train",
    "eagle3_core.stages.package", "speculators",
)  # fmt: skip
"""What compute stages import, the soonest needed first: torch 4 s of CPU, transformers 6, speculators 7.

Training needs torch alone, the verifier's stages need transformers too; only canary and package need all three.
"""


class Preload:
    """Imports what compute stages need, in the background, as long as nothing else is to do."""

    def __init__(self, channel: Sender, names: Sequence[str] = PRELOADED) -> None:
        self._channel = channel
        self._names = names
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._load, name="preload", daemon=True)
        self._thread.start()

    def enough(self) -> None:
        """Begin no further import."""
        self._wanted.set()

    def wait(self) -> None:
        """Wait for the end of the import under way: two threads importing one package may each see it half done."""
        self._thread.join()

    def _load(self) -> None:
        for name in self._names:
            if self._wanted.is_set():
                return
            try:
                importlib.import_module(name)
            except ImportError as error:  # the stage that needs it will fail with its own words
                text = f"could not import {name} ahead of time: {error}"
                self._channel.send(ChildMessage(log=LogLine(at=time.time(), level="warning", text=text)))


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
