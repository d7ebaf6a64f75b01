"""Keys name their owner, whoever wrote them: what is made can be taken apart, and nothing else passes for ours."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.jobs.graph import StageName
from eagle3_core.objects.keys import HOUSE_PREFIX, Attempt, Training, foreign, owner_of
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import UnitWriter, read_manifest
from eagle3_core.objects.protocol import checked_key

STAGES = st.sampled_from(get_args(StageName))
NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True)
NUMBER = st.integers(0, 10**9)


@given(tenant=NAME, stage=STAGES, job=NAME, unit=NUMBER, fence=NUMBER, name=NAME)
def test_every_key_of_an_attempt_names_the_attempt(tenant: str, stage: str, job: str, unit: int, fence: int, name: str):
    attempt = Attempt(tenant, stage, job, unit, fence)
    key = checked_key(f"{attempt.prefix}0011aabb-{name}")

    assert owner_of(key) == attempt
    assert foreign([key], attempt) == []
    assert foreign([key], Attempt(tenant, stage, job, unit, fence + 1)) == [key]


@given(one=st.tuples(NAME, STAGES, NAME, NUMBER, NUMBER), two=st.tuples(NAME, STAGES, NAME, NUMBER, NUMBER))
def test_no_attempts_keys_begin_with_another_ones_prefix(
    one: tuple[str, str, str, int, int], two: tuple[str, str, str, int, int]
):
    assert one == two or not Attempt(*one).prefix.startswith(Attempt(*two).prefix)


@given(tenant=NAME, unit_key=NAME, step=NUMBER)
def test_every_checkpoint_names_its_training(tenant: str, unit_key: str, step: int):
    training = Training(tenant, unit_key)

    assert owner_of(checked_key(f"{training.prefix}{step:08d}-000001-complete.json")) == training


@given(st.lists(st.text("abc/.-0123456789_", max_size=12), max_size=6).map("/".join))
def test_what_is_not_ours_has_no_owner(key: str):
    owner = owner_of(key)

    assert owner is None or key.startswith(owner.prefix) or (isinstance(owner, Attempt) and key.count("/") == 4)


def test_notes_of_the_house_and_other_peoples_files_have_no_owner():
    for key in (
        f"{HOUSE_PREFIX}probe/1",
        "readme.txt",
        "t/extract/job/00000/no-fence",
        "t/other/job/0/1-a",
        "t/extract/j/x/1-a",
    ):
        assert owner_of(key) is None


def test_what_a_writer_stores_belongs_to_its_attempt(tmp_path: Path):
    store = LocalStore(tmp_path)
    writer = UnitWriter(store, tenant="t", job_id="job_1", stage="extract", unit=(4, 8, 10), unit_key="k", fence=7)
    writer.add_bytes("sglang/config.json", b"{}")
    ref = writer.commit({})

    owners = {owner_of(found.key) for found in store.list("")}

    assert owners == {Attempt("t", "extract", "job_1", 4, 7)}
    assert foreign([e.key for e in read_manifest(store, ref).files], Attempt("t", "extract", "job_1", 4, 7)) == []
