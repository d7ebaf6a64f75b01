"""`python -m aerie_worker` with children that run scripted stages."""

import os
import sys

from worker_stubs import scripted_child

from aerie_worker import __main__ as entry

if __name__ == "__main__":
    sys.exit(entry.main(sys.argv[1:], dict(os.environ), lambda preload: scripted_child()))
