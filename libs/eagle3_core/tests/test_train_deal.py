"""Work dealt to hands: nobody is left out, nothing is dealt twice, and hands end about even."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.train.deal import WORTH, dealt

WORKS = st.lists(st.floats(1.0, 100.0), max_size=24)


@given(WORKS, st.integers(1, 6))
def test_every_sample_is_dealt_once_in_its_order_and_no_hand_is_more_than_one_sample_too_heavy(
    works: list[float], hands: int
) -> None:
    lists = dealt(range(len(works)), hands, works.__getitem__)

    assert sorted(i for hand in lists for i in hand) == list(range(len(works)))
    assert all(hand == sorted(hand) for hand in lists)
    heaviest = max(sum(works[i] for i in hand) for hand in lists)
    assert heaviest <= sum(works) / hands + max(works, default=0.0) + 1e-6


@given(st.lists(st.floats(1.0, 50.0), max_size=14), st.integers(2, 4))
def test_no_exchange_of_one_sample_with_the_lightest_hand_would_still_pay(works: list[float], hands: int) -> None:
    lists = dealt(range(len(works)), hands, works.__getitem__)

    loads = [sum(works[i] for i in hand) for hand in lists]
    heavy, light = loads.index(max(loads)), loads.index(min(loads))
    for give, take in product(lists[heavy], [None, *lists[light]]):
        moved = works[give] - (0.0 if take is None else works[take])
        assert max(loads[heavy] - moved, loads[light] + moved) >= loads[heavy] * (1 - 2 * WORTH) - 1e-9


def test_a_step_of_ten_chats_that_the_heaviest_first_leaves_uneven_is_dealt_evenly() -> None:
    works = [6.0, 12.3, 10.8, 14.0, 14.5, 11.9, 12.7, 10.9, 10.7, 14.0]

    lists = dealt(range(10), 2, works.__getitem__)

    loads = [sum(works[i] for i in hand) for hand in lists]
    assert max(loads) / (sum(loads) / 2) < 1.005  # 1.037 by the heaviest first


def test_a_hand_may_stay_empty() -> None:
    assert dealt([7], 3, lambda _: 1.0) == [[7], [], []]
