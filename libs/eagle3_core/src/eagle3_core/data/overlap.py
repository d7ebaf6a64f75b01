"""Which prompts of two data sets are the same question, whatever their spelling.

An acceptance length on prompts that were trained on says nothing, and files that share prompts rarely share their bytes:
another order, another id, a space. So a prompt is known by a hash of its turns up to case, width of letters and spacing;
the system turn is left out, since another instruction makes no other question.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from blake3 import blake3

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
