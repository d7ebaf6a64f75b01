"""A few runs of the chaos suite (`make chaos` has as many as one likes): real Postgres, Redis and S3, hit by seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.cluster import running_cluster
from chaos.runs import run, undisturbed
from chaos.schedule import BLOWS_A_RUN, draw
from test_kills import small_job

SEEDS = range(3)
BLOWS = [f"blow {i}" for i in range(20)]


@pytest.mark.slow
def test_jobs_whose_cluster_is_hit_end_once_with_the_undisturbed_drafter(tmp_path: Path):
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    document = small_job(inputs)
    with running_cluster(tmp_path, inputs) as cluster:
        reference = undisturbed(cluster, document)

        records = [run(cluster, document, reference, seed) for seed in SEEDS]

    assert all(len(record.done) >= BLOWS_A_RUN[0] for record in records)


def test_a_seed_is_a_schedule_and_every_blow_has_its_turn():
    assert draw(7, BLOWS) == draw(7, reversed(BLOWS))
    assert {moment.blow for seed in range(len(BLOWS)) for moment in draw(seed, BLOWS)} == set(BLOWS)
