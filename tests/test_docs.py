"""The documentation says what the code does."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml

from aerie_api.settings import Settings, read_settings
from aerie_verifier.__main__ import read as read_server_file
from eagle3_core.engine.allowed import endpoints_of, read_allowed
from eagle3_core.jobs.docs import render
from eagle3_core.jobs.spec import parse_job
from eagle3_core.testing import tiny_job

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_job_reference_is_the_job_model():
    assert (ROOT / "docs/job.md").read_text() == render(), (
        "run: .venv/bin/python -m eagle3_core.jobs.docs > docs/job.md"
    )


def test_the_error_page_is_made_from_the_code():
    made = runpy.run_path(str(ROOT / "docs/make_errors.py"))[
        "render"
    ]()  # here torch may be loaded already: 10 s of CPU

    assert (ROOT / "docs/errors.md").read_text() == made, "run: .venv/bin/python docs/make_errors.py > docs/errors.md"


def test_the_settings_page_is_the_settings_model():
    made = runpy.run_path(str(ROOT / "docs/make_settings.py"))["render"]()

    assert (ROOT / "docs/settings.md").read_text() == made, (
        "run: .venv/bin/python docs/make_settings.py > docs/settings.md"
    )


def test_the_variables_of_the_cluster_page_are_read_by_the_programs_that_it_starts():
    page = (ROOT / "docs/cluster.md").read_text()
    api, worker = page.split("## A worker")
    parts = ("services/worker", "services/api", "services/cli", "libs/eagle3_core")
    sources = "".join(p.read_text() for part in parts for p in (ROOT / part / "src").rglob("*.py"))

    known = {f"AERIE_{name.upper()}" for name in Settings.model_fields}
    assert set(re.findall("AERIE_[A-Z_]+", api)) <= known
    assert [name for name in re.findall("AERIE_[A-Z0-9_]+", worker) if name not in sources and name not in known] == []


def test_the_api_of_the_cluster_page_has_settings_that_validate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "db.password").write_text("secret")
    block = re.search(r"```bash\n(.*?)```", (ROOT / "docs/cluster.md").read_text(), re.DOTALL)
    assert block is not None
    for line in block[1].splitlines():
        for pair in shlex.split(line)[1:] if line.startswith("export ") else []:
            monkeypatch.setenv(*pair.replace("/etc/aerie", str(tmp_path)).split("=", 1))

    settings = read_settings()

    assert (settings.port, settings.store) == (8000, "s3://aerie?endpoint=https://s3.example")
    assert settings.broker_url_file == tmp_path / "redis.url"


def test_no_page_holds_a_placeholder():
    assert [page.name for page in PAGES if re.search(r"@@|TODO|FIXME|lorem", page.read_text())] == []


def test_the_servers_that_a_page_names_can_stand_in_a_job_and_be_allowed(tmp_path: Path):
    page = (ROOT / "docs/endpoints.md").read_text()
    (shown,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    keys = re.findall(r"`AERIE_ENDPOINT_KEYS` \| `(.*?)` \|", page)[0].replace("/secrets/", f"{tmp_path}/")
    (tmp_path / "prod").write_text("a-key-of-a-running-server\n")
    sections = json.loads(f"{{{shown}}}")
    sections["verifier"]["model"] = str(tmp_path)
    spec = parse_job(tiny_job(tmp_path) | sections)
    urls = " ".join(server.url for server, _ in endpoints_of(spec))

    allowed = read_allowed({"AERIE_ENDPOINTS": urls, "AERIE_ENDPOINT_KEYS": keys})

    for server, pointer in endpoints_of(spec):
        assert allowed.client(server, "team-a", pointer).url == server.url.removesuffix("/v1")


def shown(page: str, language: str) -> list[str]:
    """The blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


@pytest.mark.parametrize(("page", "fields"), [("sglang.md", {"capture"}), ("traffic.md", {"drafter", "traffic"})])
def test_the_server_files_that_pages_show_are_taken_by_the_launcher(page: str, fields: set[str], tmp_path: Path):
    (text,) = [block for block in shown(page, "json") if block.startswith("{")]
    (tmp_path / "server.json").write_text(text)

    config = read_server_file(tmp_path / "server.json")

    assert fields <= config.model_fields_set


def test_the_job_on_sglang_and_the_kept_chats_that_pages_show_can_stand_in_a_job(tmp_path: Path):
    (verifier,) = [block for block in shown("sglang.md", "json") if block.startswith('"verifier"')]
    (datasets,) = shown("traffic.md", "yaml")

    spec = parse_job(tiny_job(tmp_path) | json.loads(f"{{{verifier}}}") | yaml.safe_load(datasets))

    assert (spec.verifier.backend, spec.datasets[0].uri) == ("sglang", yaml.safe_load(datasets)["datasets"][0]["uri"])


def test_every_variable_that_a_page_names_is_read_by_some_program():
    programs = [
        *ROOT.glob("libs/*/src/**/*.py"),
        *ROOT.glob("services/*/src/**/*.py"),
        *ROOT.glob("tests/sglang/**/*.py"),
    ]
    sources = "".join(path.read_text() for path in programs)
    read = {f"AERIE_{name.upper()}" for name in Settings.model_fields} | set(re.findall(r"AERIE_[A-Z0-9_]+", sources))

    named = {(page.name, name) for page in PAGES for name in re.findall(r"AERIE_[A-Z0-9_]*[A-Z0-9]", page.read_text())}

    assert len(named) > 50
    assert sorted(pair for pair in named if pair[1] not in read) == []


def test_every_trap_has_its_test():
    rows = [line for line in (ROOT / "docs/traps.md").read_text().splitlines() if line.startswith("| T")]
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)` `(test_\w+)`", row)
        assert named, row
        for file, test in named:
            assert f"def {test}(" in (ROOT / "libs/eagle3_core/tests" / file).read_text(), f"{file} has no {test}"
    assert [row.split("|")[1].strip() for row in rows] == [f"T{n}" for n in range(1, 15)]
