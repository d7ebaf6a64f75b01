"""`python -m aerie_worker` with children that run scripted stages."""

import os
import sys

from worker_stubs import scripted_child

from aerie_worker import __main__ as entry
from aerie_worker.executors import local

if __name__ == "__main__":
    local.Local.__init__.__defaults__ = (scripted_child, False)
    sys.exit(entry.main(sys.argv[1:], dict(os.environ)))
