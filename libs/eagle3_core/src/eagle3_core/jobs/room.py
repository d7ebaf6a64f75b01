"""Whether the store has room for a job's hidden states, known before they are computed.

If the data brings its own answers, the size is known. If the verifier will write them, it depends on their length, which lies
between one token and what the job allows. A job is refused only if not even the shortest answers fit; if the longest may not
fit, a warning says up to which mean length they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import StageName
from eagle3_core.jobs.spec import JobSpec

STATE_BYTES = 2
"""Bytes of a stored element: states are kept in bfloat16 whatever the verifier runs in."""


class StoreTooSmall(AerieError):
    """The object store has no room for the hidden states of this job."""

    code, status = "store.too_small", 507


@dataclass(frozen=True)
class Need:
    """Bytes of hidden states: of the shortest answers that can come, and of the longest."""

    least: int
    most: int

    def share(self, part: int, whole: int) -> Need:
        """What `part` of `whole` samples need."""
        return Need(self.least * part // max(1, whole), self.most * part // max(1, whole))


def bytes_of(tokens: int, labelled: int, hidden: int) -> int:
    """Bytes of `tokens` tokens: three aux states, id and mask of each; a final state and its place of those `labelled`."""
    return tokens * (3 * hidden * STATE_BYTES + 4 + 1) + labelled * (hidden * STATE_BYTES + 4)


def exact_need(tokens: int, labelled: int, hidden: int) -> Need:
    """The need of samples that are there."""
    return Need(*[bytes_of(tokens, labelled, hidden)] * 2)


def need_of_answers(prompt_tokens: int, samples: int, most_tokens: int, hidden: int) -> Need:
    """The need of `samples` answers yet to be written, `most_tokens` at most together. An answer's labels reach one further."""
    least, most = (bytes_of(prompt_tokens + n, n + samples, hidden) for n in (samples, max(samples, most_tokens)))
    return Need(least, most)


def need_of_stage(stage: StageName, spec: JobSpec, results: Mapping[StageName, Mapping[str, Any]]) -> Need | None:
    """What all states that `stage` writes need, by the results of the stages before it.

    None for stages that write none, and where prepare did not say what they need.
    """
    prepared = results.get("prepare", {})
    if "states_bytes_least" not in prepared:
        return None
    if stage == "extract" and spec.data.regenerate.enabled:
        answers, hidden = results["generate"], int(prepared["verifier"]["hidden_size"])
        return exact_need(int(answers["tokens"]), int(answers["answer_tokens"]) + int(answers["samples"]), hidden)
    if stage in ("generate", "extract"):
        return Need(int(prepared["states_bytes_least"]), int(prepared["states_bytes"]))
    return None


def check_room(need: Need, free: int | None, longest_answer: int) -> str | None:
    """A warning where `need` may not fit `free` bytes, None where it does or nobody knows. Raises StoreTooSmall.

    `longest_answer` is what the job allows an answer, in tokens.
    """
    if free is None or need.most <= free:
        return None
    assumption = "" if need.least == need.most else " even if every answer has a single token"
    if need.least > free:
        raise StoreTooSmall(
            f"the hidden states that are still to be made need {need.least / 1e9:.2f} GB{assumption}, the store has "
            f"{free / 1e9:.2f} GB left",
            remedy="free space, or lower data.max_samples or data.max_seq_len",
            pointer="/data",
            needed_bytes=need.least,
            free_bytes=free,
        )
    fits = 1 + (longest_answer - 1) * (free - need.least) / (need.most - need.least)
    return (
        f"the hidden states may not fit: the store has {free / 1e9:.2f} GB left, they need up to {need.most / 1e9:.2f} GB if "
        f"every answer has the {longest_answer} tokens that data.regenerate.max_new_tokens allows; they fit if answers have "
        f"about {fits:.0f} tokens on average"
    )
