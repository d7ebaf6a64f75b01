"""Whether serving delivers what the chain decoder promised: both figures of every prompt side by side.

In float32 the two must have made the same number of verify calls on every prompt: they draft and verify the same
tokens, so one call more or less means that the server reads other layers, other weights or another rule. In lower
precision answers may part at near-ties, so the pooled acceptance lengths are held against each other instead.

A row is one of `prompts.json`; what serving found on its prompt lies under `served`: `tokens` after the first, verify
`calls` and the same `by_right` drafts, `lossless`, `near_tie`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eagle3_core.evaluate.lengths import acceptance_length, length_table, rounded, share

Row = Mapping[str, Any]


def delivered(rows: Sequence[Row], servings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`acceptance_length_served` and `serving` of a report; both None where nothing was served.

    `servings` are the units' facts: `engine`, `device`, `dtype`, `drafter` (digest of the served files), `exact`, and from
    one of them `speedup`.
    """
    if not servings:
        return {"acceptance_length_served": None, "serving": None}
    served = [{**row["served"], "task": row["task"]} for row in rows]
    other = [row for row in rows if _counts(row) != _counts(row["served"])]
    promised, kept = acceptance_length(rows)["mean"], acceptance_length(served)["mean"]
    serving: dict[str, Any] = {
        **{name: _all_of(servings, name) for name in ("engine", "device", "dtype", "drafter")},
        "exact": all(part["exact"] for part in servings),
        "verify_calls": sum(row["calls"] for row in served),
        "prompts_counted_otherwise": len(other),
        "gap": rounded(abs(kept - promised) / promised),
        "lossless": bool(served) and all(row["lossless"] for row in served),
        "near_tie_share": share(served, "near_tie"),
        "calls_by_right_drafts": _summed([row["by_right"] for row in served]),
        "speedup": next((list(part["speedup"]) for part in servings if part.get("speedup")), []),
    }
    return {"acceptance_length_served": length_table(served), "serving": serving}


def broken_promises(report: Mapping[str, Any], largest_gap: float) -> Iterator[str]:
    """Why `report` (see `evaluate.report.combine`) does not show serving to deliver what is promised; nothing if it does."""
    serving, served = report["serving"], report["acceptance_length_served"]
    if serving is None or served is None:
        return
    promised = report["acceptance_length"]["mean"]
    sides = (
        f"the chain decoder promises an acceptance length of {promised}, {serving['engine']} delivers {served['mean']}"
    )
    if serving["exact"] and serving["prompts_counted_otherwise"]:
        yield (
            f"{sides}: in float32 every prompt must take the same verify calls for the same tokens, and "
            f"{serving['prompts_counted_otherwise']} of {report['prompts']} took others ({report['verify_calls']} promised, "
            f"{serving['verify_calls']} served in all)"
        )
    if not serving["exact"] and serving["gap"] > largest_gap:
        yield f"{sides}: {serving['gap']:.1%} apart, {largest_gap:.1%} may lie between them"
    if not serving["lossless"]:
        yield f"{serving['engine']} answers otherwise with the drafter than without it"


def _counts(row: Row) -> tuple[int, int]:
    return int(row["tokens"]), int(row["calls"])


def _all_of(servings: Sequence[Mapping[str, Any]], name: str) -> str:
    """The value that the units agree on, or all of them."""
    return ", ".join(dict.fromkeys(str(part[name]) for part in servings))


def _summed(counts: Sequence[Sequence[int]]) -> list[int]:
    """Entry by entry; shorter ones end in zeros."""
    width = max(map(len, counts), default=0)
    return [sum(row[i] for row in counts if i < len(row)) for i in range(width)]
