"""The drafter: one Llama layer over pairs of (token, hidden state), in functions that decoding runs and training must equal.

A drafter is a dict of tensors named as in speculators' `Eagle3DraftModel` (`fc.weight`, `layers.0.self_attn...`,
`norm.weight`, `lm_head.weight`) and a `DrafterConfig`. Nothing here needs that library, so neither
training nor decoding pays for its import.

The maths (EAGLE-3, arXiv 2503.01840; 3.1, arXiv 2605.09992):
    g_p   = fc([a_p; b_p; c_p])             aux states of position p (3.1: each RMS-normed with its own gain first)
    pair  = [norm_e(E(token)); norm_h(hidden)]          2H wide; q, k, v read it
    u     = hidden + o(attention);  u = u + mlp(norm_m(u))
    out   = u (eagle3) or norm(u) (eagle3.1): what the next step gets as `hidden`
    logits= head(norm(u)) over the draft vocabulary; token = i + d2t[i]

Positions, as speculators counts them: the pair (x_{p+1}, g_p) sits at RoPE position p+1, and it proposes x_{p+2}.
Step k of the chain that starts at p reads token x_{p+1+k} at position p+1+k.

Decoding with a cache, B sequences side by side:

    drafter = Drafter.load(folder, verifier_folder, dtype=torch.float32)
    cache = DraftCache.allocate(drafter, batch, slots)            # slots >= longest context + chain
    hidden = drafter.combine(aux_BT3H)                            # aux of positions p = 0..T-1 (or of the new ones)
    out = drafter.layer(ids_BT, hidden, positions_BT, cache)      # ids x_{p+1}, positions p+1
    logits = drafter.logits(out[rows, last])                      # [B, Vd]; rows, last: each sequence's newest pair
    token = drafter.tokens(logits.argmax(-1))                     # verifier ids
    out = drafter.layer(token[:, None], out_of_last[:, None], positions + 1, cache)     # next step of the chain

The pair at RoPE position r lives in slot r-1, and a query sees every slot up to its own. So a chain's keys lie where
the next round's real pairs overwrite them: after a verify call just go on at the first unread position. Padding on
the right is harmless for the same reason: it fills slots that nothing sees before they are overwritten.

Shapes: B sequences, T positions, H hidden, Q query heads, K key-value heads, D head size, V/Vd vocabularies, S slots.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from eagle3_core.digests import canonical
from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.drafter.rope import Rope
from eagle3_core.drafter.tensors import LAYER, tensor_shapes
from eagle3_core.drafter.verifier_parts import VerifierParts
from eagle3_core.errors import AerieError

TENSORS_FILE = "drafter.safetensors"
CONFIG_FILE = "drafter.json"

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class DrafterDamaged(AerieError):
    """A drafter's files do not hold what its config says."""

    code, status = "drafter.damaged", 409


@dataclass(frozen=True)
class Drafter:
    """A drafter's tensors and maths. `at()` gives the same drafter on another device or in another dtype."""

    config: DrafterConfig
    weights: dict[str, Tensor]
    """Trainable tensors by name (`tensor_shapes`)."""
    embedding_VH: Tensor
    """The verifier's embedding: frozen, never saved, in the verifier's own dtype."""
    d2t_Vd: Tensor
    """i64 offsets: draft token i stands for verifier token i + d2t[i]."""
    t2d_V: Tensor
    """bool: which verifier tokens the drafter can propose."""
    rope: Rope

    @classmethod
    def assemble(
        cls, config: DrafterConfig, weights: dict[str, Tensor], embedding_VH: Tensor, d2t_Vd: Tensor, t2d_V: Tensor
    ) -> Drafter:
        """Put a drafter together; raises DrafterDamaged where names, shapes or the vocabulary do not fit `config`."""
        want, have = tensor_shapes(config), {name: tuple(t.shape) for name, t in weights.items()}
        if want != have:
            names = sorted(n for n in want.keys() | have.keys() if want.get(n) != have.get(n))
            both = "; ".join(f"{n}: config says {want.get(n)}, file has {have.get(n)}" for n in names[:4])
            raise DrafterDamaged(both, remedy="train or import the drafter again")
        tokens = torch.arange(len(d2t_Vd), device=d2t_Vd.device) + d2t_Vd
        if (
            (len(d2t_Vd), len(t2d_V)) != (config.draft_vocab_size, config.vocab_size)
            or not torch.equal(tokens, t2d_V.nonzero().flatten())
        ):  # fmt: skip
            raise DrafterDamaged(
                f"d2t names {len(d2t_Vd)} tokens and t2d {int(t2d_V.sum())} of {len(t2d_V)}, and they must name the same "
                f"{config.draft_vocab_size} of {config.vocab_size}: d2t holds offsets, token = i + d2t[i]",
                remedy="build the draft vocabulary again",
            )
        return cls(config, weights, embedding_VH, d2t_Vd, t2d_V, Rope(config))

    def at(self, device: torch.device | str, dtype: torch.dtype) -> Drafter:
        """The same drafter on `device` with products in `dtype`. Gradients flow back to these weights."""
        return replace(
            self,
            weights={name: t.to(device, dtype) for name, t in self.weights.items()},
            embedding_VH=self.embedding_VH.to(device),
            d2t_Vd=self.d2t_Vd.to(device),
            t2d_V=self.t2d_V.to(device),
        )

    # -- the maths, in the order of the module's docstring

    def combine(self, aux: Tensor) -> Tensor:
        """g [..., H] of aux states [..., 3H] (any float dtype), in the weights' dtype."""
        fc = self.weights["fc.weight"]
        aux = aux.to(fc.dtype)
        if self.config.fc_norm:
            parts = aux.split(self.config.hidden_size, dim=-1)
            aux = torch.cat([self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], dim=-1)
        return functional.linear(aux, fc)

    def pair(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """[..., 2H] input of the attention: token ids [...] and hidden [..., H], each under its own norm."""
        embedded = functional.embedding(ids, self.embedding_VH).to(hidden.dtype)
        normed = (
            self._norm(embedded, LAYER + "input_layernorm.weight"),
            self._norm(hidden, LAYER + "hidden_norm.weight"),
        )
        return torch.cat(normed, dim=-1)

    def queries(self, pair: Tensor, positions: Tensor) -> Tensor:
        """[..., Q, D] queries of pairs [..., 2H], rotated to `positions` [...]."""
        q = functional.linear(pair, self.weights[LAYER + "self_attn.q_proj.weight"])
        return self.rope.rotate(q.unflatten(-1, (self.config.num_heads, self.config.head_dim)), positions)

    def keys_values(self, pair: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Two [..., K, D]: rotated keys and values of pairs [..., 2H]."""
        shape = (self.config.num_kv_heads, self.config.head_dim)
        k = functional.linear(pair, self.weights[LAYER + "self_attn.k_proj.weight"]).unflatten(-1, shape)
        v = functional.linear(pair, self.weights[LAYER + "self_attn.v_proj.weight"]).unflatten(-1, shape)
        return self.rope.rotate(k, positions), v

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """What the next step is fed, [..., H], from heads' outputs [..., Q, D] and the layer's input [..., H]."""
        w = self.weights
        u = hidden + functional.linear(attended.flatten(-2), w[LAYER + "self_attn.o_proj.weight"])
        inner = self._norm(u, LAYER + "post_attention_layernorm.weight")
        gate = ACTIVATIONS[self.config.hidden_act](functional.linear(inner, w[LAYER + "mlp.gate_proj.weight"]))
        up = functional.linear(inner, w[LAYER + "mlp.up_proj.weight"])
        u = u + functional.linear(gate * up, w[LAYER + "mlp.down_proj.weight"])
        return self._norm(u, "norm.weight") if self.config.norm_output else u

    def logits(self, out: Tensor) -> Tensor:
        """[..., Vd] logits over the draft vocabulary from what `finish` or `layer` gave, [..., H]."""
        normed = out if self.config.norm_output else self._norm(out, "norm.weight")
        return functional.linear(normed, self.weights["lm_head.weight"])

    def tokens(self, draft_ids: Tensor) -> Tensor:
        """Verifier ids of draft ids."""
        return draft_ids + self.d2t_Vd[draft_ids]

    def layer(self, ids_BT: Tensor, hidden_BTH: Tensor, positions_BT: Tensor, cache: DraftCache) -> Tensor:
        """One pass over new pairs, [B, T, H]; writes their keys and values to `cache`. `positions_BT` from 1 on."""
        pair = self.pair(ids_BT, hidden_BTH)
        cache.write(positions_BT - 1, *self.keys_values(pair, positions_BT))
        return self.finish(cache.attend(self.queries(pair, positions_BT), positions_BT - 1), hidden_BTH)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (self.config.hidden_size,), self.weights[name], self.config.rms_norm_eps)

    # -- as files

    def state(self) -> dict[str, Tensor]:
        """What a drafter is saved as: trainable tensors, `d2t` and `t2d`, contiguous on the CPU."""
        tensors = {**self.weights, "d2t": self.d2t_Vd, "t2d": self.t2d_V}
        return {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}

    def digest(self) -> str:
        """BLAKE3 (hex) of config and tensors: (name, dtype, shape, bytes) in the order of the names."""
        hasher = blake3(canonical(self.config.model_dump(mode="json")))
        for name, tensor in self.state().items():
            hasher.update(canonical([name, str(tensor.dtype), list(tensor.shape)]))
            hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return hasher.hexdigest()

    def save(self, folder: Path) -> None:
        """Write `drafter.safetensors` and `drafter.json` into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state(), folder / TENSORS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(self.config.model_dump(mode="json"), indent=1) + "\n")

    @classmethod
    def load(
        cls, folder: Path, verifier: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Drafter:
        """The drafter saved in `folder`, with the embedding of the checkpoint folder `verifier`, in `dtype`.

        Rounding to `dtype` is the same as the export's, so what is measured is what is served.
        """
        config = DrafterConfig.model_validate_json((folder / CONFIG_FILE).read_text())
        return cls.from_state(config, load_file(folder / TENSORS_FILE), VerifierParts(verifier)).at(device, dtype)

    @classmethod
    def from_state(cls, config: DrafterConfig, state: dict[str, Tensor], parts: VerifierParts) -> Drafter:
        """A drafter from what `state()` gave. Raises DrafterDamaged where tensors are missing or of another shape."""
        weights = dict(state)
        try:
            d2t_Vd, t2d_V = weights.pop("d2t"), weights.pop("t2d")
        except KeyError as error:
            raise DrafterDamaged(f"the drafter's file holds no {error.args[0]}", remedy="train it again") from None
        return cls.assemble(config, weights, parts.embedding(), d2t_Vd, t2d_V)


@dataclass
class DraftCache:
    """Keys and values of a batch's pairs, by slot; allocated once, overwritten in place."""

    keys_BKSD: Tensor
    values_BKSD: Tensor

    @classmethod
    def allocate(cls, drafter: Drafter, batch: int, slots: int) -> DraftCache:
        """Room for `slots` pairs in each of `batch` sequences, in the drafter's dtype and on its device."""
        like, c = drafter.weights["fc.weight"], drafter.config
        shape = (batch, c.num_kv_heads, slots, c.head_dim)
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    def write(self, slots_BT: Tensor, keys_BTKD: Tensor, values_BTKD: Tensor) -> None:
        """Put keys and values into their slots."""
        rows_B1 = torch.arange(len(slots_BT), device=slots_BT.device)[:, None]
        self.keys_BKSD[rows_B1, :, slots_BT] = keys_BTKD
        self.values_BKSD[rows_B1, :, slots_BT] = values_BTKD

    def attend(self, queries_BTQD: Tensor, slots_BT: Tensor) -> Tensor:
        """[B, T, Q, D]: every query attends to all slots up to its own."""
        used = int(slots_BT.max()) + 1
        visible_B1TS = torch.arange(used, device=slots_BT.device) <= slots_BT[:, None, :, None]
        keys, values = self.keys_BKSD[:, :, :used], self.values_BKSD[:, :, :used]
        return functional.scaled_dot_product_attention(
            queries_BTQD.transpose(1, 2), keys, values, attn_mask=visible_B1TS,
            enable_gqa=queries_BTQD.shape[2] != keys.shape[1],
        ).transpose(1, 2)  # fmt: skip

    def select(self, rows_B: Tensor) -> DraftCache:
        """The cache of the sequences `rows_B` (indices), for batches that shrink as answers end."""
        return DraftCache(self.keys_BKSD[rows_B], self.values_BKSD[rows_B])
