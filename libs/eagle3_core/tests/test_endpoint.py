"""generate by a server that somebody else runs: who it must be, what it must say, and what becomes of what it does not."""

from __future__ import annotations

from typing import Any

import pytest
from endpoint_house import TRAIN, House, Serve, answers_of, expected
from running_server import END, RunningServer

from eagle3_core.engine.dialects import PromptDiffers
from eagle3_core.engine.heard import AnswerWrong
from eagle3_core.engine.proof import OtherVerifier
from eagle3_core.errors import AerieError
from eagle3_core.testing import RecordingReporter
from eagle3_core.verifier.endpoint import AnswersDrift, SeedIgnored

WAYS = {
    "sglang": ({}, {}),
    "completions": ({"api": "openai"}, {}),
    "chat": ({"api": "openai"}, {"ask": "messages"}),
    "completions as text": ({"api": "openai", "retokenize": True}, {}),
    "chat as text": ({"api": "openai", "retokenize": True}, {"ask": "messages"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_answers_are_the_servers_own_token_by_token_whatever_it_speaks(
    way: str, house: House, serve: Serve
) -> None:
    server = serve(says_ids="text" not in way)

    answers, result = answers_of(house.context(server, WAYS[way][0], **WAYS[way][1]))

    assert {name: answers.sample(i)[0].tolist() for i, name in enumerate(answers.ids)} == expected(server, house)
    assert result["endpoint_completion_tokens"] == result["answer_tokens"]
    assert result["endpoint_prompt_tokens"] == result["tokens"] - result["answer_tokens"]
    assert (result["retokenized"], result["left_out"]) == (TRAIN if "text" in way else 0, 0)


@pytest.mark.parametrize("way", ["completions as text", "chat as text"])
def test_a_server_that_knows_openais_fields_alone_is_asked_for_no_others(way: str, house: House, serve: Serve) -> None:
    server = serve(knows_extras=False, info=None, offers_tokenize=False)

    answers, result = answers_of(house.context(server, WAYS[way][0], **WAYS[way][1]))

    assert {name: answers.sample(i)[0].tolist() for i, name in enumerate(answers.ids)} == expected(server, house)
    assert result["retokenized"] == TRAIN


def test_what_the_server_counted_is_in_the_jobs_curves_and_what_was_compared_in_its_log(
    house: House, serve: Serve
) -> None:
    ctx = house.context(serve(), {})

    _, result = answers_of(ctx)

    assert isinstance(ctx.reporter, RecordingReporter)
    curves = {metric.name: metric.value for metric in ctx.reporter.metrics}
    assert curves["endpoint_completion_tokens"] == result["endpoint_completion_tokens"] > 0
    said = " ".join(line.text for line in ctx.reporter.lines)
    for part in (
        "the name verifier",
        "LlamaForCausalLM",
        "precision float32",
        "its tokenizer on",
        "it says its tokens",
    ):
        assert part in said


def test_everything_that_decides_a_token_is_sent_so_that_the_servers_defaults_decide_nothing(
    house: House, serve: Serve
) -> None:
    server = serve()

    answers_of(house.context(server, {"api": "openai"}, ask="messages"))

    _, body = server.asked[-1]
    assert body["repetition_penalty"] == 1.0
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.0, 1.0, -1, 0.0)
    assert body["stop_token_ids"] == [END]


def test_the_mode_that_will_be_served_is_sent_with_the_messages(house: House, serve: Serve) -> None:
    server = serve()
    ctx = house.context(server, {"api": "openai"}, ask="messages")
    spec = ctx.spec
    data = spec.data.model_copy(update={"template_arguments": {"enable_thinking": False}})
    ctx.assignment = ctx.assignment.model_copy(update={"spec": spec.model_copy(update={"data": data})})

    answers_of(ctx)

    assert server.asked[-1][1]["chat_template_kwargs"] == {"enable_thinking": False}


def test_sampled_answers_are_drawn_from_a_seed_for_each_prompt_and_are_the_same_again(
    house: House, serve: Serve
) -> None:
    server = serve()
    how = {"temperature": 0.8, "top_p": 0.9, "seed": 7}

    first, _ = answers_of(house.context(server, {"api": "openai"}, **how))
    second, _ = answers_of(house.context(server, {"api": "openai"}, **how))

    sent = {body["seed"] for path, body in server.asked if path == "/v1/completions" and "seed" in body}
    assert len(sent) == TRAIN
    assert first.input_ids.tolist() == second.input_ids.tolist()


def test_a_server_that_ignores_seeds_is_found_out_before_the_first_prompt(house: House, serve: Serve) -> None:
    server = serve(honours_seeds=False)

    with pytest.raises(SeedIgnored, match="two different answers from seed"):
        answers_of(house.context(server, {}, temperature=1.0, seed=7))


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another name": ({"info": {"model_path": "/m/other-7b", "served_model_name": "x"}}, {}, "other-7b.*wants verifier"),
    "another architecture": ({"info": {"architectures": ["Qwen3ForCausalLM"]}}, {}, "Qwen3ForCausalLM.*LlamaForCausalLM"),
    "another precision": ({"info": {"dtype": "bfloat16"}}, {}, "runs in bfloat16.*float32"),
    "random weights": ({"info": {"load_format": "dummy"}}, {}, "weights are random"),
    "quantized weights": ({"info": {"quantization": "fp8"}}, {}, "quantized .fp8."),
    "another tokenizer": ({"tokenize": lambda text: list(text.encode())}, {}, "its tokenizer makes .* tokens"),
    "no model of that name": ({}, {"api": "openai", "model": "b"}, "it lists verifier; the job wants b"),
    "several models": ({"models": [{"id": "a"}, {"id": "b"}]}, {"api": "openai"}, "it lists a, b; the job wants one model"),
    "an adapter": ({"models": [{"id": "verifier", "parent": "base"}]}, {"api": "openai"}, "adapter of base"),
    "no list of models": ({"models": []}, {"api": "openai"}, "does not list its models"),
    "no SGLang": ({"info": None}, {}, "it has no /model_info"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_a_server_of_another_model_is_refused_with_both_sides_before_it_answers(
    case: str, house: House, serve: Serve
) -> None:
    quirks, endpoint, words = OTHERS[case]
    server = serve(**quirks)

    with pytest.raises(OtherVerifier, match=words):
        answers_of(house.context(server, endpoint))

    assert not [path for path, _ in server.asked if path != "/tokenize"]


def test_the_address_may_end_as_openais_clients_are_given_it(
    house: House, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    monkeypatch.setenv("AERIE_ENDPOINTS", f"{server.url}/v1")

    answers, _ = answers_of(house.context(f"{server.url}/v1/", {"api": "openai"}))

    assert len(answers) == TRAIN


def test_a_name_that_the_job_states_stands_for_the_verifiers(house: House, serve: Serve) -> None:
    server = serve(models=[{"id": "prod"}, {"id": "other"}], info=None)

    answers, _ = answers_of(house.context(server, {"api": "openai", "model": "prod"}))

    assert len(answers) == TRAIN


def test_a_server_without_a_way_to_ask_its_tokenizer_must_spell_its_tokens_as_the_verifier_does(
    house: House, serve: Serve
) -> None:
    server = serve(offers_tokenize=False, info=None)
    server.tokenizer.decode = None  # pyright: ignore[reportAttributeAccessIssue]  # replaced below
    real = type(server.tokenizer).decode
    server.tokenizer = type("Other", (), {  # pyright: ignore[reportAttributeAccessIssue]
        "decode": lambda _, ids, **o: real(server.chat.tokenizer, [i + 1 for i in ids], **o),
        "encode": lambda _, *a, **o: server.chat.tokenizer.encode(*a, **o),
    })()  # fmt: skip

    with pytest.raises(OtherVerifier, match="spells the tokens"):
        answers_of(house.context(server, {"api": "openai"}))


def test_a_model_that_is_swapped_while_it_answers_is_found_out(house: House, serve: Serve) -> None:
    def swap(handler: Any, body: dict[str, Any], time: int) -> bool:
        handler.server.quirks.info = {"architectures": ["Qwen3ForCausalLM"]}
        return False

    with pytest.raises(OtherVerifier, match="Qwen3ForCausalLM"):
        answers_of(house.context(serve(before=swap), {}))


def test_a_chat_template_that_makes_another_prompt_is_refused_with_the_first_token_that_differs(
    house: House, serve: Serve
) -> None:
    server = serve()
    server.quirks.render = lambda messages: [1, *server.chat.prompt(messages)]

    with pytest.raises(PromptDiffers, match="they part at token 1"):
        answers_of(house.context(server, {"api": "openai"}, ask="messages"))


def test_a_server_that_says_no_tokens_is_held_to_the_number_of_the_prompts_tokens(house: House, serve: Serve) -> None:
    server = serve(says_ids=False)
    server.quirks.render = lambda messages: [1, *server.chat.prompt(messages)]

    with pytest.raises(PromptDiffers, match="counts"):
        answers_of(house.context(server, {"api": "openai", "retokenize": True}, ask="messages"))


def test_a_server_that_says_no_tokens_is_refused_unless_the_job_allows_texts(house: House, serve: Serve) -> None:
    with pytest.raises(AnswerWrong, match="does not say which tokens it sampled") as caught:
        answers_of(house.context(serve(says_ids=False), {"api": "openai"}))

    assert "verifier.endpoint.retokenize" in caught.value.remedy


def letter_by_letter(server: RunningServer, ids: list[int]) -> list[int]:
    """The same text in more tokens than the tokenizer makes of it."""
    return [
        server.tokenizer.token_to_id(letter) for token in ids for letter in (server.tokenizer.id_to_token(token) or "")
    ]


def test_an_answer_whose_text_leads_to_other_tokens_is_left_out_and_said(house: House, serve: Serve) -> None:
    server = serve(says_ids=False)
    odd = house.prompts.sample(3)[0].tolist()
    server.quirks.before = lambda handler, body, time: setattr(
        handler.server.quirks, "spell",
        (lambda ids: letter_by_letter(server, ids)) if body["prompt"] == odd else (lambda ids: ids),
    )  # fmt: skip  # pyright: ignore[reportAttributeAccessIssue]
    endpoint = {"api": "openai", "retokenize": True, "in_flight": 1}

    ctx = house.context(server, endpoint, max_new_tokens=60)
    answers, result = answers_of(ctx)

    assert answers.ids == [name for i, name in enumerate(house.prompts.ids) if i != 3]
    assert (result["left_out"], result["retokenized"], result["samples"]) == (1, TRAIN - 1, TRAIN - 1)
    assert isinstance(ctx.reporter, RecordingReporter)
    assert "1 answers were left out" in " ".join(line.text for line in ctx.reporter.lines)


def test_a_server_whose_texts_never_lead_back_to_its_tokens_ends_the_unit(house: House, serve: Serve) -> None:
    server = serve(says_ids=False)
    server.quirks.spell = lambda ids: letter_by_letter(server, ids)

    with pytest.raises(AnswersDrift, match=r"2 answers .* do not lead back"):
        answers_of(house.context(server, {"api": "openai", "retokenize": True}, max_new_tokens=60))


@pytest.mark.parametrize(
    ("quirks", "regenerate", "words"),
    [
        ({"says_ids": False, "counts": False}, {}, "nobody knows what prompt"),
        ({"says_ids": False, "reasoning": True}, {"ask": "messages"}, "its answers as one text"),
    ],
)
def test_texts_that_nobody_could_check_are_refused(
    quirks: dict[str, Any], regenerate: dict[str, Any], words: str, house: House, serve: Serve
) -> None:
    with pytest.raises(AnswerWrong, match=words):
        answers_of(house.context(serve(**quirks), {"api": "openai", "retokenize": True}, **regenerate))


def test_an_end_that_a_server_keeps_to_itself_is_put_back(house: House, serve: Serve) -> None:
    server = serve(says_end_id=False)

    answers, _ = answers_of(house.context(server, {"api": "openai"}))

    assert {name: answers.sample(i)[0].tolist() for i, name in enumerate(answers.ids)} == expected(server, house)


def test_an_error_of_the_endpoint_says_where_the_job_names_it(house: House, serve: Serve) -> None:
    with pytest.raises(AerieError) as caught:
        answers_of(house.context(serve(info={"dtype": "float16"}), {}))

    assert caught.value.pointer == "/verifier/endpoint"
