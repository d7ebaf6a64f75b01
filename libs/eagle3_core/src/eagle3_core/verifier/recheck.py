"""Whether captured states are those of the answers beside them: the states' own logits must give the next tokens.

A greedy token is the argmax of the logits that the verifier's norm and head make of the state before it. So each state
can be asked what it would have said: states of another layer, another position, another prompt or a wrong norm answer
at random. Near-ties fall either way when a pass is batched otherwise, and count as right up to the job's own bound.

Shapes: N checked positions, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3_core.drafter.verifier_parts import Teacher, VerifierParts
from eagle3_core.errors import AerieError
from eagle3_core.verifier.base import States

MOST = 512
"""Positions that are checked of one unit: half a second for every billion weights of the head."""
LEAST_AGREEMENT = 0.99


class StatesDisagree(AerieError):
    """The captured states do not say what the verifier said."""

    code, status = "states.disagree", 422


@dataclass
class Recheck:
    """Positions of one unit, chosen as its samples come, and judged at the end."""

    samples: int
    """How many will come: each gets its share of the positions."""
    _names: list[str] = field(default_factory=list[str])
    _places: list[int] = field(default_factory=list[int])
    _tokens: list[int] = field(default_factory=list[int])
    _states: list[Tensor] = field(default_factory=list[Tensor])

    def add(self, name: str, ids: Sequence[int], mask: Sequence[int], states: States, following: int | None) -> None:
        """Remember some positions of a sample.

        `mask` is 1 on tokens that are the verifier's own greedy choice, all 0 where nobody knows; `following` is the
        token that the engine said comes after the last one, if it said so.
        """
        chosen = [place for place, own in enumerate(mask) if own and place > 0]
        share = max(1, MOST // max(1, self.samples)) - 1
        picked = [(place - 1, ids[place]) for place in chosen[:: max(1, -(-len(chosen) // share))]] if share else []
        if following is not None:
            picked.append((len(ids) - 1, following))
        for place, token in picked:
            self._names.append(name)
            self._places.append(place)
            self._tokens.append(token)
            self._states.append(states.final[place].clone())

    def judge(self, parts: VerifierParts, gap: float) -> dict[str, int]:
        """{checked, agreed} of the positions; a token within `gap` logits of the best one agrees. Raises StatesDisagree."""
        if not self._tokens:
            return {"checked": 0, "agreed": 0}
        every = torch.ones(int(parts.text_config["vocab_size"]), dtype=torch.bool)
        logits_NV = Teacher.read(parts, every, "pre").logits(torch.stack(self._states).float())
        best_N = logits_NV.max(-1)
        said_N = logits_NV.gather(-1, torch.tensor(self._tokens)[:, None])[:, 0]
        off_N = best_N.values - said_N
        wrong = torch.nonzero(~(off_N <= gap))[:, 0].tolist()
        checked = len(self._tokens)
        if len(wrong) > (1 - LEAST_AGREEMENT) * checked:
            n = wrong[0]
            raise StatesDisagree(
                f"at {len(wrong)} of {checked} checked positions the state says another token than the verifier said, first at"
                f" position {self._places[n]} of sample {self._names[n]}: the state says {int(best_N.indices[n])}, the verifier"
                f" said {self._tokens[n]}, {float(off_N[n]):.3g} logits below",
                remedy="serve the checkpoint that the job names; where it does, states and answers come from different engines"
                " or precisions: capture and generate with one backend",
                checked=checked, wrong=len(wrong),
            )  # fmt: skip
        return {"checked": checked, "agreed": checked - len(wrong)}
