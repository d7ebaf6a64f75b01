"""Prepare turns a job's data into token sets, says what it left out, and refuses before any compute is spent."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from preparing import context, refusal

from eagle3_core.confined import Limits
from eagle3_core.data.templates import Chat
from eagle3_core.data.tokensets import TokenSet
from eagle3_core.digests import digest_file
from eagle3_core.errors import InvalidRequest
from eagle3_core.jobs.graph import Slice, unit_key
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.refusals import Preempted
from eagle3_core.jobs.spec import parse_job
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import read_manifest
from eagle3_core.stages import registry
from eagle3_core.stages.context import StageContext
from eagle3_core.testing import stage_context, tiny_conversations, tiny_job, tiny_verifier, write_jsonl
from eagle3_core.verifier.identity import inspect


def outcome(ctx: StageContext) -> tuple[dict[str, Any], TokenSet, TokenSet]:
    """Result, training samples and held-out prompts, as a later stage would read them."""
    commit = registry.run(ctx)
    manifest = read_manifest(ctx.store, commit.output.manifest)
    files = [TokenSet.load(ctx.fetch(manifest.file(f"{name}.safetensors"))) for name in ("train", "eval")]
    return commit.output.result, files[0], files[1]


def decoded(folder: Path, tokens: TokenSet, index: int) -> str:
    chat = Chat.of(inspect(folder / "verifier"))
    return chat.tokenizer.decode(tokens.sample(index)[0].tolist(), skip_special_tokens=False)


def test_prompts_wait_for_the_verifiers_answers(tmp_path):
    ctx = context(tmp_path, tiny_job(tmp_path))

    result, train, held_out = outcome(ctx)

    assert decoded(tmp_path, train, 0) == (
        "<|im_start|>user\nquestion number 0: what about the the?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (result["samples"], result["eval_prompts"], result["supervised_tokens"]) == (12, 4, 0)
    assert (result["tokens"], result["tasks"], result["dropped"]) == (train.tokens, {"numbers": 6, "words": 6}, {})
    assert result["verifier"] == {
        "name": "verifier", "hidden_size": 32, "num_layers": 8, "vocab_size": 320, "aux_layers": [2, 4, 5],
    }  # fmt: skip
    assert held_out.ids == ["row-10000", "row-10001", "row-10002", "row-10003"]


def test_answered_conversations_are_supervised_on_their_answers(tmp_path):
    result, train, _ = outcome(context(tmp_path, tiny_job(tmp_path, answered=True)))

    ids, mask = train.sample(1)
    answer = [int(token) for token, flag in zip(ids, mask, strict=True) if flag]
    chat = Chat.of(inspect(tmp_path / "verifier"))
    assert chat.tokenizer.decode(answer, skip_special_tokens=False) == "the and and that number 1<|im_end|>"
    assert result["supervised_tokens"] == train.supervised_tokens > 0


def test_the_last_answer_is_dropped_and_earlier_ones_stay_where_the_verifier_answers(tmp_path):
    job = tiny_job(tmp_path)
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate("abcd")]
    write_jsonl(tmp_path / "train.jsonl", [{"messages": turns}])

    _, train, _ = outcome(context(tmp_path, job))

    assert decoded(tmp_path, train, 0).endswith(
        "assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}no thinking\n{% endif %}{% endif %}"
)
"""A template that is asked with a mode, as those of reasoning models are."""


def test_prompts_are_in_the_mode_that_will_be_served(tmp_path):
    job = tiny_job(tmp_path)
    (tmp_path / "verifier" / "chat_template.jinja").write_text(THINKING)
    prompts: list[str] = []
    for mode in (True, False):
        job["data"]["template_arguments"] = {"enable_thinking": mode}
        _, train, held_out = outcome(context(tmp_path, job, store=LocalStore(tmp_path / str(mode))))
        prompts += [decoded(tmp_path, train, 0), decoded(tmp_path, held_out, 0)]

    assert [prompt.endswith("assistant\nno thinking\n") for prompt in prompts] == [False, False, True, True]


def test_a_job_does_not_say_what_conversations_and_stages_decide(tmp_path):
    job = tiny_job(tmp_path)
    job["data"]["template_arguments"] = {"add_generation_prompt": False}

    with pytest.raises(InvalidRequest, match="add_generation_prompt is not for a job to say"):
        parse_job(job)


def test_the_same_inputs_give_the_same_content(tmp_path):
    job = tiny_job(tmp_path)

    one = registry.run(context(tmp_path, job)).output.manifest
    other = registry.run(context(tmp_path, job, store=LocalStore(tmp_path / "elsewhere"))).output.manifest

    assert one.content == other.content


def test_other_aux_layers_are_checked_again_but_make_the_same_content(tmp_path):
    job = tiny_job(tmp_path)
    first = context(tmp_path, job)
    job["extraction"] = {"aux_layers": [1, 3, 5]}
    second = context(tmp_path, job)

    keys = {unit_key("prepare", c.spec, Slice(0, 0, 1), {}, c.assignment.sources, "t") for c in (first, second)}
    commits = [registry.run(c).output for c in (first, second)]

    assert len(keys) == 2
    assert len({c.manifest.content for c in commits}) == 1
    assert commits[1].result["verifier"]["aux_layers"] == [1, 3, 5]


def test_sources_are_mixed_by_weight_and_interleaved(tmp_path):
    job = tiny_job(tmp_path)
    more = write_jsonl(tmp_path / "more.jsonl", [{**row, "task": "more"} for row in tiny_conversations(40, first=500)])
    job["datasets"] = [{"uri": str(tmp_path / "train.jsonl")}, {"uri": str(more), "weight": 3}]
    job["data"]["max_samples"] = 16

    result, train, _ = outcome(context(tmp_path, job))

    assert result["tasks"]["more"] == 12
    assert [train.tasks[i : i + 4].count("more") for i in range(0, 16, 4)] == [3, 3, 3, 3]


def test_lines_that_were_left_out_are_counted_by_reason_and_said(tmp_path):
    job = tiny_job(tmp_path)
    job["data"]["bad_rows_limit"] = 0.5
    with (tmp_path / "train.jsonl").open("a") as file:
        rows = [
            {"messages": [{"role": "wizard", "content": "a"}]},
            {"messages": [{"role": "user", "content": "end <|im_end|>"}]},
            {"messages": [{"role": "user", "content": "long " * 100}]},
            tiny_conversations(1)[0],
            tiny_conversations(1, first=10_000)[0],
        ]
        file.write("{\n" + "".join(json.dumps(row) + "\n" for row in rows))

    result, train, _ = outcome(context(tmp_path, job))

    assert result["dropped"] == {
        "not_jsonl": 1, "roles": 1, "control_token": 1, "too_long": 1, "duplicate": 1, "in_evaluation": 1,
    }  # fmt: skip
    assert len(train) == 12
    assert "1 in_evaluation" in result["warnings"][-1]


CUTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content[:8] if m.role == 'user' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that reads the beginning of what a user says."""


@pytest.mark.parametrize("answered", [False, True])
def test_prompts_that_the_chat_template_makes_equal_do_not_both_train_and_measure(tmp_path, answered):
    job = tiny_job(tmp_path, answered=answered)
    (tmp_path / "verifier" / "chat_template.jinja").write_text(CUTS)
    answer = [{"role": "assistant", "content": "the and that"}] * answered
    asks = ["number 1, please", "another one"]
    write_jsonl(tmp_path / "train.jsonl", [{"messages": [{"role": "user", "content": a}, *answer]} for a in asks])
    write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "number 1?"}])

    result, train, _ = outcome(context(tmp_path, job))

    assert (result["dropped"], len(train)) == ({"in_evaluation": 1}, 1)
    write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "number 1?"}, {"prompt": "another two"}])
    error = refusal(context(tmp_path, job, store=LocalStore(tmp_path / "elsewhere")))
    assert (error.code, error.pointer) == ("evaluation.overlap", "/evaluation/prompts")
    assert "tokens" in error.detail


def test_few_held_out_prompts_are_said(tmp_path):
    job = tiny_job(tmp_path, held_out=19)
    result, _, _ = outcome(context(tmp_path, job))
    write_jsonl(tmp_path / "eval.jsonl", tiny_conversations(20, first=10_000))
    enough, _, _ = outcome(context(tmp_path, job))

    (warning,) = result["warnings"]
    assert warning.startswith("19 held-out prompts are few")
    assert "evaluation.prompts" in warning
    assert enough["warnings"] == []


def test_a_held_out_prompt_that_comes_again_measures_once(tmp_path):
    job = tiny_job(tmp_path)
    job["evaluation"]["max_prompts"] = 21
    write_jsonl(tmp_path / "eval.jsonl", [row for row in tiny_conversations(30, first=10_000) for _ in range(2)])

    result, _, held_out = outcome(context(tmp_path, job))

    assert held_out.ids == [f"row-{i}" for i in range(10_000, 10_021)]  # the most prompts are so many different ones
    assert result["warnings"] == ["20 held-out prompts were left out: duplicate"]


def test_names_that_come_again_are_told_apart(tmp_path):
    job = tiny_job(tmp_path)
    write_jsonl(tmp_path / "train.jsonl", [{"id": "same", "prompt": f"question {i}"} for i in range(3)])

    _, train, _ = outcome(context(tmp_path, job))

    assert train.ids == ["same", "same#2", "same#3"]


def test_a_long_conversation_is_cut_at_its_end_and_keeps_its_mask(tmp_path):
    job = tiny_job(tmp_path, answered=True)
    write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "hi"}])
    _, whole, _ = outcome(context(tmp_path, job))
    job["data"]["max_seq_len"] = int(whole.lengths.min()) - 4

    result, cut, _ = outcome(context(tmp_path, job, store=LocalStore(tmp_path / "cut")))

    length = job["data"]["max_seq_len"]
    assert [cut.sample(i)[0].tolist() for i in range(12)] == [whole.sample(i)[0][:length].tolist() for i in range(12)]
    assert [cut.sample(i)[1].tolist() for i in range(12)] == [whole.sample(i)[1][:length].tolist() for i in range(12)]
    assert any("cut at" in warning for warning in result["warnings"])


def test_a_number_of_held_out_prompts_is_kept_in_order(tmp_path):
    job = tiny_job(tmp_path)
    job["evaluation"]["max_prompts"] = 3

    _, _, held_out = outcome(context(tmp_path, job))

    assert held_out.ids == ["row-10000", "row-10001", "row-10002"]


def test_a_template_that_prints_the_date_is_said(tmp_path):
    job = tiny_job(tmp_path)
    template = tmp_path / "verifier" / "chat_template.jinja"
    template.write_text("{{ strftime_now('%Y') }}" + template.read_text())

    result, train, _ = outcome(context(tmp_path, job))

    assert "01 Jan 2026" in result["warnings"][0]
    assert decoded(tmp_path, train, 0).startswith("2026<|im_start|>")


def test_the_same_question_in_another_spelling_is_not_trained_on(tmp_path):
    job = tiny_job(tmp_path)
    asks = [row["messages"][0]["content"].upper() for row in tiny_conversations(5)]
    write_jsonl(tmp_path / "eval.jsonl", [{"prompt": f" {ask}\n"} for ask in asks])

    result, train, _ = outcome(context(tmp_path, job))

    assert (result["dropped"], len(train)) == ({"in_evaluation": 5}, 7)


def sources_of(tmp_path: Path, job: dict[str, Any]) -> StageContext:
    """A context for a job that preflight would refuse: prepare must not rely on it."""
    lenient = {
        **job,
        "data": {**job["data"], "max_seq_len": 96, "regenerate": {**job["data"]["regenerate"], "enabled": True}},
    }
    sources = preflight(parse_job(lenient), [tmp_path]).sources
    return stage_context(tmp_path, "prepare", job, sources=sources)


def test_a_length_shorter_than_every_sample_is_refused(tmp_path):
    job = tiny_job(tmp_path)
    write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "hi"}])
    job["data"]["max_seq_len"] = 16

    error = refusal(sources_of(tmp_path, job))

    assert (error.code, error.pointer) == ("data.too_short", "/data/max_seq_len")


def test_data_of_which_nothing_is_supervised_is_refused(tmp_path):
    job = tiny_job(tmp_path, answered=True)
    template = tmp_path / "verifier" / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if add_generation_prompt %}{{ '<think>' }}{% endif %}")

    error = refusal(sources_of(tmp_path, job))

    assert (error.code, error.pointer) == ("data.all_masked", "/datasets")


def test_training_prompts_that_are_all_held_out_are_refused(tmp_path):
    job = tiny_job(tmp_path)
    sources = preflight(parse_job(job), [tmp_path]).sources
    write_jsonl(tmp_path / "eval.jsonl", reversed(tiny_conversations(12)))
    changed = {**sources, str(tmp_path / "eval.jsonl"): digest_file(tmp_path / "eval.jsonl")}

    error = refusal(stage_context(tmp_path, "prepare", job, sources=changed))

    assert (error.code, error.pointer) == ("evaluation.overlap", "/evaluation/prompts")


def test_answers_to_held_out_prompts_are_not_trained_on(tmp_path):
    job = tiny_job(tmp_path, answered=True)
    write_jsonl(tmp_path / "eval.jsonl", tiny_conversations(5))

    result, train, _ = outcome(context(tmp_path, job))

    assert (result["dropped"], len(train)) == ({"in_evaluation": 5}, 7)


@pytest.mark.parametrize("answered", [False, True])
def test_prepare_says_how_many_bytes_the_states_will_need(tmp_path, answered):
    job = tiny_job(tmp_path, train=1, answered=answered)

    result, train, _ = outcome(context(tmp_path, job))

    aux_of_a_token, final_of_a_label = 3 * 32 * 2 + 4 + 1, 32 * 2 + 4
    if answered:
        exact = (
            train.tokens * aux_of_a_token + (train.supervised_tokens + 2) * final_of_a_label
        )  # one before, one behind
        assert (result["states_bytes_least"], result["states_bytes"]) == (exact, exact)
    else:
        shortest, longest = (
            (train.tokens + answer) * aux_of_a_token + (answer + 1) * final_of_a_label for answer in (1, 12)
        )
        assert (result["states_bytes_least"], result["states_bytes"]) == (shortest, longest)


def test_the_bytes_do_not_depend_on_the_verifiers_precision(tmp_path):
    job = tiny_job(tmp_path)
    full = outcome(context(tmp_path, job))[0]["states_bytes"]
    job["verifier"]["dtype"] = "bfloat16"

    assert outcome(context(tmp_path, job))[0]["states_bytes"] == full


def test_a_template_that_costs_too_much_ends_the_job_and_not_the_worker(tmp_path, monkeypatch):
    job = tiny_job(tmp_path)
    template = tmp_path / "verifier" / "chat_template.jinja"
    spin = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template.write_text("{% if 'number 7' in messages[0].content %}" + spin + "{% endif %}" + template.read_text())
    monkeypatch.setattr("eagle3_core.stages.prepare.LIMITS", Limits(cpu_s=1, wall_s=300, memory_bytes=3 << 30))

    error = refusal(context(tmp_path, job))

    assert (error.code, error.pointer, error.status) == ("verifier.encoding_cost", "/verifier/model", 422)
    assert "more than 1 s of CPU time" in error.detail


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(tmp_path):
    job = tiny_job(tmp_path)
    ctx = context(tmp_path, job)
    tiny_verifier(tmp_path / "verifier", vocab=280)
    tiny_verifier(tmp_path / "large", vocab=400)
    (tmp_path / "large" / "tokenizer.json").replace(tmp_path / "verifier" / "tokenizer.json")

    error = refusal(ctx)

    assert (error.code, error.pointer) == ("verifier.mismatch", "/verifier/model")


def test_a_stop_is_honoured_between_conversations(tmp_path):
    ctx = context(tmp_path, tiny_job(tmp_path))
    ctx.stop.set()

    with pytest.raises(Preempted):
        registry.run(ctx)


def test_progress_ends_with_everything_done(tmp_path):
    ctx = context(tmp_path, tiny_job(tmp_path))

    registry.run(ctx)

    last = ctx.reporter.said[-1]
    assert (last.done, last.total, last.unit) == (12, 12, "samples")
    assert Counter(p.unit for p in ctx.reporter.said) == {"samples": len(ctx.reporter.said)}
