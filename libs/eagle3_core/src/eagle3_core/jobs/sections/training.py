"""How the drafter is trained. Every default was measured or is cited."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from eagle3_core.jobs.sections.base import Positive, Section, Share, Threads, inconsistent


class Training(Section):
    """How the drafter is trained. Defaults: eagle3.1, trained head, soft cross-entropy, equal step weights."""

    algorithm: Literal["eagle3.1", "eagle3"] = "eagle3.1"
    """`eagle3.1` norms each aux state before `fc` and feeds back normed states (+.24 AL measured at 989k tokens)."""

    init: Literal["random", "verifier_layer"] = "random"
    """Start of the drafter's layer: random, or a copy of the verifier's last layer (Llama-shaped verifiers)."""

    epochs: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Passes over the training samples, unless `max_steps` ends the run earlier."""

    max_steps: Positive | None = None
    """Optimizer steps after which training ends."""

    lr: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1e-4
    """Peak learning rate of AdamW. 5e-5 for hidden sizes from 7,168 on (gradient outliers at 1e-4)."""

    scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    """Course of the learning rate after the warm-up."""

    min_lr_ratio: Share = 0.1
    """Learning rate at the end, as a share of the peak (not for `constant`): 0.1 as published EAGLE-3 recipes with a cosine."""

    warmup_ratio: Share = 0.03
    """Share of the steps in which the learning rate rises from 0."""

    clip: Annotated[FiniteFloat, Field(gt=0, le=1e6)] = 1.0
    """Largest gradient norm (L2, all parameters)."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: the matrices, all but the head, by Muon, the rest by AdamW, both at `lr`. Measured on a 135M verifier: +.20 and
    +.07 accepted tokens a verify call at the same steps (docs/performance.md); a step of it costs more, so raise
    `batch_tokens` or `accumulation` with it. Not with `sharding: fsdp2`."""

    betas: tuple[Annotated[FiniteFloat, Field(ge=0, lt=1)], Annotated[FiniteFloat, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's decay rates; Muon's own momentum is fixed."""

    weight_decay: Annotated[FiniteFloat, Field(ge=0, le=10)] = 0.0
    """AdamW's decoupled weight decay."""

    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 3
    """Steps of the training-time test. Train at least as deep as you serve; cost grows with it."""

    step_weights: Literal["equal", "decay", "survival"] = "equal"
    """Weight of step k: 1, `ttt_decay`^k, or the running chance that the chain is still alive; normalised to sum 1."""

    ttt_decay: Annotated[FiniteFloat, Field(gt=0, le=1)] = 0.8
    """Factor of `step_weights: decay`."""

    loss: Literal["soft_ce", "kl", "tv", "lk"] = "soft_ce"
    """Distance between the verifier's and the drafter's distribution over the draft vocabulary."""

    expected_length_weight: Annotated[FiniteFloat, Field(ge=0, le=1000)] = 0.0
    """Weight of (K - expected accepted tokens) beside the loss (+.022 AL measured with 4)."""

    label_rule: Literal["serving", "speculators", "specforge"] = "serving"
    """`serving` trains exactly the chains that serving can run; the others reproduce those libraries, for parity."""

    train_lm_head: bool = True
    """Train the drafter's own output head (-.018 AL measured when frozen)."""

    noise_std: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    """Half-width of uniform noise added to the aux states, relative to their root mean square."""

    max_seq_len: Annotated[int, Field(ge=8, le=1048576)] | None = None
    """Longest sample in training; may only be smaller than `data.max_seq_len`."""

    batch_tokens: Annotated[int, Field(ge=8, le=1 << 30)] = 8192
    """Tokens (prompts included) packed into one forward pass. Several GPUs share a step's samples by their cost, and then
    a pass may hold some more."""

    accumulation: Annotated[int, Field(ge=1, le=1024)] = 1
    """Forward passes per optimizer step."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the products; master weights and optimizer states are float32. `auto`: bfloat16 on GPUs."""

    checkpoint_every_steps: Positive = 500
    """Optimizer steps between checkpoints; what a death costs at most."""

    keep_checkpoints: Positive = 2
    """Newest checkpoints kept."""

    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Seed of initial weights, order and noise."""

    threads: Threads | None = None
    """CPU threads of the training process; null = all cores. Part of what makes a digest reproducible."""

    num_workers: Annotated[int, Field(ge=1, le=64)] | None = None
    """Threads that read and decode samples beside the compute; null = 4 beside a GPU, 1 on a CPU. Changes no result."""

    memory_gib: Annotated[FiniteFloat, Field(gt=0, le=1 << 20)] | None = None
    """Memory of a GPU to plan with; null = 92 % of what it has. A pass that needs more is computed in slices of its
    chains, each of which computes the keys again: slower, as exact. On a CPU there is no limit unless one is named."""

    gpus: Annotated[int, Field(ge=1, le=64)] | None = None
    """GPUs of one machine that train together, under torchrun; null = one. A step's samples stay the same and are split,
    so raise `accumulation` with it to keep every GPU busy. A machine with fewer trains on those it has, and says so."""

    sharding: Literal["ddp", "fsdp2"] = "ddp"
    """With several GPUs: `ddp` keeps weights and optimizer on each, `fsdp2` a share of them (12 bytes a weight less)."""

    @model_validator(mode="after")
    def _muon_sees_whole_matrices(self) -> Training:
        if self.optimizer == "muon" and self.sharding == "fsdp2":
            raise inconsistent(
                "training.optimizer muon needs whole matrices on each GPU, and training.sharding fsdp2 splits them",
                "sharding",
                remedy="set training.sharding to ddp, or training.optimizer to adamw",
            )
        return self
