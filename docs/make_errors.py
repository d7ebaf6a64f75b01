"""Makes `docs/errors.md` from the code: every error type of every package, by its stable code.

.venv/bin/python docs/make_errors.py > docs/errors.md
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

from eagle3_core.errors import AerieError, RemoteError, error_types

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
    named = [k for k in error_types() - {AerieError, RemoteError} if "code" in k.__dict__]
    ours = [k for k in named if k.__module__.split(".")[0] in PACKAGES]
    kinds = {kind.code: kind for kind in ours}
    if twice := sorted(f"{k.code}: {k.__module__}.{k.__name__}" for k in ours if kinds[k.code] is not k):
        raise ValueError(f"one code, two types: {', '.join(twice)}")
    return HEAD + "".join(map(_row, sorted(kinds.items())))


def _row(entry: tuple[str, type[AerieError]]) -> str:
    code, kind = entry
    title = (kind.__doc__ or "").strip().splitlines()[0]
    return f"| `{code}` | {kind.status} | {'yes' if kind.retryable else 'no'} | {title} |\n"


if __name__ == "__main__":
    sys.stdout.write(render())
