"""What must hold after a run, whatever was hit: the job ended, once, with the undisturbed run's drafter."""

from __future__ import annotations

from collections import Counter
from typing import Any

from house import wait_for

from chaos.cluster import Cluster
from eagle3_core.jobs.wire import ManifestRef
from eagle3_core.objects.keys import HOUSE_PREFIX
from eagle3_core.objects.manifest import read_manifest


def same_drafter(job: dict[str, Any], reference: dict[str, Any]) -> None:
    """The job succeeded and its drafter is the reference's, bit by bit; so is what was measured of it."""
    assert job["status"] == "succeeded", job["reason"]
    assert job["drafter"]["digest"] == reference["drafter"]["digest"]
    for figure in ("acceptance_length", "acceptance_by_position", "verdict", "lossless"):
        assert job[figure] == reference[figure], figure


def one_commit_per_unit(cluster: Cluster, job: dict[str, Any]) -> None:
    """Every unit was committed by exactly one attempt, or taken over without one."""
    units = cluster.database.rows(
        "SELECT id, stage, state, reused_from FROM units WHERE job_id = %s ORDER BY position", job["id"]
    )
    commits = Counter(
        unit
        for (unit,) in cluster.database.rows(
            "SELECT unit_id FROM attempts JOIN units ON units.id = unit_id WHERE job_id = %s AND cause = 'committed'",
            job["id"],
        )
    )
    assert units
    for unit, stage, state, donor in units:
        assert state == "succeeded", (stage, state)
        assert commits[unit] == (0 if donor else 1), f"{stage} unit {unit} was committed {commits[unit]} times"


def no_attempt_left_open(cluster: Cluster, job: dict[str, Any]) -> None:
    """No attempt is still counted as running once its job has ended."""
    wait_for(
        "every attempt to be ended",
        lambda: (
            not cluster.database.rows(
                "SELECT 1 FROM attempts JOIN units ON units.id = unit_id WHERE job_id = %s AND ended_at IS NULL",
                job["id"],
            )
        ),
    )


def committed_objects_are_whole(cluster: Cluster, job: dict[str, Any]) -> None:
    """Every committed manifest and all that it lists is in the store, whole."""
    store = cluster.store.opened()
    for (manifest,) in cluster.database.rows("SELECT manifest FROM units WHERE job_id = %s", job["id"]):
        for entry in read_manifest(store, ManifestRef.model_validate(manifest)).files:
            assert store.stat(entry.key).size == entry.size, entry.key


def no_orphan_after_collection(cluster: Cluster) -> None:
    """What no commit lists is gone soon: the house collects every two seconds, with no grace."""
    store = cluster.store.opened()
    held = set[str]()
    for (manifest,) in cluster.database.rows(
        "SELECT manifest FROM units WHERE manifest IS NOT NULL UNION ALL SELECT manifest FROM commits"
    ):
        ref = ManifestRef.model_validate(manifest)
        held |= {ref.key, *(entry.key for entry in read_manifest(store, ref).files)}

    def orphans() -> set[str]:
        return {stat.key for stat in store.list("") if not stat.key.startswith(HOUSE_PREFIX)} - held

    wait_for("the last orphan to be collected", lambda: not orphans())


def no_lost_job(cluster: Cluster) -> None:
    """Nothing waits or runs any more."""
    assert not cluster.database.rows("SELECT id FROM jobs WHERE status NOT IN ('succeeded', 'failed', 'cancelled')")
    assert not cluster.database.rows("SELECT id FROM units WHERE state IN ('queued', 'running', 'paused')")


def check(cluster: Cluster, job: dict[str, Any], reference: dict[str, Any]) -> None:
    """All of it."""
    same_drafter(job, reference)
    one_commit_per_unit(cluster, job)
    no_attempt_left_open(cluster, job)
    committed_objects_are_whole(cluster, job)
    no_orphan_after_collection(cluster)
    no_lost_job(cluster)
