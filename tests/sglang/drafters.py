"""A drafter that cannot do without the layers it was trained on.

The drafters that these tests train in seconds hardly read the verifier's states: the words of a tiny random verifier follow
from the last one. Served with the layers beside their own they accept as much, and nothing is found out. This one gets a
reader of the one direction in which states of its own layers hold least and those beside hold most.

Shapes: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from references import Reference
from torch import Tensor

from eagle3_core.drafter.model import Drafter

NEXT_TO_NOTHING = 1e-6


def lean_on_its_layers(drafter: Drafter, own: Sequence[int], verifier: Path, texts: Sequence[list[int]]) -> None:
    """Have `drafter` say nonsense where it is given the inputs of the layers behind its `own`, and hardly change it else."""
    layers = [Reference(verifier).states(ids)[0] for ids in texts]

    def normed(at: Sequence[int]) -> Tensor:
        """[T, 3H] as `fc_norm` hands it to `fc`."""
        states = [torch.cat([inputs[layer] for inputs in layers]) for layer in at]
        parts = [drafter.weights[f"fc_norm.{i}.weight"] * torch.nn.functional.rms_norm(s, s.shape[-1:])
                 for i, s in enumerate(states)]  # fmt: skip
        return torch.cat(parts, -1)

    mine_T3H, beside_T3H = normed(own), normed([layer + 1 for layer in own])
    read_3H = most_in_the_second(mine_T3H, beside_T3H)
    fc = drafter.weights["fc.weight"]
    usual = (mine_T3H @ fc.T).norm(dim=-1).mean()
    say_H = torch.randn(len(fc), generator=torch.Generator().manual_seed(0))
    drafter.weights["fc.weight"] = fc + usual * torch.outer(say_H / say_H.norm(), read_3H)


def most_in_the_second(first_TD: Tensor, second_TD: Tensor) -> Tensor:
    """The direction [D], scaled to 1 in `second`'s mean square, in which `first` holds least beside it."""
    first, second = (x.double().T @ x.double() / len(x) for x in (first_TD, second_TD))
    root = torch.linalg.inv(torch.linalg.cholesky(first + NEXT_TO_NOTHING * torch.eye(len(first))))
    shares, directions = torch.linalg.eigh(root @ second @ root.T)
    return (root.T @ directions[:, -1] / shares[-1].sqrt()).float()
