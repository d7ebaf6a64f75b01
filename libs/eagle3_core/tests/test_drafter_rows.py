"""Where the rows lie, against the same thing spelled out chain by chain."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_core.drafter.chains import plan_chains
from eagle3_core.drafter.rows import Tables, lay_out

masks = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(masks=masks, steps=st.integers(1, 4), rule=st.sampled_from(["serving", "speculators", "specforge"]))
def test_every_pair_and_every_learning_row_points_where_its_chain_says(masks, steps, rule) -> None:
    flat, offsets = np.concatenate(masks), np.cumsum([0, *map(len, masks)])
    plan = plan_chains(flat, offsets, steps, rule)

    layout = lay_out(plan, offsets)

    host = layout.host
    order = np.argsort(-plan.depth_M, kind="stable")
    pairs = [(m, k) for k in range(steps) for m in range(len(order)) if plan.depth_M[order[m]] > k]
    assert layout.pairs == len(pairs)
    learning = []
    for row, (m, k) in enumerate(pairs):
        p = plan.start_M[order[m]]
        document = int(np.searchsorted(offsets, p, side="right")) - 1
        assert layout.offsets[k] + m == row
        assert host["position_J"][host["start_P"][row]] == p
        assert host["position_J"][host["first_P"][row]] == offsets[document]
        assert host["position_J"][host["token_P"][row]] == p + k
        assert host["rotation_P"][row] == p - offsets[document] + 1 + k < layout.reach
        assert host["token_E"][host["query_P"][row]] == host["token_P"][row]
        if plan.valid_MK[order[m], k]:
            text = p + k + 2 if p + k + 2 < offsets[document + 1] else -1
            learning.append((p + k + 1, row, m * steps + k, text))
    have = zip(host["position_U"][host["label_R"]], host["pair_R"], host["entry_R"], host["text_R"], strict=True)
    assert sorted(have) == sorted(learning)
    assert layout.learning == len(learning) == plan.pairs
    assert (np.diff(host["label_R"]) >= 0).all()


def test_pieces_of_learning_rows_hold_whole_labels_and_leave_none_out() -> None:
    layout = lay_out(plan_chains(np.array([0] + [1] * 30), np.array([0, 31]), 4, "speculators"), np.array([0, 31]))

    pieces = layout.label_chunks(7)

    assert [rows.start for _, rows in pieces[1:]] == [rows.stop for _, rows in pieces[:-1]]
    assert (pieces[0][1].start, pieces[-1][1].stop) == (0, layout.learning)
    for labels, rows in pieces:
        assert rows.stop - rows.start <= 7
        assert set(layout.host["label_R"][rows]) == set(range(labels.start, labels.stop))
    assert all(a.stop == b.start for (a, _), (b, _) in pairwise(pieces))


def test_a_batch_without_chains_has_no_rows() -> None:
    layout = lay_out(plan_chains(np.zeros(5), np.array([0, 2, 5]), 3, "serving"), np.array([0, 2, 5]))

    assert (layout.pairs, layout.keys, layout.learning) == (0, 0, 0)


def test_tables_are_views_of_one_upload() -> None:
    layout = lay_out(plan_chains(np.ones(9), np.array([0, 9]), 2, "serving"), np.array([0, 9]))

    tables = Tables(layout, torch.device("cpu"))

    assert tables["start_P"].tolist() == layout.host["start_P"].tolist()
    assert tables["start_P"].untyped_storage().data_ptr() == tables["label_R"].untyped_storage().data_ptr()
