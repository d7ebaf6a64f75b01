"""Every command that a page shows, in a block or within a sentence, is one that its program's own parser takes."""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import typer
from typer.exceptions import TyperException

from aerie_api import __main__ as api_main
from aerie_cli.main import app
from aerie_verifier import __main__ as verifier_main
from aerie_worker import __main__ as worker_main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("aerie", "aerie-verifier", "python", "make", "bash", "curl")


def commands(text: str) -> list[str]:
    """The commands of a page's indented and fenced blocks and of its code within sentences, without their remarks."""
    blocks = re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)
    fenced = [
        line for block in re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.M | re.S) for line in block.split("\n")
    ]
    lines = [re.split(r"\s+#\s", line)[0] for line in (*blocks, *fenced, *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text))]
    parts = [part for line in lines for part in ([line] if "'" in line else line.split("; "))]
    typed = [part.strip().removeprefix(".venv/bin/") for part in parts]
    return [command for command in typed if command.split(" ")[0] in PROGRAMS and " " in command]


SHOWN = sorted({(page.name, command) for page in PAGES for command in commands(page.read_text())})


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_a_command_that_a_page_shows_is_one(page: str, command: str) -> None:
    program, *words = shlex.split(command)

    CHECKS[program](words)


def is_aerie(words: list[str]) -> None:
    """Raise TyperException unless the command line takes `words`; a bare name need only exist."""
    command = typer.main.get_command(app)
    context = command.context_class(command, info_name="aerie")
    while hasattr(command, "commands") and words:
        _, command, words = command.resolve_command(context, words)
        context = command.context_class(command, parent=context)
    try:
        if words:
            command.make_context(command.name, words, parent=context)
    except TyperException as error:  # a sentence may name an option without its value
        if "requires an argument" not in error.format_message():
            raise


def is_verifier(words: list[str]) -> None:
    """Fail unless the launcher takes `words`."""
    verifier_main.parser().parse_args(words)


def is_python(words: list[str]) -> None:
    """Fail unless the module or the file exists; the commands of API and worker are parsed."""
    match words:
        case ["-c", code]:
            compile(code, "page", "exec")
        case ["-m", "aerie_api", *rest]:
            api_main.parser().parse_args(rest)
        case ["-m", "aerie_worker", first, *rest]:
            worker_main.parse([first, *rest])
        case ["-m", module, *_]:
            assert importlib.util.find_spec(module) is not None
        case [file, *_]:
            assert (ROOT / file).is_file()


def is_make(words: list[str]) -> None:
    """Fail unless the target exists."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)

    assert words[0] in targets


def is_bash(words: list[str]) -> None:
    """Fail unless the script exists."""
    assert (ROOT / words[0]).is_file()


def is_curl(words: list[str]) -> None:
    """Fail unless the API has the route, and the body is JSON."""
    method = words[words.index("-X") + 1] if "-X" in words else "GET"
    (url,) = (word for word in words if word.startswith(("http", "$AERIE_URL")))
    path = urlsplit(url.replace("$AERIE_URL", "http://house")).path
    routes = json.loads((ROOT / "docs/openapi.json").read_text())["paths"]

    assert [
        route
        for route, methods in routes.items()
        if method.lower() in methods and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", route), path)
    ]
    if "-d" in words:
        json.loads(words[words.index("-d") + 1])


CHECKS = {
    "aerie": is_aerie,
    "aerie-verifier": is_verifier,
    "python": is_python,
    "make": is_make,
    "bash": is_bash,
    "curl": is_curl,
}


def test_the_pages_show_commands_of_every_program():
    assert {command.split(" ")[0] for _, command in SHOWN} == set(PROGRAMS)
    assert len(SHOWN) >= 40


@pytest.mark.parametrize(
    "command",
    ["aerie nothing", "aerie submit job.yaml --wach", "aerie keys rotate --overlap 1", "make nothing", "python -m aerie_nothing",
     "python -m aerie_api backup", "python -m aerie_worker --url http://a --name w", "python nothing.py", "aerie-verifier",
     "curl -X PUT http://127.0.0.1:8000/jobs", "bash nothing"],
)  # fmt: skip
def test_a_command_that_is_none_is_found(command):
    program, *words = command.split(" ")

    with pytest.raises((TyperException, AssertionError, SystemExit, KeyError)):
        CHECKS[program](words)
