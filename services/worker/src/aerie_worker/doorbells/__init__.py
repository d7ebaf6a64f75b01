"""How a worker learns that there is work: by asking the API, or by a message that says so.

A doorbell carries no work and no truth. It only says when to claim, so a lost or doubled ring does no harm.
"""

from __future__ import annotations

from typing import Protocol

from eagle3_core.jobs.wire import Assignment


class Doorbell(Protocol):
    """Where units come from."""

    def wait(self) -> Assignment | None:
        """A claimed unit, or None when it is time to look around and wait again. Raises Unreachable, Refused, WorkerSetAside."""
        ...

    def close(self) -> None:
        """Stop listening."""
        ...
