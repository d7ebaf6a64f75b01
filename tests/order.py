"""What keeps a tree of files in order, each rule a function from files to faults, so that it can be tried on a planted one.

A path of one machine or a registry in a lock file works for its author alone, a link to a file that moved misleads, and a
module of many hundred lines holds more than one idea. None of these breaks a test by itself.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

MOST_LINES = 400
"""Of a Python module. The house aims at 60 to 300; beyond this it must be parted."""

_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_QUOTED = re.compile(r"`((?!\.aerie/)[\w./-]+/[\w./-]+\.(?:py|md|json|toml|yaml|yml|svg|txt|in))`")
_FROM_ROOT = re.compile(
    r"(?<![\w/.-])((?:docs|examples|tests|benchmarks|libs|services|locks)/[\w/.-]*\w\.(?:py|md|json|toml|svg|txt|in))\b"
)
_MACHINE = re.compile(r"(?:(?<![\w.$}>~/-])|(?<=file://))/(?:root|home|work|Users)/[\w.-]+")
_SCRATCH = re.compile(r"(?<![\w.$}>~/-])/tmp/[\w.-]+")
_REGISTRY = re.compile(r"https?://|--(?:extra-)?index-url|--find-links")

Texts = Mapping[str, str]
"""Path relative to the root, with `/` -> text."""


def committed(root: Path) -> dict[str, str]:
    """The text files that git tracks. What else lies in a checkout is its owner's: jobs, data, links to models. Files that
    are no UTF-8 are left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"],
        cwd=root,
        check=True,
        capture_output=True,
    ).stdout.decode()
    texts: dict[str, str] = {}
    for name in filter(None, listed.split("\0")):
        try:
            texts[name] = (root / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # a picture; a file deleted and not yet committed so
            continue
    return texts


def too_long(texts: Texts) -> list[str]:
    """Python modules beyond the cap."""
    lengths = {name: text.count("\n") for name, text in texts.items() if name.endswith(".py")}
    return [
        f"{name} has {n} lines, {MOST_LINES} at most: part it by idea" for name, n in lengths.items() if n > MOST_LINES
    ]


def dead_links(texts: Texts, everything: Iterable[str]) -> list[str]:
    """Links and quoted file names in Markdown, and files named from the root anywhere, that name nothing.

    A quoted name may leave out the folders that are clear from the page (`jobs/spec.py`), or some in between
    (`services/api/.../app.py`). What lies in `.aerie/` is made by running. `everything` are the names of all files, pictures included.
    """
    files = set(everything)
    names = files | {str(folder) for name in files for folder in PurePosixPath(name).parents}
    faults: list[str] = []
    for page, text in texts.items():
        if page.endswith(".md"):
            links = [link for link in _LINK.findall(text) if "://" not in link]
            faults += [f"{page} links to {link}" for link in links if _joined(page, link) not in names]
            faults += [f"{page} names {name}" for name in _QUOTED.findall(text) if not _known(name, files)]
        faults += [f"{page} names {name}" for name in _FROM_ROOT.findall(text) if not _known(name, files)]
    return sorted(set(faults))


def _joined(page: str, link: str) -> str:
    """`link` in `page`, from the root."""
    parts: list[str] = []
    for part in (*PurePosixPath(page).parent.parts, *PurePosixPath(link).parts):
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def _known(name: str, files: set[str]) -> bool:
    pattern = re.compile("(?:.*/)?" + re.escape(name).replace(re.escape("..."), ".*"))
    return any(pattern.fullmatch(file) for file in files)


def machine_paths(texts: Texts) -> list[str]:
    """Places of one machine: homes anywhere, named temporary files in prose, registries in lock files."""
    faults: list[str] = []
    for name, text in texts.items():
        faults += [f"{name} names {path}" for path in _MACHINE.findall(text)]
        if name.endswith(".md"):
            faults += [f"{name} names {path}" for path in _SCRATCH.findall(text)]
        if name.startswith("locks/"):
            faults += [f"{name} names a registry: {line}" for line in text.splitlines() if _REGISTRY.search(line)]
    return faults
