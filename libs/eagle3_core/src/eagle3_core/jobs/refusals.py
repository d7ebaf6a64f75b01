"""Errors that more than one program raises or reads: one type for each code.

A worker reads in the API's answer what the API raised, and a command reads what either raised. If each defined such an error
anew, one code could come to mean two things. Errors that only one program raises are defined in that program.
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
