"""The job model refuses early, and names the field."""

import math
from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError, create_model

from eagle3_core import patterns
from eagle3_core.errors import InvalidRequest
from eagle3_core.faults import sentence
from eagle3_core.jobs.spec import JobSpec, Section, parse_job


def job(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": "drafter",
        "verifier": {"model": "/models/v"},
        "datasets": [{"uri": "train.jsonl"}],
        "evaluation": {"prompts": [{"uri": "test.jsonl"}]},
    }
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        place = document
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return document


def test_a_minimal_job_gets_the_documented_defaults():
    spec = parse_job(job())

    assert spec.training.algorithm == "eagle3.1"
    assert spec.training.ttt_steps == spec.evaluation.num_steps == 3
    assert spec.training.train_lm_head
    assert spec.training.init == "random"


@pytest.mark.parametrize(
    ("change", "value", "pointer"),
    [
        ("bogus", 1, "/bogus"),
        ("training__bogus", 1, "/training/bogus"),
        ("training__ttt_steps", 0, "/training/ttt_steps"),
        ("training__lr", math.nan, "/training/lr"),
        ("training__lr", math.inf, "/training/lr"),
        ("training__lr", 0, "/training/lr"),
        ("training__epochs", 0, "/training/epochs"),
        ("training__loss", "magic", "/training/loss"),
        ("vocab__draft_vocab_size", 0, "/vocab/draft_vocab_size"),
        ("vocab__draft_vocab_size", -1, "/vocab/draft_vocab_size"),
        ("data__max_seq_len", 0, "/data/max_seq_len"),
        ("datasets", [], "/datasets"),
        ("evaluation__prompts", [], "/evaluation/prompts"),
        ("verifier__model", "", "/verifier/model"),
        ("name", "Not A Name", "/name"),
        ("name", "../escape", "/name"),
        ("extraction__aux_layers", [5, 3, 1], "/extraction/aux_layers"),
        ("extraction__aux_layers", [1, 1, 2], "/extraction/aux_layers"),
        ("extraction__aux_layers", [1, 2], "/extraction/aux_layers"),
    ],
)
def test_bad_values_are_refused_with_the_field_they_stand_in(change: str, value: Any, pointer: str):
    with pytest.raises(InvalidRequest) as caught:
        parse_job(job(**{change: value}))

    assert caught.value.pointer is not None
    assert caught.value.pointer.startswith(pointer)
    assert caught.value.remedy


def test_all_faults_are_listed_and_not_only_the_first():
    with pytest.raises(InvalidRequest) as caught:
        parse_job(job(training__lr=0, training__epochs=0, bogus=1))

    assert {f["pointer"] for f in caught.value.context["faults"]} == {"/training/lr", "/training/epochs", "/bogus"}


@pytest.mark.parametrize(
    ("change", "value", "pointer", "says"),
    [
        ("training__epoch", 3, "/training/epoch", "no field 'epoch' here; did you mean 'epochs'?"),
        ("dataset", [], "/dataset", "no field 'dataset' here; did you mean 'datasets'?"),
        ("training__bogus", 1, "/training/bogus", "no field 'bogus' here"),
        ("resources", {"generate": {"thread": 1}}, "/resources/generate/thread",
         "no field 'thread' here; did you mean 'threads'?"),
        ("datasets", [{"uri": "a", "wieght": 1}], "/datasets/0/wieght", "no field 'wieght' here; did you mean 'weight'?"),
        ("datasets", {"uri": "a"}, "/datasets", "must be a list, and is an object"),
        ("datasets", ["a"], "/datasets/0", 'must be an object, and is "a"'),
        ("datasets", [{}], "/datasets/0/uri", "the field 'uri' is missing"),
        ("training", [1], "/training", "must be an object, and is a list"),
        ("metadata", None, "/metadata", "must be an object, and is null"),
        ("training__epochs", "three", "/training/epochs", 'must be a whole number, and is "three"'),
        ("training__epochs", 1.5, "/training/epochs", "must be a whole number, and is 1.5"),
        ("training__lr", "x" * 500, "/training/lr", "must be a number, and is a string"),
        ("training__lr", 0, "/training/lr", "must be greater than 0"),
        ("training__loss", "magic", "/training/loss", "must be 'soft_ce', 'kl', 'tv' or 'lk', and is \"magic\""),
        ("name", "My Drafter", "/name", "must be 1 to 63 small letters, digits, '.', '_' or '-', with a letter or digit at"
         " either end, and is \"My Drafter\""),
        ("verifier__endpoint", {"url": "http://me:word@host"}, "/verifier/endpoint/url",
         "must be an http:// or https:// address without user name, query or fragment"),
        ("data__template_arguments", {"x": [1]}, "/data/template_arguments/x",
         "must be true or false, a whole number or a string, and is a list"),
        ("data__template_arguments", {"x": "y" * 300}, "/data/template_arguments/x", "must have at most 256 characters"),
        ("data__template_arguments", {"a b": 1}, "/data/template_arguments/a b",
         "must be 1 to 64 letters, digits or '_', with no digit at the beginning, and is \"a b\""),
        ("evaluation__prompts", [], "/evaluation/prompts", "must have at least 1 entry, and has 0"),
        ("metadata", {str(i): "x" for i in range(17)}, "/metadata", "must have at most 16 entries"),
    ],
)  # fmt: skip
def test_a_fault_is_said_in_the_documents_words_and_its_place_once(change: str, value: Any, pointer: str, says: str):
    with pytest.raises(InvalidRequest) as caught:
        parse_job(job(**{change: value}))

    assert (caught.value.pointer, caught.value.detail) == (pointer, says)
    assert caught.value.text().count(pointer) == 1


@pytest.mark.parametrize("pattern", patterns.IN_WORDS)
def test_words_for_a_pattern_take_what_it_takes_at_both_ends(pattern: str):
    model = create_model("One", name=(Annotated[str, Field(pattern=pattern)], ...))

    with pytest.raises(ValidationError) as caught:
        model(name=" ")

    assert sentence(caught.value.errors()[0]) == f'must be {patterns.IN_WORDS[pattern]}, and is " "'


def test_a_short_name_with_one_letter_changed_is_taken_for_a_slip_and_others_are_counted():
    with pytest.raises(InvalidRequest) as caught:
        parse_job(job(datasets=[{"url": "a"}], bogus=1))

    assert caught.value.detail == "the field 'uri' is missing (and 2 more)"
    assert [f["detail"] for f in caught.value.context["faults"]] == [
        "the field 'uri' is missing",
        "no field 'url' here; did you mean 'uri'?",
        "no field 'bogus' here",
    ]


def test_a_flood_of_faults_is_cut():
    with pytest.raises(InvalidRequest) as caught:
        parse_job({**job(), **{f"bogus{i}": 1 for i in range(5000)}})

    assert len(caught.value.context["faults"]) == 50
    assert caught.value.detail.endswith("(and 4999 more)")


def test_switches_are_switches_and_text_may_be_a_number_as_yaml_writes_it():
    spec = parse_job(job(training__train_lm_head=False, training__lr="1e-4"))

    assert (spec.training.train_lm_head, spec.training.lr) == (False, 1e-4)


@pytest.mark.parametrize(
    ("changes", "pointer", "detail", "remedy"),
    [
        ({"data__max_seq_len": 128, "training__max_seq_len": 256}, "/training/max_seq_len", "is 256.*, 128$", "max_seq_len to 256"),
        ({"data__regenerate": {"temperature": 0.5}}, "/data/regenerate/temperature", "it is transformers", "verifier.backend to sglang"),
        ({"data__regenerate": {"top_p": 0.5}}, "/data/regenerate/top_p", "temperature is 0", "temperature above 0"),
        ({"verifier__device": "cpu", "training__gpus": 1}, "/training/gpus", "device is cpu", "leave training.gpus out"),
        ({"verifier__engine": {"in_flight": 1}}, "/verifier/engine", "backend is transformers", "leave verifier.engine out"),
        ({"extraction__aux_layers": [1, 2]}, "/extraction/aux_layers", r"is \[1, 2\]$", "three layer inputs"),
        ({"training__rate": 1}, "/training/rate", "no field .rate. here", "take training.rate out"),
        ({"training__epochs": True}, "/training/epochs", "^true and false are no values", "correct training.epochs"),
        ({"verifier": {}}, "/verifier/model", ".model. is missing", "add verifier.model"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_to_change_both_sides_and_what_to_do(
    changes: dict[str, Any], pointer: str, detail: str, remedy: str
):
    with pytest.raises(InvalidRequest, match=detail) as caught:
        parse_job(job(**changes))

    assert (caught.value.pointer, caught.value.context["faults"][0]["pointer"]) == (pointer, pointer)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("document", [None, [], "job", 3, {"name": "x"}])
def test_anything_but_a_whole_job_is_refused(document: Any):
    with pytest.raises(InvalidRequest):
        parse_job(document)


def test_a_job_survives_json():
    spec = parse_job(job(extraction__aux_layers=[2, 4, 5]))

    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_every_field_of_every_section_is_documented():
    def sections(kind: type[Section]) -> set[type[Section]]:
        return {kind}.union(*(sections(s) for s in kind.__subclasses__()))

    undocumented = [
        f"{section.__name__}.{name}"
        for section in sections(Section)
        for name, field in section.model_fields.items()
        if not field.description and not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
    ]
    assert undocumented == []


def test_a_tie_is_what_the_verifiers_precision_explains_unless_the_job_says_otherwise():
    gaps = [parse_job(job(verifier__dtype=dtype)).near_tie_logit_gap for dtype in ("float32", "bfloat16", "float16")]

    assert gaps == [0.0, 0.25, 0.03125]
    assert parse_job(job(evaluation__near_tie_logit_gap=0.5)).near_tie_logit_gap == 0.5


@pytest.mark.parametrize(
    ("change", "value", "pointer"),
    [
        ("metadata", {"x": "\ud800"}, "/metadata/x"),
        ("metadata", {"\ud800": "x"}, "/metadata"),
        ("verifier__revision", "\udfff", "/verifier/revision"),
        ("datasets", [{"uri": "a\ud800"}], "/datasets/0/uri"),
        ("metadata", {"a/b~c": "\ud800"}, "/metadata/a~1b~0c"),
        ("metadata", {"x": "a\0b"}, "/metadata/x"),
        ("verifier__model", "/a" * 3000, "/verifier/model"),
        ("verifier__revision", "r" * 257, "/verifier/revision"),
        ("datasets", [{"uri": "/a"}] * 65, "/datasets"),
        ("datasets", [{"uri": "/" + "a" * 4096}], "/datasets/0/uri"),
        ("datasets", [{"uri": "a", "weight": 0}], "/datasets/0/weight"),
        ("datasets", [{"uri": "a", "weight": -1}], "/datasets/0/weight"),
        ("datasets", [{"uri": "a", "weight": float("nan")}], "/datasets/0/weight"),
        ("datasets", [{"uri": "a", "weight": True}], "/datasets/0/weight"),
        ("datasets", [{"uri": "a", "max_samples": True}], "/datasets/0/max_samples"),
        ("training__ttt_steps", True, "/training/ttt_steps"),
        ("training__lr", True, "/training/lr"),
        ("training__betas", [True, 0.9], "/training/betas"),
        ("training__betas", [0.9], "/training/betas/1"),
        ("training__betas", [], "/training/betas/0"),
        ("training__memory_gib", 1e308, "/training/memory_gib"),
        ("evaluation__near_tie_logit_gap", 1e308, "/evaluation/near_tie_logit_gap"),
        ("extraction__aux_layers", [True, 2, 3], "/extraction/aux_layers"),
        ("training__epochs", 10**30, "/training/epochs"),
        ("training__max_steps", 10**30, "/training/max_steps"),
        ("training__accumulation", 10**6, "/training/accumulation"),
        ("training__threads", 10**6, "/training/threads"),
        ("training__clip", 1e300, "/training/clip"),
        ("training__weight_decay", 1e300, "/training/weight_decay"),
        ("training__expected_length_weight", 1e300, "/training/expected_length_weight"),
        ("metadata", {"k" * 65: "x"}, "/metadata"),
        ("metadata", {"k": "x" * 513}, "/metadata/k"),
        ("datasets", [{"uri": "a", "weight": 1e300}], "/datasets/0/weight"),
    ],
)
def test_what_cannot_be_stored_or_sent_is_refused_where_it_stands(change: str, value: Any, pointer: str):
    with pytest.raises(InvalidRequest) as caught:
        parse_job(job(**{change: value}))

    assert caught.value.pointer is not None
    assert caught.value.pointer.startswith(pointer)


@pytest.mark.parametrize("name", ["min_mean", "min_ci_low", "min_macro", "min_task"])
def test_a_gate_that_no_drafter_could_pass_is_refused(name: str):
    assert parse_job(job(evaluation__num_steps=3, evaluation__gate={name: 3.9}))

    with pytest.raises(InvalidRequest, match="yields at most 4: no drafter would pass") as caught:
        parse_job(job(evaluation__num_steps=3, evaluation__gate={name: 4.0}))

    assert caught.value.pointer == f"/evaluation/gate/{name}"
