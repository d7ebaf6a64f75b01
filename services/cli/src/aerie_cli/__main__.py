"""`aerie`, and `python -m aerie_cli`: Ctrl-C ends it in the same way while it is still loading its parts (a second)."""

import sys

from aerie_cli.exits import INTERRUPTED


def main() -> None:
    """Run the command line of this process."""
    try:
        from aerie_cli.main import app

        app(prog_name="aerie")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
