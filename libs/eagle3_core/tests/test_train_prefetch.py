"""Batches come in order, faults come where their batch would have, and nothing is read far ahead."""

from __future__ import annotations

import threading

import pytest
import torch

from eagle3_core.drafter.step import PackedBatch
from eagle3_core.drafter.testing import random_samples
from eagle3_core.train.feed import Feed, Pass
from eagle3_core.train.prefetch import Prefetch

CPU = torch.device("cpu")
FEED = Feed(random_samples(["00111", "0001111", "0111111"] * 6), steps=3, rule="serving", batch_tokens=16, seed=0)


@pytest.mark.parametrize("workers", [1, 4])
def test_batches_come_in_order_and_an_empty_pass_is_none(workers: int) -> None:
    passes: list[Pass] = [*FEED.batches(0), (), *FEED.batches(1)]

    with Prefetch(FEED.load, passes, CPU, workers) as data:
        taken = [data.take() for _ in passes]

    assert [() if batch is None else batch.samples for batch in taken] == passes
    assert all(batch is None or batch.layout is not None for batch in taken)


def test_a_fault_is_raised_where_its_batch_is_taken() -> None:
    def load(batch: Pass) -> PackedBatch:
        if batch == passes[2]:
            raise ValueError("torn shard")
        return FEED.load(batch)

    passes = FEED.batches(0)
    with Prefetch(load, passes, CPU, 2) as data:
        data.take()
        data.take()
        with pytest.raises(ValueError, match="torn shard"):
            data.take()


def test_no_more_is_read_than_a_window_ahead_and_leaving_early_hangs_nobody() -> None:
    begun: list[Pass] = []
    full = threading.Event()

    def load(batch: Pass) -> PackedBatch:
        begun.append(batch)
        if len(begun) == 5:
            full.set()
        return FEED.load(batch)

    passes = [FEED.batches(0)[0]] * 50
    with Prefetch(load, passes, CPU, 2) as data:
        data.take()
        assert full.wait(60)
        data.take()

    assert len(begun) <= 10
