"""The check that no state is NaN or infinite reads each once, and misses none."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.verifier.base import all_finite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 777, 4095])
def test_one_bad_number_anywhere_is_seen(dtype: torch.dtype, bad: float, place: int) -> None:
    states = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert all_finite(states)

    states.view(-1)[place] = bad

    assert not all_finite(states)


def test_the_largest_numbers_of_a_type_are_numbers_and_nothing_at_all_is_fine() -> None:
    assert all_finite(torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min]))
    assert all_finite(torch.zeros(0, 8))
