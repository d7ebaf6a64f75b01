"""A house whose workers have no key to the object store: the same drafter, and nothing in their processes that opens anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from house import House, running_house, wait_for
from servers import s3

from eagle3_core.jobs.spec import parse_job
from eagle3_core.objects.local import LocalStore
from eagle3_core.stages.chain import Chain
from eagle3_core.testing import tiny_job

pytestmark = pytest.mark.slow


def told(pid: int) -> str:
    """The environment that the process `pid` was started with."""
    return Path(f"/proc/{pid}/environ").read_bytes().replace(b"\0", b"\n").decode()


def processes(house: House, part: str) -> list[int]:
    return [pid for pid, command in house.descendants().items() if House.PARTS[part] in command]


def test_a_job_whose_objects_are_lent_makes_the_drafter_that_a_folder_makes(tmp_path: Path):
    document = tiny_job(tmp_path / "job")
    document["training"]["threads"] = 1
    server = s3.own(tmp_path / "s3")
    settings = {
        "AERIE_STORE": server.url("lent"),
        "AERIE_WORKER_STORE": "lent",
        "OMP_NUM_THREADS": "1",
        **server.environment,
    }
    try:
        with running_house(tmp_path / "house", [tmp_path / "job"], 1, settings) as house:
            job_id = house.post(document)
            child = wait_for("a child", lambda: processes(house, "child"))[0]
            environments = [told(pid) for pid in [child, *processes(house, "worker")]]
            opening = [server.secret_key, server.access_key, (house.folder / "run/worker.token").read_text().strip()]
            job = house.finished(job_id)
            log = (tmp_path / "house/logs/worker-1.log").read_text()
    finally:
        server.stop()

    assert job["status"] == "succeeded", job
    assert "AERIE_STORE=lent://" in environments[0]
    assert not [name for name in opening if any(name in environment for environment in environments)]
    assert "X-Amz-Signature" not in log
    (tmp_path / "folder").mkdir()
    undisturbed = Chain(
        parse_job(document), LocalStore(tmp_path / "objects"), tmp_path / "folder", [tmp_path / "job"]
    ).run("package")
    assert job["drafter"]["digest"] == undisturbed.result["digest"]
