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


def supervise(chat: Chat, messages: Sequence[Message], limit: int | None = None) -> Masked:
    """Tokens and mask of an answered conversation; a last turn of the user's is left out. Raises TemplateRefusal.

    With a `limit`, turns behind the first `limit` tokens are not looked at: what is returned is then longer than the limit,
    right up to there, and counts only what was looked at.
    """
    if messages and messages[-1]["role"] == "user":
        messages = messages[:-1]
    full = chat.template.render(messages)
    marked = chat.template.answer_spans(messages, full) if chat.template.marks_answers else []
    cutter, rewritten, unended = Cutter(chat, full), 0, 0
    for turn in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        if limit is not None and cutter.tokens > limit:
            break
        if (answer := _answer(chat, messages, turn, full, marked)) is None:
            rewritten += 1
            continue
        cutter.cut(answer.start, 0)
        cutter.cut(answer.stop, 1)
        unended += not answer.ended
    else:
        cutter.cut(len(full), 0)
    input_ids, loss_mask = cutter.done()
    return Masked(input_ids, loss_mask, rewritten, unended)


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
    encoding = chat.encoding(text)
    for stops, ended in ((chat.eos_token_ids, True), (chat.special_ids, False)):
        for token, (_, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in stops:
                return text[:stop], ended
    return text.rstrip(), False


class Cutter:
    """Tokens and mask of a text, cut at the answers' boundaries as an engine that extends a prompt would cut them.

    Each cut asks what the text up to there encodes to. Encoding that anew is quadratic in the turns; but a control token
    ends what a tokenizer looks at, so what follows one can be encoded alone. That is believed of a tokenizer only as long
    as it holds: the last cut is compared with the whole encoding, and where they differ everything is encoded the slow way.
    """

    def __init__(self, chat: Chat, full: str) -> None:
        self._chat, self._full = chat, full
        self._cuts: list[tuple[int, int]] = []
        self._start()

    def _start(self) -> None:
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._place, self._before = 0, list[int]()
        self._anchor, self._anchored = 0, list[int]()  # behind a control token: place, and the tokens up to there

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    def cut(self, stop: int, flag: int) -> None:
        """Add the text up to `stop`, supervised if `flag` is 1."""
        self._cuts.append((stop, flag))
        whole = self._encode(stop)
        piece = whole[len(self._before) :]
        if (
            whole[: len(self._before)] != self._before
        ):  # a token spans the cut: the prompt keeps its own, the rest stands alone
            if self._anchor:
                return self._again()
            piece = self._chat.encode(self._full[self._place : stop])
            if self._text([*self._before, *piece]) != self._text(whole):
                raise TemplateRefusal("the tokenizer cannot encode an answer apart from its prompt")
        self._ids += piece
        self._mask += [flag] * len(piece)
        self._place, self._before = stop, whole
        return None

    def done(self) -> tuple[list[int], list[int]]:
        """Tokens and mask."""
        if self._anchor and self._before != self._chat.encode(self._full[: self._place]):
            self._again()
        return self._ids, self._mask

    def _again(self) -> None:
        """Make every cut again, the slow way."""
        self._chat.splits_at_control = False
        cuts, self._cuts = self._cuts, []
        self._start()
        for stop, flag in cuts:
            self.cut(stop, flag)

    def _encode(self, stop: int) -> list[int]:
        """What the text up to `stop` encodes to."""
        encoding = self._chat.encoding(self._full[self._anchor : stop])
        whole = [*self._anchored, *encoding.ids]
        if self._chat.splits_at_control:
            behind = [i for i, token in enumerate(encoding.ids) if token in self._chat.special_ids]
            if behind:
                self._anchored = whole[: len(self._anchored) + behind[-1] + 1]
                self._anchor += encoding.offsets[behind[-1]][1]
        return whole

    def _text(self, ids: list[int]) -> str:
        return self._chat.tokenizer.decode(ids, skip_special_tokens=False)
