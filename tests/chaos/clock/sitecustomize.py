"""Lets a test move the wall clock of the processes that it starts: Python runs this file first wherever it is on the path.

`AERIE_TEST_CLOCK` names a file of eight bytes, the offset in seconds; only workers and their children follow it. The
monotonic clock stays as it is, as when a machine's clock is set.
"""

import mmap
import os
import struct
import sys
import time


def follow(path: str) -> None:
    """Add the number in the file `path` to the wall clock, whatever it is by then."""
    with open(path, "rb") as file:
        offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    true_time, true_time_ns = time.time, time.time_ns
    time.time = lambda: true_time() + struct.unpack("d", offset[:8])[0]
    time.time_ns = lambda: true_time_ns() + int(struct.unpack("d", offset[:8])[0] * 1e9)


if (place := os.environ.get("AERIE_TEST_CLOCK")) and {"aerie_worker", "eagle3_core.stages.child"} & set(sys.orig_argv):
    follow(place)
