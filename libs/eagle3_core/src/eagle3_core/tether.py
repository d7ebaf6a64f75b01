"""Processes that end with the process that started them.

A supervisor that is killed with SIGKILL cleans nothing up. So whatever the house starts ties itself to its starter:
on Linux the kernel sends SIGKILL when the starter is gone (prctl(2), PR_SET_PDEATHSIG). The tie survives exec, which
makes this module a launcher for programs that know nothing of it:

    python -m eagle3_core.tether 4711 python -m some.program

The kernel watches the *thread* that started the process, so start tethered processes from a thread that stays.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def die_with(starter: int) -> None:
    """End this process by SIGKILL as soon as `starter` (its parent's process id) is gone; at once if it is already.

    Elsewhere than on Linux only the second half holds; processes there also end when their stdin closes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:  # it died between our start and the call above
        os.kill(os.getpid(), signal.SIGKILL)


def tethered(command: Sequence[str]) -> list[str]:
    """`command` as a command line whose process ends with the calling process."""
    return [sys.executable, "-m", "eagle3_core.tether", str(os.getpid()), *command]


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the point of the module
