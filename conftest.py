"""Settings of every test: hypothesis judges no wall-clock time, and prints how to repeat what it found.

Triton decides when it is first imported whether its interpreter runs the kernels; here it always does.
"""

import os

from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")
