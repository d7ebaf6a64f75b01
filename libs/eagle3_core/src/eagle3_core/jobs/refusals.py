"""Failures that more than one process of the house speaks of: one type a code, whoever raises it.

A worker reads in the API's answer what the API raised, and a command what either did; were each to define it anew, the
same code could come to mean two things. What only one process raises is defined there.
"""

from __future__ import annotations

from eagle3_core.errors import AerieError


class Unreachable(AerieError):
    """No API answers, or it cannot serve now."""

    code, status, retryable = "api.unreachable", 503, True


class LeaseLost(AerieError):
    """The unit belongs to another attempt; nothing this one did counts."""

    code, status = "lease.lost", 409


class WorkerSetAside(AerieError):
    """The worker failed unit after unit and gets no more work until a person readmits it."""

    code, status = "worker.set_aside", 409


class Preempted(AerieError):
    """The process was asked to stop; what it had is saved and the unit goes on elsewhere."""

    code, status, retryable = "unit.preempted", 503, True
