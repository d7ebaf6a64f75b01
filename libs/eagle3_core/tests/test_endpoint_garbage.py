"""A server that answers what is no answer: an error that names it and says what was wrong, whatever the rubbish."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from endpoint_house import House, Serve, answers_of
from running_server import END

from eagle3_core.engine.capture import ReceiptWrong, receipt_of, token_after
from eagle3_core.engine.dialects import PromptDiffers
from eagle3_core.engine.heard import AnswerWrong
from eagle3_core.engine.proof import OtherVerifier
from eagle3_core.errors import AerieError

Change = Callable[[dict[str, Any]], object]


def answering(change: Change) -> Callable[..., bool]:
    """Answers one token to everything, as `change` changes it."""

    def before(handler: Any, body: dict[str, Any], time: int) -> bool:
        native = "input_ids" in body
        counts = {"prompt_tokens": len(body["input_ids" if native else "prompt"]), "completion_tokens": 1}
        meta = {**counts, "finish_reason": {"type": "length"}}
        choice = {"finish_reason": "length", "token_ids": [5], "text": None}
        document = {"output_ids": [5], "meta_info": meta} if native else {"choices": [choice], "usage": counts}
        change(document)
        handler.say(200, document)
        return True

    return before


NATIVE: dict[str, tuple[Change, str]] = {
    "meta that is a number": (lambda d: d.update(meta_info=5), "meta_info that is 5"),
    "no meta": (lambda d: d.pop("meta_info"), "no meta_info"),
    "an end in a word": (lambda d: d["meta_info"].update(finish_reason="abort"), "finish_reason that is abort"),
    "an odd end": (lambda d: d["meta_info"].update(finish_reason={"type": [1]}), "known are stop and length"),
    "ids that are words": (lambda d: d.update(output_ids=["a"]), "output_ids that are no token ids"),
    "ids in an object": (lambda d: d.update(output_ids={}), "output_ids that are no token ids"),
    "an id of no vocabulary": (lambda d: d.update(output_ids=[10**6]), "of a vocabulary of"),
    "an id of no number": (lambda d: d.update(output_ids=[10**400]), "no token ids"),
    "a count of no number": (lambda d: d["meta_info"].update(completion_tokens=10**12), "completion_tokens that is"),
    "a negative count": (lambda d: d["meta_info"].update(cached_tokens=-1), "cached_tokens that is -1"),
    "more than was asked": (lambda d: d["meta_info"].update(completion_tokens=10**6), "in an answer that may have"),
    "more cached than sent": (lambda d: d["meta_info"].update(cached_tokens=10**6), "cached_tokens 1000000, of"),
    "no count of the prompt": (lambda d: d["meta_info"].pop("prompt_tokens"), "nobody knows what prompt"),
    "on after its end": (
        lambda d: (d.update(output_ids=[5, END, 6]), d["meta_info"].update(completion_tokens=3)),
        f"answered on after token {END}",
    ),
}  # fmt: skip
OPENAI: dict[str, tuple[Change, str]] = {
    "usage that is a number": (lambda d: d.update(usage=5), "usage that is 5"),
    "details that are a list": (lambda d: d["usage"].update(prompt_tokens_details=[1]), "prompt_tokens_details that is"),
    "choices of numbers": (lambda d: d.update(choices=[5]), "1 choices"),
    "no choices": (lambda d: d.update(choices={}), "choices that is"),
    "half a surrogate pair": (lambda d: d["choices"][0].update(text="\ud800"), "half a surrogate pair"),
}  # fmt: skip


@pytest.mark.parametrize(("api", "case"), [("sglang", c) for c in NATIVE] + [("openai", c) for c in OPENAI])
def test_rubbish_in_an_answer_is_an_error_that_names_the_server(
    api: str, case: str, house: House, serve: Serve
) -> None:
    change, words = (NATIVE | OPENAI)[case]
    server = serve(before=answering(change))

    with pytest.raises(AnswerWrong, match=words) as caught:
        answers_of(house.context(server, {"api": api}))

    assert server.url in caught.value.detail
    assert len(json.dumps(caught.value.problem())) < 2000


def test_a_server_of_sglang_that_read_another_prompt_is_found_out(house: House, serve: Serve) -> None:
    server = serve(before=answering(lambda d: d["meta_info"].update(prompt_tokens=999)))

    with pytest.raises(PromptDiffers, match="counts 999 tokens"):
        answers_of(house.context(server, {}))


def test_a_list_of_models_that_is_none_is_an_error(house: House, serve: Serve) -> None:
    server = serve(models=(), routes={"/v1/models": {"data": 5}})

    with pytest.raises(AnswerWrong, match="data that is 5"):
        answers_of(house.context(server, {"api": "openai"}))


@pytest.mark.parametrize(
    "quirks", [{"models": [{"id": "x" * 3_000_000}]}, {"info": {"dtype": "y" * 9, "architectures": ["x" * 3_000_000]}}]
)
def test_a_name_of_megabytes_makes_no_error_of_megabytes(quirks: dict[str, Any], house: House, serve: Serve) -> None:
    with pytest.raises(OtherVerifier) as caught:
        answers_of(house.context(serve(**quirks), {"api": "openai"} if "models" in quirks else {}))

    assert len(json.dumps(caught.value.problem())) < 5000


@pytest.mark.parametrize(
    "answer",
    [{}, [], {"meta_info": None}, {"meta_info": []}, {"meta_info": {"finish_reason": "abort"}},
     {"meta_info": {"aerie_receipt": 5}}, {"meta_info": {"aerie_receipt": {"key": "x" * 9999}}}],
)  # fmt: skip
def test_a_receipt_that_is_none_is_an_error_and_no_crash(answer: Any) -> None:
    with pytest.raises(AerieError) as caught:
        receipt_of(answer, [1, 2])

    assert isinstance(caught.value, AnswerWrong | ReceiptWrong)


@pytest.mark.parametrize("answer", [{}, {"output_ids": []}, {"output_ids": 5}, {"output_ids": ["a"]}])
def test_a_capture_without_its_token_is_an_error_and_no_crash(answer: Any) -> None:
    with pytest.raises((AnswerWrong, ReceiptWrong)):
        token_after(answer)
