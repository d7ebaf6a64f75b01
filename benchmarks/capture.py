"""What keeping a verifier's states costs its prefill: passes with and without, in turns, in one run.

The verifier has Llama 3.1 8B's shape on a GPU (random weights, bf16, passes of 4 prompts of 2,048 tokens) and a tiny one
elsewhere. It runs on transformers and not on SGLang: what is measured is the plug-in's own path (states copied to pinned
memory on a stream of their own, cut into prompts, joined, digested, written by threads beside the next pass) beside
matrix products and attention of the real size, not the engine's scheduler around them.

Rows: prompt tokens a second with capture, the reference is the same passes without it. `dropped` ends at the writer's
threads, `/dev/shm` writes files there.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rows import Row, benchmark
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from aerie_verifier.config import CaptureConfig
from aerie_verifier.gathering import Chunk, PromptStates
from aerie_verifier.writer import BackgroundWriter, Captured, Origin
from eagle3_core.errors import AerieError
from eagle3_core.objects.local import LocalStore

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
LAYERS = (2, 16, 29)
"""Whose inputs are kept, of 32."""
MEMORY = "/dev/shm"  # noqa: S108
"""A file system in main memory."""
CONFIG = CaptureConfig(sink=f"file://{MEMORY}", aux_layers=LAYERS)
"""As a server is configured that says no more than it must."""


@dataclass(frozen=True)
class Shape:
    """How much is computed and how often."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    layers: int
    prompts: int
    length: int
    passes: int
    rounds: int


ON_GPU = Shape(4096, 14336, 32, 8, 128256, 32, prompts=4, length=2048, passes=12, rounds=3)
ON_CPU = Shape(64, 128, 4, 2, 512, 32, prompts=2, length=64, passes=3, rounds=2)


class CaptureBroke(AerieError):
    """A prompt's states were not kept: the figures would be of less work."""

    code = "bench.capture"


class Dropping:
    """A store that keeps nothing."""

    def put_bytes(self, key: str, data: bytes) -> None:
        """Forget `data`."""


def verifier(shape: Shape) -> LlamaForCausalLM:
    """Random weights; only time is asked of them."""
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.inner, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, vocab_size=shape.vocab,
    )  # fmt: skip
    config._attn_implementation = "sdpa"  # pyright: ignore[reportPrivateUsage]
    torch.manual_seed(0)
    with DEVICE:
        model: Any = LlamaForCausalLM(config)
        return model.to(torch.bfloat16 if GPU else torch.float32).eval()


class Kept:
    """Hooks that keep the states of a pass, and their way to the writer."""

    def __init__(self, model: LlamaForCausalLM, shape: Shape, writer: BackgroundWriter) -> None:
        self._shape, self._writer = shape, writer
        self._seen: dict[str, Tensor] = {}
        self._beside = torch.cuda.Stream() if GPU else None
        self._hooks = [self._keep(model.model.layers[layer], str(layer)) for layer in LAYERS]
        self._hooks.append(self._keep(model.model.norm, "final"))
        self._before: tuple[Chunk, Any] | None = None
        self._count = 0

    def _keep(self, module: nn.Module, name: str) -> Any:
        def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._seen[name] = inputs[0].reshape(-1, self._shape.hidden)

        return module.register_forward_pre_hook(note)

    def after_pass(self) -> None:
        """Start this pass's copy; hand on the pass before, whose copy ran beside this one."""
        aux_n3H = torch.cat([self._seen[str(layer)] for layer in LAYERS], dim=1)
        final_nH = self._seen["final"].clone()
        self._seen.clear()
        copied = self._off_device(aux_n3H, final_nH)
        self.drain()
        self._before = copied

    def _off_device(self, aux_n3H: Tensor, final_nH: Tensor) -> tuple[Chunk, Any]:
        if self._beside is None:
            return Chunk(aux_n3H, final_nH), None
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            parts = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in (aux_n3H, final_nH)
            ]
            for tensor in (aux_n3H, final_nH):
                tensor.record_stream(self._beside)
            done = torch.cuda.Event()
            done.record()
        return Chunk(parts[0], parts[1]), done

    def drain(self) -> None:
        """Hand on the pass whose copy was started last."""
        if self._before is None:
            return
        (chunk, done), self._before = self._before, None
        if done is not None:
            done.synchronize()
        for at in range(0, chunk.tokens, self._shape.length):
            rows = slice(at, at + self._shape.length)
            states = PromptStates()
            states.add(0, Chunk(chunk.aux_n3H[rows], chunk.final_nH[rows]))
            name = f"{self._count:06d}"
            self._count += 1
            ids = [0] * self._shape.length
            self._writer.submit(Captured(name, f"captures/{name}.safetensors", ids, states.whole(self._shape.length)))

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


@contextmanager
def kept(model: LlamaForCausalLM, shape: Shape, folder: Path | None) -> Generator[Kept]:
    """Capture into `folder`, or to nowhere. Raises CaptureBroke if a prompt got no receipt."""
    told: list[dict[str, Any]] = []
    store: Any = Dropping() if folder is None else LocalStore(folder)
    origin = Origin(LAYERS, "pre", "transformers", "benchmark")
    writer = BackgroundWriter(
        store, origin, told.append, queue_bytes=CONFIG.queue_bytes, writers=CONFIG.writers, stall_s=CONFIG.stall_s
    )
    capture = Kept(model, shape, writer)
    try:
        yield capture
    finally:
        capture.remove()
        writer.close()
    if len(told) != shape.prompts * shape.passes or any("problem" in outcome for outcome in told):
        raise CaptureBroke(
            f"{len(told)} outcomes of {shape.prompts * shape.passes} prompts, the last: {told[-1:]}", remedy=""
        )


@torch.inference_mode()
def prefill(model: LlamaForCausalLM, shape: Shape, capture: Kept | None) -> float:
    """Tokens a second over some passes; with capture until the last state has left the device."""
    ids_BT = torch.randint(0, shape.vocab, (shape.prompts, shape.length), device=DEVICE)
    began = time.perf_counter()
    for _ in range(shape.passes):
        out = model(ids_BT, use_cache=False, logits_to_keep=1).logits
        if capture is not None:
            capture.after_pass()
        out.argmax(-1).cpu()  # the next token, which an engine reads after every pass
    if capture is not None:
        capture.drain()
    return shape.passes * shape.prompts * shape.length / (time.perf_counter() - began)


def measure(small: bool) -> list[Row]:
    """Rounds of three kinds of passes, in turns; medians."""
    shape = ON_GPU if GPU and not small else ON_CPU
    model = verifier(shape)
    rates: dict[str, list[float]] = {"off": [], "dropped": [], MEMORY: []}
    prefill(model, shape, None)
    for _ in range(shape.rounds):
        rates["off"].append(prefill(model, shape, None))
        with kept(model, shape, None) as capture:
            rates["dropped"].append(prefill(model, shape, capture))
        folder = Path(tempfile.mkdtemp(prefix="aerie-bench-", dir="/dev/shm"))
        try:
            with kept(model, shape, folder) as capture:
                rates[MEMORY].append(prefill(model, shape, capture))
        finally:
            shutil.rmtree(folder)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return [
        Row(f"prefill with states kept, {name}", medians[name], "tokens/s", medians["off"])
        for name in ("dropped", MEMORY)
    ]


if __name__ == "__main__":
    benchmark(measure)
