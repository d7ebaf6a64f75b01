"""States that another process captured: each is checked against its receipt and the request before it is used.

The receipt says what an object in the sink holds. The object is read; it is used only if it is whole, unchanged and of exactly
the tokens that were asked, and is then removed from the sink. Results come in the order of the requests, whatever order the
engine prefers, so the same samples make the same shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from eagle3_core.digests import digest_bytes
from eagle3_core.engine.capture import ReceiptWrong, receipt_of, token_after
from eagle3_core.engine.heard import cut
from eagle3_core.objects.protocol import ObjectStore
from eagle3_core.verifier.base import Captured, States
from eagle3_core.verifier.receipt import PREFIX, Receipt


@dataclass(frozen=True)
class Expected:
    """What every receipt of one server must say."""

    sink: ObjectStore
    aux_layers: tuple[int, int, int]
    final: str
    dtype: str
    engine_version: str
    plugin_version: str
    hidden_size: int

    def take(self, receipt: Receipt, ids: Sequence[int]) -> States:
        """What `receipt` promises of the tokens `ids`; the object goes once it is found to be that.

        Raises ReceiptWrong that names both sides, and what the sink raises.
        """
        if not receipt.key.startswith(PREFIX):  # a server has no say over anything else that lies in the sink
            raise _wrong(receipt, "key", receipt.key, f"{PREFIX}...")
        data = self.sink.get_bytes(receipt.key)
        for name, said, asked in (
            ("size", receipt.size, len(data)),
            ("digest", receipt.digest, digest_bytes(data)),
            ("layers", receipt.aux_layers, self.aux_layers),
            ("final", receipt.final, self.final),
            ("dtype", receipt.dtype, self.dtype),
            ("engine", receipt.engine_version, self.engine_version),
            ("plug-in", receipt.plugin_version, self.plugin_version),
        ):
            if said != asked:
                raise _wrong(receipt, name, said, asked)
        try:
            held = load(data)
            states, tokens = States(held["aux"], held["final"]), held["input_ids"]
        except (SafetensorError, KeyError) as error:
            raise _wrong(receipt, "content", "the states of a prompt", f"an object without them: {error}") from None
        shapes = [list(states.aux.shape), list(states.final.shape)]
        width = self.hidden_size
        if shapes != (asked := [[len(ids), 3 * width], [len(ids), width]]):
            raise _wrong(receipt, "shapes", shapes, asked)
        if tokens.tolist() != list(ids):
            raise _wrong(receipt, "tokens", "others", "the prompt's")
        self.sink.delete(receipt.key)
        return states

    def in_order(
        self, answers: Iterable[tuple[int, Mapping[str, Any]]], sequences: Sequence[Sequence[int]]
    ) -> Iterator[Captured]:
        """The states of `sequences` in their order, from `answers` (place, document) that come in any. Raises as `take`."""
        early: dict[int, tuple[Receipt, int]] = {}
        coming = 0
        for place, answer in answers:
            early[place] = receipt_of(answer, sequences[place]), token_after(answer)
            while coming in early:
                receipt, token = early.pop(coming)
                yield Captured(coming, self.take(receipt, sequences[coming]), token)
                coming += 1


def _wrong(receipt: Receipt, name: str, said: Any, asked: Any) -> ReceiptWrong:
    return ReceiptWrong(
        f"{cut(receipt.key)}: the receipt says {name} {cut(said)}, asked for or found was {cut(asked)}",
        remedy="run the engine and the stages from one version; if they are, report it",
    )
