"""The hooks inside the engine's scheduler: where states are taken, copied off the device and gathered.

SGLang 0.5.23 can return auxiliary states of a prefill itself (`--enable-return-aux-hidden-states`), as JSON lists in the
answer, only for the last chunk of a long prompt, and with the final state after its norm. The hooks keep the engine's own
capture and change where its tensors go:

- `note_final`: the engine's final norm adds the residual and normalises in one kernel, and offers a callback for the sum.
  That sum is the state before the norm. A replayed CUDA graph calls no callback, and hands out buffers that the next pass
  overwrites: so prefill runs without graphs, and an engine that has them is refused. Those of decoding may stay.
- `keep_final`: hands that sum on as the pass's last hidden states, in place of the normed ones.
- `copy_final`: with the overlap scheduler, results are copied to pinned memory on a stream of their own; the final states
  go with them. Ranks that write nothing drop theirs before the copy.
- `gather`: cuts a batch into its requests, keeps their rows by position, and hands whole prompts to the writer.
- `confirm_layers`: before the engine serves, its own list of captured layers is held against the configuration.

Every hook fails loudly; none may be reached in an engine that was not confirmed.

Shapes: N tokens of a batch, n of one request's chunk, H hidden size.
"""

from __future__ import annotations

import importlib.metadata
import uuid
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from aerie_verifier import __version__
from aerie_verifier.config import CaptureMisconfigured
from aerie_verifier.gathering import CaptureIncomplete, Chunk, PromptStates
from aerie_verifier.mailbox import Sender
from aerie_verifier.writer import BackgroundWriter, Captured, Origin, Tell, failed
from eagle3_core.engine.config import CaptureConfig
from eagle3_core.errors import AerieError
from eagle3_core.objects.location import store_at
from eagle3_core.verifier.receipt import PREFIX

STATES = "aerie_states"
"""Attribute of the engine's request that holds its gathered states: they go when the request goes, however it ends."""


class LayersDiffer(AerieError):
    """The engine captures other layers than it was started for."""

    code, status = "capture.layers", 500


def engine_version() -> str:
    """Version of the SGLang that runs."""
    return importlib.metadata.version("sglang")


def captured_layers(model: nn.Module) -> tuple[int, ...]:
    """The layers whose inputs `model` says it captures; empty if none."""
    for module in model.modules():
        if layers := getattr(module, "layers_to_capture", None):
            return tuple(int(layer) for layer in layers)
    return ()


@dataclass
class Capture:
    """Capture in one scheduler process."""

    config: CaptureConfig
    address: str
    targets: tuple[str, ...]
    """What must be hooked, by full name."""
    tell: Tell | None = None
    """Sends a request's outcome to the process that answers it."""
    writer: BackgroundWriter | None = None
    """None before the engine is confirmed, and on ranks that write nothing."""
    confirmed: bool = False
    prenorm_NH: Tensor | None = None
    """The newest pass's states before the final norm."""
    run: str = ""
    """Names this run of the engine: keys of two runs never meet."""

    def confirm_layers(self, answer: Any, *, model: nn.Module, **options: Any) -> None:
        """Start capturing, if the engine is what the configuration says. Raises CaptureMisconfigured, LayersDiffer."""
        from sglang.srt.plugins.hook_registry import HookRegistry  # pyright: ignore[reportMissingImports]

        if loose := [target for target in self.targets if target not in HookRegistry._patched]:  # pyright: ignore[reportPrivateUsage]
            raise CaptureMisconfigured(
                f"SGLang {engine_version()} did not take the hooks on {', '.join(loose)}",
                remedy="use a supported version of SGLang, or turn capture off",
            )
        if not options.get("eagle_use_aux_hidden_state"):
            raise CaptureMisconfigured(
                "the engine captures no auxiliary states",
                remedy="start it with --enable-return-aux-hidden-states --speculative-algorithm EAGLE3",
            )
        if (have := captured_layers(model)) != self.config.aux_layers:
            raise LayersDiffer(
                f"the engine captures the inputs of layers {list(have)}, the configuration wants {list(self.config.aux_layers)}",
                remedy="pass --return-aux-hidden-state-layer-ids in the engine's own numbering: see verifier/layers.py",
            )
        if not _prefill_is_eager():
            raise CaptureMisconfigured(
                "the engine computes prompts by CUDA graphs, which call no hooks",
                remedy="start it with --disable-prefill-cuda-graph and no other setting of prefill's graphs",
            )
        self.confirmed = True
        self.run = uuid.uuid4().hex[:12]
        self.tell = Sender(self.address)
        self.writer = self._writer(self.tell) if _writes() else None

    def _writer(self, tell: Tell) -> BackgroundWriter:
        config = self.config
        origin = Origin(config.aux_layers, config.final, engine_version(), __version__)
        return BackgroundWriter(
            store_at(config.sink), origin, tell,
            queue_bytes=config.queue_bytes, writers=config.writers, stall_s=config.stall_s,
        )  # fmt: skip

    def note_final(self, hidden: Any, forward_batch: Any, norm: Any, capture: Any = None, **options: Any) -> Any:
        """Have the final norm hand out what it normalises."""

        def keep(residual_NH: Tensor) -> None:
            if capture is not None:
                capture(residual_NH)
            if forward_batch.capture_hidden_mode.is_full():
                self.prenorm_NH = residual_NH.clone()  # the engine lends the storage only

        return (hidden, forward_batch, norm, keep), options

    def keep_final(self, original: Any, processor: Any, hidden_NH: Tensor, *rest: Any) -> Tensor | None:
        """The states before the norm, where the engine would keep those behind it. Raises CaptureMisconfigured."""
        kept_NH = original(processor, hidden_NH, *rest)
        prenorm_NH, self.prenorm_NH = self.prenorm_NH, None
        if kept_NH is None:
            return None
        if prenorm_NH is None or prenorm_NH.shape != kept_NH.shape:
            raise CaptureMisconfigured(
                f"this model's final norm did not hand out its input for {len(kept_NH)} tokens",
                remedy='use another model, or capture with final "post" for a reader of your own: jobs of Aerie want "pre"',
            )
        return prenorm_NH

    def copy_final(self, result: Any, *args: Any, **options: Any) -> None:
        """Copy the final states off the device with the others, beside the next pass."""
        out = result.logits_output
        if out is None or out.last_hidden_states is None:
            return
        if self.writer is None:
            out.hidden_states = out.last_hidden_states = None
            return
        from sglang.srt.managers.utils import _async_d2h  # pyright: ignore[reportPrivateUsage, reportMissingImports]

        result.aerie_copied = out.last_hidden_states.device.type != "cpu"
        out.last_hidden_states = _async_d2h(out.last_hidden_states)

    def gather(self, processor: Any, batch: Any, result: Any) -> None:
        """Take the states of a prefill batch; nothing is left for the answer."""
        out = getattr(result, "logits_output", None)
        if out is None or out.hidden_states is None or not batch.return_hidden_states_mode.is_full():
            return
        if not self.confirmed:
            raise CaptureMisconfigured("hidden states came before the engine was confirmed", remedy="report this")
        if result.copy_done is not None:
            result.copy_done.synchronize()
        aux, final, out.hidden_states = out.hidden_states, out.last_hidden_states, None
        if self.writer is None:
            return
        if final is None or len(final) != len(aux):
            raise CaptureMisconfigured(
                "the engine kept no final states beside the auxiliary ones", remedy="report this"
            )
        own = _as_it_is if getattr(result, "aerie_copied", False) else _own
        if (tokens := sum(result.extend_input_len_per_req)) != len(aux):
            raise CaptureMisconfigured(
                f"a batch of {tokens} tokens came with states of {len(aux)}", remedy="report the engine's version"
            )
        row = 0
        for req, start, count in zip(batch.reqs, batch.prefix_lens, result.extend_input_len_per_req, strict=True):
            rows = slice(row, row := row + count)
            if req.return_hidden_states is True:
                self._take(req, start, Chunk(own(aux[rows]), own(final[rows])))

    def _take(self, req: Any, start: int, chunk: Chunk) -> None:
        states: PromptStates = req.__dict__.setdefault(STATES, PromptStates())
        states.add(start, chunk)
        if req.is_retracted or req.inflight_middle_chunks > 0 or req.finished() or req.to_finish is not None:
            return  # it goes on, or it is given up: nobody waits for its states
        del req.__dict__[STATES]
        ids = [int(token) for token in req.origin_input_ids]
        assert self.writer is not None
        assert self.tell is not None
        try:
            parts = states.whole(len(ids))
        except CaptureIncomplete as error:
            self.tell(failed(req.rid, error))
            return
        self.writer.submit(Captured(req.rid, f"{PREFIX}{self.run}/{req.rid}.safetensors", ids, parts))


def _own(rows: Tensor) -> Tensor:
    """`rows` in main memory, and nobody else's: what was not copied off a device may be the model's own buffer."""
    return rows.clone() if rows.device.type == "cpu" else rows.cpu()


def _as_it_is(rows: Tensor) -> Tensor:
    return rows


def _prefill_is_eager() -> bool:
    """Whether the engine records no CUDA graphs of prefill."""
    from sglang.srt.model_executor.cuda_graph_config import (  # pyright: ignore[reportMissingImports]
        Backend,
        Phase,
        check_cuda_graph_backend,
    )

    return check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED)


def _writes() -> bool:
    """Whether this process writes: residuals are whole on every tensor-parallel rank, so the first of each group does."""
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    return get_parallel().attn_tp_rank == 0
