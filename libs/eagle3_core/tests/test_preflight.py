"""A job that cannot succeed is refused when it is posted: with a stable code, the field it is about, and a remedy."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.digests import digest_file
from eagle3_core.errors import AerieError
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.spec import parse_job
from eagle3_core.testing import tiny_conversations, tiny_job, tiny_verifier, write_jsonl


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path


@pytest.fixture
def job(folder) -> dict[str, Any]:
    return tiny_job(folder)


def refusal(job: dict[str, Any], *roots: Path) -> AerieError:
    with pytest.raises(AerieError) as caught:
        preflight(parse_job(job), roots)
    assert caught.value.status in (409, 422)
    assert caught.value.remedy
    return caught.value


def said(error: AerieError) -> tuple[str, str | None]:
    return error.code, error.pointer


def unanswered(job: dict[str, Any]) -> None:
    job["data"]["regenerate"]["enabled"] = False


def test_a_job_that_may_start_knows_its_sources_by_their_content(folder, job):
    checked = preflight(parse_job(job), [folder])

    train, prompts = str(folder / "train.jsonl"), str(folder / "eval.jsonl")
    assert checked.sources == {
        "verifier": checked.verifier.digest,
        train: digest_file(folder / "train.jsonl"),
        prompts: digest_file(folder / "eval.jsonl"),
    }
    assert (checked.warnings, checked.aux_layers) == ((), (2, 4, 5))


def test_it_needs_no_torch(folder, job):
    (folder / "job.json").write_text(json.dumps(job))
    code = (
        "import json, sys; from pathlib import Path; from eagle3_core.jobs.preflight import preflight\n"
        "from eagle3_core.jobs.spec import parse_job; folder = Path(sys.argv[1])\n"
        "preflight(parse_job(json.loads((folder / 'job.json').read_text())), [folder])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code, folder], check=True)


def test_an_unknown_verifier_path(folder, job):
    job["verifier"]["model"] = str(folder / "nowhere")

    assert said(refusal(job, folder)) == ("verifier.missing", "/verifier/model")


def test_a_verifier_outside_the_roots(folder, job):
    assert said(refusal(job, folder / "other")) == ("source.not_allowed", "/verifier/model")


def test_a_verifier_without_tokenizer(folder, job):
    (folder / "verifier" / "tokenizer.json").unlink()

    assert said(refusal(job, folder)) == ("verifier.tokenizer", "/verifier/model")


def test_a_verifier_without_chat_template(folder, job):
    (folder / "verifier" / "chat_template.jinja").unlink()

    assert said(refusal(job, folder)) == ("verifier.chat_template", "/verifier/model")


def test_a_chat_template_that_does_not_compile(folder, job):
    (folder / "verifier" / "chat_template.jinja").write_text("{% if %}")

    assert said(refusal(job, folder)) == ("verifier.chat_template", "/verifier/model")


@pytest.mark.parametrize(("layers", "pointer"), [(2, "/verifier/model"), (6, "/extraction/aux_layers")])
def test_too_few_layers(folder, job, layers, pointer):
    job["verifier"]["model"] = str(tiny_verifier(folder / "shallow", layers=layers))

    assert said(refusal(job, folder)) == ("verifier.layers", pointer)


def test_layers_that_the_verifier_does_not_have(folder, job):
    job["extraction"] = {"aux_layers": [1, 4, 8]}

    assert said(refusal(job, folder)) == ("verifier.layers", "/extraction/aux_layers")


def test_a_draft_vocabulary_above_the_verifiers(folder, job):
    job["vocab"]["draft_vocab_size"] = 321

    error = refusal(job, folder)

    assert said(error) == ("vocab.size", "/vocab/draft_vocab_size")
    assert "321" in error.detail
    assert "320" in error.remedy


def test_a_start_from_a_layer_that_is_no_llama_layer(folder, job):
    from safetensors.numpy import load_file, save_file

    weights = folder / "verifier" / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "model.layers.7.self_attn.q_norm.weight": tensors["model.norm.weight"]}, weights)
    job["training"]["init"] = "verifier_layer"

    error = refusal(job, folder)

    assert said(error) == ("training.init", "/training/init")
    assert "self_attn.q_norm.weight" in error.detail


def test_a_start_from_a_llama_layer_is_fine(folder, job):
    job["training"]["init"] = "verifier_layer"

    assert preflight(parse_job(job), [folder]).warnings == ()


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "dataset.missing"),
        ("", "dataset.empty"),
        ("question,answer\nwhy,so\n", "dataset.not_jsonl"),
        ('{"messages": [{"role": "wizard", "content": "a"}]}\n', "dataset.roles"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "dataset.roles"),
        ('{"text": "a"}\n', "dataset.format"),
    ],
)
@pytest.mark.parametrize(("file", "pointer"), [("train", "/datasets/0/uri"), ("eval", "/evaluation/prompts/0/uri")])
def test_a_data_set_that_cannot_be_used(folder, job, file, pointer, content, code):
    path = folder / f"{file}.jsonl"
    path.unlink() if content is None else path.write_text(content)

    error = refusal(job, folder)

    assert said(error) == (code, pointer)
    assert str(path) in error.detail


def test_a_data_set_without_any_answer_where_none_are_asked_for(folder, job):
    unanswered(job)

    error = refusal(job, folder)

    assert said(error) == ("dataset.no_assistant", "/datasets/0/uri")
    assert "data.regenerate.enabled" in error.remedy


def test_a_data_set_outside_the_roots(folder, job):
    job["datasets"].append({"uri": "/etc/passwd"})

    assert said(refusal(job, folder)) == ("source.not_allowed", "/datasets/1/uri")


def test_a_data_set_of_another_kind_of_uri(folder, job):
    job["datasets"][0]["uri"] = "s3://bucket/train.jsonl"

    assert said(refusal(job, folder)) == ("source.scheme", "/datasets/0/uri")


def test_the_same_prompts_for_training_and_measuring(folder, job):
    (folder / "eval.jsonl").write_bytes((folder / "train.jsonl").read_bytes())

    assert said(refusal(job, folder)) == ("evaluation.overlap", "/evaluation/prompts/0/uri")


def test_a_length_that_is_shorter_than_every_sample(folder, job):
    job["data"]["max_seq_len"] = 8

    error = refusal(job, folder)

    assert said(error) == ("data.too_short", "/data/max_seq_len")
    assert "at least" in error.remedy


def test_a_length_that_cuts_every_answer_away(folder, job):
    write_jsonl(folder / "train.jsonl", tiny_conversations(4, answered=True))
    unanswered(job)
    job["data"]["max_seq_len"] = 8

    assert said(refusal(job, folder)) == ("data.too_short", "/data/max_seq_len")


def test_answers_that_the_chat_template_never_shows_as_they_were_prompted(folder, job):
    template = folder / "verifier" / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if add_generation_prompt %}{{ '<think>' }}{% endif %}")
    write_jsonl(folder / "train.jsonl", tiny_conversations(4, answered=True))
    unanswered(job)

    error = refusal(job, folder)

    assert said(error) == ("data.all_masked", "/datasets")
    assert "data.regenerate.enabled" in error.remedy


def test_prompts_that_spell_control_tokens(folder, job):
    write_jsonl(folder / "train.jsonl", [{"prompt": "say <|im_end|>"}])

    error = refusal(job, folder)

    assert said(error) == ("dataset.format", "/datasets")
    assert "control_token" in error.detail


@pytest.mark.parametrize(
    ("section", "field", "value", "says"),
    [
        ("data", "max_seq_len", 4096, "2048 positions"),
        ("evaluation", "num_steps", 5, "drafts deeper"),
    ],
)
def test_what_is_only_unwise_is_a_warning(folder, job, section, field, value, says):
    job[section][field] = value

    (warning,) = preflight(parse_job(job), [folder]).warnings

    assert says in warning


def test_no_tie_allowed_in_low_precision_is_a_warning(folder, job):
    job["verifier"]["dtype"] = "bfloat16"
    assert not preflight(parse_job(job), [folder]).warnings
    job["evaluation"]["near_tie_logit_gap"] = 0

    (warning,) = preflight(parse_job(job), [folder]).warnings

    assert "near_tie_logit_gap" in warning


def test_answers_that_cannot_fit_are_a_warning(folder, job):
    job["data"]["regenerate"]["max_new_tokens"] = 96

    assert "do not fit" in preflight(parse_job(job), [folder]).warnings[0]


def test_a_few_broken_lines_are_a_warning(folder, job):
    job["data"]["bad_rows_limit"] = 0.5
    with (folder / "train.jsonl").open("a") as file:
        file.write("{\n")

    assert "1 of the first 13 lines" in preflight(parse_job(job), [folder]).warnings[0]
