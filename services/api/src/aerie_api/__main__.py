"""Runs the API: `python -m aerie_api`, configured by `AERIE_*`. `backup URL` and `restore URL` save and restore its data.

Exit status 2 means that starting it again would fail again. The reason is then printed in words on stderr, and as a problem
document on stdout (which is used for nothing else) for a supervisor that reads it. A backup or a restoration prints what it
did as one JSON document; its exit status 1 means that something in it is damaged or lost.
"""

from __future__ import annotations

import argparse
import json
import sys

from aerie_api.server import serve
from aerie_api.settings import read_settings
from eagle3_core.errors import AerieError
from eagle3_core.objects.location import store_at


def parser() -> argparse.ArgumentParser:
    """What the program takes."""
    made = argparse.ArgumentParser(prog="python -m aerie_api", description="The API, configured by AERIE_*.")
    commands = made.add_subparsers(dest="command")
    saving = commands.add_parser("backup", help="save database and store; the API may go on serving")
    saving.add_argument("url", help="store to save to: file:///folder or s3://bucket/prefix?...")
    bringing = commands.add_parser("restore", help="bring a backup into an empty database and its store")
    bringing.add_argument("url", help="store that was saved to")
    bringing.add_argument("--id", default=None, help="which backup; default: the newest")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Do what was asked; the process's exit status."""
    asked = parser().parse_args(arguments)
    try:
        if asked.command == "backup":
            return _back_up(asked.url)
        if asked.command == "restore":
            return _restore(asked.url, asked.id)
        serve(read_settings())
    except AerieError as error:
        sys.stderr.write(error.text() + "\n")
        sys.stdout.write(json.dumps(error.problem()) + "\n")
        return 2
    return 0


def _back_up(url: str) -> int:
    from aerie_api.backup import back_up

    settings = read_settings()
    made = back_up(settings, store_at(settings.store_url), store_at(url))
    sys.stdout.write(made.model_dump_json(indent=1) + "\n")
    return 1 if made.damaged else 0


def _restore(url: str, name: str | None) -> int:
    from aerie_api.backup import restore

    settings = read_settings()
    brought = restore(settings, store_at(settings.store_url), store_at(url), name)
    sys.stdout.write(brought.model_dump_json(indent=1) + "\n")
    return 1 if brought.lost else 0


if __name__ == "__main__":
    sys.exit(main())
