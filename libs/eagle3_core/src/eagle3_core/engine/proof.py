"""Whether a server that somebody else runs serves the job's verifier: asked before the first prompt, and after the last.

Answers of another model would be believed otherwise: it speaks the same language and says plausible things. What a server says
of itself is compared as far as it goes (names, architecture, precision, whether its weights are real), and its
tokenizer is tried on a text that tells tokenizers apart. Every refusal names both sides. What no server can show are
its weights; the states that `extract` captures are asked for the answers' tokens (`verifier.recheck`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol

from eagle3_core.engine.client import Client
from eagle3_core.engine.refusals import RequestRefused, ServerFailed
from eagle3_core.errors import AerieError
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


def look(client: Client, api: str, model: str | None, check: Check) -> Served:
    """Ask a server what it serves. Raises OtherVerifier where `model` is none of it, or one of several is meant."""
    info = {**(_said(client, "/model_info", check) or {}), **(_said(client, "/server_info", check) or {})}
    if api == "sglang":
        names = tuple(str(info[name]) for name in ("served_model_name",) if info.get(name))
        places = tuple(str(info[name]) for name in ("model_path",) if info.get(name))
        if not places:
            raise _other(
                client, "it has no /model_info", "SGLang", "set verifier.endpoint.api to openai, if it speaks that"
            )
        if model is not None and model not in names:
            raise _other(client, f"it serves {_list(names)}", model, f"set verifier.endpoint.model to {names[:1]}")
        return Served(names, places, info)
    listing = _said(client, "/v1/models", check)
    cards = [c for c in (listing or {}).get("data") or [] if isinstance(c, dict) and isinstance(c.get("id"), str)]
    if model is None and len(cards) != 1:
        what = f"it lists {_list([c['id'] for c in cards])}" if cards else "it does not list its models"
        raise _other(client, what, "one model", "set verifier.endpoint.model to the name of the verifier there")
    chosen = [card for card in cards if model in (None, card["id"])]
    if cards and not chosen:
        raise _other(client, f"it lists {_list([c['id'] for c in cards])}", str(model), "name one of those")
    if chosen and chosen[0].get("parent"):
        raise _other(
            client, f"{chosen[0]['id']} is an adapter of {chosen[0]['parent']}", "the verifier", "name the base model"
        )
    names = (chosen[0]["id"],) if chosen else (str(model),)
    return Served(names, tuple(str(c["root"]) for c in chosen if c.get("root")), info)


def require_verifier(client: Client, served: Served, who: Identity, dtype: str, model: str | None) -> list[str]:
    """Compare what a server says of itself with the job's verifier; what was compared, in words. Raises OtherVerifier."""
    said, compared = served.info, list[str]()
    if model is None:
        names = [*served.names, *served.places]
        if not any(_label(name) == _label(who.name) for name in names):
            remedy = f"if it is the same model under another name, set verifier.endpoint.model to {served.names[0]}"
            raise _other(
                client, f"it serves {_list(names)}", who.name, remedy if served.names else "serve the verifier"
            )
        compared.append(f"the name {who.name}")
    for field, want in (("architectures", who.architecture), ("model_type", who.model_type)):
        if (have := said.get(field)) is None or not want:
            continue
        if want not in (have if isinstance(have, list) else [have]):
            raise _other(client, f"{field} {have}", f"{want} in {who.name}", "serve the checkpoint that the job names")
        compared.append(f"{field} {want}")
    if said.get("load_format") == "dummy":
        raise _other(client, "its weights are random (load_format dummy)", who.name, "load the checkpoint")
    if (quantization := said.get("quantization")) is not None:
        raise _other(
            client, f"its weights are quantized ({quantization})", f"{who.name} in {dtype}", "serve it as it is"
        )
    if (have := str(said.get("dtype") or "").removeprefix("torch.")) in PRECISIONS:
        if have != dtype:
            remedy = "set verifier.dtype to what it serves in, or serve it in that of the job"
            raise _other(client, f"it runs in {have}", f"verifier.dtype {dtype}", remedy)
        compared.append(f"precision {dtype}")
    return compared


def require_tokenizer(client: Client, served: Served, tokens_of: TokensOf, check: Check) -> list[str]:
    """Compare a server's tokenizer with the verifier's on `PROOF_TEXT`; what was compared, in words, nothing where the
    server offers none to ask. Raises OtherVerifier."""
    body = {"model": (*served.names, "")[0], "prompt": PROOF_TEXT, "add_special_tokens": False}
    try:
        answer = client.patiently(lambda: client.post("/tokenize", body), check)
    except RequestRefused:
        return []
    have, (want, _) = answer.get("tokens") if isinstance(answer, dict) else None, tokens_of(PROOF_TEXT)
    if have != want:
        listed: Sequence[Any] = have if isinstance(have, list) else []
        place = next(
            (i for i, (a, b) in enumerate(zip(listed, want, strict=False)) if a != b), min(len(listed), len(want))
        )
        raise _other(
            client, f"its tokenizer makes {len(listed)} tokens of a text, from token {place} on {list(listed[place : place + 5])}",
            f"{len(want)} tokens, from there on {want[place : place + 5]}", "serve the tokenizer of the verifier's folder",
        )  # fmt: skip
    return [f"its tokenizer on {len(want)} tokens"]


def _said(client: Client, path: str, check: Check) -> dict[str, Any] | None:
    """What a server says there; None where it has nothing to say."""
    try:
        found = client.patiently(lambda: client.get(path), check)
    except RequestRefused as error:
        if type(error) is RequestRefused:  # it has no such route; a redirect or a wrong key is another matter
            return None
        raise
    if not isinstance(found, dict):
        raise ServerFailed(f"{client.url}{path} answers no JSON object", remedy="name a server of vLLM or SGLang")
    return found


def _label(name: str) -> str:
    return PurePosixPath(name.rstrip("/")).name.lower()


def _list(names: Sequence[str]) -> str:
    return ", ".join(sorted(set(names))[:8]) or "nothing that it names"


def _other(client: Client, have: str, want: str, remedy: str) -> OtherVerifier:
    return OtherVerifier(
        f"{client.url} does not serve the job's verifier: {have}; the job wants {want}",
        remedy=remedy,
        pointer="/verifier/endpoint",
    )
