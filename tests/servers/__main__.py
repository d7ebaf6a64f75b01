"""`python -m servers`: have every server that the tests need on this machine, before any test runs."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import servers


def main() -> None:
    """Install whatever is missing, of every module here that has an `install`."""
    for module in pkgutil.iter_modules(servers.__path__, "servers."):
        if module.name != __spec__.name and hasattr(found := importlib.import_module(module.name), "install"):
            sys.stdout.write(f"{module.name.rpartition('.')[2]}: {found.install()}\n")


if __name__ == "__main__":
    main()
