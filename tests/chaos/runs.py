"""Runs: an undisturbed one for reference, then one after another with blows."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from house import wait_for

from chaos import invariants
from chaos.cluster import Cluster
from chaos.parts import Missed
from chaos.schedule import Moment, draw, lent


@dataclass
class Record:
    """What happened in one run."""

    seed: int
    lent: bool
    """Whether the workers had no key to the store."""
    moments: list[Moment]
    done: list[str] = field(default_factory=list[str])
    hit: set[str] = field(default_factory=set[str])
    """Names of the blows that found something to hit."""
    seconds: float = 0.0

    def line(self) -> str:
        """One line for a person, enough to repeat the run."""
        how = ", store lent" if self.lent else ""
        return f"seed {self.seed}{how}: {self.seconds:.0f} s; " + "; ".join(self.done)


def reached(job: dict[str, Any], moment: Moment) -> bool:
    """Whether the job has come to `moment`, or past it."""
    stages = {stage["name"]: stage for stage in job["stages"]}
    stage = stages[moment.stage]
    if job["status"] in ("succeeded", "failed", "cancelled") or stage["state"] == "succeeded":
        return True
    return stage["state"] == "running" and stage["progress_percentage"] / 100 >= moment.share


def undisturbed(cluster: Cluster, document: dict[str, Any]) -> dict[str, Any]:
    """The reference: the same job, nothing hit."""
    job = cluster.house.finished(cluster.house.post({**document, "name": "undisturbed"}))
    invariants.check(cluster, job, job)
    return job


def run(cluster: Cluster, document: dict[str, Any], reference: dict[str, Any], seed: int) -> Record:
    """One run; what must hold is checked at its end, and the record says what fell where if it does not."""
    blows = cluster.blows
    record = Record(seed, lent(seed, blows), draw(seed, blows))
    cluster.start(lent=record.lent)
    rng, started, house = random.Random(seed), time.monotonic(), cluster.house
    try:
        cluster.database.forget_results()
        job_id = house.post({**document, "name": f"run-{seed}-{len(reference)}"})
        for moment in record.moments:
            wait_for(f"{moment}", lambda at=moment: reached(house.job(job_id), at), 600)
            did = blows[moment.blow].strike(house, rng)
            if not isinstance(did, Missed):
                record.hit.add(moment.blow)
            how = "missed: " if isinstance(did, Missed) else ""
            record.done.append(f"{moment.blow} at {moment.stage} {moment.share:.0%} ({how}{did})")
        job = house.finished(job_id)
        record.seconds = time.monotonic() - started
        invariants.check(cluster, job, reference)
    except BaseException as error:
        error.add_note(f"chaos: {record.line()}")
        raise
    return record
