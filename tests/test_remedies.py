"""Whoever is told an error is told what to do about it: no error of the house is made without a remedy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [*ROOT.glob("libs/*/src/**/*.py"), *ROOT.glob("services/*/src/**/*.py")]
Name = tuple[str, str]
"""(module, what it is called there)"""


def modules() -> dict[str, ast.Module]:
    """Every module of the packages by its dotted name."""
    parts = {path: path.as_posix().split("/src/")[-1].removesuffix(".py").split("/") for path in SOURCES}
    return {".".join(names): ast.parse(path.read_text()) for path, names in parts.items()}


def seen_in(module: str, tree: ast.Module) -> dict[str, Name]:
    """What the names of a module's classes and imports stand for."""
    classes = {node.name: (module, node.name) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return classes | {a.asname or a.name: (node.module or "", a.name) for node in imports for a in node.names}


def error_kinds(trees: dict[str, ast.Module]) -> set[Name]:
    """AerieError and every class below it."""
    bases: dict[Name, set[Name]] = {}
    for module, tree in trees.items():
        names = seen_in(module, tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[module, node.name] = {
                    names[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in names
                }
    kinds: set[Name] = {("eagle3_core.errors", "AerieError")}
    while more := {name for name, above in bases.items() if above & kinds} - kinds:
        kinds |= more
    return kinds


def without_remedy(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Places that make an error and pass no `remedy=`, or an empty one."""
    kinds = error_kinds(trees)
    for module, tree in trees.items():
        names = seen_in(module, tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and names.get(node.func.id) in kinds:
                given = [keyword.value for keyword in node.keywords if keyword.arg == "remedy"]
                if not given or (isinstance(given[0], ast.Constant) and not given[0].value):
                    yield f"{module}:{node.lineno} {node.func.id}"


def test_every_error_is_made_with_a_remedy():
    trees = modules()

    assert len(error_kinds(trees)) > 100
    assert list(without_remedy(trees)) == []


def test_an_error_that_is_made_without_a_remedy_is_found():
    text = (
        "from eagle3_core.errors import AerieError as Base\nclass Own(Base): ...\n"
        "Own('a')\nOwn('b', remedy='')\nOwn('c', remedy='do')\nValueError('d')\n"
    )

    assert list(without_remedy({"m": ast.parse(text)})) == ["m:3 Own", "m:4 Own"]
