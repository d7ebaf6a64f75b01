"""A job that cannot succeed is refused when it is posted: with a stable code, the field it is about, and a remedy."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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
    return tiny_job(folder, held_out=20)


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


def test_a_draft_vocabulary_too_small_for_the_tokens_that_end_a_turn(folder, job):
    job["vocab"]["draft_vocab_size"] = 1

    error = refusal(job, folder)

    assert said(error) == ("vocab.size", "/vocab/draft_vocab_size")
    assert "at least 2" in error.remedy


def test_a_draft_vocabulary_above_the_verifiers(folder, job):
    job["vocab"]["draft_vocab_size"] = 321

    error = refusal(job, folder)

    assert said(error) == ("vocab.size", "/vocab/draft_vocab_size")
    assert "321" in error.detail
    assert "320" in error.remedy


def test_a_start_from_a_layer_that_is_no_llama_layer(folder, job):
    weights, config = folder / "verifier" / "model.safetensors", folder / "verifier" / "config.json"
    norms = {f"model.layers.{i}.self_attn.{x}_norm.weight": np.ones(8, np.float32) for i in range(8) for x in "qk"}
    save_file({**load_file(weights), **norms}, weights)
    config.write_text(config.read_text().replace('"llama"', '"qwen3"'))
    job["training"]["init"] = "verifier_layer"

    error = refusal(job, folder)

    assert said(error) == ("training.init", "/training/init")
    assert "self_attn.q_norm.weight" in error.detail


YARN = {"rope_type": "yarn", "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"final_logit_softcapping": 30.0}, "drafter.verifier", "final_logit_softcapping"),
        ({"logits_scaling": 8.0}, "drafter.verifier", "logits_scaling"),
        ({"logits_scaling": True}, "drafter.verifier", "logits_scaling"),
        ({"hidden_act": "relu2"}, "drafter.verifier", "relu2"),
        ({"hidden_act": ["silu"]}, "drafter.verifier", "hidden_act"),
        ({"hidden_act": None}, "verifier.config", "hidden_act"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "drafter.verifier", "dynamic"),
        ({"rope_parameters": {"rope_type": True}}, "drafter.verifier", "'True'"),
        ({"rope_parameters": "yarn"}, "verifier.config", "an object is needed"),
        ({"rope_parameters": [1]}, "verifier.config", "an object is needed"),
        ({"rope_parameters": {**YARN}}, "verifier.config", "yarn without factor"),
        ({"rope_parameters": {**YARN, "factor": True}}, "verifier.config", "factor=True"),
        ({"rope_parameters": {**YARN, "factor": "4"}}, "verifier.config", "factor='4'"),
        ({"rope_parameters": {**YARN, "factor": 0}}, "verifier.config", "factor of 0"),
        ({"rope_parameters": {**YARN, "factor": 4, "beta_fast": -1}}, "verifier.config", "beta_fast=-1"),
        ({"rope_parameters": {**LLAMA3}}, "verifier.config", "without low_freq_factor, high_freq_factor"),
        (
            {"rope_parameters": {**LLAMA3, "low_freq_factor": 4, "high_freq_factor": 4}},
            "verifier.config", "not below high_freq_factor",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": False}}, "verifier.config", "rope_theta=False"),
        ({"rms_norm_eps": True}, "verifier.config", "rms_norm_eps=True"),
        ({"rms_norm_eps": -1e-5}, "verifier.config", "rms_norm_eps=-1e-05"),
        ({"initializer_range": "0.02"}, "verifier.config", "initializer_range='0.02'"),
        ({"kv_lora_rank": True}, "verifier.config", "kv_lora_rank=True"),
    ],
)  # fmt: skip
def test_a_verifier_that_no_drafter_can_be_built_for(folder, job, fields, code, says):
    config = folder / "verifier" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))

    error = refusal(job, folder)

    assert said(error) == (code, "/verifier/model")
    assert says in error.detail


def test_a_verifier_whose_heads_make_no_drafter(folder, job):
    job["verifier"]["model"] = str(tiny_verifier(folder / "odd", hidden=36))

    error = refusal(job, folder)

    assert said(error) == ("drafter.verifier", "/verifier/model")
    assert "of size 9" in error.detail


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
    assert "control_token (first: a turn spells the control token <|im_end|>)" in error.detail


def test_a_template_that_takes_no_conversation_is_quoted(folder, job):
    (folder / "verifier" / "chat_template.jinja").write_text("{{ raise_exception('only in French') }}")

    error = refusal(job, folder)

    assert said(error) == ("dataset.format", "/datasets")
    assert "12 template (first: only in French)" in error.detail


def respelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same questions with another id, case, spacing and system turn."""
    rule = {"role": "system", "content": "Be brief."}
    asks = [row["messages"][0]["content"].upper().replace(" ", "  ") + "\n" for row in rows]
    return [{"id": f"other-{i}", "messages": [rule, {"role": "user", "content": ask}]} for i, ask in enumerate(asks)]


@pytest.mark.parametrize("answered", [False, True])
def test_prompts_that_both_train_and_measure_are_counted_in_a_warning_whatever_their_spelling(folder, answered):
    job = tiny_job(folder, answered=answered)
    write_jsonl(folder / "eval.jsonl", [*respelled(tiny_conversations(3)), *tiny_conversations(2, first=10_000)])

    warning, _few = preflight(parse_job(job), [folder]).warnings

    assert "3 of the 12 training conversations ask held-out prompts" in warning


def test_a_question_within_a_longer_conversation_is_found(folder, job):
    unanswered(job)
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": text}
        for i, text in enumerate(("one", "two", "three", "four"))
    ]
    write_jsonl(folder / "train.jsonl", [{"messages": turns}, *tiny_conversations(1, answered=True)])
    write_jsonl(folder / "eval.jsonl", [{"prompt": "ONE"}])

    assert "1 of the 2 training" in preflight(parse_job(job), [folder]).warnings[0]


def test_held_out_prompts_that_are_all_that_trains_are_refused_whatever_their_spelling(folder, job):
    write_jsonl(folder / "eval.jsonl", respelled(tiny_conversations(12)))

    assert said(refusal(job, folder)) == ("evaluation.overlap", "/evaluation/prompts")


def test_a_long_data_set_that_shares_its_beginning_is_only_warned_about(folder, job):
    write_jsonl(folder / "train.jsonl", tiny_conversations(1001))
    write_jsonl(folder / "eval.jsonl", respelled(tiny_conversations(1000)))

    assert "1000 of the first 1000" in preflight(parse_job(job), [folder]).warnings[0]


def test_a_verifier_with_a_link_that_leads_out_of_the_roots(folder, job):
    (folder / "in").mkdir()
    job["verifier"]["model"] = str((folder / "verifier").rename(folder / "in" / "verifier"))
    for name in ("train.jsonl", "eval.jsonl"):
        (folder / name).rename(folder / "in" / name)
    job["datasets"][0]["uri"], job["evaluation"]["prompts"][0]["uri"] = (
        str(folder / "in" / n) for n in ("train.jsonl", "eval.jsonl")
    )
    template = folder / "in" / "verifier" / "chat_template.jinja"
    template.rename(folder / "secret")
    template.symlink_to(folder / "secret")

    assert said(refusal(job, folder / "in")) == ("source.not_allowed", "/verifier/model")
    assert preflight(parse_job(job), [folder]).warnings == ()


def test_a_data_set_that_vanishes_while_it_is_looked_at(folder, job, monkeypatch):
    def gone(path):
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr("eagle3_core.jobs.preflight.fingerprint", gone)

    assert said(refusal(job, folder)) == ("dataset.missing", "/datasets/0/uri")


def test_what_is_tried_is_bounded_and_the_rest_left_to_prepare(folder, job, monkeypatch):
    monkeypatch.setattr("eagle3_core.jobs.looks.TRIED_CHARS", 100)
    job["data"]["max_seq_len"] = 8

    assert preflight(parse_job(job), [folder]).sources


@pytest.mark.parametrize("answered", [False, True])
def test_a_chat_template_that_makes_one_prompt_of_all_conversations_is_refused_and_quoted(folder, answered):
    job = tiny_job(folder, answered=answered)
    (folder / "verifier" / "chat_template.jinja").write_text(
        "<|im_start|>user\nhello<|im_end|>\n"
        "{% for m in messages if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    error = refusal(job, folder)

    assert said(error) == ("verifier.chat_template", "/verifier/model")
    assert "user\\nhello" in error.detail
    assert "16 different conversations" in error.detail


def test_the_same_question_many_times_is_no_fault_of_the_template(folder, job):
    write_jsonl(folder / "train.jsonl", [{"prompt": "one"}] * 5)
    write_jsonl(folder / "eval.jsonl", [{"prompt": "two"}] * 20)

    trains, measures = preflight(parse_job(job), [folder]).warnings
    assert trains.startswith("the 5 training prompts are 1 different one")
    assert measures.startswith("1 held-out prompt is few")


def test_a_val_ratio_that_leaves_less_to_train_on_than_it_holds_out_is_a_warning(folder, job):
    job["data"]["val_ratio"] = 0.9

    (warning,) = preflight(parse_job(job), [folder]).warnings

    assert warning.startswith("data.val_ratio 0.9 holds out ")
    assert "of the 12 training conversations" in warning
    assert "make it smaller" in warning
