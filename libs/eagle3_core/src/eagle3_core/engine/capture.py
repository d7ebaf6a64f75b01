"""Asks a capturing server for states, and holds its receipt against what was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

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
    """The receipt in the `answer` to `capture_request(ids)`. Raises ReceiptWrong that names both sides."""
    found = answer["meta_info"].get(RECEIPT_FIELD)
    if found is None:
        why = (answer["meta_info"].get("finish_reason") or {}).get("message")
        raise ReceiptWrong(
            f"the server answered without a receipt{f': {why}' if why else ''}",
            remedy="start it by aerie-verifier with `capture`; if it was, its hooks are not attached: see its log",
        )
    try:
        receipt = Receipt.model_validate(found)
    except ValidationError as error:
        raise ReceiptWrong(
            f"the server's receipt does not validate: {placed(error.errors()[0])}",
            remedy="run server and stages from one version",
        ) from None
    if (receipt.tokens, receipt.prompt_digest) != (len(ids), prompt_digest(ids)):
        raise ReceiptWrong(
            f"the receipt is for {receipt.tokens} tokens with digest {receipt.prompt_digest[:16]}, asked for were"
            f" {len(ids)} with {prompt_digest(ids)[:16]}",
            remedy="send the request again; if it comes back, report it",
        )
    return receipt
