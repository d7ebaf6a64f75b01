"""Decoding keeps keys and values in a cache; what it computes is what training scored, whatever the slots held before."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.drafter.losses import Objective, distance
from eagle3_core.drafter.model import DraftCache
from eagle3_core.drafter.step import batch_loss
from eagle3_core.drafter.testing import pack, random_drafter, random_samples, random_teacher, tiny_config


@pytest.mark.parametrize("algorithm", ["eagle3.1", "eagle3"])
def test_decoding_with_a_cache_gives_the_logits_that_training_scores(algorithm) -> None:
    config = tiny_config(algorithm)
    drafter, teacher = random_drafter(config), random_teacher(config)
    samples = random_samples(["0" * 4 + "1" * 7])
    (sample,) = samples.samples
    ids, total = sample.input_ids.long(), len(sample.input_ids)
    final = dict(zip(sample.final_index.tolist(), sample.final, strict=True))
    numerator = torch.zeros(())
    pairs = 0

    with torch.no_grad():
        for p in range(3, total - 2):
            cache = DraftCache.allocate(drafter, 1, total + 4)
            out = drafter.layer(
                ids[None, 1 : p + 2], drafter.combine(sample.aux[None, : p + 1]), torch.arange(1, p + 2)[None], cache
            )[:, -1:]
            for k in range(min(3, total - 2 - p)):
                if k:
                    out = drafter.layer(ids[None, p + 1 + k, None], out, torch.tensor([[p + 1 + k]]), cache)
                target = teacher.probabilities(final[p + 1 + k][None])
                numerator += distance(drafter.logits(out)[0], target, "soft_ce", with_overlap=False)[0].sum()
                pairs += 1

    have, denominator, counts = batch_loss(drafter, teacher, pack(samples, 3), Objective(3))
    assert pairs == pack(samples, 3).plan.pairs
    assert float(have.detach() / denominator) == pytest.approx(float(numerator / pairs), rel=1e-5)
    assert int(counts.tried_K[0]) == total - 2 - 3


def test_a_next_round_overwrites_the_slots_of_rejected_drafts() -> None:
    drafter = random_drafter(tiny_config())
    ids, hidden = torch.randint(0, 40, (1, 6)), torch.randn(1, 6, 16)
    clean = DraftCache.allocate(drafter, 1, 12)
    want = drafter.layer(ids, hidden, torch.arange(1, 7)[None], clean)

    used = DraftCache.allocate(drafter, 1, 12)
    drafter.layer(ids[:, :3], hidden[:, :3], torch.arange(1, 4)[None], used)
    for k in range(3):  # a chain that is rejected
        drafter.layer(torch.randint(0, 40, (1, 1)), torch.randn(1, 1, 16), torch.tensor([[4 + k]]), used)
    have = drafter.layer(ids[:, 3:], hidden[:, 3:], torch.arange(4, 7)[None], used)

    assert torch.allclose(have, want[:, 3:], atol=1e-6)


def test_rows_of_a_batch_at_different_lengths_do_not_see_each_other_or_their_padding() -> None:
    drafter = random_drafter(tiny_config())
    ids, hidden = torch.randint(0, 40, (2, 5)), torch.randn(2, 5, 16)
    cache = DraftCache.allocate(drafter, 2, 12)
    drafter.layer(ids, hidden, torch.arange(1, 6).expand(2, 5), cache)  # row 1 has 3 real pairs, 2 of padding

    new_ids, new_hidden = torch.tensor([[7], [8]]), torch.randn(2, 1, 16)
    have = drafter.layer(new_ids, new_hidden, torch.tensor([[6], [4]]), cache)

    for row, length in ((0, 5), (1, 3)):
        alone = DraftCache.allocate(drafter, 1, 12)
        drafter.layer(ids[row, None, :length], hidden[row, None, :length], torch.arange(1, length + 1)[None], alone)
        want = drafter.layer(new_ids[row, None], new_hidden[row, None], torch.tensor([[length + 1]]), alone)
        assert torch.allclose(have[row], want[0], atol=1e-6)
