"""What training costs, without doing it: operations of a sample.

Beyond step 0 only chains are computed (`drafter.chains`), so a sample's cost is not its length: it is its keys, its
(chain, step) pairs and how far those look back. Work is shared over ranks by this number.

Shapes: H hidden, Q query and K key-value heads of size D, I the MLP's width, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle3_core.drafter.config import DrafterConfig

LOOK_COST = 2.6
"""An operation of attention takes as long as so many of a product: 290 against 757 TFLOP/s on an H200, T 8192."""


@dataclass(frozen=True)
class Facts:
    """What is known of a sample without reading its states."""

    tokens: int
    """Length after the cut at `max_seq_len`."""
    supervised: int
    """Tokens that some chain drafts first: its chains."""
    pairs: int
    """(chain, step) pairs to compute."""
    reach: int
    """Sum over pairs of the keys that a pair looks back to."""


@dataclass(frozen=True)
class Weights:
    """Operations (forward and backward) of one key, of one pair, and of one pair looking at one key (in products')."""

    key: float
    pair: float
    look: float

    @classmethod
    def of(cls, c: DrafterConfig) -> Weights:
        """A multiply-add counts 2; a product's backward is two products, attention's is 2.5 times its forward."""
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        h, pair = c.hidden_size, 2 * c.hidden_size
        layer = pair * (q + 2 * kv) + q * h + 3 * h * c.intermediate_size + h * c.draft_vocab_size
        return cls(key=6.0 * (3 * h * h + pair * 2 * kv), pair=6.0 * layer, look=LOOK_COST * 3.5 * 4.0 * q)

    def operations(self, facts: Facts) -> float:
        """Of one sample."""
        return self.key * facts.tokens + self.pair * facts.pairs + self.look * facts.reach


EVEN = Weights(key=0.25, pair=1.0, look=0.0)
"""Where no drafter is known: a pair costs about four keys at the shapes of large verifiers."""
