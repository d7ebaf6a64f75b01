"""The draft vocabulary: what is in, how it is written, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from eagle3_core.data.split import held_out
from eagle3_core.data.tokensets import TokenSet
from eagle3_core.data.vocab import Counts, VocabCoverage, choose, estimated_coverage
from eagle3_core.jobs.preflight import VocabSize
from eagle3_core.objects.manifest import UnitWriter, read_manifest
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.vocab import PARTS, VOCAB_FILE, vocab
from eagle3_core.testing import CHATML, RecordingReporter, stage_context, tiny_job, tiny_verifier
from eagle3_core.verifier.identity import inspect

scores = st.lists(st.integers(0, 5), min_size=1, max_size=40)


def tokens_of(d2t: np.ndarray) -> list[int]:
    return (np.arange(len(d2t)) + d2t).tolist()


@settings(deadline=None)
@given(scores=scores, data=st.data())
def test_offsets_name_increasing_tokens_that_t2d_names_too(scores: list[int], data: st.DataObject) -> None:
    always = data.draw(st.sets(st.integers(0, len(scores) - 1), max_size=3))
    size = data.draw(st.none() | st.integers(max(1, len(always)), len(scores)))

    chosen = choose(np.array(scores), size, always)

    tokens = tokens_of(chosen.d2t_Vd)
    assert tokens == sorted(set(tokens)) == np.flatnonzero(chosen.t2d_V).tolist()
    assert chosen.t2d_V.sum() == len(chosen) == len(tokens)
    assert (np.diff(chosen.d2t_Vd) >= 0).all()
    assert always <= set(tokens)


@settings(deadline=None)
@given(scores=scores, data=st.data())
def test_no_token_is_in_before_a_more_frequent_one_and_none_that_was_never_seen(
    scores: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(scores)))

    chosen = choose(np.array(scores), size, ())

    inside, outside = set(tokens_of(chosen.d2t_Vd)), set(range(len(scores)))
    assert all(scores[t] > 0 for t in inside)
    assert len(inside) == min(size, sum(s > 0 for s in scores))
    assert all((-scores[i], i) < (-scores[o], o) for i in inside for o in outside - inside)


def test_all_tokens_are_written_as_zero_offsets() -> None:
    chosen = choose(np.array([0, 3, 0, 1]), None, ())

    assert chosen.d2t_Vd.tolist() == [0, 0, 0, 0]
    assert chosen.t2d_V.all()
    assert chosen.distinct == 2


def test_a_supervised_token_counts_twenty_times() -> None:
    samples = TokenSet.build([("a", "t", [5, 5, 5, 7], [0, 0, 0, 1])])

    counts = Counts.of(samples, 10)

    assert counts.scores_V.tolist() == [0, 0, 0, 0, 0, 3, 0, 20, 0, 0]
    assert tokens_of(choose(counts.scores_V, 1, ()).d2t_Vd) == [7]


@pytest.mark.parametrize(("size", "always", "said"), [(11, set(), "has 10 tokens"), (1, {1, 2}, "alone are 2")])
def test_sizes_that_cannot_be_are_refused(size: int, always: set[int], said: str) -> None:
    with pytest.raises(VocabSize, match=said):
        choose(np.ones(10, dtype=np.int64), size, always)


def test_tokens_beyond_the_verifiers_vocabulary_are_refused() -> None:
    with pytest.raises(VocabSize, match="holds token 12"):
        Counts.of(TokenSet.build([("a", "t", [1, 12], [0, 1])]), 10)


@pytest.mark.parametrize("token", [-1, 10, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_named_wherever_it_lies(token: int) -> None:
    samples = TokenSet.build([("a", "t", [1, 2], [0, 1]), ("b", "t", [3, 4], [1, 1])])
    samples.input_ids[3] = token

    with pytest.raises(VocabSize, match=f"holds token {token}, the verifier's vocabulary goes from 0 to 9"):
        Counts.of(samples, 10)
    assert Counts.of(samples, 10, np.array([0])).all_V.sum() == 2


def test_coverage_is_measured_on_samples_that_were_not_counted() -> None:
    rows = [(str(i), "t", [100 + i, 3, 3, 4], [0, 1, 1, 1]) for i in range(60)]
    counted = [i for i in range(60) if not held_out(i, 0.1)]
    rows = [(n, t, ids if int(n) in counted else [ids[0], 3, 3, 9], m) for n, t, ids, m in rows]

    share, fair = estimated_coverage(TokenSet.build(rows), 200, 60, ())

    assert fair
    assert share == pytest.approx(2 / 3)


def test_one_sample_measures_itself_and_says_so() -> None:
    assert estimated_coverage(TokenSet.build([("a", "t", [1, 2, 2], [0, 1, 1])]), 5, 2, ()) == (1.0, False)


def test_turn_markers_of_the_template_and_every_end_are_always_in(tmp_path: Path) -> None:
    chatml = tiny_verifier(tmp_path / "chatml")
    other = tiny_verifier(tmp_path / "other", chat_template=CHATML.replace("<|im_start|>", "User: "))

    assert inspect(chatml).always_drafted() == {1, 2}
    assert inspect(other).always_drafted() == {2}


def context(folder: Path, rows: list[tuple[str, str, list[int], list[int]]], **changes) -> StageContext:
    document = tiny_job(folder)
    document["vocab"] = {"draft_vocab_size": 8, "min_coverage": 0.5, **changes}
    sources = {"verifier": inspect(folder / "verifier").digest}
    ctx = stage_context(folder, "vocab", document)
    refs = []
    for unit, part in enumerate((rows[: len(rows) // 2], rows[len(rows) // 2 :])):
        path = folder / f"answers-{unit}.safetensors"
        TokenSet.build(part).save(path)
        writer = UnitWriter(
            ctx.store, tenant="t", job_id="j", stage="generate", unit=(unit, 0, 1), unit_key="k", fence=1
        )
        writer.add_file("answers.safetensors", path)
        refs.append(writer.commit({}))
    return stage_context(folder, "vocab", document, inputs={"generate": refs}, store=ctx.store, sources=sources)


ROWS = [(str(i), "t", [10 + i % 3, 20, 21, 2], [0, 1, 1, 1]) for i in range(40)]


def test_the_stage_counts_every_unit_and_clamps_aloud(tmp_path: Path) -> None:
    ctx = context(tmp_path, ROWS)

    commit = vocab(ctx)

    result = commit.output.result
    assert result == {
        "draft_vocab_size": 7, "requested": 8, "distinct_tokens": 7, "coverage": 1.0, "coverage_on": "held_out",
        "clamped": True,
        "warnings": ["vocab.draft_vocab_size 8 is more than the 7 distinct tokens that the data holds: the drafter gets 7"],
    }  # fmt: skip
    files = load_file(ctx.fetch(read_manifest(ctx.store, commit.output.manifest).file(VOCAB_FILE)))
    assert tokens_of(files["d2t"]) == [1, 2, 10, 11, 12, 20, 21]
    assert (files["d2t"].dtype, files["t2d"].dtype, files["t2d"].shape) == (np.int64, np.bool_, (320,))
    assert isinstance(ctx.reporter, RecordingReporter)
    assert [line.text for line in ctx.reporter.lines] == [
        "vocab.draft_vocab_size 8 is more than the 7 distinct tokens that the data holds: the drafter gets 7",
        "7 draft tokens cover 100.0% of the supervised tokens (held_out samples)",
    ]


def test_the_stage_says_what_it_is_at(tmp_path: Path) -> None:
    ctx = context(tmp_path, ROWS)

    vocab(ctx)

    assert isinstance(ctx.reporter, RecordingReporter)
    assert [said.note for said in ctx.reporter.said] == list(PARTS)
    assert [said.done / said.total for said in ctx.reporter.said] == [0, 0.25, 0.5, 0.75]
    assert [(m.name, m.value) for m in ctx.reporter.metrics] == [("coverage", 1.0)]


RARE = [(str(i), "t", [10, 30 + i, 21, 2], [0, 1, 1, 1]) for i in range(40)]
"""Every answer holds a token that no other one holds."""


@pytest.mark.parametrize(
    ("rows", "size", "advice"),
    [(ROWS, 3, "raise vocab.draft_vocab_size, or add training samples"), (RARE, 300, "add training samples")],
)
def test_a_vocabulary_that_leaves_out_one_token_in_twenty_warns_with_what_helps(
    tmp_path: Path, rows: Sequence[tuple], size: int, advice: str
) -> None:
    commit = vocab(context(tmp_path, rows, draft_vocab_size=size, min_coverage=0.1))

    *clamped, warning = commit.output.result["warnings"]
    assert len(clamped) == (size > 100)
    assert warning.endswith(f"of the supervised tokens: every other one ends a chain, so {advice}")


def test_a_vocabulary_that_covers_too_little_ends_the_job_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(VocabCoverage, match=r"2 draft tokens cover 33\.3%.*min_coverage is 50\.0%"):
        vocab(context(tmp_path, ROWS, draft_vocab_size=2))
