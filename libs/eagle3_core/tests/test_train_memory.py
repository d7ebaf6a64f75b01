"""Slices of a pass add up to it, and the estimate says how many are needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.model import tensor_shapes
from eagle3_core.drafter.testing import pack, random_drafter, random_samples, random_teacher, tiny_config
from eagle3_core.jobs.spec import Training
from eagle3_core.train.memory import Demand, NoRoom, Rows
from eagle3_core.train.noise import noisy
from eagle3_core.train.replica import Place, Replica
from eagle3_core.train.slices import sliced

MASKS = ["0001111", "00111111", "0111", "1" * 17, "0011011101"]
CPU = torch.device("cpu")


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text("01", min_size=3, max_size=12), min_size=1, max_size=5), st.integers(1, 9))
def test_slices_hold_every_chain_once_with_the_keys_that_it_looks_back_to(masks: list[str], count: int) -> None:
    batch = pack(random_samples(masks, hidden=1), 3, "serving")
    if not len(batch.plan.start_M):
        return

    pieces = sliced(batch, count)

    assert np.concatenate([p.plan.start_M for p in pieces]).tolist() == batch.plan.start_M.tolist()
    assert np.concatenate([p.plan.valid_MK for p in pieces]).tolist() == batch.plan.valid_MK.tolist()
    for piece in pieces:
        document_M = np.searchsorted(batch.offsets, piece.plan.start_M, side="right") - 1
        assert (piece.plan.key_stops[document_M] > piece.plan.start_M).all()
        assert (np.diff(piece.plan.row_offsets) == np.bincount(document_M, minlength=len(masks))).all()


@pytest.mark.parametrize("objective", [Objective(3), Objective(3, "lk", "survival", 0.8, 4.0)])
def test_a_pass_in_slices_has_the_loss_and_the_gradient_of_the_whole(objective: Objective) -> None:
    config, training = tiny_config(), Training()
    drafter, teacher = random_drafter(config), random_teacher(config)
    batch = pack(random_samples(MASKS), 3, "serving")
    demand = Place(CPU, torch.float32).demand(config, training)
    rows = Rows(len(batch.input_ids_T), len(batch.plan.start_M), int(batch.plan.depth_M.sum()))
    tight = Place(CPU, torch.float32, room=demand.peak(rows, slices=4))
    whole = Replica(drafter, teacher, objective, training, Place(CPU, torch.float32))
    cut = Replica(drafter, teacher, objective, training, tight)

    assert len(tight.pieces(batch, demand)) > 1
    sums, again = whole.learn(batch, last=True), cut.learn(batch, last=True)

    assert torch.allclose(again, sums, rtol=1e-6)
    assert torch.equal(again[2:], sums[2:])
    norm, same = whole.update(sums[1], 1e-3), cut.update(again[1], 1e-3)
    assert float(same) == pytest.approx(float(norm), rel=1e-5)
    for name, weight in whole.drafter().weights.items():
        assert torch.allclose(cut.drafter().weights[name], weight, atol=2e-6), name


def demand(**changes: object) -> Demand:
    return replace(Demand(tiny_config(), 2, True), **changes)  # type: ignore[arg-type]


def test_the_count_of_weights_is_the_drafters_own() -> None:
    for algorithm in ("eagle3", "eagle3.1"):
        config = tiny_config(algorithm)  # type: ignore[arg-type]
        sizes = {name: int(np.prod(shape)) for name, shape in tensor_shapes(config).items()}
        assert Demand(config, 2, True).weights == sum(sizes.values())
        assert Demand(config, 2, False).weights == sum(sizes.values()) - sizes["lm_head.weight"]


def test_more_tokens_take_more_memory_and_slices_and_shares_take_less() -> None:
    small, large = Rows.densest(1024, 3), Rows.densest(1 << 20, 3)

    assert demand().peak(small) < demand().peak(large)
    assert demand().peak(large, slices=8) < demand().peak(large, slices=2) < demand().peak(large)
    assert demand(ranks=8, sharded=True).standing() < demand().standing()


def test_a_pass_is_cut_only_where_it_does_not_fit_and_refused_where_no_cut_helps() -> None:
    rows = Rows.densest(1 << 20, 3)
    whole = demand().peak(rows)

    assert demand().slices(rows, None) == demand().slices(rows, whole) == 1
    count = demand().slices(rows, int(whole * 0.8))
    assert count > 1
    assert demand().peak(rows, slices=count) <= whole * 0.8
    with pytest.raises(NoRoom, match="even chain by chain"):
        demand().slices(rows, 1 << 20)


def test_noise_is_a_function_of_seed_epoch_and_sample_alone() -> None:
    samples = random_samples(MASKS)
    together = noisy(pack(samples, 3, "serving"), width=0.1, place="0/2")
    alone = replace(pack(replace(samples, samples=samples.samples[1:2]), 3, "serving"), samples=(1,))

    shaken = noisy(alone, width=0.1, place="0/2").aux_T3H

    start, stop = together.offsets[1:3]
    assert torch.equal(shaken, together.aux_T3H[start:stop])
    assert not torch.equal(shaken, noisy(alone, width=0.1, place="0/3").aux_T3H)
    gap = (shaken - alone.aux_T3H).unflatten(-1, (3, -1)).abs()
    assert (gap <= 0.1 * alone.aux_T3H.unflatten(-1, (3, -1)).square().mean(-1, keepdim=True).sqrt() + 1e-6).all()
    assert noisy(alone, width=0.0, place="0/2") is alone
