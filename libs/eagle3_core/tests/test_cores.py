"""Workers and threads share the cores: all of them are used, none twice."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.cores import BadThreads, default_workers, share, unit_threads, usable_cores


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [(1, 1, 1), (2, 2, 1), (3, 2, 1), (4, 2, 2), (8, 2, 4), (12, 3, 4), (16, 4, 4), (64, 4, 16), (192, 4, 48)],
)
def test_a_machine_is_shared_by_few_workers_with_many_threads(cores, workers, threads):
    assert (default_workers(cores), share(cores, default_workers(cores))) == (workers, threads)


@given(st.integers(1, 512), st.integers(0, 64))
def test_no_core_is_promised_twice_and_nobody_goes_without(cores, workers):
    assert share(cores, workers) >= 1
    assert share(cores, workers) * workers <= max(cores, workers)
    assert share(cores, default_workers(cores)) * default_workers(cores) > cores - default_workers(cores)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "100000000 100000\n"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu.max": ""}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "0\n"}, None),
    ],
)
def test_a_containers_quota_counts_where_it_is_smaller(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert usable_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_the_environment_decides_and_without_it_the_share_of_a_default_worker():
    cores = usable_cores()

    assert unit_threads({"AERIE_THREADS": " 3 "}) == 3
    assert unit_threads({"AERIE_THREADS": ""}) == unit_threads({}) == share(cores, default_workers(cores))


@pytest.mark.parametrize("stated", ["0", "-1", "many", "1.5", "2000", "1e3", "²", "9" * 5000])
def test_what_is_no_number_of_threads_is_refused(stated):
    with pytest.raises(BadThreads, match="AERIE_THREADS"):
        unit_threads({"AERIE_THREADS": stated})
