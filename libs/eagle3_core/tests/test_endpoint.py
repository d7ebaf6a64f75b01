"""generate by a server that somebody else runs: who it must be, what it must say, and what becomes of what it does not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from running_server import END, Quirks, RunningServer, running

from eagle3_core.data.tokensets import TokenSet
from eagle3_core.engine import client as client_module
from eagle3_core.engine.allowed import EndpointKeyRefused, EndpointNotAllowed
from eagle3_core.engine.dialects import AnswerWrong, PromptDiffers
from eagle3_core.engine.proof import OtherVerifier
from eagle3_core.engine.refusals import EndpointDown, KeyNotTaken, Redirected
from eagle3_core.errors import AerieError
from eagle3_core.jobs.preflight import preflight
from eagle3_core.jobs.spec import parse_job
from eagle3_core.jobs.wire import ManifestRef, UnitSlice
from eagle3_core.objects.manifest import read_manifest
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.generate import ANSWERS_FILE, generate
from eagle3_core.stages.prepare import prepare
from eagle3_core.testing import RecordingReporter, stage_context, tiny_job
from eagle3_core.verifier.endpoint import AnswersDrift, SeedIgnored

TRAIN = 6
Serve = Callable[..., RunningServer]


class House:
    """A prepared tiny job, and its generate stage by whatever server a test names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.document = folder, tiny_job(folder, train=TRAIN)
        self.document["data"] |= {"val_ratio": 0, "bad_rows_limit": 0.2, "unit_samples": TRAIN}
        spec = parse_job(self.asking("http://a", {"api": "openai"}, ask="messages"))
        self.sources = preflight(spec, [folder]).sources
        self.prepared = prepare(stage_context(folder, "prepare", spec, sources=self.sources)).output.manifest

    def asking(self, url: str, endpoint: dict[str, Any], **regenerate: Any) -> dict[str, Any]:
        verifier, data = dict(self.document["verifier"]), dict(self.document["data"])
        verifier["endpoint"] = {"url": url, **endpoint}
        data["regenerate"] = {"max_new_tokens": 12, **regenerate}
        return {**self.document, "verifier": verifier, "data": data}

    def context(self, server: RunningServer | str, endpoint: dict[str, Any], **regenerate: Any) -> StageContext:
        document = self.asking(server if isinstance(server, str) else server.url, endpoint, **regenerate)
        unit = UnitSlice(index=0, start=0, stop=TRAIN, of=1)
        inputs: dict[Any, list[ManifestRef]] = {"prepare": [self.prepared]}
        return stage_context(self.folder, "generate", document, sources=self.sources, inputs=inputs, unit=unit)

    @property
    def prompts(self) -> TokenSet:
        ctx = self.context("http://a", {})
        return TokenSet.load(ctx.fetch(read_manifest(ctx.store, self.prepared).file("train.safetensors")))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("house"))


@pytest.fixture
def serve(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts a server with some quirks, and lists it as the operator would."""
    monkeypatch.setattr(client_module, "PAUSE_S", 0.001)
    with ExitStack() as servers:

        def start(**quirks: Any) -> RunningServer:
            server = servers.enter_context(running(house.folder / "verifier", Quirks(**quirks)))
            monkeypatch.setenv("AERIE_ENDPOINTS", server.url)
            return server

        yield start


def answers_of(ctx: StageContext) -> tuple[TokenSet, dict[str, Any]]:
    commit = generate(ctx)
    manifest = read_manifest(ctx.store, commit.output.manifest)
    return TokenSet.load(ctx.fetch(manifest.file(ANSWERS_FILE))), commit.output.result


def expected(server: RunningServer, house: House) -> dict[str, list[int]]:
    """Prompt and answer by sample, as the server's rule makes them."""
    prompts = {name: house.prompts.sample(i)[0].tolist() for i, name in enumerate(house.prompts.ids)}
    return {name: [*ids, *server.answer(ids, 12, None, 0)[0]] for name, ids in prompts.items()}


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


# -- the way there


def in_place_of_an_answer(status: int, **headers: str) -> Callable[..., bool]:
    """Says `status` the first two times that an answer is asked for."""

    def before(handler: Any, body: dict[str, Any], time: int) -> bool:
        if time <= 2:
            handler.say(status, {"error": {"message": "later"}}, **headers)
        return time <= 2

    return before


@pytest.mark.parametrize("status", [429, 503, 502])
def test_a_server_that_is_busy_for_a_while_answers_everything_in_the_end(
    status: int, house: House, serve: Serve
) -> None:
    server = serve(before=in_place_of_an_answer(status))

    answers, _ = answers_of(house.context(server, {}))

    assert {name: answers.sample(i)[0].tolist() for i, name in enumerate(answers.ids)} == expected(server, house)


def test_a_server_that_breaks_off_is_asked_again(house: House, serve: Serve) -> None:
    def cut(handler: Any, body: dict[str, Any], time: int) -> bool:
        if time == 1:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b'{"text": "the')
            handler.close_connection = True
        return time == 1

    server = serve(before=cut)

    answers, _ = answers_of(house.context(server, {}))

    assert len(answers) == TRAIN


def test_a_dead_server_is_an_error_that_names_it_and_may_pass(
    house: House, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve()
    monkeypatch.setenv("AERIE_ENDPOINTS", "http://127.0.0.1:1")

    with pytest.raises(EndpointDown, match=r"127\.0\.0\.1:1/model_info got no answer") as caught:
        answers_of(house.context("http://127.0.0.1:1", {}))

    assert caught.value.retryable


def test_a_redirect_is_not_followed_wherever_it_leads(house: House, serve: Serve) -> None:
    elsewhere = in_place_of_an_answer(307, Location="http://169.254.169.254/latest/meta-data/")
    server = serve(before=elsewhere)

    with pytest.raises(Redirected, match=r"points to http://169\.254\.169\.254.*no redirect") as caught:
        answers_of(house.context(server, {}))

    assert not caught.value.retryable


def test_a_server_that_is_not_listed_is_never_asked(
    house: House, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    monkeypatch.setenv("AERIE_ENDPOINTS", "https://models.example")

    with pytest.raises(
        EndpointNotAllowed, match=r"none of the servers that the operator lists \(https://models.example\)"
    ):
        answers_of(house.context(server, {}))

    assert server.asked == []


KEY = "sk-opensesame-0123456789"


@pytest.fixture
def keyed(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """A server that wants a key, which the operator has."""
    server = serve(key=KEY)
    (tmp_path / "key").write_text(KEY + "\n")
    entry = {"file": str(tmp_path / "key"), "endpoint": server.url}
    keys = {"ours": entry, "theirs": {**entry, "tenants": ["others"]}, "elsewhere": {**entry, "endpoint": "https://b"}}
    monkeypatch.setenv("AERIE_ENDPOINT_KEYS", json.dumps(keys))
    return server


def test_a_key_is_named_by_the_job_and_shown_to_its_server_alone(house: House, keyed: RunningServer) -> None:
    ctx = house.context(keyed, {"key": "ours"})

    answers, _ = answers_of(ctx)

    assert len(answers) == TRAIN
    assert keyed.keys == {f"Bearer {KEY}"}
    assert isinstance(ctx.reporter, RecordingReporter)
    assert KEY not in ctx.assignment.model_dump_json() + str(ctx.reporter.lines) + str(dict(os.environ))


def test_a_key_that_the_server_repeats_in_its_refusal_is_hidden(
    house: House, keyed: RunningServer, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("wrong-key-0123456789")

    with pytest.raises(KeyNotTaken, match="answered 401") as caught:
        answers_of(house.context(keyed, {"key": "ours"}))

    assert "wrong-key" not in caught.value.text() + str(caught.value) + json.dumps(caught.value.problem())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("theirs", "no key named theirs for jobs of tenant"),
        ("none", "no key named none"),
        ("elsewhere", "another server"),
    ],
)
def test_a_key_for_somebody_else_or_another_server_is_not_used(
    name: str, words: str, house: House, keyed: RunningServer
) -> None:
    with pytest.raises(EndpointKeyRefused, match=words):
        answers_of(house.context(keyed, {"key": name}))

    assert keyed.asked == []


def test_an_error_of_the_endpoint_says_where_the_job_names_it(house: House, serve: Serve) -> None:
    with pytest.raises(AerieError) as caught:
        answers_of(house.context(serve(info={"dtype": "float16"}), {}))

    assert caught.value.pointer == "/verifier/endpoint"
