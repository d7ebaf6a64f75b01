"""The loop: it learns, it can be killed anywhere without a trace, and it says when it cannot go on."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_core.drafter.model import DraftCache, Drafter
from eagle3_core.drafter.testing import (
    MemorySample,
    MemorySamples,
    random_drafter,
    random_samples,
    random_teacher,
    tiny_config,
    tiny_contract,
)
from eagle3_core.drafter.verifier_parts import Teacher
from eagle3_core.jobs.refusals import Preempted
from eagle3_core.jobs.spec import Training
from eagle3_core.jobs.wire import Progress
from eagle3_core.objects.local import LocalStore
from eagle3_core.shards.format import kept_positions
from eagle3_core.stages.context import StageContext
from eagle3_core.testing import RecordingReporter, stage_context, tiny_job
from eagle3_core.train.checkpoint import Checkpoints
from eagle3_core.train.feed import Feed
from eagle3_core.train.loop import Diverged, Trained, Trainer
from eagle3_core.train.replica import Place

CPU = torch.device("cpu")
MASKS = ["0001111", "00111111", "0111", "00011111", "001111", "0011111111", "00111", "0000111"]
QUICK: dict[str, Any] = {"epochs": 3, "batch_tokens": 20, "lr": 3e-3, "checkpoint_every_steps": 2, "warmup_ratio": 0.1}


class Run:
    """Everything that one training needs, over one store."""

    def __init__(
        self, folder: Path, samples: MemorySamples | None = None, val_ratio: float = 0.0, **settings: Any
    ) -> None:
        self.folder, self.samples, self.val_ratio = folder, samples or random_samples(MASKS), val_ratio
        self.training = Training(**{**QUICK, **settings})
        self.document = tiny_job(folder / "job")
        self.store = LocalStore(folder / "store")
        self.config = tiny_config(self.training.algorithm, steps=self.training.ttt_steps)

    def context(self) -> StageContext:
        return stage_context(self.folder, "train", self.document, store=self.store)

    def feed(self) -> Feed:
        training = self.training
        return Feed(
            self.samples, steps=training.ttt_steps, rule=training.label_rule, batch_tokens=training.batch_tokens,
            seed=training.seed, val_ratio=self.val_ratio,
        )  # fmt: skip

    def trainer(self, ctx: StageContext, drafter: Drafter | None = None, teacher: Teacher | None = None) -> Trainer:
        training, feed = self.training, self.feed()
        checkpoints = Checkpoints(
            self.store, tenant="t", provenance="p" * 64, fence=1, keep=training.keep_checkpoints,
            scratch=ctx.scratch, warn=lambda text: ctx.log(text, "warning"),
        )  # fmt: skip
        drafter = drafter or random_drafter(self.config)
        dtype = torch.bfloat16 if training.dtype == "bfloat16" else torch.float32
        return Trainer(
            ctx, drafter, teacher or random_teacher(self.config), feed, training, checkpoints, Place(CPU, dtype)
        )

    def straight(self) -> Trained:
        return self.trainer(self.context()).run()

    def until_done(self, stop_at: set[int]) -> tuple[Trained, int]:
        """Train with a stop after each of the steps `stop_at`; returns what came out and the number of attempts."""
        for attempt in range(1, 60):
            ctx = self.context()
            trainer = self.trainer(ctx)
            step = trainer._step

            def counted(group, step=step, trainer=trainer, ctx=ctx) -> None:
                step(group)
                if trainer._cursor.step in stop_at:
                    stop_at.discard(trainer._cursor.step)
                    ctx.stop.set()

            trainer._step = counted
            try:
                return trainer.run(), attempt
            except Preempted:
                continue
        raise AssertionError("never finished")


def same(a: Trained, b: Trained) -> bool:
    return (a.drafter.digest(), replace(a, drafter=None)) == (b.drafter.digest(), replace(b, drafter=None))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulation": 2, "noise_std": 0.05, "step_weights": "survival", "expected_length_weight": 4.0},
        {"algorithm": "eagle3", "loss": "lk", "ttt_steps": 2, "scheduler": "linear", "weight_decay": 0.1},
        {"dtype": "bfloat16"},
        {"optimizer": "muon", "weight_decay": 0.1},
    ],
)
def test_a_run_that_is_stopped_at_any_step_ends_with_the_same_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole = Run(tmp_path / "whole", val_ratio=0.2, **settings).straight()

    for case, stops in enumerate([{1}, {2}, {3, 4}, set(range(1, whole.steps + 1))]):
        count = len(stops)
        pieces, attempts = Run(tmp_path / f"cut{case}", val_ratio=0.2, **settings).until_done(stops)
        assert attempts == count + 1 or (attempts == count and whole.steps in range(1, count + 1))
        assert same(pieces, whole)


def test_a_run_that_dies_without_a_word_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    whole, run = Run(tmp_path / "whole").straight(), Run(tmp_path / "killed")
    trainer = run.trainer(run.context())
    step = trainer._step

    def dies(group) -> None:
        if trainer._cursor.step == 5:
            raise KeyboardInterrupt
        step(group)

    trainer._step = dies
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    ctx = run.context()
    again = run.trainer(ctx).run()

    assert same(again, whole)
    assert isinstance(ctx.reporter, RecordingReporter)
    assert any("checkpoint at step 4" in line.text for line in ctx.reporter.lines)


def test_the_same_training_twice_gives_the_same_digest_and_another_seed_another(tmp_path: Path) -> None:
    one, two = Run(tmp_path / "1").straight(), Run(tmp_path / "2").straight()
    other = Run(tmp_path / "3", seed=1).straight()

    assert same(one, two)
    assert other.drafter.digest() != one.drafter.digest()


def test_accumulating_two_passes_is_the_step_of_both_in_one_pass(tmp_path: Path) -> None:
    masks = ["0001111", "0011111"]
    settings: dict[str, Any] = {"epochs": 1, "step_weights": "survival", "expected_length_weight": 1.0}

    apart = Run(tmp_path / "apart", random_samples(masks), batch_tokens=8, accumulation=2, **settings).straight()
    whole = Run(tmp_path / "whole", random_samples(masks), batch_tokens=16, **settings).straight()

    assert apart.steps == whole.steps == 1
    assert apart.loss == pytest.approx(whole.loss, rel=1e-6)
    for name, weight in whole.drafter.weights.items():
        assert torch.allclose(apart.drafter.weights[name], weight, atol=1e-5), name


def test_max_steps_ends_the_run_inside_an_epoch_and_validates(tmp_path: Path) -> None:
    run = Run(tmp_path, val_ratio=0.2, max_steps=5, epochs=9)
    an_epoch = len(run.feed().batches(0))

    trained = run.straight()

    assert an_epoch > 1
    assert (trained.steps, trained.epochs) == (5, -(-5 // an_epoch))
    assert trained.val_loss is not None


def test_what_a_person_sees(tmp_path: Path) -> None:
    run = Run(tmp_path, val_ratio=0.2)
    ctx = run.context()

    trained = run.trainer(ctx).run()

    reporter = ctx.reporter
    assert isinstance(reporter, RecordingReporter)
    names = {m.name for m in reporter.metrics}
    curves = {"loss", "lr", "grad_norm", "accuracy/0", "val_loss", "val_accuracy/0"}
    later = {f"{kind}accuracy/{k}" for kind in ("", "val_") for k in (1, 2)}  # only where an earlier step hit
    later |= {"steps_per_s", "tokens_per_s"}  # only where the run lasts half a second
    assert curves <= names <= curves | later
    assert [m.step for m in reporter.metrics if m.name == "lr"] == list(range(1, trained.steps + 1))
    assert reporter.said[-1] == Progress(done=trained.steps, total=trained.steps, unit="steps")
    assert trained.val_loss == [m.value for m in reporter.metrics if m.name == "val_loss"][-1]


def test_the_pace_in_tokens_is_told_in_words_and_as_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3_core.train.progress.PROGRESS_EVERY_S", 0)
    run = Run(tmp_path)
    ctx = run.context()

    run.trainer(ctx).run()

    assert isinstance(ctx.reporter, RecordingReporter)
    *steps, _end = ctx.reporter.said
    assert steps
    assert all(step.tokens_per_s and "tokens/s" in step.note for step in steps)


def test_a_frozen_head_stays_and_everything_else_moves(tmp_path: Path) -> None:
    run = Run(tmp_path)
    drafter = random_drafter(run.config)
    drafter.weights["lm_head.weight"].requires_grad_(False)

    trained = run.trainer(run.context(), drafter).run().drafter

    moved = {n for n, w in trained.weights.items() if not torch.equal(w, drafter.weights[n])}
    assert moved == drafter.weights.keys() - {"lm_head.weight"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_run_with_step_and_samples(tmp_path: Path, value: float) -> None:
    samples = random_samples(MASKS)
    broken = samples.samples[3].aux.clone()
    broken[0, 0] = value
    poisoned = replace(samples.samples[3], aux=broken)
    run = Run(tmp_path, MemorySamples(samples.contract, (*samples.samples[:3], poisoned, *samples.samples[4:])))

    with pytest.raises(Diverged, match=r"step \d has loss nan .* samples \[.*3.*\]") as caught:
        run.straight()

    assert 3 in caught.value.context["samples"]


def test_noise_changes_training_and_never_validation(tmp_path: Path) -> None:
    quiet = Run(tmp_path / "quiet", val_ratio=0.3, lr=1e-12, epochs=1).straight()
    noisy = Run(tmp_path / "noisy", val_ratio=0.3, lr=1e-12, epochs=1, noise_std=0.5).straight()

    assert noisy.loss != quiet.loss
    assert noisy.val_loss == pytest.approx(quiet.val_loss, rel=1e-6)


VOCAB, HIDDEN = 24, 16


def toy_world() -> tuple[MemorySamples, Teacher, torch.Tensor, torch.Tensor]:
    """A verifier whose next token is a function of the token: x_{n+1} = f(x_n). Its states name the token they stand at."""
    generator = torch.Generator().manual_seed(11)
    follows = torch.randperm(VOCAB, generator=generator)
    code = torch.randn(VOCAB, HIDDEN, generator=generator)
    head = torch.zeros(VOCAB, HIDDEN)
    head[follows] = 8.0 * code / code.norm(dim=1, keepdim=True)
    samples: list[MemorySample] = []
    for first in range(VOCAB):
        ids = [first]
        for _ in range(9):
            ids.append(int(follows[ids[-1]]))
        mask = torch.tensor([0, 0] + [1] * 8, dtype=torch.uint8)
        kept, tokens = kept_positions(mask), torch.tensor(ids, dtype=torch.int32)
        states = code[tokens]
        samples.append(MemorySample(tokens, mask, states.repeat(1, 3), states[kept.long()], kept))
    teacher = Teacher(torch.ones(HIDDEN), head, 1e-5, "pre")
    return MemorySamples(tiny_contract(HIDDEN, VOCAB), tuple(samples)), teacher, follows, code


@pytest.mark.parametrize("algorithm", ["eagle3.1", "eagle3"])
def test_a_drafter_learns_a_toy_language_perfectly_which_no_wrong_shift_could(tmp_path: Path, algorithm: str) -> None:
    samples, teacher, follows, code = toy_world()
    run = Run(tmp_path, samples, algorithm=algorithm, epochs=80, batch_tokens=240, lr=2e-2, checkpoint_every_steps=1000)
    run.config = tiny_config(run.training.algorithm, vocab=VOCAB, draft_vocab=VOCAB)
    ctx = run.context()
    drafter = random_drafter(run.config)

    run_out = run.trainer(ctx, drafter, teacher).run()

    trained, reporter = run_out.drafter, ctx.reporter
    entropy = -(teacher.probabilities(code) * teacher.probabilities(code).log()).sum(-1).mean()
    assert float(entropy) <= run_out.loss <= float(entropy) + 0.1
    assert isinstance(reporter, RecordingReporter)
    last = {m.name: m.value for m in reporter.metrics}
    assert [last[f"accuracy/{k}"] for k in range(3)] == [1.0, 1.0, 1.0]
    for first in range(VOCAB):  # free-running: its own proposals are fed back
        ids = [first, int(follows[first]), int(follows[follows[first]])]
        cache = DraftCache.allocate(trained, 1, 16)
        aux = code[torch.tensor(ids)].repeat(1, 3)[None, :2]
        with torch.no_grad():
            out = trained.layer(torch.tensor([ids[1:]]), trained.combine(aux), torch.tensor([[1, 2]]), cache)[:, -1:]
            for k in range(3):
                token = trained.tokens(trained.logits(out)[:, -1].argmax(-1))
                assert int(token) == int(follows[ids[-1]])
                ids.append(int(token))
                out = trained.layer(token[:, None], out, torch.tensor([[3 + k]]), cache)


def test_the_first_batches_are_read_while_the_weights_are_put_in_place(tmp_path: Path) -> None:
    run = Run(tmp_path)
    trainer = run.trainer(run.context())
    read, load, hold = threading.Event(), trainer._feed.load, trainer._hold

    def told(*batch: Any, **how: Any) -> Any:
        read.set()
        return load(*batch, **how)

    def placed() -> Any:
        assert read.wait(30), "no batch is read before the weights are in place"
        return hold()

    trainer._feed.load, trainer._hold = told, placed

    assert trainer.run().steps
