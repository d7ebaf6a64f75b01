"""A verifier's tokens as its tokenizer files name them, and the ids with a meaning of their own (end, begin, padding).

Ids come from four files that rarely come from one hand: config, generation config, tokenizer config, tokenizer. One that
points outside the embedding crashes the engine, or never ends an answer; so each is checked and the file at fault named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_core.verifier.folder import (
    VerifierConfig,
    VerifierFault,
    VerifierMismatch,
    VerifierTokenizer,
    read_json,
    read_json_if_there,
    refusal,
)

ROLES = ("bos_token", "eos_token")
"""Roles whose token the tokenizer must know."""


@dataclass(frozen=True)
class Vocabulary:
    """What tokenizer.json and tokenizer_config.json say of tokens."""

    folder: Path
    ids: Mapping[str, int]
    """Every token's id, by its text (of a Unigram model, whose ids are places in a list, only the added ones)."""
    largest: int
    """Largest id."""
    special: frozenset[str]
    """Added tokens that are marked special: text that spells one is refused, so only the template can write it."""
    special_tokens: dict[str, str]
    """Special tokens by role (`bos_token`, `eos_token`, ...), as the chat template sees them."""
    special_ids: dict[str, int]
    """Their ids, of those that the tokenizer knows."""

    @classmethod
    def read(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> Vocabulary:
        """The vocabulary in `folder`. Raises VerifierTokenizer where files are odd or a role's token is unknown."""
        tokenizer = read_json(folder / "tokenizer.json", VerifierTokenizer)
        added, model = tokenizer.get("added_tokens") or [], tokenizer.get("model") or {}
        vocab: Any = model.get("vocab") if isinstance(model, dict) else None
        entries = vocab if isinstance(vocab, dict) else {}
        known = {str(text): number for text, number in entries.items()}
        if (
            not isinstance(added, list)
            or not all(isinstance(e, dict) for e in added)
            or not isinstance(vocab, dict | list)
        ):
            raise _odd(folder, "it has a model or added_tokens of the wrong kind")
        known.update({str(entry.get("content")): entry.get("id") for entry in added})
        if (bad := next(((t, i) for t, i in known.items() if not _is_id(i)), None)) is not None:
            raise _odd(folder, f"token {bad[0]!r:.80} has the id {bad[1]!r:.80}")
        largest = max([*known.values(), len(vocab) - 1 if isinstance(vocab, list) else 0], default=0)
        special = frozenset(str(e.get("content")) for e in added if e.get("special") is True)
        texts = _roles(folder, tokenizer_config)
        for role in ROLES:
            if role in texts and texts[role] not in known and not isinstance(vocab, list):
                raise refusal(
                    VerifierTokenizer,
                    f"tokenizer_config.json says {role}={texts[role]!r:.200}, tokenizer.json knows no such token",
                    "use tokenizer.json and tokenizer_config.json of one and the same release of the model",
                )
        ids = {role: known[text] for role, text in texts.items() if text in known}
        return cls(folder, known, largest, special, texts, ids)

    def check_fits(self, rows: int, template: str) -> None:
        """Raise VerifierMismatch where a token that a text or the chat template can make has no row in the embedding.

        Special tokens that the template never writes are let pass: nothing makes them.
        """
        if self.largest < rows:
            return
        beyond = {text: number for text, number in self.ids.items() if number >= rows}
        made = {t: i for t, i in beyond.items() if t not in self.special or t in template}
        made.update(
            {t: i for role, t in self.special_tokens.items() if (i := beyond.get(t)) is not None and role in template}
        )
        if made or not beyond:
            number, text = max(((i, t) for t, i in made.items()), default=(self.largest, "its last one"))
            raise refusal(
                VerifierMismatch,
                f"the tokenizer makes token {number} ({text!r:.80}), the verifier's embedding has {rows} rows "
                f"(vocab_size in config.json)",
                "use tokenizer and weights of one and the same release of the model",
            )


@dataclass(frozen=True)
class SpecialIds:
    """The ids of tokens with a role, from all files that name them."""

    config: Mapping[str, Any]
    text: Mapping[str, Any]
    generation: Mapping[str, Any]
    known: Mapping[str, int]
    """From the tokenizer, by role."""
    rows: int
    """Rows of the embedding."""

    def ends(self) -> tuple[int, ...]:
        """Every token that ends an answer, ascending: of all files together, as SGLang does.

        Raises VerifierTokenizer where there is none, VerifierConfig for what is no token of the verifier.
        """
        found = {self.known["eos_token"]} if "eos_token" in self.known else set[int]()
        for file, place in self._places():
            value = place.get("eos_token_id")
            entries: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
            found.update(self._token(file, "eos_token_id", entry) for entry in entries)
        if not found:
            raise refusal(
                VerifierTokenizer,
                "neither config, generation config nor tokenizer name an end-of-turn token",
                "set eos_token_id in generation_config.json to the token that ends an answer",
            )
        return tuple(sorted(self._token("tokenizer.json", "eos_token", number) for number in found))

    def one(self, role: str) -> int | None:
        """The id of `role`, from the first place that names one; -1 stands for none (old Llama releases).

        Raises VerifierConfig.
        """
        stated = [self.known.get(role)]
        for file, place in self._places():
            value = place.get(f"{role}_id")
            stated.append(None if value in (None, -1) else self._token(file, f"{role}_id", value))
        return next((number for number in stated if number is not None), None)

    def _places(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        nested = (("config.json", self.config), ("config.json's text_config", self.text))
        return (("generation_config.json", self.generation), *(nested if self.text is not self.config else nested[:1]))

    def _token(self, file: str, field: str, value: Any) -> int:
        if _is_id(value) and value < self.rows:
            return int(value)
        raise refusal(
            VerifierConfig,
            f"{file} says {field}={value!r:.80}, the verifier's tokens are the whole numbers from 0 to {self.rows - 1}",
            f"correct {field} in {file}, or copy the file of the model's release again",
        )


def _roles(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens' texts by role."""
    stated = {**read_json_if_there(folder / "special_tokens_map.json", VerifierTokenizer), **tokenizer_config}
    texts: dict[str, str] = {}
    for role, value in stated.items():
        token: Any = value.get("content") if isinstance(value, dict) else value
        if role.endswith("_token") and isinstance(token, str):
            texts[role] = token
    return texts


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _odd(folder: Path, what: str) -> VerifierFault:
    detail = f"{folder / 'tokenizer.json'} cannot be used: {what}"
    return refusal(VerifierTokenizer, detail, "download the tokenizer again")
