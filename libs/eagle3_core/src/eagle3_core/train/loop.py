"""The training loop: the same drafter, bit for bit, whether or not it was interrupted.

Everything random is a pure function of (seed, place): the order of samples by epoch, the noise by forward pass. So a
checkpoint holds weights, optimizer state, the cursor and the running sums, and nothing else; going on from it repeats
what an uninterrupted run would have done, on the same number of threads and the same device.

One optimizer step is `accumulation` forward passes; its loss is one fraction over all of them (`drafter.losses`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from blake3 import blake3
from pydantic import BaseModel
from torch import Tensor

from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.step import PackedBatch, batch_loss
from eagle3_core.drafter.verifier_parts import Teacher
from eagle3_core.errors import AerieError
from eagle3_core.jobs.spec import Training
from eagle3_core.stages.context import StageContext
from eagle3_core.train.checkpoint import Checkpoints, Restored
from eagle3_core.train.feed import Feed
from eagle3_core.train.optim import AdamW, learning_rate, scale_and_clip

CURVE_POINTS = 400
"""Points of a curve over the whole run: more would say nothing that a person can see."""
PROGRESS_EVERY_S = 0.5


class Diverged(AerieError):
    """The loss or its gradient is no longer a number."""

    code, status = "training.diverged", 422


class Sums(BaseModel):
    """Sums of which loss and accuracy are quotients; plain numbers, so that they survive a checkpoint exactly."""

    numerator: float = 0.0
    denominator: float = 0.0
    hits: list[int] = []
    tried: list[int] = []

    def add(self, other: Sums) -> None:
        """Add up."""
        self.numerator += other.numerator
        self.denominator += other.denominator
        self.hits = [a + b for a, b in zip(self.hits or [0] * len(other.hits), other.hits, strict=True)]
        self.tried = [a + b for a, b in zip(self.tried or [0] * len(other.tried), other.tried, strict=True)]

    @property
    def loss(self) -> float | None:
        """Mean loss; None before anything was added."""
        return self.numerator / self.denominator if self.denominator else None


class Cursor(BaseModel):
    """Where the run is. `interval` are the sums since the last point of the curves, `epoch_sums` of this epoch."""

    step: int = 0
    epoch: int = 0
    group: int = 0
    """Optimizer steps done in this epoch."""
    tokens: int = 0
    finished: bool = False
    interval: Sums = Sums()
    epoch_sums: Sums = Sums()
    last_epoch_loss: float | None = None
    val_loss: float | None = None


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    drafter: Drafter
    steps: int
    epochs: int
    """Epochs begun (the last one may be cut by `max_steps`)."""
    supervised_tokens: int
    """Tokens that chains of all steps drafted first, repeats counted."""
    loss: float
    """Mean loss of the last epoch begun."""
    val_loss: float | None
    """Mean loss of the held-out samples after the last step; None without held-out samples."""


class Trainer:
    """One run of training over one feed."""

    def __init__(
        self, ctx: StageContext, drafter: Drafter, teacher: Teacher, feed: Feed, training: Training,
        checkpoints: Checkpoints, *, device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """`drafter` in float32 on the CPU, `device` and `dtype` (of the products) where the work is done."""
        self._ctx, self._feed, self._training, self._checkpoints = ctx, feed, training, checkpoints
        self._device, self._dtype = device, dtype
        self._master = _on_device(drafter, device)
        self._teacher = teacher.to(device, dtype)
        self._learning = {name: w for name, w in self._master.weights.items() if w.requires_grad}
        self._adam = AdamW(self._learning, training.betas, training.weight_decay)
        self._objective = Objective(
            training.ttt_steps,
            training.loss,
            training.step_weights,
            training.ttt_decay,
            training.expected_length_weight,
        )
        self._cursor = Cursor()
        self._epochs = [math.ceil(len(feed.batches(e)) / training.accumulation) for e in range(training.epochs)]
        self.total_steps = min(sum(self._epochs), training.max_steps or sum(self._epochs))
        self._curve_every = max(1, self.total_steps // CURVE_POINTS)
        self._clock = _Clock()

    def run(self) -> Trained:
        """Train to the end, from the newest checkpoint where there is one. Raises Diverged, Preempted."""
        self._resume()
        cursor = self._cursor
        while not cursor.finished:
            groups = _grouped(self._feed.batches(cursor.epoch), self._training.accumulation)
            for group in groups[cursor.group :]:
                if cursor.step == self.total_steps:
                    break
                self._honour_stop()
                self._step(group)
                cursor.group += 1
                if cursor.step % self._training.checkpoint_every_steps == 0 and cursor.step < self.total_steps:
                    self._save()
            self._end_epoch()
        self._ctx.progress(self.total_steps, self.total_steps, "steps")
        assert cursor.last_epoch_loss is not None
        return Trained(
            self._finished(), cursor.step, cursor.epoch, cursor.tokens, cursor.last_epoch_loss, cursor.val_loss
        )

    def _step(self, group: Sequence[tuple[int, ...]]) -> None:
        """One optimizer step over the forward passes `group`."""
        cursor, training = self._cursor, self._training
        sums = Sums()
        for pass_index, samples in enumerate(group):
            noise = self._noise(f"{training.seed}/{cursor.step}/{pass_index}")
            sums.add(self._forward(self._feed.load(samples), noise=noise, learn=True))
            cursor.tokens += self._feed.supervised_in(samples)
        norm = scale_and_clip(self._learning.values(), sums.denominator, training.clip)
        self._require_finite(sums, norm, group)
        rate = learning_rate(
            cursor.step, self.total_steps, peak=training.lr, schedule=training.scheduler,
            warmup_ratio=training.warmup_ratio, min_ratio=training.min_lr_ratio,
        )  # fmt: skip
        self._adam.step(rate)
        cursor.step += 1
        cursor.interval.add(sums)
        cursor.epoch_sums.add(sums)
        if cursor.step % self._curve_every == 0 or cursor.step == self.total_steps:
            self._draw("loss", "accuracy", cursor.interval)
            self._ctx.metric("lr", rate, cursor.step)
            self._ctx.metric("grad_norm", norm, cursor.step)
            cursor.interval = Sums()
        self._tell(sum(self._feed.supervised_in(samples) for samples in group))

    def _forward(self, batch: PackedBatch, *, noise: Callable[[Tensor], Tensor] | None, learn: bool) -> Sums:
        """One pass; gradients of the numerator are added up where `learn`."""
        batch = _to_device(batch, self._device)
        with torch.set_grad_enabled(learn):
            drafter = self._master.at(self._device, self._dtype)
            numerator, denominator, counts = batch_loss(drafter, self._teacher, batch, self._objective, noise)
        if learn:
            numerator.backward()
        return Sums(
            numerator=float(numerator.detach()),
            denominator=float(denominator),
            hits=counts.hits_K.tolist(),
            tried=counts.tried_K.tolist(),
        )

    def _noise(self, place: str) -> Callable[[Tensor], Tensor] | None:
        """Uniform noise on aux states, relative to each state's root mean square; a function of `place` alone."""
        width = self._training.noise_std
        if width == 0:
            return None
        generator = torch.Generator(self._device)
        generator.manual_seed(int.from_bytes(blake3(place.encode()).digest(7), "big"))
        hidden = self._master.config.hidden_size

        def add(aux_P3H: Tensor) -> Tensor:
            state = aux_P3H.float().unflatten(-1, (3, hidden))
            drawn = torch.rand(state.shape, generator=generator, device=self._device) * 2.0 - 1.0
            size = state.square().mean(-1, keepdim=True).sqrt()
            return (state + width * size * drawn).flatten(-2).to(aux_P3H.dtype)

        return add

    def _end_epoch(self) -> None:
        """Validate, and move the cursor to the next epoch's first step. A stop meanwhile repeats only this."""
        cursor, held = self._cursor, Sums()
        for samples in self._feed.validation_batches():
            self._honour_stop()
            held.add(self._forward(self._feed.load(samples), noise=None, learn=False))
        if held.loss is not None:
            cursor.val_loss = held.loss
            self._draw("val_loss", "val_accuracy", held)
        cursor.last_epoch_loss = cursor.epoch_sums.loss
        cursor.epoch, cursor.group, cursor.epoch_sums = cursor.epoch + 1, 0, Sums()
        cursor.finished = cursor.step == self.total_steps

    def _draw(self, loss: str, accuracy: str, sums: Sums) -> None:
        """A point on the curves. Accuracy of step k: among pairs all of whose earlier steps hit, in verifier ids."""
        if sums.loss is not None:
            self._ctx.metric(loss, sums.loss, self._cursor.step)
        for k, (hits, tried) in enumerate(zip(sums.hits, sums.tried, strict=True)):
            if tried:
                self._ctx.metric(f"{accuracy}/{k}", hits / tried, self._cursor.step)

    def _tell(self, supervised: int) -> None:
        if (rates := self._clock.tick(supervised)) is not None:
            steps_per_s, tokens_per_s = rates
            left = (self.total_steps - self._cursor.step) / steps_per_s
            note = f"{tokens_per_s:.0f} supervised tokens/s, {left:.0f} s left"
            self._ctx.progress(self._cursor.step, self.total_steps, "steps", rate=steps_per_s, note=note)

    def _require_finite(self, sums: Sums, norm: float, group: Sequence[tuple[int, ...]]) -> None:
        if math.isfinite(sums.numerator) and math.isfinite(norm):
            return
        samples = sorted(i for samples in group for i in samples)
        raise Diverged(
            f"step {self._cursor.step} has loss {sums.loss} and gradient norm {norm}; it read samples {samples[:32]}",
            remedy="lower training.lr or training.clip; if it is always the same samples, look at their states",
            step=self._cursor.step,
            samples=samples,
        )

    def _honour_stop(self) -> None:
        if self._ctx.stop.is_set():
            if self._cursor.step:
                self._save()
            self._ctx.check()

    def _save(self) -> None:
        tensors = {f"weight/{name}": w for name, w in self._learning.items()} | self._adam.state()
        self._checkpoints.save(self._cursor.step, tensors, self._cursor.model_dump())
        self._ctx.log(f"checkpoint at step {self._cursor.step}")

    def _resume(self) -> None:
        restored: Restored | None = self._checkpoints.latest()
        if restored is None:
            return
        with torch.no_grad():
            for name, weight in self._learning.items():
                weight.copy_(restored.tensors[f"weight/{name}"])
        self._adam.restore(restored.tensors)
        self._cursor = Cursor.model_validate(restored.marker.cursor)
        self._ctx.log(f"going on from the checkpoint at step {self._cursor.step} of {self.total_steps}")

    def _finished(self) -> Drafter:
        weights = {name: w.detach().cpu() for name, w in self._master.weights.items()}
        return replace(self._master.at("cpu", torch.float32), weights=weights)


class _Clock:
    """Rates since the last report, reported at most twice a second."""

    def __init__(self) -> None:
        self._since, self._steps, self._tokens = time.monotonic(), 0, 0

    def tick(self, tokens: int) -> tuple[float, float] | None:
        """(steps/s, tokens/s) if it is time to report."""
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens
        if (elapsed := time.monotonic() - self._since) < PROGRESS_EVERY_S:
            return None
        rates = self._steps / elapsed, self._tokens / elapsed
        self._since, self._steps, self._tokens = time.monotonic(), 0, 0
        return rates


def _grouped(batches: Sequence[tuple[int, ...]], size: int) -> list[Sequence[tuple[int, ...]]]:
    """Batches in optimizer steps of `size` passes; an epoch's last step may have fewer."""
    return [batches[i : i + size] for i in range(0, len(batches), size)]


def _on_device(drafter: Drafter, device: torch.device) -> Drafter:
    """The master copy: leaves in float32 on `device`, with the same gradients required; the caller's stays as it is."""
    weights = {
        name: w.detach().to(device, torch.float32, copy=True).requires_grad_(w.requires_grad)
        for name, w in drafter.weights.items()
    }
    return replace(drafter.at(device, torch.float32), weights=weights)


def _to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    if device.type == "cpu":
        return batch
    return replace(
        batch,
        input_ids_T=batch.input_ids_T.to(device),
        aux_T3H=batch.aux_T3H.to(device),
        final_FH=batch.final_FH.to(device),
        final_row_T=batch.final_row_T.to(device),
    )
