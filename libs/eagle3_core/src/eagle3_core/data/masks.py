"""Which tokens of a conversation the assistant wrote: the mask that decides what is trained.

The boundary of an answer is where serving draws it: the tokens of `render(messages[:i], generation prompt)` come first,
whatever the turn adds is the answer. So no pattern is searched in text, and a boundary is always a boundary of tokens.
A template that marks answers with `{% generation %}` is taken at its word within its turn.

What counts as the answer:
- its text and its end-of-turn token (the first one that the turn adds); the line break that many templates set behind it
  is not, since an engine stops before it;
- not what the template puts in front by itself, such as an empty `<think></think>`: no answer ever begins so in the mode
  in which it would be served. White space in front stays with the answer;
- only turns whose context is rendered as it was when they were written. Templates that rewrite history (Qwen3 strips the
  thinking of earlier turns) leave the last turn, and `rewritten` counts the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3_core.data.rows import Message
from eagle3_core.data.templates import PRIVATE_USE, Chat, TemplateRefusal

PLACEHOLDER = chr(PRIVATE_USE[-1])
"""Stands in for an answer, to see what the template sets in front of it."""


@dataclass(frozen=True)
class Masked:
    """A tokenised conversation of T tokens."""

    input_ids: list[int]
    """Token ids, [T]."""
    loss_mask: list[int]
    """1 where the token is part of an answer, [T]."""
    rewritten: int
    """Answers left out because the template renders their context differently later on."""
    unended: int
    """Answers without an end-of-turn token that the verifier is known to stop at."""


@dataclass(frozen=True)
class _Answer:
    """A span of the rendered text."""

    start: int
    stop: int
    ended: bool


def supervise(chat: Chat, messages: Sequence[Message]) -> Masked:
    """Tokens and mask of an answered conversation; a last turn of the user's is left out. Raises TemplateRefusal."""
    if messages and messages[-1]["role"] == "user":
        messages = messages[:-1]
    full = chat.template.render(messages)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    marked = chat.template.answer_spans(messages, full) if chat.template.marks_answers else []
    answers = [_answer(chat, messages, i, full, marked) for i in turns]
    kept = [answer for answer in answers if answer is not None]
    input_ids, loss_mask = _tokens(chat, full, kept)
    return Masked(input_ids, loss_mask, len(answers) - len(kept), sum(not answer.ended for answer in kept))


def _answer(
    chat: Chat, messages: Sequence[Message], turn: int, full: str, marked: Sequence[tuple[int, int]]
) -> _Answer | None:
    """Where answer `turn` lies in `full`; None if serving would have seen another context than `full` shows."""
    head = chat.template.render(messages[:turn], generation_prompt=True)
    through = chat.template.render(messages[: turn + 1])
    if not through.startswith(head) or not full.startswith(head):
        return None
    added = through[len(head) :]
    skip = _inserted(chat, messages[: turn + 1], head, added)
    within = [(a, b) for a, b in marked if len(head) <= b and a < len(through)]
    if within:
        skip = max(skip, within[0][0] - len(head))
        added = added[: within[-1][1] - len(head)]
    text, ended = _until_end(chat, added[skip:])
    if not text or not full.startswith(text, len(head) + skip):
        return None
    return _Answer(len(head) + skip, len(head) + skip + len(text), ended)


def _inserted(chat: Chat, messages: Sequence[Message], head: str, added: str) -> int:
    """Characters of `added` that the template set in front of the last message's content, unless white space."""
    probe = chat.template.render([*messages[:-1], {"role": "assistant", "content": PLACEHOLDER}])
    front = probe[len(head) : probe.find(PLACEHOLDER)] if probe.startswith(head) else ""
    content = messages[-1]["content"].strip()
    own = added.startswith(front) and added[len(front) :].lstrip().startswith(content)
    return len(front) if own and front.strip() else 0


def _until_end(chat: Chat, text: str) -> tuple[str, bool]:
    """`text` up to and with its end-of-turn token, and whether the verifier is known to stop there.

    The token is the first of the verifier's own end tokens, else the first control token, else there is none and the
    white space behind the text is dropped.
    """
    encoding = chat.tokenizer.encode(text, add_special_tokens=False)
    for stops, ended in ((chat.eos_token_ids, True), (chat.special_ids, False)):
        for token, (_, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in stops:
                return text[:stop], ended
    return text.rstrip(), False


def _tokens(chat: Chat, full: str, answers: Sequence[_Answer]) -> tuple[list[int], list[int]]:
    """Tokens and mask of `full`, cut at the answers' boundaries as an engine that extends a prompt would cut them."""
    input_ids: list[int] = []
    loss_mask: list[int] = []
    place, before = 0, list[int]()
    cuts = [(stop, flag) for answer in answers for stop, flag in ((answer.start, 0), (answer.stop, 1))]
    for stop, flag in [*cuts, (len(full), 0)]:
        whole = chat.encode(full[:stop])
        piece = whole[len(before) :]
        if whole[: len(before)] != before:  # a token spans the cut: the prompt keeps its own, the rest is encoded alone
            piece = chat.encode(full[place:stop])
            if _text(chat, [*before, *piece]) != _text(chat, whole):
                raise TemplateRefusal("the tokenizer cannot encode an answer apart from its prompt")
        input_ids += piece
        loss_mask += [flag] * len(piece)
        place, before = stop, whole
    return input_ids, loss_mask


def _text(chat: Chat, ids: list[int]) -> str:
    return chat.tokenizer.decode(ids, skip_special_tokens=False)
