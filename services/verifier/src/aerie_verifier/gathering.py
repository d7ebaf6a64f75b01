"""The states of one prompt, gathered over the passes that compute it.

An engine computes a long prompt in chunks, may skip what its prefix cache holds, and may take a request back and run it
again. So every chunk is kept by the position of its first token, and a prompt is whole only if its positions are covered
without a gap: what the cache skipped, or an engine dropped, is then an error and never a shorter sample.

Shapes: n tokens of a chunk, T tokens of the prompt, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from eagle3_core.errors import AerieError


class CaptureIncomplete(AerieError):
    """The engine did not compute every token of a prompt whose states were asked for."""

    code, status, retryable = "capture.incomplete", 500, True


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a prompt."""

    aux_n3H: Tensor
    """Inputs of the three aux layers, side by side, in main memory."""
    final_nH: Tensor

    @property
    def tokens(self) -> int:
        """How many."""
        return len(self.aux_n3H)

    def behind(self, rows: int) -> Chunk:
        """This without its first `rows` tokens."""
        return Chunk(self.aux_n3H[rows:], self.final_nH[rows:])


@dataclass
class PromptStates:
    """Chunks of one prompt by the position of their first token."""

    chunks: dict[int, Chunk] = field(default_factory=dict[int, Chunk])

    def add(self, start: int, chunk: Chunk) -> None:
        """Keep the chunk that begins at position `start`; a later pass over the same place replaces an earlier one."""
        if chunk.tokens:
            self.chunks[start] = chunk

    def whole(self, tokens: int) -> list[Chunk]:
        """Chunks that cover positions 0 to `tokens`, each once, in order. Raises CaptureIncomplete that names the gap."""
        parts: list[Chunk] = []
        reached = 0
        for start, chunk in sorted(self.chunks.items()):
            if start > reached:
                raise _gap(reached, start, tokens)
            if (end := start + chunk.tokens) > reached:
                parts.append(chunk.behind(reached - start))
                reached = end
        if reached < tokens:
            raise _gap(reached, tokens, tokens)
        if reached > tokens:
            raise CaptureIncomplete(
                f"states of {reached} tokens came for a prompt of {tokens}", remedy="report the engine's version"
            )
        return parts


def _gap(start: int, stop: int, tokens: int) -> CaptureIncomplete:
    return CaptureIncomplete(
        f"states of positions {start} to {stop - 1} are missing, of a prompt of {tokens} tokens",
        remedy="a prefix cache held these tokens, or the engine dropped a chunk: send the request again, and report it",
    )
