"""How a server is asked for an answer, and how its answer is read: SGLang's own way, and OpenAI's two.

Wherever it can be, token ids go in and token ids come out; text would be tokenised again on the way, and not always to the
same ids. SGLang's `/generate` always says its ids. vLLM and SGLang say them on OpenAI's routes for `return_token_ids`: as
`token_ids` and `prompt_token_ids` of a choice, vLLM's chat keeps the prompt's beside the choices, and SGLang's chat calls
the answer's `response_token_ids` (vLLM pull 22587, SGLang pull 30917). A server that knows none of that gives text.

Everything that decides the next token is sent, the neutral values too: both engines fill what is left out from a model's
generation_config.json, and a repetition penalty makes another answer than the verifier's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from eagle3_core.data.rows import Message
from eagle3_core.engine.heard import count, cut, is_count, part, part_or, token_ids, wrong
from eagle3_core.engine.refusals import ServerFailed
from eagle3_core.errors import AerieError
from eagle3_core.text import is_text

NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
NEUTRAL_TOO = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""What OpenAI's own interface does not have."""


class PromptDiffers(AerieError):
    """A server made another prompt of a conversation than the verifier's own template and tokenizer do."""

    code, status = "endpoint.prompt", 409


@dataclass(frozen=True)
class Prompt:
    """What is to be answered."""

    ids: Sequence[int]
    messages: Sequence[Message] = ()
    """The conversation that `ids` are made of; needed by servers that are asked by messages."""


@dataclass(frozen=True)
class Wanted:
    """How an answer is to be made."""

    max_tokens: int
    temperature: float
    top_p: float
    stop_ids: Sequence[int]
    seed: int | None = None


@dataclass(frozen=True)
class Answer:
    """What a server said."""

    ids: list[int] | None
    """The tokens that it sampled, the one that ended them included if it said that one; None if it does not say."""
    text: str | None
    """None: not as one text."""
    ended: bool
    """Whether a token ended it, else it was cut."""
    end: int | None
    """That token, where the server names it apart."""
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int = 0


class Dialect(Protocol):
    """One way to ask."""

    @property
    def path(self) -> str:
        """Where to."""
        ...

    def body(self, prompt: Prompt, wanted: Wanted) -> dict[str, Any]:
        """The request."""
        ...

    def read(self, document: Any, prompt: Prompt) -> Answer:
        """The answer to it. Raises AnswerWrong, PromptDiffers, ServerFailed."""
        ...


@dataclass(frozen=True)
class Native:
    """SGLang's `/generate`."""

    path: str = "/generate"

    def body(self, prompt: Prompt, wanted: Wanted) -> dict[str, Any]:
        """See Dialect."""
        params: dict[str, Any] = {
            "temperature": wanted.temperature, "top_p": wanted.top_p, "max_new_tokens": wanted.max_tokens,
            "stop_token_ids": list(wanted.stop_ids), "skip_special_tokens": False, **NEUTRAL, **NEUTRAL_TOO,
        }  # fmt: skip
        if wanted.seed is not None:
            params["sampling_seed"] = wanted.seed
        return {"input_ids": list(prompt.ids), "sampling_params": params}

    def read(self, document: Any, prompt: Prompt) -> Answer:
        """See Dialect."""
        meta = part(document, "meta_info", dict)
        ids, why = token_ids(document.get("output_ids"), "output_ids"), part(meta, "finish_reason", dict)
        if ids is None:
            raise wrong("no output_ids")
        ended = _ended(why.get("type"), why.get("message"))
        _same_prompt(None, count(meta, "prompt_tokens"), prompt, chat=False)
        return Answer(
            ids, _text(document.get("text")), ended, _end(why.get("matched")),
            count(meta, "prompt_tokens"), count(meta, "completion_tokens"), _cached(meta, prompt),
        )  # fmt: skip


@dataclass(frozen=True)
class OpenAI:
    """`/v1/completions`, which takes token ids, and `/v1/chat/completions`, which takes messages."""

    model: str
    chat: bool
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the server's chat template is asked with."""
    extras: bool = True
    """Whether it is asked for what OpenAI's own interface does not have, its token ids above all."""

    @property
    def path(self) -> Literal["/v1/completions", "/v1/chat/completions"]:
        """Where it is asked."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: Prompt, wanted: Wanted) -> dict[str, Any]:
        """See Dialect."""
        body: dict[str, Any] = {
            "model": self.model, "n": 1, "stream": False, "max_tokens": wanted.max_tokens,
            "temperature": wanted.temperature, "top_p": wanted.top_p, **NEUTRAL,
        }  # fmt: skip
        if wanted.seed is not None:
            body["seed"] = wanted.seed
        if self.chat:
            body["messages"] = [dict(message) for message in prompt.messages]
            if self.arguments:
                body["chat_template_kwargs"] = dict(self.arguments)
        else:
            body["prompt"] = list(prompt.ids)
        if self.extras:
            body |= {
                "return_token_ids": True, "stop_token_ids": list(wanted.stop_ids), "skip_special_tokens": False,
                **NEUTRAL_TOO,
            }  # fmt: skip
            body |= {"separate_reasoning": False} if self.chat else {}
        return body

    def read(self, document: Any, prompt: Prompt) -> Answer:
        """See Dialect. The prompt must be the verifier's: by its tokens, or where the server does not say them by their number."""
        choices = part(document, "choices", list)
        if len(choices) != 1 or not isinstance(choices[0], dict):
            raise wrong(f"{len(choices)} choices")
        choice: dict[str, Any] = choices[0]
        usage = part_or(document, "usage", dict[str, Any]())
        made = token_ids(_first(choice, document, "prompt_token_ids"), "prompt_token_ids")
        _same_prompt(made, count(usage, "prompt_tokens"), prompt, chat=self.chat)
        ids = token_ids(choice.get("token_ids") or choice.get("response_token_ids"), "token_ids")
        end = next((v for k in ("stop_reason", "matched_stop") if (v := _end(choice.get(k))) is not None), None)
        return Answer(
            ids, self._text(choice), _ended(choice.get("finish_reason"), None), end,
            count(usage, "prompt_tokens"), count(usage, "completion_tokens"),
            _cached(part_or(usage, "prompt_tokens_details", dict[str, Any]()), prompt),
        )  # fmt: skip

    def _text(self, choice: Mapping[str, Any]) -> str | None:
        """The answer as one text; None where the server took it apart into reasoning, tool calls and the rest."""
        if not self.chat:
            return _text(choice.get("text"))
        message = part_or(choice, "message", dict[str, Any]())
        apart = [name for name in ("reasoning_content", "reasoning", "tool_calls") if message.get(name)]
        return None if apart else _text(message.get("content"))


def _same_prompt(said: list[int] | None, counted: int | None, prompt: Prompt, *, chat: bool) -> None:
    """Raise PromptDiffers unless the server answered `prompt`, AnswerWrong where nobody can know."""
    want = list(prompt.ids)
    remedy = "serve the chat template and tokenizer of the verifier's folder, in the mode of data.template_arguments"
    if said is None and counted is None:
        raise wrong("neither prompt_token_ids nor prompt_tokens: nobody knows what prompt was answered")
    if said is not None and said != want:
        pairs = zip(said, want, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(said), len(want)))
        raise PromptDiffers(
            f"the server made {len(said)} tokens of a {'conversation' if chat else 'prompt'}, the verifier's folder"
            f" {len(want)}; they part at token {place}: {said[place : place + 5]} there, {want[place : place + 5]} here",
            remedy=remedy,
        )
    if said is None and counted != len(want):
        raise PromptDiffers(
            f"the server counts {counted} tokens in a prompt, the verifier's folder makes {len(want)}", remedy=remedy
        )


def _first(inner: Mapping[str, Any], outer: Mapping[str, Any], name: str) -> Any:
    return outer.get(name) if inner.get(name) is None else inner.get(name)


def _ended(kind: Any, message: Any) -> bool:
    """Whether a token ended the answer. Raises ServerFailed for one that was given up, AnswerWrong for what is no answer."""
    if kind in ("abort", "error"):
        raise ServerFailed(
            f"the engine gave a request up: {cut(message or 'it does not say why')}",
            remedy="see what it says; fewer requests in flight or more KV cache may help",
        )
    if kind not in ("stop", "length"):
        raise wrong(f"finish_reason {cut(repr(kind), 60)}, known are stop and length")
    return bool(kind == "stop")


def _text(value: Any) -> str | None:
    """A text; None where there is none. Raises AnswerWrong for half a surrogate pair, of which no tokens can be made."""
    if not isinstance(value, str):
        return None
    if not is_text(value):
        raise wrong(f"a text with half a surrogate pair: {cut(repr(value), 60)}")
    return value


def _end(value: Any) -> int | None:
    """The token that a server says ended an answer; None where it names none, or a text."""
    return value if is_count(value) else None


def _cached(said: Mapping[str, Any], prompt: Prompt) -> int:
    """How much of the prompt a server had computed before. Raises AnswerWrong where that is more than the prompt."""
    cached = count(said, "cached_tokens") or 0
    if cached > len(prompt.ids):
        raise wrong(f"cached_tokens {cached}, of a prompt of {len(prompt.ids)}")
    return cached
