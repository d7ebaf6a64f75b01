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
from rows import ROOT, Row, benchmark, rate

from eagle3_core.objects.s3 import S3Store, s3_store
from eagle3_core.objects.s3_read import PART_BYTES, download

MIB = 1 << 20


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cost(work: Callable[[], float], rounds: int) -> float:
    """CPU seconds a GiB: the least of some runs of `work`, which says how many MiB it moved."""
    spent: list[float] = []
    for _ in range(rounds):
        before = cpu_s()
        moved = work()
        spent.append((cpu_s() - before) * 1024 / moved)
    return min(spent)


def rows(store: S3Store, file: Path, rounds: int) -> list[Row]:
    """Measure both clients."""
    bucket, folder, size = store.address.bucket, file.parent, file.stat().st_size

    def control() -> float:
        store.client.fput_object(
            bucket_name=bucket, object_name="a", file_path=str(file), part_size=PART_BYTES, num_parallel_uploads=4
        )
        return size / MIB

    def bulk() -> float:
        obstore.put(store.bulk, "b", file, chunk_size=PART_BYTES, max_concurrency=4)
        return size / MIB

    def stream() -> float:
        answer = store.client.get_object(bucket_name=bucket, object_name="b")
        with (folder / "streamed").open("wb") as out:
            while piece := answer.read(MIB):
                out.write(piece)
        answer.release_conn()
        return size / MIB

    def parts() -> float:
        download(store.opened("b"), "b", size, folder / "parts", store.ask)
        return size / MIB

    return [
        Row("write: obstore, against minio-py", rate(bulk, rounds), "MiB/s", rate(control, rounds)),
        Row("CPU of a write: obstore, against minio-py", cost(bulk, rounds), "s/GiB", cost(control, rounds)),
        Row("read: four ranges, against one stream", rate(parts, rounds), "MiB/s", rate(stream, rounds)),
        Row("CPU of a read: four ranges, against one stream", cost(parts, rounds), "s/GiB", cost(stream, rounds)),
    ]


def measure(small: bool) -> list[Row]:
    """Start a server, measure against it."""
    sys.path.insert(0, str(ROOT / "tests"))
    from servers import s3  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as scratch:
        file = Path(scratch) / "object"
        file.write_bytes(os.urandom(MIB if small else 128 * MIB))
        server = s3.start(s3.kinds()[0], Path(scratch) / "server")
        try:
            return rows(s3_store(server.url("bench"), server.environment), file, 1 if small else 3)
        finally:
            server.stop()


if __name__ == "__main__":
    benchmark(measure)
