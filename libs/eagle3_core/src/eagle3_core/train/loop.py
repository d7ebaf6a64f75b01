"""The training loop: the same drafter, bit for bit, whether or not it was interrupted.

Everything random is a pure function of (seed, epoch, sample): the order of samples, their noise. So a checkpoint holds
weights, optimizer state, the cursor and the running sums, and nothing else; going on from it repeats what an
uninterrupted run would have done, on the same number of threads and ranks and the same device.

One optimizer step is `accumulation` forward passes; its loss is one fraction over all of them (`drafter.losses`). With
several ranks the step keeps its samples and the ranks share them (`train.feed`), so the curve is the same up to the
order in which floats are added. The loop never waits for a GPU: what it must know of a step (is the loss a number, does
a rank want to stop) it reads while the next step runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.model import Drafter
from eagle3_core.drafter.step import PackedBatch
from eagle3_core.drafter.verifier_parts import Teacher
from eagle3_core.errors import AerieError
from eagle3_core.jobs.refusals import Preempted
from eagle3_core.jobs.spec import Training
from eagle3_core.stages.context import StageContext
from eagle3_core.train.checkpoint import Checkpoints
from eagle3_core.train.feed import Feed, Group, Pass
from eagle3_core.train.noise import noisy
from eagle3_core.train.optim import learning_rate
from eagle3_core.train.prefetch import Prefetch
from eagle3_core.train.progress import Clock, Cursor, Sums
from eagle3_core.train.readback import Readback
from eagle3_core.train.replica import Place, hold
from eagle3_core.train.saver import Saver
from eagle3_core.train.speed import Speed

CURVE_POINTS = 400
"""Points of a curve over the whole run: more would say nothing that a person can see."""


class Diverged(AerieError):
    """The loss or its gradient is no longer a number."""

    code, status = "training.diverged", 422


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
    speed: dict[str, float] = field(compare=False)
    """Where the time of the last attempt went (`train.speed`)."""


class Trainer:
    """One run of training over one feed, seen from one of its ranks."""

    def __init__(
        self, ctx: StageContext, drafter: Drafter, teacher: Teacher, feed: Feed, training: Training,
        checkpoints: Checkpoints, place: Place,
    ) -> None:  # fmt: skip
        """`drafter` in float32 on the CPU, `place` where the work is done."""
        self._ctx, self._feed, self._training, self._checkpoints = ctx, feed, training, checkpoints
        self._device, self._ranks = place.device, place.ranks
        objective = Objective(
            training.ttt_steps,
            training.loss,
            training.step_weights,
            training.ttt_decay,
            training.expected_length_weight,
        )
        self._hold = partial(hold, drafter, teacher, objective, training, place)
        self._cursor = Cursor()
        epochs = [len(feed.groups(e, training.accumulation)) for e in range(training.epochs)]
        self.total_steps = min(sum(epochs), training.max_steps or sum(epochs))
        self._curve_every = max(1, self.total_steps // CURVE_POINTS)
        self._workers = decode_threads(training.num_workers, place.device)
        self._readback, self._saver = Readback(place.device), Saver(checkpoints, place.device)
        self._speed, self._clock = Speed(place.device), Clock()
        self._rates: tuple[float, float] | None = None
        """Steps and supervised tokens a second, as told last."""
        self._stopping = False

    def run(self) -> Trained:
        """Train to the end, from the newest checkpoint where there is one. Raises Diverged, Preempted."""
        restored = self._newest()
        cursor = self._cursor
        # One window over the whole run: an epoch's end or a validation does not begin with an empty one. It is open before
        # the weights are in place, so the first batches are read meanwhile.
        load = partial(self._feed.load, pinned=self._device.type == "cuda")
        with Prefetch(load, self._ahead(cursor), self._device, self._workers) as self._data:
            self._replica = self._hold()
            if restored is not None:
                self._replica.restore(restored)
            del restored
            self._speed.start()
            while not cursor.finished:
                for group in self._groups(cursor.epoch, cursor.group, cursor.step):
                    self._honour_stop()
                    self._step(group)
                    cursor.group += 1
                    if cursor.step % self._training.checkpoint_every_steps == 0 and cursor.step < self.total_steps:
                        self._save()
                self._end_epoch()
        with self._speed.spend("saving"):
            self._saver.wait()
        self._ctx.progress(self.total_steps, self.total_steps, "steps")
        assert cursor.last_epoch_loss is not None
        return Trained(
            self._replica.drafter(), cursor.step, cursor.epoch, cursor.tokens, cursor.last_epoch_loss, cursor.val_loss,
            self._speed.report(),
        )  # fmt: skip

    def _groups(self, epoch: int, done: int, step: int) -> list[Group]:
        """The steps of `epoch` that are left behind its first `done`, when `step` steps of the run are done."""
        left = self._feed.groups(epoch, self._training.accumulation)[done:]
        return left[: self.total_steps - step]

    def _ahead(self, cursor: Cursor) -> Iterator[Pass]:
        """This rank's passes from `cursor` on to the end of the run, validations included, in the order of `run`."""
        epoch, done, step = cursor.epoch, cursor.group, cursor.step
        while not cursor.finished:
            groups = self._groups(epoch, done, step)
            for group in (*groups, *self._feed.validation_groups(self._ranks.size)):
                yield from self._own(group)
            epoch, done, step = epoch + 1, 0, step + len(groups)
            if step == self.total_steps:
                return

    def _own(self, group: Group) -> Sequence[Pass]:
        return self._feed.shared(group, self._ranks.size)[self._ranks.rank]

    def _take(self) -> PackedBatch | None:
        before = self._data.waited_s
        batch = self._data.take()
        self._speed.waited(self._data.waited_s - before)
        return batch

    def _step(self, group: Group) -> None:
        """One optimizer step over the samples of `group`, which all ranks share."""
        cursor, training = self._cursor, self._training
        passes = self._own(group)
        sums = torch.zeros(2 + 2 * training.ttt_steps, dtype=torch.float64, device=self._device)
        for index in range(len(passes)):
            batch = self._take()
            with self._speed.computing():
                sums += self._replica.learn(self._shaken(batch), last=index == len(passes) - 1)
        rate = learning_rate(
            cursor.step, self.total_steps, peak=training.lr, schedule=training.scheduler,
            warmup_ratio=training.warmup_ratio, min_ratio=training.min_lr_ratio,
        )  # fmt: skip
        with self._speed.computing():
            stop = torch.full((1,), float(self._ctx.stop.is_set()), dtype=torch.float64, device=self._device)
            shared = self._ranks.add_up(torch.cat([sums, stop]))
            norm = self._replica.update(shared[1], rate)
        samples = [i for one in group for i in one]
        step, supervised = cursor.step, self._feed.supervised_in(samples)
        cursor.step, cursor.tokens = step + 1, cursor.tokens + supervised
        self._speed.count(self._feed.tokens_in(samples), supervised)
        self._readback.later(
            torch.cat([shared, norm.reshape(1)]), lambda values: self._after(step, rate, samples, values)
        )
        self._readback.settle(but=1)

    def _after(self, step: int, rate: float, samples: list[int], values: list[float]) -> None:
        """What is done when the numbers of `step` (from 0) have arrived."""
        *shared, stop, norm = values
        sums = Sums.of(shared)
        if not (math.isfinite(sums.numerator) and math.isfinite(norm)):
            raise Diverged(
                f"step {step} has loss {sums.loss} and gradient norm {norm}; it read samples {sorted(samples)[:32]}",
                remedy="lower training.lr or training.clip; if it is always the same samples, look at their states",
                step=step,
                samples=sorted(samples),
            )
        self._stopping = self._stopping or (stop > 0 and self._ranks.size > 1)
        cursor, done = self._cursor, step + 1
        cursor.interval.add(sums)
        cursor.epoch_sums.add(sums)
        self._tell(done, self._feed.supervised_in(samples))
        if done % self._curve_every == 0 or done == self.total_steps:
            self._draw("loss", "accuracy", cursor.interval, done)
            self._ctx.metric("lr", rate, done)
            self._ctx.metric("grad_norm", norm, done)
            if self._rates is not None:
                for name, pace in zip(("steps_per_s", "tokens_per_s"), self._rates, strict=True):
                    self._ctx.metric(name, pace, done)
            cursor.interval = Sums()

    def _shaken(self, batch: PackedBatch | None) -> PackedBatch | None:
        """`batch` with this epoch's noise on its aux states."""
        training = self._training
        if batch is None:
            return None
        return noisy(batch, width=training.noise_std, place=f"{training.seed}/{self._cursor.epoch}")

    def _end_epoch(self) -> None:
        """Validate, and move the cursor to the next epoch's first step. A stop meanwhile repeats only this."""
        self._readback.settle()
        cursor = self._cursor
        with self._speed.spend("validating"):
            held = self._validated()
        if held.loss is not None:
            cursor.val_loss = held.loss
            self._draw("val_loss", "val_accuracy", held, cursor.step)
        cursor.last_epoch_loss = cursor.epoch_sums.loss
        cursor.epoch, cursor.group, cursor.epoch_sums = cursor.epoch + 1, 0, Sums()
        cursor.finished = cursor.step == self.total_steps

    def _validated(self) -> Sums:
        """The sums of the held-out samples."""
        groups = self._feed.validation_groups(self._ranks.size)
        total = torch.zeros(2 + 2 * self._training.ttt_steps, dtype=torch.float64, device=self._device)
        for group in groups:
            self._honour_stop(everywhere=True)
            for _ in self._own(group):
                total += self._replica.judge(self._data.take())
        if not groups:
            return Sums()
        return Sums.of(self._ranks.add_up(total).tolist())

    def _draw(self, loss: str, accuracy: str, sums: Sums, step: int) -> None:
        """A point on the curves. Accuracy of step k: among pairs all of whose earlier steps hit, in verifier ids."""
        if sums.loss is not None:
            self._ctx.metric(loss, sums.loss, step)
        for k, (hits, tried) in enumerate(zip(sums.hits, sums.tried, strict=True)):
            if tried:
                self._ctx.metric(f"{accuracy}/{k}", hits / tried, step)

    def _tell(self, done: int, supervised: int) -> None:
        if (rates := self._clock.tick(supervised)) is not None:
            steps_per_s, tokens_per_s = rates
            note = f"{tokens_per_s:.0f} supervised tokens/s"
            self._ctx.progress(done, self.total_steps, "steps", rate=steps_per_s, tokens_per_s=tokens_per_s, note=note)
            self._rates = rates

    def _honour_stop(self, *, everywhere: bool = False) -> None:
        """Save and raise Preempted once this process was asked to stop; with several ranks, once all know of it.

        Between steps they know by the sums of an earlier step; `everywhere` asks them now.
        """
        stop = self._ctx.stop.is_set() if self._ranks.size == 1 else self._stopping
        if everywhere:
            stop = self._ranks.any(self._ctx.stop.is_set() or stop, self._device)
        if stop:
            if self._cursor.step:
                self._save()
            self._saver.wait()
            self._ranks.wait()
            raise Preempted("asked to stop", remedy="none needed: the unit is queued again")

    def _save(self) -> None:
        """Begin to write a checkpoint of this moment; rank 0 does, and the others lend it what they hold."""
        self._readback.settle()
        step = self._cursor.step
        with self._speed.spend("saving"):
            tensors = self._replica.state()
            if not self._ranks.first:
                for _ in tensors:
                    pass
                return
            self._saver.save(
                step, tensors, self._cursor.model_dump(), lambda: self._ctx.log(f"checkpoint at step {step}")
            )

    def _newest(self) -> Mapping[str, Tensor] | None:
        """Move the cursor to the newest checkpoint; its tensors, which only rank 0 has, or None where there is none."""
        restored = self._checkpoints.latest() if self._ranks.first else None
        cursor = self._ranks.from_first(None if restored is None else restored.marker.cursor)
        if cursor is None:
            return None
        self._cursor = Cursor.model_validate(cursor)
        self._ctx.log(f"going on from the checkpoint at step {self._cursor.step} of {self.total_steps}")
        return {} if restored is None else restored.tensors


def decode_threads(asked: int | None, device: torch.device) -> int:
    """Threads that decode samples: as asked, else as many as keep up with a GPU, and one beside a CPU's own work."""
    return asked or (min(4, os.cpu_count() or 1) if device.type == "cuda" else 1)
