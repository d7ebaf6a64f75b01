"""Lines become conversations or are counted with their number and their reason; too many of the latter are refused."""

import gzip
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.data import datasets
from eagle3_core.data.datasets import SAMPLE_LINES, Tally, judge, judge_beginning, mix, read
from eagle3_core.data.rows import (
    DatasetEmpty,
    DatasetFault,
    DatasetFormat,
    DatasetLineTooLong,
    DatasetMissing,
    DatasetNoAssistant,
    DatasetNotJsonl,
    DatasetRoles,
    DatasetUnread,
)
from eagle3_core.jobs.spec import DatasetSpec

ASK = {"role": "user", "content": "why?"}
ANSWER = {"role": "assistant", "content": "because"}
RULE = {"role": "system", "content": "be brief"}


def file_of(folder, *lines, name="set.jsonl"):
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def spec(**fields) -> DatasetSpec:
    return DatasetSpec(uri="x", **fields)


def conversations(path, *, answers_needed=False, **fields):
    tally = Tally()
    return list(read(path, spec(**fields), tally, answers_needed=answers_needed)), tally


def probe(path, spec, limit, *, answers_needed, pointer=None) -> Tally:
    """A look at the beginning of a file, and the judgement about it."""
    tally = Tally()
    for _ in read(path, spec, tally, answers_needed=answers_needed, pointer=pointer, beginning=True):
        pass
    judge_beginning(path, tally, limit, pointer=pointer)
    return tally


def refused(path, kind, *, limit=0.0, answers_needed=False, **fields) -> DatasetFault:
    with pytest.raises(kind) as caught:
        probe(path, spec(**fields), limit, answers_needed=answers_needed, pointer="/datasets/0/uri")
    assert type(caught.value) is kind
    assert caught.value.pointer == "/datasets/0/uri"
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    ("line", "roles"),
    [
        ({"messages": [RULE, ASK, ANSWER]}, ["system", "user", "assistant"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "why?"}]}]}, ["user"]),
        (
            {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so"}]},
            ["user", "assistant"],
        ),
        ({"conversations": [ASK, ANSWER]}, ["user", "assistant"]),
        ({"instruction": "why?", "input": "", "output": "so"}, ["user", "assistant"]),
        ({"instruction": "why?", "output": ""}, ["user"]),
        ({"prompt": "why?"}, ["user"]),
        ({"question": "why?", "answer": "so"}, ["user"]),
        ({"turns": ["why?", "and then?"], "category": "writing"}, ["user"]),
    ],
)
def test_every_shape_that_people_bring_is_read_unasked(tmp_path, line, roles):
    (found,), tally = conversations(file_of(tmp_path, line))

    assert [m["role"] for m in found.messages] == roles
    assert all(isinstance(m["content"], str) for m in found.messages)
    assert found.messages[roles.index("user")]["content"] == "why?"
    assert (tally.lines, tally.good, tally.bad) == (1, 1, 0)


def test_alpacas_input_follows_its_instruction(tmp_path):
    (found,), _ = conversations(file_of(tmp_path, {"instruction": "Add.", "input": "1 2"}))

    assert found.messages[0]["content"] == "Add.\n\n1 2"


def test_names_and_tasks_are_kept_or_made_from_file_and_line(tmp_path):
    lines = (
        {"id": 7, "task": "maths", "prompt": "a"},
        "",
        {"question_id": "q", "category": "c", "prompt": "b"},
        {"prompt": "d"},
    )

    found, _ = conversations(file_of(tmp_path, *lines, name="chats.v1.jsonl"))

    assert [(c.id, c.task) for c in found] == [("7", "maths"), ("q", "c"), ("chats-4", "chats")]


def test_a_limit_takes_the_first_usable_lines(tmp_path):
    path = file_of(tmp_path, "{", *({"prompt": str(i)} for i in range(5)))

    found, _ = conversations(path, max_samples=2)

    assert [c.messages[0]["content"] for c in found] == ["0", "1"]


def test_a_gzip_file_reads_like_the_plain_one(tmp_path):
    (tmp_path / "set.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n'))

    found, _ = conversations(tmp_path / "set.jsonl.gz")

    assert [(c.id, c.messages[0]["content"]) for c in found] == [("set-1", "a")]


def test_a_byte_order_mark_and_windows_line_ends_are_no_fault(tmp_path):
    (tmp_path / "w.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')

    found, tally = conversations(tmp_path / "w.jsonl")

    assert (len(found), tally.bad) == (2, 0)


@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        ("{", DatasetNotJsonl, "not JSON"),
        ("[1]", DatasetNotJsonl, "a list where an object belongs"),
        ("[" * 100_000, DatasetNotJsonl, "nested too deeply"),
        ('{"prompt": ' + "9" * 5000 + "}", DatasetNotJsonl, "not JSON"),
        ({"text": "a"}, DatasetFormat, "fit no known format"),
        ({"prompt": 3}, DatasetFormat, "a number where text belongs"),
        ('{"prompt": "\\ud800"}', DatasetFormat, "surrogate"),
        ({"messages": "hello"}, DatasetFormat, "no list"),
        ({"messages": [{"role": "user"}]}, DatasetFormat, "without 'role' and 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, DatasetFormat, "other parts than text"),
        ({"messages": [{"role": "user", "content": "  "}]}, DatasetFormat, "an empty turn"),
        ({"messages": []}, DatasetRoles, "no turn of a user"),
        ({"messages": [RULE]}, DatasetRoles, "no turn of a user"),
        ({"messages": [ANSWER]}, DatasetRoles, "turn 1 is the assistant's"),
        ({"messages": [ASK, ASK]}, DatasetRoles, "turn 2 is the user's"),
        ({"messages": [ASK, RULE]}, DatasetRoles, "turn 2 is the system's"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, DatasetRoles, "unknown role 'wizard'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, DatasetRoles, "unknown role"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, DatasetRoles, "unknown role 'alien'"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": [{}]}]}, DatasetUnread, "a turn with 'tool_calls'"),
        ({"messages": [ASK, {**ANSWER, "content": None, "tool_calls": [{}]}]}, DatasetUnread, "'tool_calls'"),
        ({"messages": [ASK, ANSWER], "tools": [{}]}, DatasetUnread, "'tools' that the prompt would leave out"),
        ({"conversations": [{"from": "human", "value": "a"}], "system": "Be brief."}, DatasetUnread, "'system' beside"),
        ({"system_prompt": "Be brief.", "question": "a"}, DatasetUnread, "'system_prompt' beside the turns"),
        ({"instruction": "a", "history": [["b", "c"]]}, DatasetUnread, "'history'"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_with_its_reason(tmp_path, line, kind, says):
    error = refused(file_of(tmp_path, line), kind)

    assert says in error.detail
    assert "line 1: " in error.detail


def test_fields_beside_the_turns_that_say_nothing_are_no_fault(tmp_path):
    empty = {"tools": [], "functions": None, "system": "", "history": []}
    turns = [RULE, ASK, {**ANSWER, "tool_calls": None, "function_call": {}}]
    path = file_of(tmp_path, {**empty, "messages": turns}, {"messages": turns, "system": RULE["content"]})

    found, tally = conversations(path)

    assert (len(found), tally.bad) == (2, 0)


def test_thoughts_apart_from_an_answer_are_a_fault_where_that_answer_is_trained(tmp_path):
    path = file_of(tmp_path, {"messages": [ASK, {**ANSWER, "reasoning_content": "Let me see."}]})

    assert conversations(path)[1].bad == 0
    assert "a turn with 'reasoning_content'" in refused(path, DatasetUnread, answers_needed=True).detail


def test_a_line_that_is_too_long_is_skipped_and_the_next_one_read(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "MAX_LINE_BYTES", 64)
    path = file_of(tmp_path, {"prompt": "x" * 500}, {"prompt": "short"})

    found, tally = conversations(path)

    assert [c.messages[0]["content"] for c in found] == ["short"]
    assert tally.kinds == {DatasetLineTooLong: 1}


def test_a_line_that_is_too_long_is_named_by_file_and_number(tmp_path):
    path = file_of(tmp_path, {"prompt": "short"}, {"prompt": "x" * (4 << 20)})

    error = refused(path, DatasetLineTooLong)

    assert str(path) in error.detail
    assert "line 2: longer than 4194304 bytes" in error.detail


def test_a_line_without_end_is_not_read_to_its_end(tmp_path):
    with (tmp_path / "endless.jsonl").open("wb") as file:
        file.truncate(1 << 40)

    assert "line 1: longer than" in refused(tmp_path / "endless.jsonl", DatasetLineTooLong).detail


def test_blank_lines_without_end_are_not_read_to_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "SAMPLE_BYTES", 1000)
    (tmp_path / "blank.jsonl").write_text("\n" * 2000 + '{"prompt": "a"}\n')

    assert "in its first 1000 bytes" in refused(tmp_path / "blank.jsonl", DatasetEmpty, limit=1.0).detail


def test_a_file_that_is_too_long_to_count_has_the_benefit_of_the_doubt(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "COUNTED_BYTES", 1000)
    path = file_of(tmp_path, *["{"] * 100, *({"prompt": str(i)} for i in range(2 * SAMPLE_LINES)))

    assert probe(path, spec(), 0.01, answers_needed=False).bad == 100
    refused(path, DatasetNotJsonl, limit=0.0)


def test_a_conversation_of_thousands_of_turns_is_refused(tmp_path):
    turns = [ASK, ANSWER] * 500 + [ASK]

    assert "1001 turns" in refused(file_of(tmp_path, {"messages": turns}), DatasetFormat).detail


def test_a_file_that_is_not_utf8_is_not_jsonl(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "café"}\n'.encode("latin-1"))

    assert "not UTF-8" in refused(tmp_path / "latin.jsonl", DatasetNotJsonl).detail


def test_a_missing_file_is_named(tmp_path):
    assert "nowhere" in refused(tmp_path / "nowhere", DatasetMissing).detail


def test_a_folder_and_a_pipe_are_no_data_sets(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    assert "no regular file" in refused(tmp_path, DatasetMissing).detail
    assert "no regular file" in refused(tmp_path / "pipe", DatasetMissing).detail


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path, text):
    (tmp_path / "empty.jsonl").write_text(text)

    refused(tmp_path / "empty.jsonl", DatasetEmpty, limit=1.0)


def test_a_file_that_is_no_json_lines_names_its_first_line(tmp_path):
    path = tmp_path / "array.json"
    path.write_text(json.dumps([{"prompt": "a"}], indent=2))

    error = refused(path, DatasetNotJsonl, limit=0.5)

    assert "line 1: " in error.detail
    assert "jq" in error.remedy


def test_conversations_without_any_answer_are_refused_where_nobody_will_answer(tmp_path):
    path = file_of(tmp_path, {"messages": [ASK]}, {"messages": [RULE, ASK]})

    error = refused(path, DatasetNoAssistant, answers_needed=True, format="messages", limit=0.5)

    assert "regenerate" in error.remedy
    assert probe(path, spec(), 0.0, answers_needed=False).good == 2


def test_a_stated_format_is_not_second_guessed(tmp_path):
    refused(file_of(tmp_path, {"messages": [ASK]}), DatasetFormat, format="alpaca")


def test_few_bad_lines_are_tolerated_and_counted(tmp_path):
    path = file_of(tmp_path, "{", *({"prompt": str(i)} for i in range(9)))

    tally = probe(path, spec(), 0.1, answers_needed=False)

    assert (tally.bad, tally.good) == (1, 9)
    assert "10.00%" not in refused(path, DatasetNotJsonl, limit=0.09).detail


def test_bad_lines_at_the_beginning_of_a_long_file_are_weighed_against_all_of_it(tmp_path):
    good = [{"prompt": str(i)} for i in range(20 * SAMPLE_LINES)]
    path = file_of(tmp_path, *["{"] * 100, *good)

    assert probe(path, spec(), 0.01, answers_needed=False).bad == 100
    refused(path, DatasetNotJsonl, limit=0.001)


def test_a_judgement_names_the_most_frequent_fault(tmp_path):
    tally = Tally(lines=4, good=1)
    tally.add(1, DatasetRoles, "unknown role")
    tally.add(2, DatasetNotJsonl, "not JSON")
    tally.add(3, DatasetNotJsonl, "not JSON")

    with pytest.raises(DatasetNotJsonl, match="3 of 4 lines"):
        judge(tmp_path, tally, 0.5)


def test_reasons_that_the_data_makes_up_do_not_fill_the_memory():
    tally = Tally()

    for i in range(1000):
        tally.add(i, DatasetRoles, f"unknown role {i}")

    assert len(tally.reasons) <= 21
    assert tally.reasons.total() == tally.bad == 1000


def test_a_compressed_bomb_is_refused_before_it_unfolds(tmp_path, monkeypatch):
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"{}\n" * 2_000_000))
    monkeypatch.setattr(datasets, "MIN_UNPACKED_BYTES", 0)

    assert "unpacks to more than" in refused(tmp_path / "bomb.gz", DatasetFormat).detail


def test_a_truncated_gzip_file_is_refused(tmp_path):
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 1000)[:-9])

    assert "damaged gzip" in refused(tmp_path / "cut.gz", DatasetFormat).detail


counts = st.lists(st.tuples(st.integers(0, 50), st.floats(1e-3, 1e3)), min_size=1, max_size=5)


@given(counts, st.one_of(st.none(), st.integers(1, 300)), st.integers(0, 9))
def test_a_mix_takes_what_was_asked_and_never_a_row_twice(drawn, limit, seed):
    sizes, weights = [n for n, _ in drawn], [w for _, w in drawn]

    rows = mix(sizes, weights, limit, seed)

    assert sum(map(len, rows)) == min(sum(sizes), limit if limit is not None else sum(sizes))
    for chosen, size in zip(rows, sizes, strict=True):
        assert list(chosen) == sorted(set(chosen.tolist()))
        assert all(0 <= row < size for row in chosen)
    assert all((a == b).all() for a, b in zip(rows, mix(sizes, weights, limit, seed), strict=True))


def test_sources_share_in_the_ratio_of_their_weights():
    assert [len(rows) for rows in mix([1000, 1000], [3.0, 1.0], 100)] == [75, 25]


def test_what_a_small_source_cannot_fill_goes_to_the_others():
    assert [len(rows) for rows in mix([10, 1000, 1000], [2.0, 1.0, 1.0], 100)] == [10, 45, 45]


def test_another_seed_draws_other_rows():
    assert mix([1000], [1.0], 10, 0)[0].tolist() != mix([1000], [1.0], 10, 1)[0].tolist()
