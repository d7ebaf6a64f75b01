"""The alerts ask for what is really exported, and the runbook has an answer to each."""

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest

from aerie_api.metrics import EVENTS, registry_of
from aerie_api.settings import Settings
from aerie_worker.metrics import REGISTRY

DOCS = Path(__file__).parents[1] / "docs"
RULES = [rule for group in yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
RUNBOOK = (DOCS / "runbook.md").read_text()
FUNCTIONS = {
    "absent", "min", "max", "sum", "rate", "clamp_min", "histogram_quantile", "by", "and",
}  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, set[str]]:
    """Every metric that a whole house exports, with its labels. A database of its own, opened and closed."""
    from aerie_api.house import House, Parts

    class Away:
        def send(self, rings):
            """Rings go nowhere."""

        def waiting(self, queue):
            """Nothing waits."""
            return 0

    folder = tmp_path_factory.mktemp("house")
    house = House(Settings(run_dir=folder / "run", data_dir=folder / "data"), Parts(broker=Away(), reaper=False))
    page = generate_latest(registry_of(house)).decode() + generate_latest(REGISTRY).decode()
    house.close()
    found = {
        name: set(re.findall(r"(\w+)=", labels))
        for name, labels in re.findall(r"^(aerie_\w+)(?:\{(.*)\})? \S+$", page, re.M)
    }
    for metric in EVENTS:  # those that nothing has counted yet have no sample
        kinds = ("_total",) if metric._type == "counter" else ("_bucket", "_sum", "_count")
        for kind in kinds:
            found[metric._name + kind] = {*metric._labelnames, *({"le"} if kind == "_bucket" else ())}
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_metrics_and_labels_that_exist(rule, exported):
    expression = rule["expr"]
    for name, labels in re.findall(r"(aerie_\w+)(?:\{(.*?)\}(?=[\[\s)]|$))?", expression):
        assert name in exported, f"{name} is exported by nobody"
        assert set(re.findall(r'(\w+)="', labels)) <= exported[name]
    named = set(re.findall(r"by \((\w+)\)", expression)) - {"instance"}
    assert named <= set().union(*exported.values())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_well_formed(rule):
    bare = re.sub(r'"[^"]*"', '""', rule["expr"])
    for opening, closing in ("()", "[]", "{}"):
        assert bare.count(opening) == bare.count(closing)
    assert set(re.findall(r"\b([a-z_]+) ?(?=\()", bare)) <= FUNCTIONS
    assert all(re.fullmatch(r"\d+[smhd]", window) for window in re.findall(r"\[(.*?)\]", bare))
    assert re.fullmatch(r"\d+[mh]", rule["for"])
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]


def test_every_alert_has_its_page_in_the_runbook_and_every_page_its_alert():
    assert re.findall(r"^## (\w+)$", RUNBOOK, re.M) == [rule["alert"] for rule in RULES]


def test_the_runbook_names_routes_that_the_api_has():
    from aerie_api.app import create_app

    paths = create_app(Settings()).openapi()["paths"]
    named = set(re.findall(r"\$AERIE_URL(/[\w/]*)", RUNBOOK))
    known = {re.sub(r"\{\w+\}", "X", path) for path in paths}
    assert named
    assert {re.sub(r"/(JOB|WORKER)\b", "/X", path) for path in named} <= known
