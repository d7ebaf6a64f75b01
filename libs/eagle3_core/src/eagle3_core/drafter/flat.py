"""All trained weights in one buffer, and their gradients in another of the same layout.

Three things follow. Matrices that are multiplied with the same rows (q, k and v; gate and up) lie behind one another and
are one matrix to a product. A pass gives its gradient as one tensor, which a collective or an optimizer takes whole. And
masters, moments and the copy that products read are updated by one kernel over flat memory.

Shapes: N elements of all trained weights, gaps included; W = query and key-value heads x head size, A query heads x head
size, H hidden size, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.model import LAYER, Drafter, tensor_shapes

QKV = tuple(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv")
OUT = f"{LAYER}self_attn.o_proj.weight"
GATE_UP = (f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight")
DOWN = f"{LAYER}mlp.down_proj.weight"
FC, HEAD, NORM = "fc.weight", "lm_head.weight", "norm.weight"
EMBEDDING_NORM = f"{LAYER}input_layernorm.weight"
HIDDEN_NORM = f"{LAYER}hidden_norm.weight"
MLP_NORM = f"{LAYER}post_attention_layernorm.weight"
FC_NORMS = tuple(f"fc_norm.{i}.weight" for i in range(3))

ALIGNMENT = 64
"""Elements; every group begins at a multiple, so that vector loads and tensor maps are aligned."""


@dataclass(frozen=True)
class Slot:
    """Where one weight lies."""

    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Behind its last element."""
        size = 1
        for side in self.shape:
            size *= side
        return self.start + size

    def of(self, flat_N: Tensor) -> Tensor:
        """The weight's view of a flat tensor."""
        return flat_N[self.start : self.stop].view(self.shape)


def slots_of(config: DrafterConfig, names: Sequence[str]) -> tuple[dict[str, Slot], int]:
    """(slot by name, N) of the weights `names`, which are taken in the order of `tensor_shapes`."""
    shapes, wanted = tensor_shapes(config), set(names)
    slots: dict[str, Slot] = {}
    end = 0
    for name, shape in shapes.items():
        if name not in wanted:
            continue
        glued = any(name == after and before in slots for group in (QKV, GATE_UP) for before, after in pairwise(group))
        start = end if glued else -(-end // ALIGNMENT) * ALIGNMENT
        slots[name] = Slot(start, shape)
        end = slots[name].stop
    return slots, -(-end // ALIGNMENT) * ALIGNMENT


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Matrices [n_i, C] on top of one another: a view where they already lie so, else a copy."""
    first = parts[0]
    glued = all(
        a.is_contiguous() and b.is_contiguous() and a.data_ptr() + a.numel() * a.element_size() == b.data_ptr()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        for a, b in pairwise(parts)
    )  # fmt: skip
    if not glued:
        return torch.cat(list(parts))
    return first.as_strided((sum(len(p) for p in parts), first.shape[1]), first.stride())


class Matrices:
    """A drafter's tensors as the step's products read them (or a gradient's, as they write them)."""

    def __init__(self, config: DrafterConfig, weights: Mapping[str, Tensor]) -> None:
        hidden = config.hidden_size
        pair_W2H = stacked([weights[name] for name in QKV])
        self.embedding_WH, self.hidden_WH = pair_W2H[:, :hidden], pair_W2H[:, hidden:]
        """The halves of q, k and v that read the token and the hidden state."""
        self.gate_up_2IH = stacked([weights[name] for name in GATE_UP])
        self.out_HA, self.down_HI, self.fc_H3H = weights[OUT], weights[DOWN], weights[FC]
        self.head_VdH = weights.get(HEAD)
        self.norm_H, self.embedding_norm_H = weights[NORM], weights[EMBEDDING_NORM]
        self.hidden_norm_H, self.mlp_norm_H = weights[HIDDEN_NORM], weights[MLP_NORM]
        self.fc_norms = [weights[name] for name in FC_NORMS] if config.fc_norm else []


Portions = tuple[tuple[slice, ...], ...]
"""Ranges of the flat gradient in the order in which a backward pass ends them."""


def portions_of(slots: Mapping[str, Slot], size: int) -> Portions:
    """The head's range, whose gradient is there before the chains are walked backward; that of the layer's output and
    MLP, which ends next; and all else. Together they are 0 to `size`, nothing twice."""
    head, middle = slots.get(HEAD), slice(slots[OUT].start, slots[DOWN].stop)
    early = ([slice(head.start, head.stop)] if head else []) + [middle]
    ends = sorted({0, size, *(end for part in early for end in (part.start, part.stop))})
    rest = tuple(part for part in (slice(a, b) for a, b in pairwise(ends)) if part not in early)
    return *((part,) for part in early), rest


class Gradients:
    """The gradient of one pass: one tensor, by name, and as the products write it."""

    def __init__(
        self, config: DrafterConfig, names: Sequence[str], like: Tensor, tell: Callable[[Tensor], None] | None = None
    ) -> None:
        """Of the weights `names` in the dtype and on the device of `like`; contents are not set, gaps are zero.

        `tell` gets every range of `flat_N` as soon as nothing more is written to it.
        """
        slots, size = slots_of(config, names)
        self._tell, self._portions = tell, iter(portions_of(slots, size) if tell else ())
        self.flat_N = like.new_empty(size)
        for before, after in pairwise([*slots.values(), Slot(size, (0,))]):
            self.flat_N[before.stop : after.start].zero_()
        self.named = {name: slot.of(self.flat_N) for name, slot in slots.items()}
        self.matrices = Matrices(config, self.named)

    def portion_done(self) -> None:
        """The next of `portions_of` is final."""
        for part in next(self._portions, ()):
            if self._tell is not None:
                self._tell(self.flat_N[part])


class FlatWeights:
    """The trained weights of a drafter: float32 masters, the copy that products read, and the gradient."""

    def __init__(self, drafter: Drafter, device: torch.device | str, dtype: torch.dtype) -> None:
        """Take over `drafter` (any device and dtype; it stays as it is) for training with products in `dtype`."""
        trained = [name for name, weight in drafter.weights.items() if weight.requires_grad]
        self.slots, size = slots_of(drafter.config, trained)
        self.portions = portions_of(self.slots, size)
        self.master_N = torch.zeros(size, device=device)
        for name, slot in self.slots.items():
            slot.of(self.master_N).copy_(drafter.weights[name].detach())
        self.compute_N = self.master_N if dtype == torch.float32 else self.master_N.to(dtype)
        weights = {name: weight.detach().to(device, dtype) for name, weight in drafter.weights.items()
                   if name not in self.slots}  # fmt: skip
        weights |= {name: slot.of(self.compute_N).requires_grad_() for name, slot in self.slots.items()}
        placed = replace(drafter, weights={}).at(device, dtype)
        self.drafter = replace(placed, weights={name: weights[name] for name in drafter.weights})
        """Its trained weights are leaves, and views of `compute_N`."""

    def masters(self) -> dict[str, Tensor]:
        """float32 views by name."""
        return {name: slot.of(self.master_N) for name, slot in self.slots.items()}

    def gradient(self) -> Tensor:
        """[N] in the dtype of the products: the leaves' gradients, without a copy where they came from one pass."""
        gradients = {name: self.drafter.weights[name].grad for name in self.slots}
        first_name = next(iter(self.slots))
        first, base = gradients[first_name], self.slots[first_name].start
        if first is not None and all(
            g is not None and g.is_contiguous()
            and g.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and g.storage_offset() - first.storage_offset() == self.slots[name].start - base
            for name, g in gradients.items()
        ):  # fmt: skip
            return first.as_strided((len(self.compute_N),), (1,), first.storage_offset() - base)
        flat_N = torch.zeros_like(self.compute_N)
        for name, gradient in gradients.items():
            if gradient is not None:
                self.slots[name].of(flat_N).copy_(gradient)
        return flat_N

    def clear(self) -> None:
        """Forget the gradients."""
        for name in self.slots:
            self.drafter.weights[name].grad = None
