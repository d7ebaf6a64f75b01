"""Settings of every test: hypothesis judges no wall-clock time, and prints how to repeat what it found.

Triton decides when it is first imported whether its interpreter runs the kernels; here it always does. A shell lets what
it starts in the background ignore Ctrl-C, and so would every program that a test starts and interrupts.
"""

import os
import signal

from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")
