"""`python -m aerie_api`: the API, configured by `AERIE_*`.

Exit status 2 when it cannot start and starting it again would not help: the reason is said on stderr in words, and on
stdout, which it uses for nothing else, as a problem document for whoever supervises it.
"""

from __future__ import annotations

import json
import sys

from aerie_api.server import serve
from aerie_api.settings import read_settings
from eagle3_core.errors import AerieError


def main() -> int:
    """Serve; the process's exit status."""
    try:
        serve(read_settings())
    except AerieError as error:
        sys.stderr.write(error.text() + "\n")
        sys.stdout.write(json.dumps(error.problem()) + "\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
