"""What children say can always be stored and shown: half surrogate pairs and floods are made harmless on the way in."""

from eagle3_core.jobs.states import Cause
from eagle3_core.jobs.wire import Failure, LogLine, Metric, Progress

HALF = "a\ud800b"


def test_a_nul_that_a_data_set_brings_becomes_a_question_mark():
    assert LogLine(at=0, text="a\0b").text == "a?b"


def test_half_surrogate_pairs_become_question_marks_wherever_a_child_can_put_them():
    failure = Failure(cause=Cause.FAILED, problem={"detail": HALF, HALF: [HALF]})
    said = [
        Progress(done=1, total=2, note=HALF).note,
        LogLine(at=0, text=HALF).text,
        Metric(name=HALF, value=1, step=1).name,
    ]

    assert said == ["a?b"] * 3
    assert failure.problem == {"detail": "a?b", "a?b": ["a?b"]}


def test_a_note_is_a_note_and_not_a_flood():
    assert len(Progress(done=1, total=2, note="x" * 100_000).note) == 500
