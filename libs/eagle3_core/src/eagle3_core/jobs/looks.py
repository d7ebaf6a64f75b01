"""What the beginnings of a job's data sets hold: prompts to compare, and whether the verifier makes a sample of one.

The first conversations are made into tokens with the verifier's own template and tokenizer until one makes a sample and
two differ; the rest are only known by the keys of their prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eagle3_core.confined import Say
from eagle3_core.data.corpus import Source
from eagle3_core.data.datasets import Tally, judge_beginning
from eagle3_core.data.overlap import last_prompt_key, prompt_keys
from eagle3_core.data.rows import Conversation
from eagle3_core.data.samples import Dropped, Sampler
from eagle3_core.data.templates import Chat, TemplateRefusal
from eagle3_core.jobs.mistakes import Mistakes
from eagle3_core.verifier.folder import POINTER, VerifierTemplate, VerifierTokenizer, refusal

TRIED_CHARS = 1 << 18
"""Text that is made into tokens to see whether a data set makes a sample: a second or two of work. Longer conversations are
not tried."""
TRY_CPU_S = 5.0
"""CPU time of compiling a template, and of making tokens of one conversation."""


@dataclass
class Renderings:
    """Whether different conversations stay different once the verifier's template and tokenizer are through with them.

    Where all become one prompt, held-out and training prompts are the same and nothing is learnt from either; no digest and
    no comparison of texts would show it.
    """

    chat: Chat
    asked: set[bytes] = field(default_factory=set[bytes])
    """Keys of the conversations that were tried."""
    texts: set[str] = field(default_factory=set[str])
    """What the template made of them."""
    tokens: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    """What the tokenizer made of that."""

    @property
    def differ(self) -> bool:
        """Whether two different prompts were seen."""
        return len(self.tokens) > 1

    def take(self, conversation: Conversation, key: bytes) -> None:
        """Try the prompt of one more conversation, unless the same was tried before."""
        if key in self.asked:
            return
        last = max(i for i, message in enumerate(conversation.messages) if message["role"] == "user")
        try:
            text = self.chat.template.render(conversation.messages[: last + 1], generation_prompt=True)
        except TemplateRefusal:
            return
        self.asked.add(key)
        self.texts.add(text)
        self.tokens.add(tuple(self.chat.encode(text)))

    def check(self) -> None:
        """Raise VerifierTemplate or VerifierTokenizer where several conversations were tried and gave one prompt."""
        if self.differ or len(self.asked) < 2:
            return
        kind, who = (
            (VerifierTemplate, "chat template") if len(self.texts) == 1 else (VerifierTokenizer, "tokenizer")
        )  # fmt: skip
        given = repr(min(self.texts)[:120]) if len(self.texts) == 1 else f"tokens {list(*self.tokens)[:16]}"
        raise refusal(
            kind,
            f"the verifier's {who} gives one and the same prompt for {len(self.asked)} different conversations: {given}",
            f"copy the {who} of the model's release again: this one leaves out what the user says",
        )


@dataclass(frozen=True)
class Trial:
    """What conversations are tried with."""

    sampler: Sampler
    renderings: Renderings


@dataclass
class Look:
    """What the beginnings of some data sets hold."""

    answered: bool
    """Whether the answers are the data's own."""
    trial: Trial | None
    """None where the verifier cannot be used: then lines are only read."""
    warnings: list[str] = field(default_factory=list[str])
    keys: list[tuple[bytes, ...]] = field(default_factory=list[tuple[bytes, ...]])
    """The prompts' keys of every usable conversation."""
    whole: bool = True
    """Whether all files were read to their ends and can be used."""
    usable: bool = False
    """Whether a sample was made."""
    tried: int = 0
    """Characters of conversations that were made into tokens without one, and of the one that was too long to try."""

    def take(self, conversation: Conversation, source: Source, say: Say) -> None:
        """Look at one more conversation of `source`."""
        keys = tuple(prompt_keys(conversation)) if self.answered else (last_prompt_key(conversation),)
        self.keys.append(keys)
        if self.trial is not None:
            self._try(conversation, keys[-1], self.trial, source, say)

    def _try(self, conversation: Conversation, key: bytes, trial: Trial, source: Source, say: Say) -> None:
        if (self.usable and trial.renderings.differ) or self.tried > TRIED_CHARS:
            return
        self.tried += sum(len(message["content"]) for message in conversation.messages)
        if self.tried > TRIED_CHARS:
            return
        what = f"a conversation of {source.spec.uri} with the verifier's template and tokenizer"
        say(what, POINTER, cpu_s=TRY_CPU_S)
        if not trial.renderings.differ:
            trial.renderings.take(conversation, key)
        try:
            if not self.usable:
                _ = trial.sampler.answered(conversation) if self.answered else trial.sampler.prompt(conversation)
                self.usable = True
        except Dropped:
            pass
        say(source.spec.uri, source.pointer)

    def check(self, pointer: str) -> None:
        """Raise DataTooShort, DataAllMasked and the like where all was tried and made no sample."""
        if self.trial is not None and not self.usable and self.whole and self.tried <= TRIED_CHARS:
            raise self.trial.sampler.nothing_left(pointer)


def look_at(sources: Sequence[Source], look: Look, bad_rows_limit: float, mistakes: Mistakes, say: Say) -> None:
    """Read the beginnings of `sources` into `look`, and make tokens of them until one line makes a sample.

    Files that are longer than what is looked at get the benefit of the doubt; prepare reads them whole. Files that cannot be
    used are among the `mistakes`.
    """
    for source in sources:
        tally, judged = Tally(), False
        with mistakes.noted():
            say(source.spec.uri, source.pointer)
            for conversation in source.usable(tally, answers_needed=look.answered, beginning=True):
                look.take(conversation, source, say)
            judge_beginning(source.path, tally, bad_rows_limit, pointer=source.pointer)
            judged = True
        look.whole &= judged and tally.whole
        if tally.bad:
            look.warnings.append(
                f"{source.spec.uri}: {tally.bad} of the first {tally.lines} lines cannot be used and are left out"
            )
