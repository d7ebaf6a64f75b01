"""What must not be written down, and how it is hidden in what is: log lines, tracebacks, bundles for support.

Three nets, each for what the others let through: values whose name says that they are secret, texts that look like a
secret of ours or of the services that we use, and values that are known to be secret, wherever they stand.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

HIDDEN = "[secret]"
LEAST_CHARS = 8
"""A known value that is shorter is looked for in no text: it would hide words, and is no secret worth the name."""
_NAMED = re.compile(
    r"(?i)(token(?!s|iz)|secret|passw|authorization|api_?key|access_?key|private_?key|credential|cookie)"
)
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"\baerie_([0-9a-f]{16})_[A-Za-z0-9_-]{43}"), rf"aerie_\1_{HIDDEN}"),
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^\s/:@'\"]*):[^\s/'\"]+@"), rf"\1:{HIDDEN}@"),
    (re.compile(r"(?i)\b(X-Amz-(?:Signature|Credential|Security-Token))=[^\s&'\"]+"), rf"\1={HIDDEN}"),
    (
        re.compile(
            r"(?i)((?:passw(?:or)?d|secret|secret[_-]key|api[_-]?key|access[_-]key|(?:access|auth)[_-]token)=)[^\s&'\",;]{6,}"
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"\b(hf_|wandb_v1_|sk-|ghp_|github_pat_|AKIA|ASIA)[A-Za-z0-9_-]{12,}"), rf"\1{HIDDEN}"),
    (re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)", re.S), HIDDEN),
)


def named_secret(name: str) -> bool:
    """Whether a field, setting or variable of this name holds a secret. Counts of tokens do not."""
    return _NAMED.search(name) is not None


def hide(value: Any, known: Collection[str] = ()) -> Any:
    """`value` (text, or JSON of texts) without its secrets; of `known` ones, none stays."""
    if isinstance(value, str):
        return hide_in(value, known)
    if isinstance(value, Mapping):
        return {name: _blank(inner) if named_secret(str(name)) else hide(inner, known) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [hide(inner, known) for inner in value]
    return value if isinstance(value, int | float | bool | None) else hide_in(str(value), known)


def _blank(value: Any) -> Any:
    """What stands under a secret's name, without its texts. Numbers stay: the ids of `eos_token_ids` are no secrets."""
    if isinstance(value, Mapping):
        return {name: _blank(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_blank(inner) for inner in value]
    return value if isinstance(value, int | float | bool | None) or value == "" else HIDDEN


def hide_in(text: str, known: Collection[str] = ()) -> str:
    """`text` without its secrets."""
    for secret in sorted(known, key=len, reverse=True):  # the longest first: one may be part of another
        if len(secret) >= LEAST_CHARS:
            text = text.replace(secret, HIDDEN)
    for pattern, put in _PATTERNS:
        text = pattern.sub(put, text)
    return text
