"""What the control plane takes: latencies with 200 pollers, a fleet of 500 workers, and what stays behind afterwards.

One real API process (its own routes, database and store) serves this process, which speaks HTTP to it as people and
workers do. Nothing is computed: the fleet claims, sends a heartbeat, writes a real manifest with a tiny file and commits.
It is a process of its own (`served.py`), so that its memory is the API's alone.

The reference of a latency is `/healthz` of the same process under the same load (p95): what HTTP alone costs there and
then. The machine's load average stands in the JSON's rows; client and server share the machine.

    python benchmarks/service.py                     1,000 jobs, 200 pollers, 500 workers, 50 tiny jobs through; SQLite
    python benchmarks/service.py --postgres          the same on a Postgres server of its own
    python benchmarks/service.py --through 10000     the long mode (`make bench THROUGH=10000`): does anything grow but the rows?
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import held
from asking import Answer, Http, asking
from rows import ROOT, Row, command_line, publish

from eagle3_core.jobs.wire import Assignment, Commit, Output
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import UnitWriter

QUEUES = ["prep", "extract", "train", "evaluate"]
POLL_EVERY_S = 2.0
"""What the API asks pollers to wait (Retry-After)."""
AL = {"mean": 2.1, "macro": 2.0, "ci_low": 1.9, "ci_high": 2.3, "by_task": {}}
REPORT = {
    "verdict": "pass", "acceptance_length": AL, "acceptance_by_position": [0.6, 0.5, None], "lossless": True,
    "looping_share": 0.0, "seen_ngram_share": 0.1, "prompts": 4,
}  # fmt: skip
TARGETS = {"get_p95_ms": 50, "get_304_p95_ms": 10, "queue_to_start_p95_ms": 1000, "fleet_lease_losses": 0}
"""The most that rows should say on a machine that does nothing else. Only told: no test judges speed."""
RESULTS: dict[str, dict[str, Any]] = {
    "prepare": {"samples": 8, "eval_prompts": 4, "tokens": 4096},
    "package": {"digest": "d" * 64, "report": REPORT},
}


@dataclass(frozen=True)
class Shape:
    """How much of everything."""

    jobs: int = 1000
    pollers: int = 200
    fleet: int = 500
    worked: int = 150
    """Jobs that the fleet works through; the others are cancelled."""
    poll_s: float = 20.0
    posts: int = 50
    through: int = 50


@dataclass
class Times:
    """Milliseconds of every answer, by what was asked."""

    of: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def add(self, what: str, started: float) -> None:
        """Note an answer that came just now."""
        self.of.setdefault(what, []).append((time.perf_counter() - started) * 1e3)

    def share(self, what: str, percent: float) -> float:
        """A percentile."""
        ordered = sorted(self.of[what])
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


# -- the API process


class Api:
    """A running API process and what the kernel knows of it."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        own = {"AERIE_RUN_DIR": str(folder / "run"), "AERIE_DATA_DIR": str(folder / "data"), **settings}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AERIE_")}
        self.folder, self.settings = folder, settings
        self.log = (folder / "api.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks/served.py")],
            env={**kept, **own},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.url = self._url()
        self.token = (folder / "run/worker.token").read_text().strip()
        self.store = LocalStore(folder / "objects")

    def _url(self) -> str:
        while self.process.poll() is None:
            with suppress(FileNotFoundError, ValueError):
                return str(json.loads((self.folder / "run/server.json").read_text())["url"])
            time.sleep(0.05)
        raise SystemExit((self.folder / "api.log").read_text())

    def figures(self) -> dict[str, float]:
        """RSS, descriptors, connections, and the rows of every table."""
        return held.of_process(self.process.pid) | held.of_database(self.folder, self.settings)

    def close(self) -> None:
        """Stop it."""
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


# -- people


def job(name: str) -> dict[str, Any]:
    """A job of eleven units."""
    return {
        "name": name, "verifier": {"model": "/models/v"}, "datasets": [{"uri": "file:///data/train.jsonl"}],
        "data": {"unit_samples": 2},
        "evaluation": {"prompts": [{"uri": "file:///data/eval.jsonl"}], "unit_prompts": 2},
    }  # fmt: skip


async def post(http: Http, times: Times, name: str) -> str:
    """Post a job; its id."""
    started = time.perf_counter()
    answer = await http.post("/jobs", job(name))
    times.add("post", started)
    assert answer.status == 202, answer.body
    return str(answer.json()["id"])


async def get(http: Http, times: Times, what: str, path: str, tag: str | None = None) -> Answer:
    """Ask for `path`, as one who knows `tag`."""
    started = time.perf_counter()
    answer = await http.get(path, headers={"If-None-Match": tag} if tag else {})
    times.add("get_304" if answer.status == 304 else what, started)
    assert answer.status in (200, 304), answer.body
    return answer


async def poller(http: Http, times: Times, job_id: str, until: float) -> None:
    """Look at one job again and again: fresh and with the tag in turns."""
    await asyncio.sleep(random.uniform(0, POLL_EVERY_S))  # noqa: S311 - to spread them
    tag: str | None = None
    for turn in itertools.count():
        if turn >= 2 and time.monotonic() >= until:  # once fresh, once with the tag, however short the time
            return
        answer = await get(http, times, "get", f"/jobs/{job_id}", tag)
        tag = answer.headers["ETag"] if tag is None else None
        await asyncio.sleep(POLL_EVERY_S)


async def prober(http: Http, times: Times, until: float) -> None:
    """Ask `/healthz` ten times a second: what HTTP alone costs meanwhile."""
    while True:
        await get(http, times, "healthz", "/healthz")
        if time.monotonic() >= until:
            return
        await asyncio.sleep(0.1)


# -- the fleet


class Fleet:
    """Workers without compute. `ends` says when there is nothing more to do."""

    def __init__(self, api: Api, http: Http, times: Times) -> None:
        self.api = api
        self.http = http
        self.times = times
        self.committed = self.claimed = self.lost = 0
        self.first: dict[str, float] = {}
        """When a job's first unit was claimed."""

    async def run(self, workers: int, ends: Callable[[], bool], named: str = "w") -> None:
        """Work with `workers` until `ends`."""
        await asyncio.gather(*(self._worker(f"{named}{i}", ends) for i in range(workers)))

    async def _worker(self, name: str, ends: Callable[[], bool]) -> None:
        while not ends():
            unit = await self._claim(name)
            if unit is not None:
                await self._finish(unit)

    async def _claim(self, name: str) -> Assignment | None:
        body = {"worker_id": name, "incarnation": "1", "queues": QUEUES, "wait_s": 5}
        started = time.perf_counter()
        answer = await self._post("/claim", body, self.api.token)
        if answer is None or answer.status == 204:
            return None
        self.times.add("claim", started)
        self.claimed += 1
        unit = Assignment.model_validate_json(answer.body)
        self.first.setdefault(unit.job_id, time.perf_counter())
        return unit

    async def _finish(self, unit: Assignment) -> None:
        where = f"/units/{unit.unit_run_id}"
        started = time.perf_counter()
        progress = {"progress": {"done": 1, "total": 2, "unit": "steps", "rate_per_s": 10.0}}
        if await self._post(f"{where}/heartbeat", progress, unit.token) is None:
            return
        self.times.add("heartbeat", started)
        made = await asyncio.to_thread(self._made, unit)
        started = time.perf_counter()
        if await self._post(f"{where}/commit", made.model_dump(mode="json"), unit.token) is not None:
            self.times.add("commit", started)
            self.committed += 1

    async def _post(self, route: str, body: Mapping[str, Any], token: str) -> Answer | None:
        """The answer, or None when the lease was lost."""
        answer = await self.http.post(f"/internal/v1{route}", body, {"Authorization": f"Bearer {token}"})
        if answer.status == 409:
            self.lost += 1
            return None
        assert answer.status in (200, 204), answer.body
        return answer

    def _made(self, unit: Assignment) -> Commit:
        place, result = (unit.unit.index, unit.unit.start, unit.unit.stop), RESULTS.get(unit.stage, {"value": 1})
        writer = UnitWriter(self.api.store, tenant=unit.tenant, job_id=unit.job_id, stage=unit.stage, unit=place,
                            unit_key=unit.key, fence=unit.fence)  # fmt: skip
        writer.add_bytes("out.bin", f"{unit.job_id} {unit.stage} {place}".encode())
        return Commit(
            output=Output(stage=unit.stage, key=unit.key, manifest=writer.commit(result), result=result), seconds=0.1
        )


# -- the phases


async def post_many(http: Http, times: Times, count: int, named: str, at_once: int = 8) -> list[str]:
    """Post `count` jobs, `at_once` at a time; their ids, oldest first as far as that can be told."""
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> str:
        async with gate:
            return await post(http, times, f"{named}-{number}")

    return list(await asyncio.gather(*(one(number) for number in range(count))))


async def ended(http: Http, ids: Sequence[str]) -> None:
    """Wait until every job of `ids` has succeeded."""
    for job_id in ids:
        while (found := (await http.get(f"/jobs/{job_id}")).json())["status"] != "succeeded":
            assert found["status"] in ("queued", "running"), found
            await asyncio.sleep(0.1)


async def through(api: Api, http: Http, times: Times, ids: Sequence[str], workers: int) -> Fleet:
    """Work through the jobs `ids`."""
    fleet, done = Fleet(api, http, times), asyncio.Event()
    working = asyncio.create_task(fleet.run(workers, done.is_set))
    waiting = asyncio.create_task(ended(http, ids))
    finished, _ = await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    done.set()
    for task in finished:
        task.result()
    await working
    return fleet


async def fleet_rows(api: Api, http: Http, shape: Shape) -> list[Row]:
    """1,000 queued jobs, 500 workers: units/s (beside the heartbeats/s that the same clients got in) and losses."""
    times = Times()
    ids = await post_many(http, times, shape.jobs, "seed")
    kept, rest = ids[: shape.worked], ids[shape.worked :]
    gate = asyncio.Semaphore(8)

    async def cancel(job_id: str) -> None:
        async with gate:
            answer = await http.post(f"/jobs/{job_id}/cancel")
            assert answer.status == 202, answer.body

    await asyncio.gather(*(cancel(job_id) for job_id in rest))
    started = time.perf_counter()
    fleet = await through(api, http, times, kept, shape.fleet)
    seconds = time.perf_counter() - started
    beat = times.share("heartbeat", 95)
    return [
        Row("fleet_units_per_s", fleet.committed / seconds, "units/s", shape.fleet / seconds),
        Row("fleet_lease_losses", fleet.lost, "losses", fleet.claimed),
        *(Row(f"{what}_p{p}_ms", times.share(what, p), "ms", beat)
          for what in ("claim", "heartbeat", "commit") for p in (50, 95, 99)),
    ]  # fmt: skip


async def polling_rows(api: Api, http: Http, shape: Shape) -> list[Row]:
    """200 pollers while jobs are posted and a worker that waits for them starts each."""
    times, until = Times(), time.monotonic() + shape.poll_s
    page = (await http.get("/jobs", params={"limit": 100})).json()["data"]
    polling = [asyncio.create_task(poller(http, times, page[i % len(page)]["id"], until)) for i in range(shape.pollers)]
    polling.append(asyncio.create_task(prober(http, times, until)))
    fleet, stop = Fleet(api, http, times), asyncio.Event()
    working = asyncio.create_task(fleet.run(4, stop.is_set, "prompt"))
    posted: dict[str, float] = {}
    for number in range(shape.posts):
        started = time.perf_counter()
        posted[await post(http, times, f"prompt-{number}-{time.time_ns()}")] = started
        await ended(http, list(posted)[-1:])
    await asyncio.gather(*polling)
    stop.set()
    await working
    times.of["queue_to_start"] = [(fleet.first[job_id] - at) * 1e3 for job_id, at in posted.items()]
    reference = times.share("healthz", 95)
    whats = ("get", "get_304", "post", "queue_to_start")
    return [Row(f"{what}_p{p}_ms", times.share(what, p), "ms", reference) for what in whats for p in (50, 95, 99)]


async def through_rows(api: Api, http: Http, shape: Shape) -> list[Row]:
    """What the API's process holds after many tiny jobs, beside what it held before."""
    before, left, number, began = api.figures(), shape.through, 0, time.monotonic()
    while left:
        batch = min(left, 200)
        ids = await post_many(http, Times(), batch, f"through-{number}")
        await through(api, http, Times(), ids, min(batch, 16))
        left, number, rss = left - batch, number + 1, held.of_process(api.process.pid)["rss"]
        said = f"through: {shape.through - left} of {shape.through} jobs, {time.monotonic() - began:.0f} s, {rss:.0f} MiB\n"
        sys.stderr.write(said)
    after = api.figures()
    grown = [
        Row(f"through_{it}", after[it], held.UNITS.get(it, "rows"), was) for it, was in before.items() if it in after
    ]
    return [Row("through_jobs", shape.through, "jobs", Shape.jobs), *grown]


async def measure(folder: Path, shape: Shape, settings: Mapping[str, str]) -> list[Row]:
    """All rows."""
    api = Api(folder, settings)
    try:
        async with asking(api.url) as http:
            rows = [*await fleet_rows(api, http, shape), *await polling_rows(api, http, shape)]
            rows += await through_rows(api, http, shape)
    finally:
        api.close()
    cores = os.cpu_count() or 1
    rows.append(Row("machine_load", os.getloadavg()[0], "processes", cores))
    return [replace(row, target=TARGETS.get(row.name)) for row in rows]


def run(options: argparse.Namespace) -> list[Row]:
    """Measure on a fresh folder, with a Postgres of its own if that was asked for."""
    shape = Shape(6, 4, 5, 3, 0.5, 2, 3) if options.small else Shape(through=options.through)
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as place:
        folder = Path(place)
        if not options.postgres:
            return asyncio.run(measure(folder, shape, {}))
        sys.path.append(str(ROOT / "tests"))
        from servers.postgres import start  # type: ignore[import-not-found]

        with closing(start(folder / "postgres")) as server:
            settings = {"AERIE_DATABASE_URL": server.database(), "AERIE_KEYS_REQUIRED": "0"}
            return asyncio.run(measure(folder, shape, settings))


def main() -> None:
    """The command."""
    parser = command_line("Measures the control plane, prints a table, writes a JSON file.")
    parser.add_argument("--postgres", action="store_true", help="on a Postgres server of its own, in place of SQLite")
    parser.add_argument("--through", type=int, default=Shape.through, help="tiny jobs of the last phase (long: 10000)")
    options = parser.parse_args()
    publish("service-postgres" if options.postgres else "service", run(options), options.out)


if __name__ == "__main__":
    main()
