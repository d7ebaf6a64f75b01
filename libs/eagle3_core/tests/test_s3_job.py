"""A whole tiny job, its verifier's states and its drafter, through a real S3 server: the same drafter as through a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.jobs.spec import parse_job
from eagle3_core.objects.collect import Collector, Holdings
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.protocol import ObjectStore
from eagle3_core.objects.s3 import S3Store
from eagle3_core.stages.chain import Chain
from eagle3_core.testing import tiny_job


def digest_through(store: ObjectStore, document: dict[str, object], folder: Path, root: Path) -> str:
    folder.mkdir()
    outcome = Chain(parse_job(document), store, folder, [root]).run("package")
    return str(outcome.result["digest"])


@pytest.mark.slow
def test_a_job_through_s3_makes_the_drafter_that_a_folder_makes(bucket_store: S3Store, tmp_path: Path):
    document = tiny_job(tmp_path / "job")

    through_s3 = digest_through(bucket_store, document, tmp_path / "s3", tmp_path / "job")
    through_folder = digest_through(LocalStore(tmp_path / "objects"), document, tmp_path / "local", tmp_path / "job")

    assert through_s3 == through_folder
    assert any("/extract/" in stat.key for stat in bucket_store.list(""))


class Nothing:
    """A truth that knows of nothing."""

    def about(self, owners: object) -> Holdings:
        return Holdings([], frozenset())


@pytest.mark.slow
def test_every_key_of_a_real_job_has_an_owner(tmp_path: Path):
    store = LocalStore(tmp_path / "objects")
    digest_through(store, tiny_job(tmp_path / "job"), tmp_path / "work", tmp_path / "job")

    swept = Collector(store, Nothing(), grace_s=-60, checkpoint_grace_s=-60).collect()

    assert swept.strange == 0
    assert list(store.list("")) == []
