"""Writes and reads of one object store by both clients, beside each other: which one the adapter takes, and why.

A real S3 server on loopback, plain HTTP, 128 MiB of random bytes in parts of 16 MiB: `.venv/bin/python benchmarks/store.py`.
The reference is minio-py; of the two CPU rows less is better.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import obstore
from rows import ROOT, Row, publish, rate

from eagle3_core.objects.s3 import S3Store, s3_store
from eagle3_core.objects.s3_read import PART_BYTES, download

SIZE = 128 << 20
MIB = 1 << 20


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cost(work: Callable[[], object]) -> float:
    """CPU seconds a GiB: the least of three runs."""
    spent: list[float] = []
    for _ in range(3):
        before = cpu_s()
        work()
        spent.append((cpu_s() - before) * (1 << 30) / SIZE)
    return min(spent)


def rows(store: S3Store, file: Path) -> list[Row]:
    """Measure both clients."""
    bucket, folder = store.address.bucket, file.parent

    def control() -> float:
        store.client.fput_object(
            bucket_name=bucket, object_name="a", file_path=str(file), part_size=PART_BYTES, num_parallel_uploads=4
        )
        return SIZE / MIB

    def bulk() -> float:
        obstore.put(store.bulk, "b", file, chunk_size=PART_BYTES, max_concurrency=4)
        return SIZE / MIB

    def stream() -> float:
        answer = store.client.get_object(bucket_name=bucket, object_name="b")
        with (folder / "streamed").open("wb") as out:
            while piece := answer.read(MIB):
                out.write(piece)
        answer.release_conn()
        return SIZE / MIB

    def parts() -> float:
        download(store.client, bucket, "b", SIZE, folder / "parts", store.ask)
        return SIZE / MIB

    return [
        Row("write: obstore, against minio-py", rate(bulk, 3), "MiB/s", rate(control, 3)),
        Row("CPU of a write: obstore, against minio-py", cost(bulk), "s/GiB", cost(control)),
        Row("read: four ranges, against one stream", rate(parts, 3), "MiB/s", rate(stream, 3)),
        Row("CPU of a read: four ranges, against one stream", cost(parts), "s/GiB", cost(stream)),
    ]


def main() -> None:
    """Measure and publish."""
    sys.path.insert(0, str(ROOT / "tests"))
    from servers import s3

    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as scratch:
        file = Path(scratch) / "object"
        file.write_bytes(os.urandom(SIZE))
        server = s3.start(s3.kinds()[0], Path(scratch) / "server")
        try:
            publish("store", rows(s3_store(server.url("").replace("/?", "?"), server.environment), file))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
