"""Conversations as tokens: the one place where a verifier's template and tokenizer meet what people wrote.

Both come with the checkpoint and can cost anything: a template is a program, a tokenizer brings regular expressions. So
`prepare` asks a confined process for every conversation, bounded in time and memory; what is confined already (preflight)
encodes where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

from eagle3_core.confined import Confined, Limits, Say, Unanswered
from eagle3_core.data.masks import Masked, supervise
from eagle3_core.data.rows import Message
from eagle3_core.data.templates import Chat, TemplateRefusal
from eagle3_core.digests import digest_json
from eagle3_core.verifier.folder import POINTER, VerifierFault, refusal
from eagle3_core.verifier.identity import Identity

LIMITS = Limits(cpu_s=120, wall_s=600, memory_bytes=3 << 30)
"""What one conversation may cost. The longest line with the most turns takes 44 s of CPU time, most take milliseconds."""


class EncodingTooCostly(VerifierFault):
    """The verifier's chat template or tokenizer takes more time or memory than one conversation can need."""

    code = "verifier.encoding_cost"


class ControlText(Exception):
    """A turn spells a control token: serving would take it for the token itself (`<|im_end|>` ends the user's turn)."""


class Encoder(Protocol):
    """Makes tokens of conversations."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that waits for the assistant. Raises TemplateRefusal, ControlText."""
        ...

    def answered(self, messages: Sequence[Message], limit: int) -> Masked:
        """Tokens and mask of an answered conversation; whole up to more than `limit` tokens. Raises like `prompt`."""
        ...


class ChatEncoder:
    """In this process."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """See Encoder."""
        self._refuse_control(messages)
        return self.chat.prompt(messages)

    def answered(self, messages: Sequence[Message], limit: int) -> Masked:
        """See Encoder."""
        self._refuse_control(messages)
        return supervise(self.chat, messages, limit)

    def _refuse_control(self, messages: Sequence[Message]) -> None:
        if (token := self.chat.control_text(messages)) is not None:
            raise ControlText(f"a turn spells the control token {token}")


class ConfinedEncoder:
    """In a process of its own, which ends with the `with` block."""

    def __init__(self, verifier: Identity, limits: Limits, arguments: Mapping[str, Any] = MappingProxyType({})) -> None:
        """`arguments`: what the chat template is asked with besides the messages."""
        self._chat = {
            "folder": str(verifier.folder), "template": verifier.chat_template,
            "special_tokens": verifier.special_tokens, "eos_token_ids": list(verifier.eos_token_ids),
            "arguments": dict(arguments),
        }  # fmt: skip
        self._name = digest_json(self._chat)
        self._process = Confined("eagle3_core.data.encoding:confined", limits)

    def __enter__(self) -> ConfinedEncoder:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self._process.close()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """See Encoder. Raises EncodingTooCostly besides, and what is wrong with template or tokenizer."""
        ids: list[int] = self._ask({"messages": list(messages)})["input_ids"]
        return ids

    def answered(self, messages: Sequence[Message], limit: int) -> Masked:
        """See Encoder. Raises like `prompt`."""
        return Masked(**self._ask({"messages": list(messages), "limit": limit}))

    def tokens_of(self, text: str) -> tuple[list[int], str]:
        """Token ids of a text that no template made, control tokens recognised, and the text that they give again."""
        answer = self._ask({"text": text})
        return answer["input_ids"], answer["text"]

    def text_of(self, ids: Sequence[int]) -> str:
        """What token ids spell, control tokens included."""
        return str(self._ask({"ids": list(ids)})["text"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self._process.ask({**request, "name": self._name})
            if "unknown" in answer:
                answer = self._process.ask({**request, "name": self._name, "chat": self._chat})
        except Unanswered as error:
            raise too_costly(error.why) from None
        if "refused" in answer:
            raise TemplateRefusal(answer["refused"])
        if "control" in answer:
            raise ControlText(answer["control"])
        return answer


def too_costly(why: str) -> VerifierFault:
    """The fault of a verifier whose template or tokenizer met a limit."""
    return refusal(
        EncodingTooCostly,
        f"the verifier's chat template or tokenizer could not make tokens of one conversation: {why}",
        "copy template and tokenizer of the model's release again; those in use need milliseconds",
    )


_known: dict[str, ChatEncoder] = {}
"""The chat that a confined process serves, by its name: it is told once, since a tokenizer takes a second to load."""


def confined(request: Any, say: Say) -> Any:
    """The service of ConfinedEncoder's process: tokens of one conversation, of a text, or a text of tokens."""
    say("a conversation", POINTER)
    name = request["name"]
    if (chat := request.get("chat")) is not None:
        _known.clear()
        _known[name] = ChatEncoder(
            Chat.load(
                Path(chat["folder"]), chat["template"], chat["special_tokens"], chat["eos_token_ids"], chat["arguments"]
            )
        )
    if name not in _known:
        return {"unknown": name}
    chosen = _known[name]
    if "text" in request:
        ids = chosen.chat.encode(request["text"])
        return {"input_ids": ids, "text": chosen.chat.decode(ids)}
    if "ids" in request:
        return {"text": chosen.chat.decode(request["ids"])}
    try:
        if "limit" in request:
            return vars(chosen.answered(request["messages"], request["limit"]))
        return {"input_ids": chosen.prompt(request["messages"])}
    except TemplateRefusal as error:
        return {"refused": str(error)}
    except ControlText as error:
        return {"control": str(error)}
