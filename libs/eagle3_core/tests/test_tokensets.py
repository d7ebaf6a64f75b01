"""A token set is three arrays and two lists of names; its file says exactly that, always in the same bytes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hostile import damaged, odd_documents, outcome, tensor_files
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from eagle3_core.data.tokensets import TokenSet, TokenSetDamaged

ROWS = [("a", "words", [1, 2, 3], [0, 1, 1]), ("b", "numbers", [4], [0]), ("ü", "words", [5, 6], [1, 0])]

rows = st.lists(
    st.tuples(st.text(max_size=5), st.text(max_size=5), st.lists(st.integers(0, 2**31 - 1), max_size=5)), max_size=5
)


def same(one: TokenSet, other: TokenSet) -> bool:
    arrays = all(
        np.array_equal(getattr(one, k), getattr(other, k)) for k in ("input_ids", "loss_mask", "sample_offsets")
    )
    return arrays and one.ids == other.ids and one.tasks == other.tasks


@given(rows)
def test_what_is_saved_is_what_is_loaded(tmp_path_factory, drawn):
    path = tmp_path_factory.mktemp("set") / "set.safetensors"
    tokens = TokenSet.build((name, task, ids, [i % 2 for i in ids]) for name, task, ids in drawn)

    tokens.save(path)

    assert same(TokenSet.load(path), tokens)


def test_a_sample_is_its_own_tokens_and_mask():
    tokens = TokenSet.build(ROWS)

    ids, mask = tokens.sample(2)

    assert (ids.tolist(), mask.tolist()) == ([5, 6], [1, 0])
    assert (len(tokens), tokens.tokens, tokens.supervised_tokens, tokens.lengths.tolist()) == (3, 6, 3, [3, 1, 2])


def test_slices_put_together_again_are_the_whole():
    tokens = TokenSet.build(ROWS)

    parts = [tokens.slice(0, 1), tokens.slice(1, 1), tokens.slice(1, 3)]

    assert same(TokenSet.concat(parts), tokens)
    assert parts[2].sample(0)[0].tolist() == [4]


def test_no_sets_put_together_are_an_empty_set():
    assert same(TokenSet.concat([]), TokenSet.build([]))


@pytest.mark.parametrize("index", [-1, 3])
def test_a_sample_that_is_not_there_is_an_index_error(index):
    with pytest.raises(IndexError, match="of 3"):
        TokenSet.build(ROWS).sample(index)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 4), (2, 1)])
def test_a_slice_beyond_the_set_is_an_index_error(start, stop):
    with pytest.raises(IndexError, match="of 3"):
        TokenSet.build(ROWS).slice(start, stop)


def test_equal_sets_have_equal_bytes_in_every_process(tmp_path):
    code = (
        "import sys; from pathlib import Path; from eagle3_core.data.tokensets import TokenSet\n"
        f"TokenSet.build({ROWS!r}).save(Path(sys.argv[1]))"
    )
    paths = [tmp_path / name for name in ("one", "other", "third")]

    for path in paths:
        subprocess.run([sys.executable, "-c", code, path], check=True)

    assert len({path.read_bytes() for path in paths}) == 1


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def other_file(path: Path) -> None:
    save_file({"x": np.zeros(2)}, path)


def with_names(text: str):
    def damage(path: Path) -> None:
        save_file(load_file(path), path, metadata={"tokenset": text})

    damage.__name__ = text[:30]
    return damage


def bad_names(path: Path) -> None:
    save_file(load_file(path), path, metadata={"tokenset": '{"schema_version": 1, "ids": [1, 2, 3], "tasks": []}'})


def later_version(path: Path) -> None:
    save_file(load_file(path), path, metadata={"tokenset": '{"schema_version": 9}'})


def with_array(name: str, array: np.ndarray):
    def damage(path: Path) -> None:
        names = '{"schema_version": 1, "ids": ["a", "b", "c"], "tasks": ["t", "t", "t"]}'
        save_file({**load_file(path), name: array}, path, metadata={"tokenset": names})

    damage.__name__ = f"{name}_{array.dtype}_{len(array)}"
    return damage


@pytest.mark.parametrize(
    "damage",
    [
        cut_short,
        emptied,
        other_file,
        bad_names,
        later_version,
        with_array("sample_offsets", np.array([0, 4, 3, 6])),
        with_array("sample_offsets", np.array([0, 1, 2, 7])),
        with_array("sample_offsets", np.array([0, 6])),
        with_array("loss_mask", np.array([0, 1, 2, 0, 0, 0], np.uint8)),
        with_array("loss_mask", np.zeros(5, np.uint8)),
        with_array("input_ids", np.zeros(6, np.int64)),
        with_array("input_ids", np.array([1, 2, -3, 4, 5, 6], np.int32)),
        with_array("input_ids", np.zeros((2, 3), np.int32)),
        with_names('{"schema_version": 1, "ids": {"a": 0, "b": 0, "c": 0}, "tasks": ["t", "t", "t"]}'),
        with_names('{"schema_version": 1, "ids": "abc", "tasks": "ttt"}'),
        with_names('{"schema_version": 1, "ids": ["a", "b", 3], "tasks": ["t", "t", "t"]}'),
        with_names('{"schema_version": 1, "ids": ["a", "b", "\\ud800"], "tasks": ["t", "t", "t"]}'),
        with_names('{"schema_version": 1, "ids": ["a", "b", "c"], "tasks": ["t", "t", "t"], "more": 1}'),
        with_names('{"schema_version": true, "ids": [], "tasks": []}'),
        with_names("[" * 100_000),
        with_names('{"ids":' * 50_000),
        with_names("[1, 2]"),
        with_names(""),
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_file_is_refused_by_its_name(tmp_path, damage):
    path = tmp_path / "set.safetensors"
    TokenSet.build(ROWS).save(path)
    damage(path)

    with pytest.raises(TokenSetDamaged, match=str(path)) as caught:
        TokenSet.load(path)

    assert caught.value.code == "tokens.damaged"
    assert "again" in caught.value.remedy


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "set.safetensors"


@pytest.fixture(scope="module")
def whole(place) -> bytes:
    TokenSet.build(ROWS).save(place)
    return place.read_bytes()


@given(data=st.data())
def test_any_bytes_are_a_set_that_fits_together_or_a_damaged_file(place, whole, data):
    names = ("input_ids", "loss_mask", "sample_offsets")
    place.write_bytes(
        data.draw(damaged(whole) | tensor_files(names, "tokenset") | st.binary(max_size=40) | odd_documents)
    )

    tokens, error = outcome(lambda: TokenSet.load(place))

    if tokens is None:
        assert isinstance(error, TokenSetDamaged)
        assert str(place) in error.detail
        return
    assert sum(len(tokens.sample(i)[0]) for i in range(len(tokens))) == tokens.tokens == len(tokens.loss_mask)
    assert all(isinstance(name, str) for name in (*tokens.ids, *tokens.tasks))
    assert tokens.tokens == 0 or tokens.input_ids.min() >= 0


@pytest.mark.parametrize("ids", [[-1], [1 << 31], [-(1 << 40)]])
def test_a_token_that_is_no_number_of_a_token_is_refused(ids):
    with pytest.raises(TokenSetDamaged):
        TokenSet.build([("a", "t", ids, [0])])


def test_a_missing_file_is_refused_by_its_name(tmp_path):
    with pytest.raises(TokenSetDamaged, match="nowhere"):
        TokenSet.load(tmp_path / "nowhere")
