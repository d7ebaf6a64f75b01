"""Makes `docs/errors.md` from the code: every error type of every package, by its stable code.

.venv/bin/python docs/make_errors.py > docs/errors.md
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

from eagle3_core.errors import error_types

PACKAGES = ("eagle3_core", "aerie_api", "aerie_worker", "aerie_cli", "aerie_verifier")
HEAD = """# Error codes

Made by `docs/make_errors.py`. Every error that the API, the command line or a job's `reason` shows carries one of these
codes, a sentence that says what is wrong (naming both sides where two disagree), and the remedy. As HTTP they are problem
documents (RFC 9457, `application/problem+json`) with the status below; `again` says whether a unit that failed so is tried again.

| code | status | again | what it means |
|---|---|---|---|
"""


def render() -> str:
    """The page as Markdown."""
    for package in PACKAGES:
        root = importlib.import_module(package)
        for module in pkgutil.walk_packages(root.__path__, package + "."):
            if ".migrations." not in module.name:
                importlib.import_module(module.name)
    rows = {
        (kind.code, kind.status, "yes" if kind.retryable else "no", (kind.__doc__ or "").strip().splitlines()[0])
        for kind in error_types()
        if "code" in kind.__dict__ and kind.code != "remote" and kind.__module__.split(".")[0] in PACKAGES
    }
    first = {row[0]: row for row in sorted(rows, reverse=True)}  # one line a code, where two processes raise it
    return HEAD + "".join(
        f"| `{code}` | {status} | {again} | {title} |\n" for code, status, again, title in sorted(first.values())
    )


if __name__ == "__main__":
    sys.stdout.write(render())
