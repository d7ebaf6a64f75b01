"""What a drafter delivers in the engine that serves it: the same prompts, asked of an SGLang server.

The chain decoder's acceptance length is a promise; only the server can keep it. Two servers answer each prompt greedily,
one with the drafter and one without, so that the drafted answer is held against the same engine's plain one and not
against another engine's rounding. Both are asked first what they run: a server that drafts with something else, or not
at all, answers every request just as politely.

Counts come from each answer's `meta_info` (SGLang 0.5.23): `spec_verify_ct`, and `spec_correct_drafts_histogram`, which
counts verify calls by how many of their drafts were right. The engine's own `spec_accept_length` divides all tokens by
the calls, the first token included, which costs no call; here acceptance length is (tokens - 1) / calls, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from eagle3_core.digests import digest_file, digest_json
from eagle3_core.errors import AerieError
from eagle3_core.evaluate.losslessness import Replay, Verdict, judge
from eagle3_core.verifier.base import Decoding, Progressed

ALGORITHM = "EAGLE3"
SAME = ("model_path", "dtype", "device", "tp_size", "version")
"""What two servers must have in common to be compared."""


class AnswerUnusable(AerieError):
    """A server's answer lacks what evaluation counts."""

    code, status = "served.answer", 502


class NotDrafting(AerieError):
    """A server that must draft does not, or not as asked."""

    code, status = "served.not_drafting", 409


class OtherDrafter(AerieError):
    """A server drafts with another drafter than the one to be measured."""

    code, status = "served.other_drafter", 409


class ServersDiffer(AerieError):
    """The servers with and without the drafter are not the same engine."""

    code, status = "served.servers_differ", 409


class Endpoint(Protocol):
    """A server that answers SGLang's own requests: `eagle3_core.engine.client.Client`."""

    def get(self, path: str) -> Any:
        """The decoded answer to a plain request."""
        ...

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The decoded answer to a JSON request."""
        ...

    def each(
        self, bodies: Sequence[Mapping[str, Any]], *, most: int, steady: bool = False, check: Callable[[], None]
    ) -> Iterator[tuple[int, Any]]:
        """Answers to `bodies` with their places, as they come, at most (`steady`: always) `most` in flight."""
        ...


@dataclass(frozen=True)
class ServedAnswer:
    """One prompt's answer by a server."""

    ids: list[int]
    """The answer's tokens, the end-of-sequence token included if it came."""
    calls: int
    """Verify calls; 0 without a drafter, and where the first token ended the answer."""
    by_right: tuple[int, ...]
    """Calls by the number of drafts that were right, from none on."""


@dataclass(frozen=True)
class Delivered:
    """One prompt as the servers answered it, and how the drafted answer compares with the plain one."""

    answer: ServedAnswer
    verdict: Verdict


@dataclass(frozen=True)
class Exported:
    """A drafter in SGLang's format, as it was written."""

    folder: Path
    num_steps: int
    """Tokens drafted per verify call, in one chain."""
    digest: str
    """Of the folder's files: `folder_digest` at the time of writing."""


def folder_digest(folder: Path) -> str:
    """Hex BLAKE3 over the names and contents of a drafter's files."""
    return digest_json({path.name: digest_file(path) for path in sorted(folder.iterdir()) if path.is_file()})


def require_comparable(plain: Endpoint, drafting: Endpoint, drafter: Exported) -> dict[str, Any]:
    """What both servers run (`version`, `dtype`, `device`), once they are proved to differ in the drafter alone.

    Raises NotDrafting, OtherDrafter, ServersDiffer.
    """
    without, having = plain.get("/server_info"), drafting.get("/server_info")
    if (algorithm := without.get("speculative_algorithm")) is not None:
        raise ServersDiffer(
            f"the server that must not draft runs with speculative_algorithm {algorithm}",
            remedy="start it without a drafter: its answers are what the drafted ones are held against",
        )
    require_drafting(having, drafter)
    if differing := [name for name in SAME if without.get(name) != having.get(name)]:
        sides = "; ".join(f"{n}: {without.get(n)} without, {having.get(n)} with the drafter" for n in differing)
        raise ServersDiffer(f"the two servers differ in {sides}", remedy="start both from the same settings")
    return {name: having.get(name) for name in ("version", "dtype", "device")}


def require_drafting(info: Mapping[str, Any], drafter: Exported) -> None:
    """Prove from a server's `/server_info` that it drafts with `drafter`. Raises NotDrafting, OtherDrafter."""
    steps = drafter.num_steps
    want = {
        "speculative_algorithm": ALGORITHM, "speculative_num_steps": steps, "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }  # fmt: skip
    if wrong := [name for name, value in want.items() if info.get(name) != value]:
        sides = "; ".join(f"{name}: it runs with {info.get(name)}, wanted is {want[name]}" for name in wrong)
        raise NotDrafting(sides, remedy="start the server with the drafter and the flags that its card names")
    have = info.get("speculative_draft_model_path")
    if have is None or Path(str(have)).resolve() != drafter.folder.resolve():
        raise OtherDrafter(
            f"the server drafts with {have}, to be measured is {drafter.folder}",
            remedy="start the server with this drafter's folder",
        )
    if (now := folder_digest(drafter.folder)) != drafter.digest:
        raise OtherDrafter(
            f"{drafter.folder} holds files of digest {now[:16]}, written were {drafter.digest[:16]}",
            remedy="let nothing else write there, and evaluate again",
        )


def read_answer(document: Any, *, drafting: bool) -> ServedAnswer:
    """An answer of `/generate`. Raises AnswerUnusable that names what lacks or disagrees."""
    ids, meta = document.get("output_ids"), document.get("meta_info") or {}
    if not isinstance(ids, list) or not ids:
        raise _unusable("no output_ids")
    tokens = cast("list[int]", ids)
    if meta.get("completion_tokens") != len(tokens):
        raise _unusable(f"{len(tokens)} output_ids and completion_tokens {meta.get('completion_tokens')}")
    if not drafting:
        return ServedAnswer(tokens, 0, ())
    calls, by_right = meta.get("spec_verify_ct"), meta.get("spec_correct_drafts_histogram")
    if calls is None and len(tokens) == 1:  # the prompt's own pass gives the first token
        return ServedAnswer(tokens, 0, ())
    if not isinstance(calls, int) or calls < 1:
        raise _unusable(f"{len(tokens)} tokens and spec_verify_ct {calls}: the server did not draft this answer")
    counts: tuple[int, ...] = tuple(by_right or ())
    if sum(counts) != calls:
        raise _unusable(f"spec_verify_ct {calls} and a spec_correct_drafts_histogram of {sum(counts)} calls")
    return ServedAnswer(tokens, calls, counts)


def _unusable(what: str) -> AnswerUnusable:
    return AnswerUnusable(f"the server's answer has {what}", remedy="serve with SGLang 0.5.23, drafting with EAGLE3")


def ask(
    endpoint: Endpoint,
    prompts: Sequence[Sequence[int]],
    how: Decoding,
    *,
    drafting: bool,
    steady: bool = False,
    on_progress: Progressed,
) -> list[ServedAnswer]:
    """Greedy answers to `prompts` in their order, `how.batch_size` in flight; what `on_progress` raises ends it."""
    found: dict[int, ServedAnswer] = {}
    tokens = 0

    def check() -> None:
        on_progress(done=len(found), tokens=tokens)

    bodies = [_request(prompt, how) for prompt in prompts]
    for place, document in endpoint.each(bodies, most=how.batch_size, steady=steady, check=check):
        found[place] = read_answer(document, drafting=drafting)
        tokens += len(found[place].ids)
    check()
    return [found[place] for place in range(len(prompts))]


def _request(prompt: Sequence[int], how: Decoding) -> dict[str, Any]:
    return {
        "input_ids": list(prompt),
        "sampling_params": {
            "temperature": 0, "max_new_tokens": how.limit(len(prompt)), "stop_token_ids": list(how.eos_ids),
        },
    }  # fmt: skip


def replay_on(endpoint: Endpoint) -> Replay:
    """Judges a difference by the logits of the server itself: one more token behind the text both answers share."""

    def replay(context: list[int], tokens: tuple[int, int]) -> float:
        body: dict[str, Any] = {
            "input_ids": context, "sampling_params": {"temperature": 0, "max_new_tokens": 1}, "return_logprob": True,
            "top_logprobs_num": 1, "token_ids_logprob": list(tokens),
        }  # fmt: skip
        meta = endpoint.post("/generate", body)["meta_info"]
        (best,), asked = meta["output_top_logprobs"][0], meta["output_token_ids_logprobs"][0]
        return float(best[0]) - min(float(entry[0]) for entry in asked)

    return replay


def deliver(
    plain: Endpoint,
    drafting: Endpoint,
    prompts: Sequence[Sequence[int]],
    how: Decoding,
    *,
    near_tie_logit_gap: float,
    exact: bool,
    on_progress: Progressed,
) -> list[Delivered]:
    """Answer `prompts` on both servers and compare; `exact` where no near-tie is granted (float32)."""
    drafted = ask(drafting, prompts, how, drafting=True, on_progress=_part(on_progress, 0, 0))
    tokens = sum(len(answer.ids) for answer in drafted)
    undrafted = ask(plain, prompts, how, drafting=False, on_progress=_part(on_progress, len(prompts), tokens))
    replay = replay_on(plain)
    return [
        Delivered(a, judge(replay, list(prompt), a.ids, b.ids, near_tie_logit_gap, exact=exact))
        for prompt, a, b in zip(prompts, drafted, undrafted, strict=True)
    ]


def _part(on_progress: Progressed, done_before: int, tokens_before: int) -> Progressed:
    def report(*, done: int, tokens: int) -> None:
        on_progress(done=done_before + done, tokens=tokens_before + tokens)

    return report
