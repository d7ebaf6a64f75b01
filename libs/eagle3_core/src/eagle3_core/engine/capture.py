"""Asks a capturing server for states, and holds its receipt against what was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from eagle3_core.engine.heard import cut, part, part_or, token_ids
from eagle3_core.errors import AerieError
from eagle3_core.faults import placed
from eagle3_core.verifier.receipt import RECEIPT_FIELD, Receipt, prompt_digest


class ReceiptWrong(AerieError):
    """A server's receipt for hidden states is not one for what was asked."""

    code, status, retryable = "capture.receipt", 502, True


def capture_request(ids: Sequence[int]) -> dict[str, Any]:
    """The body of a request for the states of the tokens `ids`. Its answer is one greedy token, and the receipt."""
    return {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_hidden_states": True,
    }


def receipt_of(answer: Mapping[str, Any], ids: Sequence[int]) -> Receipt:
    """The receipt in the `answer` to `capture_request(ids)`. Raises ReceiptWrong that names both sides, AnswerWrong."""
    meta = part(answer, "meta_info", dict)
    if (found := meta.get(RECEIPT_FIELD)) is None:
        why = part_or(meta, "finish_reason", dict[str, Any]()).get("message")
        raise ReceiptWrong(
            f"the server answered without a receipt{f': {cut(why)}' if why else ''}",
            remedy="start it by aerie-verifier with `capture`; if it was, its hooks are not attached: see its log",
        )
    try:
        receipt = Receipt.model_validate(found)
    except ValidationError as error:
        raise ReceiptWrong(
            f"the server's receipt does not validate: {cut(placed(error.errors()[0]))}",
            remedy="run server and stages from one version",
        ) from None
    if (receipt.tokens, receipt.prompt_digest) != (len(ids), prompt_digest(ids)):
        raise ReceiptWrong(
            f"the receipt is for {receipt.tokens} tokens with digest {receipt.prompt_digest[:16]}, asked for were"
            f" {len(ids)} with {prompt_digest(ids)[:16]}",
            remedy="send the request again; if it comes back, report it",
        )
    return receipt


def token_after(answer: Mapping[str, Any]) -> int:
    """The one token of the `answer` to a `capture_request`. Raises ReceiptWrong, AnswerWrong."""
    ids = token_ids(answer.get("output_ids"), "output_ids")
    if not ids:
        raise ReceiptWrong(
            "the server captured a prompt and answered no token", remedy="run server and stages from one version"
        )
    return ids[-1]
