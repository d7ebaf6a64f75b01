"""Conversations as samples: tokens and mask, or the reason why one is of no use.

Two kinds of jobs need two kinds of samples. Where the verifier writes the answers (`regenerate`), a sample is a prompt
up to the last turn of the user, with the opening of the assistant's turn, and nothing is supervised yet. Where the
answers are the data's own, a sample is the whole conversation with its mask. Held-out prompts are of the first kind.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from zlib import compress

import numpy as np
from numpy.typing import NDArray

from eagle3_core.data.encoding import ControlText, Encoder
from eagle3_core.data.overlap import prompt_keys, token_keys
from eagle3_core.data.rows import Conversation, DatasetFormat, fault
from eagle3_core.data.templates import TemplateRefusal
from eagle3_core.errors import AerieError

MIN_ANSWER_TOKENS = 2
"""Shortest answer that trains anything: a chain needs the token it starts from and one to predict."""

CONTROL, TEMPLATE, LONG, UNSUPERVISED = "control_token", "template", "too_long", "nothing_supervised"
UNUSABLE = (CONTROL, TEMPLATE)
"""Reasons that count as bad lines; the others are a matter of the job's settings."""


class DataTooShort(AerieError):
    """`max_seq_len` is shorter than every sample."""

    code, status = "data.too_short", 422


class DataAllMasked(AerieError):
    """No token of the data is supervised."""

    code, status = "data.all_masked", 422


class HeldOutOverlap(AerieError):
    """What measures or validates the drafter is all that there is to train it."""

    code, status = "evaluation.overlap", 422


class Dropped(Exception):
    """A conversation makes no sample."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Sample:
    """One sample of T tokens."""

    id: str
    task: str
    input_ids: NDArray[np.int32]
    """[T]."""
    loss_mask: NDArray[np.uint8]
    """[T]."""
    prompts: tuple[bytes, ...]
    """Keys of the prompts that it answers or asks (`overlap`), by their text."""
    token_prompts: tuple[bytes, ...]
    """The same by their tokens; answers that are not supervised have none."""
    messages: bytes = b""
    """The conversation that `input_ids` are made of, as compressed JSON; empty unless the sampler keeps it."""


@dataclass
class Sampler:
    """Makes samples of at most `limit` tokens, and counts what it had to leave out and why."""

    encoder: Encoder
    limit: int
    keep_messages: bool = False
    """Whether samples carry the conversation of a prompt beside its tokens."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Conversations that made no sample, by reason."""
    examples: dict[str, str] = field(default_factory=dict[str, str])
    """What was wrong with the first conversation of each reason."""
    cut: int = 0
    """Samples that were longer than the limit."""
    rewritten: int = 0
    """Answers left out because the template renders their context differently later on."""
    unended: int = 0
    """Answers whose end-of-turn token the verifier is not known to stop at."""
    shortest: int | None = None
    """Fewest tokens among the conversations that were too long."""

    def prompt(self, conversation: Conversation) -> Sample:
        """The conversation up to its last user turn, ready to be answered. Raises Dropped."""
        last = max(i for i, message in enumerate(conversation.messages) if message["role"] == "user")
        messages = conversation.messages[: last + 1]
        try:
            tokens = self.encoder.prompt(messages)
        except ControlText as error:
            raise self._drop(CONTROL, str(error)) from None
        except TemplateRefusal as error:
            raise self._drop(TEMPLATE, str(error)) from None
        if len(tokens) + MIN_ANSWER_TOKENS > self.limit:
            raise self._too_long(len(tokens), f"a prompt of {len(tokens)} tokens leaves no room for an answer")
        sample = _sample(conversation, tokens, [0] * len(tokens))
        return replace(sample, messages=compress(json.dumps(messages).encode(), 1)) if self.keep_messages else sample

    def answered(self, conversation: Conversation) -> Sample:
        """The whole conversation with its answers supervised, cut at the limit. Raises Dropped."""
        try:
            masked = self.encoder.answered(conversation.messages, self.limit)
        except ControlText as error:
            raise self._drop(CONTROL, str(error)) from None
        except TemplateRefusal as error:
            raise self._drop(TEMPLATE, str(error)) from None
        self.rewritten += masked.rewritten
        self.unended += masked.unended
        if sum(masked.loss_mask) < MIN_ANSWER_TOKENS:
            raise self._drop(UNSUPERVISED, "no token of an answer could be told apart")
        mask = masked.loss_mask[: self.limit]
        if sum(mask) < MIN_ANSWER_TOKENS:
            length = masked.loss_mask.index(1)
            raise self._too_long(length, f"the first answer begins after {length} tokens")
        self.cut += len(masked.input_ids) > self.limit
        return _sample(conversation, masked.input_ids[: self.limit], mask)

    def nothing_left(self, pointer: str) -> AerieError:
        """Why no sample is left, as an error. `pointer` names the data; a limit that is too low points at itself."""
        if self.dropped[LONG] and self.dropped.most_common(1)[0][0] == LONG:
            return DataTooShort(
                f"at most {self.limit} tokens fit a sample, the shortest conversation needs "
                f"{(self.shortest or 0) + MIN_ANSWER_TOKENS}",
                remedy=f"set data.max_seq_len to at least {(self.shortest or 0) + MIN_ANSWER_TOKENS}; the answers come on top",
                pointer="/data/max_seq_len",
            )
        reasons = ", ".join(
            f"{count} {reason} (first: {self.examples[reason]})" for reason, count in sorted(self.dropped.items())
        )
        if not self.dropped[UNSUPERVISED]:
            return fault(DatasetFormat, f"no conversation can be used: {reasons}", pointer)
        return DataAllMasked(
            f"no token of the data is supervised ({reasons}; {self.rewritten} answers are rendered "
            "differently by the chat template than they were written)",
            remedy="set data.regenerate.enabled to true, or give conversations whose answers the chat template keeps",
            pointer=pointer,
        )

    def _too_long(self, tokens: int, detail: str) -> Dropped:
        self.shortest = tokens if self.shortest is None else min(self.shortest, tokens)
        return self._drop(LONG, detail)

    def _drop(self, reason: str, detail: str) -> Dropped:
        self.dropped[reason] += 1
        self.examples.setdefault(reason, detail)
        return Dropped(reason, detail)


def _sample(conversation: Conversation, tokens: list[int], mask: list[int]) -> Sample:
    ids, flags = np.asarray(tokens, np.int32), np.asarray(mask, np.uint8)
    prompts, token_prompts = tuple(prompt_keys(conversation)), tuple(token_keys(ids, flags))
    return Sample(conversation.id, conversation.task, ids, flags, prompts, token_prompts)
