"""The verifier as somebody else serves it: answers from a running server, with the token ids that it sampled.

Before the first prompt it is checked that the server is the job's verifier (`engine.proof`), and one short answer shows whether
it reports its token ids and its prompt. The ids of each answer are used as they came. If a server reports none, its text is
used only where the job allows it, and only if the text's tokens give the same text again and are as many as the server
counted. Other answers are left out and counted; too many of them end the unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagle3_core.data.rows import Message
from eagle3_core.digests import digest_json
from eagle3_core.engine.allowed import ANSWERS_AT
from eagle3_core.engine.client import Client
from eagle3_core.engine.dialects import Answer, Dialect, Native, OpenAI, Prompt, Wanted
from eagle3_core.engine.heard import AnswerWrong, naming
from eagle3_core.engine.proof import OtherVerifier, Proof, TokensOf
from eagle3_core.engine.refusals import RequestRefused
from eagle3_core.errors import AerieError
from eagle3_core.jobs.spec import Endpoint, JobSpec
from eagle3_core.verifier.base import Decoding, Generated, Progressed
from eagle3_core.verifier.identity import Identity

PROBE_TOKENS = 8
"""Length of the answers by which a server shows what it can."""


class AnswersDrift(AerieError):
    """The texts of a server's answers do not lead back to the tokens that it sampled."""

    code, status = "endpoint.drift", 422


class SeedIgnored(AerieError):
    """A server draws another answer from the same seed."""

    code, status = "endpoint.seed", 409


@dataclass(frozen=True)
class Words:
    """The verifier's tokenizer, whoever runs it."""

    tokens_of: TokensOf
    text_of: Callable[[Sequence[int]], str]
    """What token ids spell, control tokens included."""
    turn_ends: frozenset[int]
    """Of the tokens that end an answer those that the chat template writes."""


@dataclass
class EndpointAnswers:
    """Answers of one unit's prompts by the server that the job names."""

    client: Client
    spec: JobSpec
    identity: Identity
    words: Words
    messages: Sequence[Sequence[Message]] = ()
    """The conversations of the prompts, where the server is asked by messages."""
    say: Callable[[str], None] = lambda line: None
    check: Callable[[], None] = lambda: None
    """Raises to stop waiting."""
    usage: Counter[str] = field(default_factory=Counter[str])
    """Tokens as the server counts them: `prompt_tokens`, `completion_tokens`, `cached_tokens`; answers `retokenized`."""
    left_out: set[int] = field(default_factory=set[int])
    """Prompts whose answers did not stand the trip from text to tokens."""
    _dialect: Dialect | None = None

    def generate(self, prompts: Sequence[Sequence[int]], how: Decoding, on_progress: Progressed) -> Iterator[Generated]:
        """See Verifier; prompts in `left_out` have no answer.

        Raises OtherVerifier, PromptDiffers, AnswerWrong, AnswersDrift, SeedIgnored, and what the server answers.
        """
        asked = [Prompt(ids, self.messages[i] if self.messages else ()) for i, ids in enumerate(prompts)]
        dialect = self._dialect = self._prove(asked[0], how)
        bodies = [dialect.body(prompt, self._wanted(prompt, how)) for prompt in asked]
        done = tokens = 0

        def report() -> None:
            on_progress(done=done, tokens=tokens)

        most = self._endpoint.in_flight
        for place, document in self.client.each(bodies, most=most, path=dialect.path, check=report):
            answer = self._read(dialect, document, asked[place])
            generated = self._generated(place, asked[place], answer, how)
            done += 1
            tokens += self._count(answer, asked[place], generated)
            if generated is not None:
                yield generated
            report()
        self._prove_again()

    @property
    def _endpoint(self) -> Endpoint:
        assert self.spec.verifier.endpoint is not None
        return self.spec.verifier.endpoint

    @property
    def _proof(self) -> Proof:
        return Proof(self.client, self._endpoint, ANSWERS_AT, self.identity, self.spec.verifier.dtype, self.check)

    def _wanted(self, prompt: Prompt, how: Decoding) -> Wanted:
        seed = self.spec.data.regenerate.seed
        own = None if seed is None else int(digest_json([seed, list(prompt.ids)])[:8], 16) & 0x7FFFFFFF
        return Wanted(how.limit(len(prompt.ids)), how.temperature, how.top_p, how.eos_ids, own)

    def _prove(self, first: Prompt, how: Decoding) -> Dialect:
        """The way in which this server is asked, once it is proved to be the job's verifier."""
        endpoint, proof = self._endpoint, self._proof
        served = proof.look(endpoint.api)
        compared = proof.require_verifier(served)
        tokenizer = proof.require_tokenizer(served, self.words.tokens_of)
        dialect: Dialect = Native()
        if endpoint.api == "openai":
            chat = self.spec.data.regenerate.ask == "messages"
            dialect = OpenAI(served.names[0], chat, self.spec.data.template_arguments)
        dialect, answer = self._try(dialect, first, how)
        if answer.ids is None and not endpoint.retokenize:
            raise AnswerWrong(
                f"{self.client.url} does not say which tokens it sampled",
                remedy="serve with vLLM (0.10.2 or later) or SGLang 0.5.23, or allow verifier.endpoint.retokenize",
            )
        if not tokenizer and answer.ids is not None and answer.text is not None:
            tokenizer = self._same_text(answer)
        self._prove_seed(dialect, first, how)
        how_ids = "it says its tokens" if answer.ids is not None else "its texts are made into tokens"
        self.say(
            f"{self.client.url} serves the verifier: compared were {', '.join([*compared, *tokenizer]) or 'its prompts'}; {how_ids}"
        )
        return dialect

    def _prove_again(self) -> None:
        """Raise OtherVerifier where another model was put behind the address meanwhile."""
        _ = self._proof.require_verifier(self._proof.look(self._endpoint.api))

    def _try(self, dialect: Dialect, first: Prompt, how: Decoding) -> tuple[Dialect, Answer]:
        """A short answer, and the way in which it could be had: without what only vLLM and SGLang know, if need be."""
        wanted = Wanted(min(PROBE_TOKENS, how.limit(len(first.ids))), 0.0, 1.0, how.eos_ids)
        try:
            return dialect, self._ask(dialect, first, wanted)
        except RequestRefused:
            if not (isinstance(dialect, OpenAI) and self._endpoint.retokenize):
                raise
            plain = replace(dialect, extras=False)
            return plain, self._ask(plain, first, wanted)

    def _ask(self, dialect: Dialect, prompt: Prompt, wanted: Wanted) -> Answer:
        body = dialect.body(prompt, wanted)
        return self._read(dialect, self.client.patiently(dialect.path, body, self.check), prompt)

    def _read(self, dialect: Dialect, document: Mapping[str, Any], prompt: Prompt) -> Answer:
        """The answer in `document`, of tokens that the verifier has. Raises AnswerWrong, PromptDiffers, ServerFailed."""
        with naming(self.client.url):
            answer = dialect.read(document, prompt)
        if (largest := max(answer.ids or [0])) >= (size := self.identity.vocab_size):
            raise AnswerWrong(
                f"{self.client.url} answered token number {largest} of a vocabulary of {size}",
                remedy="serve the verifier",
            )
        return answer

    def _prove_seed(self, dialect: Dialect, first: Prompt, how: Decoding) -> None:
        if self.spec.data.regenerate.seed is None:
            return
        wanted = replace(self._wanted(first, how), max_tokens=min(2 * PROBE_TOKENS, how.limit(len(first.ids))))
        one, two = (self._ask(dialect, first, wanted) for _ in range(2))
        if (one.ids, one.text) != (two.ids, two.text):
            raise SeedIgnored(
                f"{self.client.url} drew two different answers from seed {wanted.seed}",
                remedy="start SGLang with --enable-deterministic-inference, or leave data.regenerate.seed out",
                pointer="/data/regenerate/seed",
            )

    def _same_text(self, answer: Answer) -> list[str]:
        """Raise OtherVerifier where the server spells its tokens otherwise than the verifier's tokenizer does."""
        ids = [token for token in answer.ids or [] if token not in self.identity.eos_token_ids]
        here, there = (text.rstrip("\ufffd").strip() for text in (self.words.text_of(ids), answer.text or ""))
        if not (here.startswith(there) or there.startswith(here)) and _plain(here) != _plain(there):
            raise OtherVerifier(
                f"{self.client.url} spells the tokens {ids[:8]} as {there[:60]!r}, the verifier's tokenizer as {here[:60]!r}",
                remedy="serve the tokenizer of the verifier's folder",
                pointer=ANSWERS_AT,
            )
        return [f"what {len(ids)} tokens spell"]

    def _generated(self, place: int, prompt: Prompt, answer: Answer, how: Decoding) -> Generated | None:
        """The answer with its tokens; None, and counted, where a text does not lead to them."""
        limit = how.limit(len(prompt.ids))
        if (wrote := answer.completion_tokens) is not None and wrote > limit:
            raise AnswerWrong(
                f"{self.client.url} counts {wrote} tokens in an answer that may have {limit}",
                remedy="serve the verifier, with an engine that honours the limit of an answer",
            )
        ids = self._whole(answer) if answer.ids is not None else self._retokenized(answer)
        if ids is None:
            self._leave_out(place, answer)
            return None
        if not ids or len(ids) > limit or max(ids) >= self.identity.vocab_size:
            raise AnswerWrong(
                f"{self.client.url} answered {len(ids)} tokens up to number {max(ids, default=-1)}; asked for were 1 to {limit}"
                f" of a vocabulary of {self.identity.vocab_size}",
                remedy="serve the verifier, with an engine that honours the limit of an answer",
            )
        if (end := next((token for token in ids[:-1] if token in self.identity.eos_token_ids), None)) is not None:
            raise AnswerWrong(
                f"{self.client.url} answered on after token {end}, which ends an answer",
                remedy="serve with an engine that honours stop_token_ids: a drafter would learn what is never served",
            )
        return Generated(place, [*prompt.ids, *ids], len(prompt.ids), answer.ended, None)

    def _whole(self, answer: Answer) -> list[int]:
        """The ids as the server said them, with the one that ended them. Raises AnswerWrong."""
        ids, count = list(answer.ids or []), answer.completion_tokens
        if answer.ended and (not ids or ids[-1] not in self.identity.eos_token_ids):
            ids.append(self._end(answer))
        if count is not None and count != len(ids):
            raise AnswerWrong(
                f"{self.client.url} counts {count} tokens in an answer and says {len(ids)}",
                remedy="report the engine's version; answers that lack tokens would train a drafter to skip them",
            )
        return ids

    def _retokenized(self, answer: Answer) -> list[int] | None:
        """Tokens of the answer's text, if they give it again and are as many as the server counted. Raises AnswerWrong."""
        if answer.text is None or answer.completion_tokens is None:
            lacks = "its answers as one text" if answer.text is None else "usage.completion_tokens"
            raise AnswerWrong(
                f"{self.client.url} gives neither token ids nor {lacks}: nobody could know the tokens",
                remedy="have it return token ids, or turn off what takes answers apart (its reasoning and tool parsers)",
            )
        ids, again = self.words.tokens_of(answer.text)
        if again != answer.text:
            return None
        if answer.ended and (not ids or ids[-1] not in self.identity.eos_token_ids):
            ids = [*ids, self._end(answer)]
        return ids if len(ids) == answer.completion_tokens else None

    def _end(self, answer: Answer) -> int:
        """The token that ended the answer: named by the server, or the only one that it can have been. Raises AnswerWrong."""
        if answer.end is not None and answer.end in self.identity.eos_token_ids:
            return answer.end
        for ends in (frozenset(self.identity.eos_token_ids), self.words.turn_ends):
            if answer.end is None and len(ends) == 1:
                return next(iter(ends))
        raise AnswerWrong(
            f"{self.client.url} does not say which of the tokens {list(self.identity.eos_token_ids)} ended an answer"
            + (f" (it names {answer.end})" if answer.end is not None else ""),
            remedy="have it return token ids",
        )

    def _leave_out(self, place: int, answer: Answer) -> None:
        self.left_out.add(place)
        share, prompts = self.spec.data.bad_rows_limit, self.spec.data.unit_samples
        if len(self.left_out) > max(1.0, share * prompts):
            raise AnswersDrift(
                f"{len(self.left_out)} answers of {self.client.url} do not lead back to their tokens; the last one of"
                f" {answer.completion_tokens} tokens begins {(answer.text or '')[:60]!r}",
                remedy="have the server return token ids; data.bad_rows_limit says how many answers may be left out",
            )

    def _count(self, answer: Answer, prompt: Prompt, generated: Generated | None) -> int:
        asked = len(prompt.ids) if answer.prompt_tokens is None else answer.prompt_tokens
        said = answer.completion_tokens
        wrote = said if said is not None else len(generated.ids) - generated.prompt_len if generated is not None else 0
        self.usage += Counter(prompt_tokens=asked, completion_tokens=wrote, cached_tokens=answer.cached_tokens)
        self.usage["retokenized"] += answer.ids is None and generated is not None
        return asked + wrote


def _plain(text: str) -> str:
    return "".join(text.split())
