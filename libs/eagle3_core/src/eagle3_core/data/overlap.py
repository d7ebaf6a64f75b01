"""Which prompts of two data sets are the same question, whatever their spelling.

An acceptance length on prompts that were trained on says nothing, and files that share prompts rarely share their bytes: order,
ids and spaces differ. So a prompt is identified by a hash of its turns that ignores case, width of letters and spacing. The
system turn is left out, because another instruction does not make another question.

The verifier reads tokens, though, and a chat template can make the same tokens of different words (one that drops or cuts
turns). So where a prompt's tokens are known, it is identified by them as well.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from eagle3_core.data.rows import Conversation

KEY_BYTES = 16


def prompt_keys(conversation: Conversation) -> Iterator[bytes]:
    """A key for each prompt of a conversation (what lies before each answer), the last one last; KEY_BYTES each."""
    hasher = blake3()
    for message in conversation.messages:
        if message["role"] == "system":
            continue
        text = " ".join(unicodedata.normalize("NFKC", message["content"]).casefold().split())
        hasher.update(f"{message['role']}\0{text}\0".encode())
        if message["role"] == "user":
            yield hasher.digest(KEY_BYTES)


def last_prompt_key(conversation: Conversation) -> bytes:
    """The key of the prompt that a held-out conversation asks."""
    *_, last = prompt_keys(conversation)
    return last


def token_keys(input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> Iterator[bytes]:
    """A key for what stands before each answer of a sample ([T], mask 1 in answers), or for all of it if none is marked."""
    hasher, done = blake3(b"tokens"), 0
    starts = np.flatnonzero(np.diff(loss_mask.astype(np.int8), prepend=0) == 1)
    for start in starts.tolist() or [len(input_ids)]:
        hasher.update(input_ids[done:start].astype("<i4").tobytes())
        yield hasher.digest(KEY_BYTES)
        done = start
