"""A few runs of the chaos suite (`make chaos` has as many as one likes): real Postgres, Redis and S3, hit by seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.cluster import running_cluster
from chaos.runs import run, undisturbed
from chaos.schedule import draw, lent
from test_kills import small_job

SEEDS = (1188, 68, 161)
"""Three that between them draw twelve different blows; the workers of the last two have no key to the store."""
HIT = {
    "kill api", "kill worker", "freeze worker", "flush redis", "restart redis", "lose rings", "double rings",
    "restart postgres", "clock jumps", "store 503", "store reset", "store half uploads",
}  # fmt: skip
"""What must have been tried in every run of this test, whoever changes the names or the drawing."""
BLOWS = [f"blow {i}" for i in range(20)]


@pytest.mark.slow
def test_jobs_whose_cluster_is_hit_end_once_with_the_undisturbed_drafter(tmp_path: Path):
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    document = small_job(inputs)
    with running_cluster(tmp_path, inputs) as cluster:
        reference = undisturbed(cluster, document)

        records = [run(cluster, document, reference, seed) for seed in SEEDS]

    assert [record.lent for record in records] == [False, True, True]
    assert {moment.blow for record in records for moment in record.moments} == HIT
    missed = HIT - {blow for record in records for blow in record.hit}
    assert missed <= {"lose rings"}  # a ring that a free worker hears at once cannot be lost


def test_every_blow_falls_on_workers_with_a_key_to_the_store_and_on_workers_without():
    both = {(draw(seed, BLOWS)[0].blow, lent(seed, BLOWS)) for seed in range(40 * len(BLOWS))}

    assert both == {(blow, without) for blow in BLOWS for without in (False, True)}


def test_a_seed_is_a_schedule_and_every_blow_has_its_turn():
    assert draw(7, BLOWS) == draw(7, reversed(BLOWS))
    assert {moment.blow for seed in range(len(BLOWS)) for moment in draw(seed, BLOWS)} == set(BLOWS)
