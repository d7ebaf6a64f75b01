"""Whether a server that somebody else runs serves the job's verifier: checked before the first prompt and after the last.

Without the check the answers of another model would be taken: it speaks the same protocol and its answers look plausible. What
a server says of itself is compared as far as it goes (names, architecture, precision, whether its weights are real), and its
tokenizer is tried on a text that tells tokenizers apart. Every refusal names both sides. No server can show its weights; for
those, `extract` checks that the captured states predict the answers' tokens (`verifier.recheck`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol

from eagle3_core.engine.client import Client
from eagle3_core.engine.heard import cut, naming, part_or
from eagle3_core.engine.refusals import RequestRefused
from eagle3_core.errors import AerieError
from eagle3_core.jobs.spec import ServerAddress
from eagle3_core.verifier.identity import Identity

PROOF_TEXT = (
    "The answer is 3.14159, not 1,000,000!\n\n\tdef f(x): return {'a': [x ** 2]}  # ≠ café naïve\r\n"
    "Größe 東京都 Привет 🦜🇨🇭 don't I'LL  \u00a0 0xFF https://a.b/c?d=e&f"
)
"""Digits, runs of spaces, code, contractions, scripts and emoji: where tokenizers of different families part."""

PRECISIONS = frozenset({"float32", "float16", "bfloat16"})
Check = Callable[[], None]


class OtherVerifier(AerieError):
    """A server that the job names does not serve the job's verifier."""

    code, status = "endpoint.other_verifier", 409


class TokensOf(Protocol):
    """The verifier's own tokenizer: token ids of a text, and the text that they give again."""

    def __call__(self, text: str, /) -> tuple[list[int], str]:
        """See the class."""
        ...


@dataclass(frozen=True)
class Served:
    """What a server says of itself."""

    names: tuple[str, ...]
    """Under which it serves a model; the first is what to ask for. Empty where it does not say."""
    places: tuple[str, ...]
    """Folders or repositories of that model, as far as it says them."""
    info: Mapping[str, Any]
    """SGLang's `/model_info` and `/server_info`; empty for others."""


@dataclass(frozen=True)
class Proof:
    """Asks one server, and compares."""

    client: Client
    address: ServerAddress
    at: str
    """JSON pointer of the job's field that names the server."""
    who: Identity
    dtype: str
    """Precision of the job's verifier."""
    check: Check
    """Raises to stop waiting."""

    def look(self, api: str) -> Served:
        """What the server says of itself. Raises OtherVerifier where the model that the job means is none of it."""
        model = self.address.model
        info = {**(self._said("/model_info") or {}), **(self._said("/server_info") or {})}
        if api == "sglang":
            names = (str(info["served_model_name"]),) if info.get("served_model_name") else ()
            places = (str(info["model_path"]),) if info.get("model_path") else ()
            if not places:
                raise self._other(
                    "it has no /model_info", "SGLang", f"if it speaks OpenAI's, set {self._field}.api to openai"
                )
            if model is not None and model not in names:
                raise self._other(
                    f"it serves {_list(names)}", model, f"set {self._field}.model to that, if it is the verifier"
                )
            return Served(names, places, info)
        card = self._card(model)
        names = (str(card["id"] if card else model),)
        return Served(names, (str(card["root"]),) if card and card.get("root") else (), info)

    def _card(self, model: str | None) -> Mapping[str, Any] | None:
        """The entry of the model that the job means in `/v1/models`; None where the server lists none. Raises OtherVerifier."""
        listing = self._said("/v1/models") or {}
        with naming(self.client.url):
            entries = part_or(listing, "data", list[Any]())
        cards = [c for c in entries if isinstance(c, dict) and isinstance(c.get("id"), str)]
        listed = f"it lists {_list([c['id'] for c in cards])}" if cards else "it does not list its models"
        if model is None and len(cards) != 1:
            raise self._other(listed, "one model", f"set {self._field}.model to the name of the verifier there")
        card = next((c for c in cards if model in (None, c["id"])), None)
        if cards and card is None:
            raise self._other(listed, str(model), "name one of those")
        if card is not None and card.get("parent"):
            raise self._other(f"{card['id']} is an adapter of {card['parent']}", "the verifier", "name the base model")
        return card

    def require_verifier(self, served: Served) -> list[str]:
        """Compare what the server says of itself with the job's verifier; what was compared, in words. Raises OtherVerifier."""
        said, who, compared = served.info, self.who, list[str]()
        if self.address.model is None:
            names = [*served.names, *served.places]
            if not any(_label(name) == _label(who.name) for name in names):
                remedy = (
                    f"if it is the same model under another name, set {self._field}.model to {(*served.names, '')[0]}"
                )
                raise self._other(f"it serves {_list(names)}", who.name, remedy)
            compared.append(f"the name {who.name}")
        for field, want in (("architectures", who.architecture), ("model_type", who.model_type)):
            if (have := said.get(field)) is None or not want:
                continue
            if want not in (have if isinstance(have, list) else [have]):
                raise self._other(f"{field} {have}", f"{want} in {who.name}", "serve the checkpoint that the job names")
            compared.append(f"{field} {want}")
        if said.get("load_format") == "dummy":
            raise self._other("its weights are random (load_format dummy)", who.name, "load the checkpoint")
        if (quantization := said.get("quantization")) is not None:
            what = f"its weights are quantized ({quantization})"
            raise self._other(what, f"{who.name} in {self.dtype}", "serve it as it is")
        if (have := str(said.get("dtype") or "").removeprefix("torch.")) in PRECISIONS:
            if have != self.dtype:
                remedy = "set verifier.dtype to what it serves in, or serve it in that of the job"
                raise self._other(f"it runs in {have}", f"verifier.dtype {self.dtype}", remedy)
            compared.append(f"precision {have}")
        return compared

    def require_tokenizer(self, served: Served, tokens_of: TokensOf) -> list[str]:
        """Compare the server's tokenizer with the verifier's on `PROOF_TEXT`; what was compared, in words, nothing where the
        server offers no way to ask it. Raises OtherVerifier."""
        body = {"model": (*served.names, "")[0], "prompt": PROOF_TEXT, "add_special_tokens": False}
        try:
            answer = self.client.patiently("/tokenize", body, self.check)
        except RequestRefused as error:
            if type(error) is RequestRefused:
                return []
            raise
        have, (want, _) = answer.get("tokens"), tokens_of(PROOF_TEXT)
        if have != want:
            listed: list[Any] = have if isinstance(have, list) else []
            pairs = zip(listed, want, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(listed), len(want)))
            raise self._other(
                f"its tokenizer makes {len(listed)} tokens of a text, from token {place} on {listed[place : place + 5]}",
                f"{len(want)}, from there on {want[place : place + 5]}", "serve the tokenizer of the verifier's folder",
            )  # fmt: skip
        return [f"its tokenizer on {len(want)} tokens"]

    @property
    def _field(self) -> str:
        return self.at[1:].replace("/", ".")

    def _said(self, path: str) -> dict[str, Any] | None:
        """What the server says there; None where it has nothing to say."""
        try:
            return self.client.patiently(path, None, self.check)
        except RequestRefused as error:
            if type(error) is RequestRefused:  # it has no such route; a redirect or a wrong key is another matter
                return None
            raise

    def _other(self, have: str, want: str, remedy: str) -> OtherVerifier:
        return OtherVerifier(
            f"{self.client.url} does not serve the job's verifier: {cut(have)}; the job wants {cut(want)}",
            remedy=cut(remedy), pointer=self.at,
        )  # fmt: skip


def _label(name: str) -> str:
    return PurePosixPath(name.rstrip("/")).name.lower()


def _list(names: Sequence[str]) -> str:
    return ", ".join(sorted(set(names))[:8]) or "nothing that it names"
