"""Reading job documents, and changing them from the command line."""

import contextlib

import pytest

from aerie_cli.jobfile import apply, parse, read_job
from eagle3_core.errors import InvalidRequest


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("training.epochs=5", {"training": {"epochs": 5}}),
        ("training.lr=1e-4", {"training": {"lr": 0.0001}}),
        ("training.lr=.5", {"training": {"lr": 0.5}}),
        ("training.max_steps=null", {"training": {"max_steps": None}}),
        ("training.train_lm_head=false", {"training": {"train_lm_head": False}}),
        ("extraction.aux_layers=[2, 15, 27]", {"extraction": {"aux_layers": [2, 15, 27]}}),
        ("name=smollm2-long", {"name": "smollm2-long"}),
        ("metadata.note=a=b", {"metadata": {"note": "a=b"}}),
    ],
)
def test_a_change_names_a_field_by_its_path_and_its_value_means_what_it_looks_like(change, expected):
    assert apply({}, [change]) == expected


def test_changes_reach_into_lists_and_keep_everything_else():
    document = {"datasets": [{"uri": "a"}, {"uri": "b", "weight": 2}], "data": {"max_seq_len": 64}}

    changed = apply(document, ["datasets.1.uri=c", "data.regenerate.enabled=false"])

    assert changed == {
        "datasets": [{"uri": "a"}, {"uri": "c", "weight": 2}],
        "data": {"max_seq_len": 64, "regenerate": {"enabled": False}},
    }


@pytest.mark.parametrize("change", ["training.epochs", "=5", "training..epochs=5", "datasets.7.uri=c", "name.first=x"])
def test_a_change_that_leads_nowhere_is_refused_by_name(change):
    with pytest.raises(InvalidRequest) as refused:
        apply({"datasets": [{"uri": "a"}], "name": "tiny"}, [change])

    assert f"--set {change}" in refused.value.detail


def test_yaml_and_json_are_the_same_job(tmp_path):
    (tmp_path / "job.yaml").write_text("name: tiny\ntraining: {lr: 1e-4, epochs: 3}\n")
    (tmp_path / "job.json").write_text('{"name": "tiny", "training": {"lr": 1e-4, "epochs": 3}}')

    assert read_job(str(tmp_path / "job.yaml")) == read_job(str(tmp_path / "job.json"))


@pytest.mark.parametrize(
    ("text", "says"),
    [("{name: [", "job.json, line 1 is neither JSON nor YAML"), ("- a\n- b", "not an object"), ("", "not an object")],
)
def test_a_document_that_is_no_job_says_what_is_wrong(text, says):
    with pytest.raises(InvalidRequest) as refused:
        parse(text, "job.json")

    assert says in refused.value.detail


def test_yaml_builds_no_objects():
    with pytest.raises(InvalidRequest):
        parse("!!python/object/apply:os.getcwd []", "job.yaml")


def test_relative_paths_start_at_the_job_documents_folder(tmp_path):
    place = tmp_path / "job.yaml"
    place.write_text(
        "verifier: {model: models/v}\n"
        "datasets: [{uri: train.jsonl}, {uri: /data/x.jsonl}, {uri: 'file:///data/y.jsonl'}]\n"
        "evaluation: {prompts: [{uri: ../held-out.jsonl}]}\n"
    )

    job = read_job(str(place))

    assert job["verifier"]["model"] == f"{tmp_path}/models/v"
    assert [d["uri"] for d in job["datasets"]] == [f"{tmp_path}/train.jsonl", "/data/x.jsonl", "file:///data/y.jsonl"]
    assert job["evaluation"]["prompts"][0]["uri"] == f"{tmp_path}/../held-out.jsonl"


@pytest.mark.parametrize("text", ["verifier: 3", "datasets: {uri: a}", "datasets: [a, null]", "evaluation: []"])
def test_a_document_of_the_wrong_shape_is_left_for_the_api_to_refuse(tmp_path, text):
    place = tmp_path / "job.yaml"
    place.write_text(text)

    assert read_job(str(place)) == parse(text, "job.yaml")


@pytest.mark.parametrize(
    "change", ["name=2020-13-45", "name=0x_", "name=!!int x", "name=" + "[" * 3000, "datasets.\u00b2=x"]
)
def test_odd_values_are_words_or_refused_and_never_a_traceback(change):
    with contextlib.suppress(InvalidRequest):
        apply({"datasets": [{"uri": "a"}]}, [change])


@pytest.mark.parametrize("text", ["[" * 100_000, "a: &a {b: *a}", "2020-01-01: x"])
def test_documents_that_json_cannot_hold_are_refused(tmp_path, text):
    place = tmp_path / "job.yaml"
    place.write_text(text)

    with pytest.raises(InvalidRequest):
        read_job(str(place))
