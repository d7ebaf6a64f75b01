"""Reading job documents, and changing them from the command line."""

import contextlib

import pytest
from hostile import odd_documents, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


def test_a_tilde_is_unfolded_as_a_shell_would(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/homes/me")
    place = tmp_path / "job.yaml"
    place.write_text(
        "verifier: {model: ~/models/v}\ndatasets: [{uri: ~/a.jsonl}, {uri: ~nobody-of-this-name/a.jsonl}]\n"
    )

    job = read_job(str(place))

    assert job["verifier"]["model"] == "/homes/me/models/v"
    assert [d["uri"] for d in job["datasets"]] == ["/homes/me/a.jsonl", f"{tmp_path}/~nobody-of-this-name/a.jsonl"]


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


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
MERGE_BOMB = "a0: &a0 {k: v}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12)
)


@pytest.mark.parametrize("text", ["[" * 100_000, "a: &a {b: *a}", "2020-01-01: x", BOMB, MERGE_BOMB, "a: &a [*a]"])
def test_documents_that_json_cannot_hold_are_refused(tmp_path, text):
    place = tmp_path / "job.yaml"
    place.write_text(text)

    with pytest.raises(InvalidRequest):
        read_job(str(place))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"name": "a", "name": "b"}', "line 1 is neither JSON nor YAML: the name 'name' stands twice"),
        ('{"a": {"lr": 1,\n "lr": 2}}', "line 2 .* the name 'lr' stands twice"),
        ("name: a\ndata: {}\nname: b\n", "line 3 .* the name 'name' stands twice"),
    ],
)
def test_a_name_that_stands_twice_is_refused_with_its_line(text, says):
    with pytest.raises(InvalidRequest, match=says):
        parse(text, "job")


def test_anchors_and_merges_that_stay_small_are_welcome():
    job = parse("base: &b {dtype: float32, model: a}\nverifier: {<<: *b, model: m}\n", "job.yaml")

    assert job["verifier"] == {"dtype": "float32", "model": "m"}


@pytest.mark.parametrize(
    "data",
    [
        b'\xef\xbb\xbf{"name": "tiny"}',
        b"\xef\xbb\xbfname: tiny\n",
        b'{\t"name":\t"tiny"}\r\n',
        b"---\nname: tiny\n...\n",
    ],
)
def test_marks_tabs_and_line_ends_do_not_matter(tmp_path, data):
    (tmp_path / "job").write_bytes(data)

    assert read_job(str(tmp_path / "job")) == {"name": "tiny"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"name": "\xff"}', "byte 10 is not UTF-8"),
        ('{"name": "tiny"}'.encode("utf-16"), "UTF-16, save it as UTF-8"),
        (b'{"name": "' + b"x" * (5 << 20) + b'"}', "more than 4194304 bytes"),
        (b"name: a\n---\nname: b\n", "line 2 .*another document"),
        (b"\x00\x01\x02", "neither JSON nor YAML"),
        (b"a: !!python/name:os.system x", "could not determine a constructor"),
        (b"? [a, b]\n: c", "unhashable key"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path, data, says):
    (tmp_path / "job").write_bytes(data)

    with pytest.raises(InvalidRequest, match=says):
        read_job(str(tmp_path / "job"))


@pytest.mark.parametrize("place", ["/dev/zero", "/nowhere", "/", "", "x" * 5000])
def test_a_place_that_holds_no_document_is_refused(place):
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_job(place)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=60) | odd_documents | st.text("{}[]:,-&*!|>'\"ab1 \n\t#?%@", max_size=40).map(str.encode)
)
def test_any_bytes_are_a_document_that_json_can_hold_or_an_invalid_request(tmp_path, data):
    (tmp_path / "job").write_bytes(data)

    job, error = outcome(lambda: read_job(str(tmp_path / "job")))

    assert isinstance(job, dict) or isinstance(error, InvalidRequest)
    assert error is None or error.remedy
