"""A job document from a file, with changes from the command line.

`--set training.epochs=5` names a field by its path; numbers in a path are places in a list. The value is read as YAML,
so `null`, `true`, `0.1`, `[1, 2, 3]` and words mean what they look like.

Relative paths of the verifier and of data sets start at the job document's folder (at the working folder for stdin). They
are made absolute here (and `~` unfolded), since only here it is known where the document lies; the API takes absolute ones only.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from eagle3_core import strict_json
from eagle3_core.errors import InvalidRequest

MAX_JOB_BYTES = 4 << 20
MAX_NODES = 200_000
"""Values of a job document, aliases unfolded: a few lines of YAML can name billions."""

JobFile = Annotated[str, typer.Argument(metavar="FILE", help="Job document, JSON or YAML; - reads stdin.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field, for instance training.epochs=5."),
]


def read_job(place: str, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The document at `place` (`-` = stdin) with `changes` applied. Raises InvalidRequest."""
    folder = Path.cwd() if place == "-" else Path(place).absolute().parent
    document = anchored(apply(parse(read_text(place), place), changes), folder)
    try:
        return json.loads(json.dumps(document, default=str))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{place} holds what JSON cannot: {error}", remedy="use names, numbers and lists"
        ) from None


def read_text(place: str) -> str:
    """The text at `place` (`-` = stdin), which is UTF-8; a byte-order mark is skipped. Raises InvalidRequest."""
    try:
        if place == "-":
            data = sys.stdin.buffer.read(MAX_JOB_BYTES + 1)
        else:
            with Path(place).open("rb") as file:
                data = file.read(MAX_JOB_BYTES + 1)
        if len(data) > MAX_JOB_BYTES:
            raise ValueError(f"it has more than {MAX_JOB_BYTES} bytes")
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ValueError("it is UTF-16, save it as UTF-8")
        return data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, UnicodeDecodeError):
            reason = f"byte {error.start} is not UTF-8 text"
        raise InvalidRequest(f"{place} cannot be read: {reason}", remedy="name a job document, JSON or YAML") from None


def anchored(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`document` with the relative paths of its verifier and data sets made absolute, from `folder`, and `~` unfolded as
    a shell would."""
    verifier, evaluation = document.get("verifier"), document.get("evaluation")
    sources = [document.get("datasets"), evaluation.get("prompts") if isinstance(evaluation, dict) else None]
    fields = [(verifier, "model"), *((source, "uri") for many in sources if isinstance(many, list) for source in many)]
    for place, name in fields:
        if not isinstance(place, dict):
            continue
        value = place.get(name)
        if isinstance(value, str) and value and not value.startswith("/") and not _SCHEME.match(value):
            with suppress(RuntimeError):  # of a person whom nobody knows: then it is a file's name like any other
                value = str(Path(value).expanduser())
            place[name] = str(folder / value)
    return document


def parse(text: str, place: str) -> dict[str, Any]:
    """`text` as a document. JSON is tried first: it is exact, and YAML reads 1e-4 as a word. Raises InvalidRequest."""
    try:
        document = strict_json.loads_once(text)  # of a doubled name YAML's reader says which, and where
    except (ValueError, RecursionError):
        try:
            document = load_yaml(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f", line {mark.line + 1}" if mark else ""
            reason = getattr(error, "problem", None) or str(error)
            raise InvalidRequest(
                f"{place}{where} is neither JSON nor YAML: {reason}", remedy="correct the document"
            ) from None
    if not isinstance(document, dict):
        raise InvalidRequest(
            f"{place} holds no job: it is not an object", remedy="docs/job.md lists the fields of a job"
        )
    return document


def load_yaml(text: str) -> Any:
    """What the one YAML document `text` holds. Raises YAMLError, ValueError where aliases would blow it up."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if (nodes := _unfolded(node, {}, set())) > MAX_NODES:
            raise ValueError(f"its aliases unfold to {nodes} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _unfolded(node: yaml.Node, known: dict[int, int], above: set[int]) -> int:
    """How many values `node` has, each counted as often as aliases name it. Raises ValueError for one that holds itself."""
    if id(node) in above:
        raise ValueError("an alias names what it is part of")
    if id(node) not in known:
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            parts = list(node.value)
        elif isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_unfolded(part, known, above | {id(node)}) for part in parts)
    return known[id(node)]


def apply(document: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """`document` with each `a.b.c=value` of `changes` set. Raises InvalidRequest that names the change."""
    for change in changes:
        path, equals, value = change.partition("=")
        steps = path.split(".")
        if not equals or not all(steps):
            raise InvalidRequest(f"--set {change}: not FIELD=VALUE", remedy="for instance --set training.epochs=5")
        try:
            parsed = load_yaml(value)
        except (yaml.YAMLError, ValueError, RecursionError):
            parsed = value
        _set(document, steps, parsed, change)
    return document


def _set(document: dict[str, Any], steps: Sequence[str], value: Any, change: str) -> None:
    place: Any = document
    for i, step in enumerate(steps):
        last = i == len(steps) - 1
        if isinstance(place, list) and step.isascii() and step.isdecimal() and int(step) < len(place):
            key: Any = int(step)
        elif isinstance(place, dict):
            key = step
            if not last and place.get(step) is None:
                place[step] = {}
        else:
            where = ".".join(steps[:i]) or "the job"
            raise InvalidRequest(
                f"--set {change}: {where} has no {step}", remedy="docs/job.md lists the fields of a job"
            )
        if last:
            place[key] = value
        place = place[key]


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-4 is a number, as in JSON, and a name stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping `node`. Raises ConstructorError where a name stands in it twice."""
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in names:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the name {key.value!r} stands twice in one object", key.start_mark
                    )
                names.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
