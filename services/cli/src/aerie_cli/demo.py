"""`aerie demo`: the main job on this machine, from nothing to a measured drafter.

It does what a user would do by hand: a verifier and prompts (`examples/smollm2`), `aerie up`, a job posted over HTTP,
its progress, its files. Everything that it measured lands in `report.json`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from aerie_cli.client import DEFAULT_DIR, Api, checked_url, house_key, job_path
from aerie_cli.demo_report import make_report, store_report, whereabouts
from aerie_cli.download import download_bar, download_drafter
from aerie_cli.exits import status_of_job
from aerie_cli.jobfile import Changes, apply, parse
from aerie_cli.output import Json, command, document, people, remark
from aerie_cli.report import from_earlier_jobs, show_job
from aerie_cli.testimony import read_server, tail
from aerie_cli.up import THREADS_HELP, WORKERS_HELP, crew
from aerie_cli.watch import follow
from eagle3_core.engine.settings import read_settings, require_engine
from eagle3_core.errors import AerieError, InvalidRequest
from eagle3_core.folders import cache_folder
from eagle3_core.jobs.refusals import Unreachable
from eagle3_core.tether import tethered

EXAMPLE = Path("examples/smollm2")


class Backend(StrEnum):
    """Which engine runs the verifier in the demo."""

    TRANSFORMERS = "transformers"
    SGLANG = "sglang"


JOBS = {Backend.TRANSFORMERS: "job.json", Backend.SGLANG: "job-sglang.json"}
"""The example's jobs. The one for SGLang is small: its engine for CPUs writes 12 tokens a second for one request."""
PER_TASK = {"train": 400, "test": 40}
"""Prompts of each of the five tasks: what the job draws from, and what it is measured on."""
SEED = 0
STARTING_S = 120.0
NAMES = 1000

Folder = Annotated[Path, typer.Option("--dir", help="Folder of the embedded house and of the demo's results.")]
Engine = Annotated[
    Backend, typer.Option("--backend", help="Engine that answers, captures and serves; see docs/sglang.md.")
]
Epochs = Annotated[int | None, typer.Option("--epochs", min=1, help="Train for so many epochs instead.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, max=64, help=WORKERS_HELP)]
Threads = Annotated[int | None, typer.Option("--threads", min=1, max=1024, help=THREADS_HELP)]


class NoCheckout(AerieError):
    """The demo needs the project's checkout."""

    code, status = "demo.checkout", 500


class ExampleFailed(AerieError):
    """A script of the example failed."""

    code, status = "demo.example", 500


@command
def demo(
    folder: Folder = DEFAULT_DIR,
    backend: Engine = Backend.TRANSFORMERS,
    epochs: Epochs = None,
    changes: Changes = None,
    workers: Workers = None,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """Train and measure a drafter for a small real model. Exit status 0 only if its verdict is pass (3 if it is fail)."""
    started = time.monotonic()
    if backend is Backend.SGLANG:
        require_engine(read_settings())  # else the job would wait for a worker that has it
    example, home = checkout() / EXAMPLE, folder.absolute() / "demo"
    home.mkdir(parents=True, exist_ok=True)
    job = make_job(
        example / JOBS[backend], home, [*([f"training.epochs={epochs}"] if epochs else []), *(changes or ())]
    )
    with house(folder.absolute(), *crew(workers, threads)) as url, Api(url, key=house_key(folder)) as api:
        posted = post(api, job)
        remark(f"posted {posted['id']} as {posted['name']}")
        finished = follow_or_cancel(api, posted["id"])
        _tell_reuse(finished)
        drafter = fetch(api, finished, home / "drafter") if finished["status"] == "succeeded" else None
    place, report = home / "report.json", make_report(finished, drafter, time.monotonic() - started)
    store_report(place, report)
    if as_json:
        document(report)
    else:
        show_job(finished)
        for line in whereabouts(place, report):
            people().print(escape(line))
    return status_of_job(finished)


def checkout() -> Path:
    """The root of the project's checkout, seen from this file. Raises NoCheckout."""
    for root in Path(__file__).resolve().parents:
        if (root / EXAMPLE / "job.json").is_file():
            return root
    raise NoCheckout(
        f"{EXAMPLE}/job.json is not above {Path(__file__).resolve().parent}",
        remedy="clone the project and run `make demo` there; elsewhere, post your own job with `aerie submit`",
    )


def make_job(document: Path, home: Path, changes: list[str]) -> dict[str, Any]:
    """The example's job in `document` over a converted verifier and freshly drawn prompts, with `changes`."""
    example = document.parent
    remark("getting the verifier ready (converted once, then cached)")
    folder = _run_script(example / "verifier.py", "--cache", str(cache_folder()))
    places = {"VERIFIER": folder.splitlines()[-1].strip()}
    for split, count in PER_TASK.items():
        out = home / f"{split}.jsonl"
        _run_script(
            example / "prompts.py", "--split", split, "--per-task", str(count), "--seed", str(SEED), "--out", str(out)
        )
        places[split.upper()] = str(out)
    job = parse(document.read_text(), str(document))
    return apply(fill(job, places), changes)


def fill(value: Any, places: Mapping[str, str]) -> Any:
    """`value` with `${NAME}` in every string replaced by its place."""
    if isinstance(value, dict):
        return {key: fill(part, places) for key, part in value.items()}
    if isinstance(value, list):
        return [fill(part, places) for part in value]
    if isinstance(value, str):
        for name, place in places.items():
            value = value.replace(f"${{{name}}}", place)
    return value


def _run_script(script: Path, *arguments: str) -> str:
    """What `script` prints. Its stderr is shown as it comes. Raises ExampleFailed."""
    done = subprocess.run(  # noqa: S603 - the checkout's own script
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise ExampleFailed(
            f"{script.name} ended with exit status {done.returncode}", remedy="its own words stand above"
        )
    return done.stdout


@contextmanager
def house(folder: Path, workers: int, threads: int) -> Generator[str]:
    """The URL of the house in `folder`; starts one if none runs, and then stops it at the end."""
    if (server := read_server(folder / "run" / "server.json")) is not None and _answers(server["url"]):
        remark(f"using the house at {server['url']}")
        yield server["url"]
        return
    log = folder / "logs" / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        up = subprocess.Popen(  # noqa: S603 - our own command
            tethered([
                sys.executable, "-m", "aerie_cli", "up", "--dir", str(folder), "--workers", str(workers),
                "--threads", str(threads),
            ]),
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0,
        )  # fmt: skip
    try:
        yield _wait_for_house(folder, up, log)
    finally:
        up.terminate()
        up.wait()


def _wait_for_house(folder: Path, up: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + STARTING_S
    while time.monotonic() < until:
        if up.poll() is not None:
            raise Unreachable(f"`aerie up` ended with exit status {up.returncode}:\n{tail(log)}", remedy=f"see {log}")
        server = read_server(folder / "run" / "server.json")
        if server is not None and _answers(server["url"]):
            return str(server["url"])
        time.sleep(0.1)
    raise Unreachable(f"the API did not answer within {STARTING_S:.0f} s", remedy=f"see {log.parent}")


def _answers(url: str) -> bool:
    try:
        with Api(checked_url(url, "server.json")) as api:
            return api.call("GET", "/readyz").is_success
    except AerieError:
        return False


def follow_or_cancel(api: Api, job_id: str) -> dict[str, Any]:
    """As `follow`; Ctrl-C cancels the job, so that the next demo does not find it going on. What it computed is kept."""
    try:
        return follow(api, job_id)
    except KeyboardInterrupt:
        remark(f"cancelling {job_id}, stopping the house; what is computed is reused next time")
        with suppress(AerieError):
            api.post(job_path(job_id, "cancel"))
        raise


def post(api: Api, job: dict[str, Any]) -> dict[str, Any]:
    """Post `job`; if its name is in use, as NAME-2, NAME-3 and so on."""
    name = job["name"]
    for number in range(2, NAMES):
        try:
            return api.post("/jobs", job)
        except AerieError as error:
            if error.code != "drafter.name_in_use":
                raise
            job["name"] = f"{name}-{number}"
    raise InvalidRequest(
        f"{NAMES} drafters are called {name}", remedy="choose another folder with --dir", pointer="/name"
    )


def fetch(api: Api, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Download the drafter of `job`; where it lies and its digest."""
    with download_bar() as done:
        download_drafter(api, job["id"], folder, done, replace=True)
    return {
        "sglang_dir": str(folder / "sglang"),
        "speculators_dir": str(folder / "speculators"),
        "digest": job["drafter"]["digest"],
    }


def _tell_reuse(job: dict[str, Any]) -> None:
    reused = [s["name"] for s in job["stages"] if s.get("reused") and from_earlier_jobs(s, job["id"])]
    if reused:
        remark(f"reused from earlier jobs, not run again: {', '.join(reused)}")
