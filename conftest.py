"""Settings of every test: hypothesis judges no wall-clock time, and prints how to repeat what it found.

Triton decides when it is first imported whether its interpreter runs the kernels; here it always does. A shell lets what
it starts in the background ignore Ctrl-C, and so would every program that a test starts and interrupts. Importing readline,
as pytest does, tells every child that lines have 80 columns. Clients of tests hang up on servers of tests, which print a
traceback each time unless told otherwise.
"""

import os
import signal
import socketserver
import sys
from typing import Any

from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"
os.environ.pop("COLUMNS", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")

_print_traceback = socketserver.BaseServer.handle_error


def _handle_error(self: socketserver.BaseServer, request: Any, client_address: Any) -> None:
    if not isinstance(sys.exception(), ConnectionError):
        _print_traceback(self, request, client_address)


socketserver.BaseServer.handle_error = _handle_error
