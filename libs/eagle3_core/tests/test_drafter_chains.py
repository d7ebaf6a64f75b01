"""Which chains train, against the rule spelled out position by position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_core.drafter.chains import LabelRule, plan_chains, valid_steps

masks = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=4)


def trained_tokens(mask: str, steps: int, rule: LabelRule) -> list[set[int]]:
    """For every step, the positions of the tokens that are drafted."""
    valid_TK = valid_steps(np.array([int(c) for c in mask]), np.array([0, len(mask)]), steps, rule)
    return [set((np.flatnonzero(valid_TK[:, k]) + 2 + k).tolist()) for k in range(steps)]


def test_serving_trains_the_tokens_that_a_drafter_would_have_to_propose() -> None:
    # Span 4..7: the verifier itself writes token 4, so 5 is the first that is ever drafted, and 8 never is.
    assert trained_tokens("0000111100", 3, "serving") == [{5, 6, 7}, {6, 7}, {7}]


def test_the_speculators_rule_reads_the_mask_one_token_earlier() -> None:
    assert trained_tokens("0000111100", 3, "speculators") == [{5, 6, 7, 8}] * 3


def test_the_specforge_rule_reads_it_two_tokens_earlier() -> None:
    assert trained_tokens("0000111100", 3, "specforge") == [{6, 7, 8, 9}] * 3


def test_a_span_at_the_very_end_trains_up_to_the_last_token() -> None:
    assert trained_tokens("000111", 2, "serving") == [{4, 5}, {5}]


@pytest.mark.parametrize("mask", ["0", "1", "01", "0100", "10101", "0000"])
def test_a_mask_without_two_tokens_in_a_row_trains_nothing(mask: str) -> None:
    assert not valid_steps(np.array([int(c) for c in mask]), np.array([0, len(mask)]), 3, "serving").any()


@settings(deadline=None)
@given(masks=masks, steps=st.integers(1, 5), rule=st.sampled_from(["serving", "speculators", "specforge"]))
def test_validity_is_the_rule_of_the_design_and_stays_in_one_document(
    masks: list[list[int]], steps: int, rule: LabelRule
) -> None:
    flat, offsets = np.concatenate(masks), np.cumsum([0, *map(len, masks)])

    valid_TK = valid_steps(flat, offsets, steps, rule)

    for s, mask in enumerate(masks):
        for p in range(len(mask)):
            for k in range(steps):
                if rule == "serving":
                    want = all(m < len(mask) and mask[m] for m in range(p + 1, p + 3 + k))
                else:  # the label's state lies in the document, and the mask is set where the rule reads it
                    want = p + 1 + k < len(mask) and mask[p + k + (rule == "speculators")]
                assert valid_TK[offsets[s] + p, k] == want


@settings(deadline=None)
@given(masks=masks, steps=st.integers(1, 4), rule=st.sampled_from(["serving", "speculators", "specforge"]))
def test_a_plan_lists_every_chain_once_with_its_depth_and_the_keys_it_needs(
    masks: list[list[int]], steps: int, rule: LabelRule
) -> None:
    flat, offsets = np.concatenate(masks), np.cumsum([0, *map(len, masks)])

    plan = plan_chains(flat, offsets, steps, rule)

    valid_TK = valid_steps(flat, offsets, steps, rule)
    assert plan.start_M.tolist() == np.flatnonzero(valid_TK.any(1)).tolist()
    assert plan.pairs == valid_TK.sum()
    for chain, start in enumerate(plan.start_M):
        assert plan.depth_M[chain] == 1 + max(k for k in range(steps) if valid_TK[start, k])
    for s in range(len(masks)):
        starts = plan.start_M[plan.row_offsets[s] : plan.row_offsets[s + 1]]
        assert all(offsets[s] <= p < offsets[s + 1] for p in starts)
        assert plan.key_stops[s] == (starts[-1] + 1 if len(starts) else offsets[s])
