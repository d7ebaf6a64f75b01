"""The feed: every sample once an epoch, in an order that only seed and epoch decide."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_core.drafter.testing import MemorySamples, pack, random_samples
from eagle3_core.train.feed import Feed, MissingFinalState, NoSupervision
from eagle3_core.train.memory import BatchTooSmall

MASKS = ["00111", "0001111", "0000", "0111111", "10101", "001111111", "00011"]


def feed(samples: MemorySamples | None = None, **changes) -> Feed:
    asked = {"steps": 3, "rule": "serving", "batch_tokens": 16, "seed": 0, **changes}
    return Feed(random_samples(MASKS) if samples is None else samples, **asked)


def flat(batches: list[tuple[int, ...]]) -> list[int]:
    return [i for batch in batches for i in batch]


def test_an_epoch_holds_every_usable_sample_once_and_says_how_many_it_dropped() -> None:
    fed = feed()

    assert sorted(flat(fed.batches(0))) == [0, 1, 3, 5, 6]
    assert fed.dropped == 2
    assert fed.supervised_tokens == 2 + 3 + 5 + 6 + 1


def test_order_depends_on_seed_and_epoch_alone() -> None:
    masks = ["00111"] * 40

    first, again = feed(random_samples(masks)), feed(random_samples(masks, seed=5))

    assert first.batches(3) == again.batches(3)
    assert first.batches(0) != first.batches(1)
    assert first.batches(0) != feed(random_samples(masks), seed=1).batches(0)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(3, 16), min_size=1, max_size=30), epoch=st.integers(0, 3))
def test_no_batch_is_larger_than_asked_and_none_could_have_taken_its_successor(lengths: list[int], epoch: int) -> None:
    batches = feed(random_samples(["0" + "1" * (n - 1) for n in lengths], hidden=1)).batches(epoch)

    sizes = [sum(lengths[i] for i in batch) for batch in batches]
    assert all(size <= 16 for size in sizes)
    assert all(a + lengths[nxt[0]] > 16 for a, nxt in zip(sizes, batches[1:], strict=False))


def test_a_sample_that_fits_into_no_batch_is_refused_with_both_numbers() -> None:
    with pytest.raises(BatchTooSmall, match=r"9 tokens, training\.batch_tokens is 8"):
        feed(batch_tokens=8)


def test_samples_are_cut_and_what_begins_behind_the_cut_is_dropped() -> None:
    fed = feed(max_seq_len=5)

    batch = fed.load([1, 5])

    assert len(batch.input_ids_T) == 10
    assert fed.supervised_tokens == feed(random_samples([m[:5] for m in MASKS])).supervised_tokens
    assert fed.dropped == 2


@pytest.mark.parametrize("masks", [["0000", "0100"], []])
def test_data_without_supervision_is_an_error_and_not_a_nan(masks: list[str]) -> None:
    with pytest.raises(NoSupervision, match="two supervised tokens"):
        feed(random_samples(masks))


def test_answers_that_end_at_once_are_said_to_be_empty_and_no_fault_of_the_mask() -> None:
    with pytest.raises(NoSupervision, match=r"every answer is empty.*\(2 samples") as refused:
        feed(random_samples(["0001", "00001", "000"]))

    assert "mask" not in str(refused.value.remedy)


@pytest.mark.parametrize(("masks", "cut"), [(["0000", "000"], None), (["0000111"], 4), (["00001", "0000111"], 4)])
def test_answers_that_mask_or_cut_leave_out_are_not_said_to_be_empty(masks: list[str], cut: int | None) -> None:
    with pytest.raises(NoSupervision) as refused:
        feed(random_samples(masks), max_seq_len=cut)

    assert "mask" in str(refused.value.remedy)
    assert "empty" not in str(refused.value)


def test_a_loaded_batch_is_the_samples_end_to_end() -> None:
    samples = random_samples(MASKS)
    order = [3, 0, 5]

    have = feed(samples).load(order)

    want = pack(MemorySamples(samples.contract, tuple(samples.samples[i] for i in order)), 3)
    for name in ("input_ids_T", "aux_T3H", "final_FH", "final_row_T"):
        assert torch.equal(getattr(have, name), getattr(want, name))
    assert have.plan.start_M.tolist() == want.plan.start_M.tolist()
    assert have.samples == (3, 0, 5)


def test_held_out_samples_never_train_and_stay_the_same_over_seeds() -> None:
    samples = random_samples(["00111"] * 200, hidden=1)

    fed, other = feed(samples, val_ratio=0.2), feed(samples, val_ratio=0.2, seed=9)

    assert 20 <= len(fed.held_out) <= 60
    assert fed.held_out == other.held_out
    assert not set(fed.held_out) & set(flat(fed.batches(0)))
    assert sorted(flat([batch for group in fed.validation_groups() for batch in group])) == fed.held_out


def test_one_sample_is_trained_on_even_if_all_would_be_held_out() -> None:
    fed = feed(random_samples(["00111"]), val_ratio=0.999999)

    assert fed.train == [0]
    assert fed.held_out == []


def test_a_shard_that_lacks_a_label_state_is_named() -> None:
    samples = random_samples(["001111"])
    (sample,) = samples.samples
    thin = type(sample)(sample.input_ids, sample.loss_mask, sample.aux, sample.final[:-2], sample.final_index[:-2])

    with pytest.raises(MissingFinalState, match="sample 0 holds no final state at position 4"):
        feed(MemorySamples(samples.contract, (thin,))).load([0])


def test_truncation_inside_a_span_trains_up_to_the_cut() -> None:
    fed = feed(random_samples(["00111111"]), max_seq_len=6)

    plan = fed.load([0]).plan

    assert (plan.start_M[-1] + 2).item() == 5
    assert plan.valid_MK[-1].tolist() == [True, False, False]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(3, 16), min_size=1, max_size=20), ranks=st.integers(1, 5), passes=st.integers(1, 4))
def test_ranks_share_a_step_without_losing_a_sample_and_all_take_as_many_passes(
    lengths: list[int], ranks: int, passes: int
) -> None:
    fed = feed(random_samples(["0" + "1" * (n - 1) for n in lengths], hidden=1))

    for group in fed.groups(0, passes):
        shares = fed.shared(group, ranks)

        assert len(shares) == ranks
        assert len({len(share) for share in shares}) == 1
        assert sorted(i for share in shares for batch in share for i in batch) == sorted(flat(list(group)))
        assert len(shares[0]) == -(-len(group) // ranks)


def test_the_work_of_ranks_differs_by_less_than_the_largest_sample() -> None:
    fed = feed(random_samples(["0" + "1" * n for n in (3, 14, 5, 9, 12, 4, 8, 11, 6, 7)], hidden=1), batch_tokens=200)
    (group,) = fed.groups(0, 1)

    work = [sum(fed._work(i) for batch in share for i in batch) for share in fed.shared(group, 3)]

    assert max(work) - min(work) <= max(fed._work(i) for i in group[0])
    assert fed.shared(group, 1) == [list(group)]
