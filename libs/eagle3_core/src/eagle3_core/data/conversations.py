"""The conversations that prompts were made of, stored beside the tokens for servers that accept only messages.

JSON lines `["id", [message, ...]]`, in the order of the token set. Each carries the sample's id, so that no prompt can be
answered in another one's place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from eagle3_core.data.rows import Message
from eagle3_core.errors import AerieError

MESSAGES_FILE = "messages.jsonl"


class ConversationsDamaged(AerieError):
    """The conversations of a token set are not those of its prompts."""

    code, status = "data.conversations", 500


def save(path: Path, conversations: Iterable[tuple[str, Sequence[Message]]]) -> None:
    """Write (id, messages) of every prompt, in order."""
    with path.open("w", encoding="utf-8") as file:
        for name, messages in conversations:
            file.write(json.dumps([name, list(messages)], ensure_ascii=False) + "\n")


def load(path: Path, start: int = 0, stop: int | None = None) -> Iterator[tuple[str, list[Message]]]:
    """(id, messages) of the prompts `start` (inclusive) to `stop` (exclusive)."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in islice(file, start, stop):
            name, messages = json.loads(line)
            yield name, messages


def of_prompts(path: Path, start: int, ids: Sequence[str]) -> list[list[Message]]:
    """The conversations of the prompts `ids`, the first of which is number `start`. Raises ConversationsDamaged."""
    found = list(load(path, start, start + len(ids)))
    if [name for name, _ in found] != list(ids):
        raise ConversationsDamaged(
            f"{path.name} holds {len(found)} of {len(ids)} conversations from number {start} on, or others",
            remedy="prepare the job's data again",
        )
    return [messages for _, messages in found]
