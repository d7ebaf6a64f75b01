"""Conversations as the verifier's own text and tokens: its chat template and its tokenizer, rendered as serving does.

The renderer is jinja2 with the settings of transformers' `apply_chat_template` (a test compares the two), because
importing transformers costs 12 s and a job's first stage takes less. Templates come with checkpoints, so they run in
jinja's sandbox. That bounds neither their time nor their memory: whoever does not trust a checkpoint lets `encoding` run
this module in a bounded process. Two things differ, and are said: `strftime_now` answers one fixed day, since a sample must
not depend on when it was made; and text that spells a control token is refused (`control_text`), since it would become
that token.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding, Tokenizer

from eagle3_core.data.rows import Message
from eagle3_core.verifier.folder import VerifierTemplate, VerifierTokenizer, refusal
from eagle3_core.verifier.identity import Identity

FIXED_DAY = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
"""What a template that prints the date sees."""

PRIVATE_USE = range(0xE000, 0xF8FF)
"""Code points without a meaning, from which the marks of answers are taken."""


def prints_date(source: str) -> bool:
    """Whether a rendering of the chat template `source` depends on the day."""
    return "strftime_now" in source


class TemplateRefusal(Exception):
    """The template cannot render this conversation, with the template's own words."""


class _Answers(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: what the template says an assistant writes."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.marks: tuple[str, str] = ("", "")

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call that may set marks around what it renders."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{self.marks[0]}{caller()}{self.marks[1]}"


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """`special_tokens` are the names that the template may print (`bos_token`, ...), `arguments` what it is asked with
        besides (`enable_thinking`, ...). Raises VerifierTemplate."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Answers, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        names = cast(dict[str, Any], environment.globals)
        del environment.filters["random"], names["lipsum"]  # equal conversations are equal prompts
        names.update(raise_exception=_raise_exception, strftime_now=FIXED_DAY.strftime)
        self._answers = cast(_Answers, environment.extensions[_Answers.identifier])
        self._names: dict[str, Any] = {**special_tokens, **arguments}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise refusal(
                VerifierTemplate,
                f"the chat template does not compile: line {error.lineno}: {error.message}",
                "copy the template of the model's release again",
            ) from None
        except MemoryError:  # says what there was room for, not what the template is
            raise
        except Exception as error:  # deep nesting and odd constants make the compiler itself stumble
            raise refusal(
                VerifierTemplate,
                f"the chat template does not compile: {type(error).__name__}: {error}"[:300],
                "copy the template of the model's release again",
            ) from None
        self.marks_answers = bool(re.search(r"\{%-?\s*generation\b", source))
        """Whether the template itself says what an assistant writes."""

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """The text of `messages`, with the opening of the assistant's next turn if asked. Raises TemplateRefusal."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._names,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: whatever it raises is its refusal
            raise TemplateRefusal(f"{error or type(error).__name__}"[:200]) from error

    def answer_spans(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        """What the template's `{% generation %}` blocks wrote, as character spans of `text` (= `render(messages)`).

        Raises TemplateRefusal when marking the blocks changes the text, as it does where a template trims them.
        """
        first, last = [chr(code) for code in PRIVATE_USE if chr(code) not in text][:2]
        self._answers.marks = (first, last)
        try:
            marked = self.render(messages)
        finally:
            self._answers.marks = ("", "")
        if marked.replace(first, "").replace(last, "") != text:
            raise TemplateRefusal("the template changes the text of its generation blocks")
        opened = [match.start() for match in re.finditer(first, marked)]
        closed = [match.start() for match in re.finditer(last, marked)]
        return [(o - 2 * i, c - 2 * i - 1) for i, (o, c) in enumerate(zip(opened, closed, strict=True))]


class Chat:
    """A verifier's way to write conversations: template and tokenizer together."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.template = template
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.splits_at_control = True
        """Whether text behind a control token encodes as it does alone, as far as is known."""
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        texts = sorted((added[i].content for i in self.special_ids), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, texts))) if texts else None

    @classmethod
    def of(cls, verifier: Identity) -> Chat:
        """The chat of a verifier. Raises VerifierTokenizer, VerifierTemplate."""
        return cls.load(verifier.folder, verifier.chat_template, verifier.special_tokens, verifier.eos_token_ids)

    @classmethod
    def load(
        cls, folder: Path, template: str, special_tokens: Mapping[str, str], eos_token_ids: Sequence[int],
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> Chat:  # fmt: skip
        """The chat of the tokenizer in `folder` and the source of a template. Raises VerifierTokenizer, VerifierTemplate."""
        return cls(ChatTemplate(template, special_tokens, arguments), load_tokenizer(folder), eos_token_ids)

    def encoding(self, text: str) -> Encoding:
        """Tokens and offsets of rendered text: control tokens are recognised, none is added (the template wrote them).

        Raises VerifierTokenizer.
        """
        try:
            return self.tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises the bare class, whatever is wrong
            raise refusal(
                VerifierTokenizer, f"the tokenizer cannot encode a text: {error}"[:300], "download the tokenizer again"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text. Raises VerifierTokenizer."""
        return self.encoding(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """What `ids` spell, control tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that waits for the assistant. Raises TemplateRefusal."""
        return self.encode(self.template.render(messages, generation_prompt=True))

    def control_text(self, messages: Sequence[Message]) -> str | None:
        """The first control token that a turn spells out, if any does.

        Serving would take it for the token itself: `<|im_end|>` in a question ends the user's turn.
        """
        if self._control is None:
            return None
        found = (self._control.search(message["content"]) for message in messages)
        return next((match.group() for match in found if match), None)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`/tokenizer.json. Raises VerifierTokenizer."""
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare class, whatever is wrong
        raise refusal(VerifierTokenizer, f"{path} is no tokenizer: {error}", "copy the file again") from error


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)
