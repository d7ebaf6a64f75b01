"""`python -m aerie_worker`: a worker, of the embedded house or of a cluster.

The token comes from a file that the environment names (AERIE_WORKER_TOKEN_FILE), never from the command line, which
every process of the machine can read. AERIE_STORE and AERIE_FILE_ROOTS are handed to the child as they are; what opens the queue or the
API is not. Without AERIE_STORE the worker has no key to the object store, and its units' objects are lent to it (`aerie_worker.lending`).
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from aerie_worker import metrics
from aerie_worker.children import Inbox, stage_child
from aerie_worker.claim import Control
from aerie_worker.doorbells import Doorbell
from aerie_worker.doorbells.poll import Poll
from aerie_worker.executors.local import Local, machine_gpus
from aerie_worker.worker import Worker
from eagle3_core.addresses import require_encrypted
from eagle3_core.engine.settings import EngineMissing, read_settings, require_engine
from eagle3_core.errors import AerieError
from eagle3_core.jobs.graph import ON_SGLANG
from eagle3_core.jobs.rings import PREFIX
from eagle3_core.telemetry import logs, traces
from eagle3_core.telemetry.scrape import Scrapable, port_of

log = logging.getLogger("aerie.worker")
QUEUES = ("prep", "extract", "train", "evaluate")


class TokenMissing(AerieError):
    """The worker token cannot be read."""

    code, status = "worker.token", 401


def read_token(environment: dict[str, str]) -> str:
    """The worker token. Raises TokenMissing."""
    place = environment.get("AERIE_WORKER_TOKEN_FILE", "")
    try:
        token = Path(place).read_text().strip() if place else ""
    except OSError as error:
        raise TokenMissing(
            f"{place} cannot be read: {error.strerror}", remedy="start the API first, or name its file"
        ) from None
    if not token:
        raise TokenMissing("no worker token", remedy="let AERIE_WORKER_TOKEN_FILE name the file that the API wrote")
    return token


class BrokerMissing(AerieError):
    """The worker was told to listen to a broker and not where it is."""

    code, status = "worker.broker", 500


def check_transport(url: str, environment: Mapping[str, str]) -> None:
    """Raise PlainHttpRefused unless `url` keeps what is said to itself, or the operator says that something else does."""
    require_encrypted(url, "the worker's token", allowed=environment.get("AERIE_ALLOW_PLAIN_HTTP") == "1")


def broker_url(environment: Mapping[str, str]) -> str:
    """The broker's URL, which holds a password: from AERIE_BROKER_URL_FILE or AERIE_BROKER_URL. Raises BrokerMissing."""
    place = environment.get("AERIE_BROKER_URL_FILE", "")
    try:
        url = Path(place).read_text().strip() if place else environment.get("AERIE_BROKER_URL", "")
    except OSError as error:
        raise BrokerMissing(
            f"{place} cannot be read: {error.strerror}", remedy="name a file that holds the broker's URL"
        ) from None
    if not url:
        raise BrokerMissing(
            "AERIE_DOORBELL=celery, and no broker", remedy="let AERIE_BROKER_URL_FILE name a file that holds its URL"
        )
    return url


def doorbell(control: Control, name: str, queues: list[str], environment: Mapping[str, str]) -> Doorbell:
    """What tells this worker that there is work: AERIE_DOORBELL is `poll` (default) or `celery`. Raises BrokerMissing."""
    match environment.get("AERIE_DOORBELL", "poll"):
        case "poll":
            return Poll(control)
        case "celery":
            from aerie_worker.doorbells.celery import Rung

            return Rung(control, broker_url(environment), queues, name, environment.get("AERIE_BROKER_PREFIX", PREFIX))
        case other:
            raise BrokerMissing(f"AERIE_DOORBELL={other}", remedy="set it to poll or celery")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m aerie_worker", description="Claims units and runs them.")
    parser.add_argument("--url", required=True, help="where the API listens")
    parser.add_argument("--worker-id", default=socket.gethostname(), help="stable name: a restart frees the old leases")
    parser.add_argument(
        "--queues",
        default=",".join(QUEUES),
        help="queues to serve, separated by commas; with SGLang on this machine also those that need it",
    )
    parser.add_argument("--no-preload", action="store_true", help="import torch only when a stage needs it")
    return parser.parse_args(arguments)


def served_queues(named: str, environment: Mapping[str, str]) -> list[str]:
    """The queues `named`, separated by commas, and beside them those whose units need SGLang, where this machine has it.

    Asked once, at the start. Raises BadEngineSettings, and EngineMissing if such a queue is named and there is no SGLang.
    """
    queues = [queue for queue in named.split(",") if queue]
    further = [with_it for plain, with_it in ON_SGLANG.items() if plain in queues and with_it not in queues]
    asked = set(queues) & set(ON_SGLANG.values())
    if not further and not asked:
        return queues
    try:
        version = require_engine(read_settings(environment)).version
    except EngineMissing as missing:
        if asked:
            raise
        log.info("no SGLang here, units that need it go to other workers: %s; %s", missing.detail, missing.remedy)
        return queues
    log.info("SGLang %s is here: this worker also serves %s", version, ", ".join([*further, *sorted(asked)]))
    return [*queues, *further]


@contextmanager
def metrics_at(environment: Mapping[str, str]) -> Generator[None]:
    """Serve this worker's metrics during the block, if AERIE_WORKER_METRICS_PORT names a port. Raises MetricsAddress."""
    port = port_of(environment, "AERIE_WORKER_METRICS_PORT")
    if port is None:
        yield
        return
    with closing(Scrapable(metrics.REGISTRY, environment.get("AERIE_METRICS_HOST") or "127.0.0.1", port)):
        yield


def main(arguments: list[str], environment: dict[str, str], child: Callable[[bool], list[str]] = stage_child) -> int:
    """Run a worker; its exit status. `child(preload)` is the command line of its child."""
    options = parse(arguments)
    logs.configure()
    traces.configure("aerie-worker", environment)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        token = read_token(environment)
        queues = served_queues(options.queues, environment)
        check_transport(options.url, environment)
        place = environment.get("AERIE_API_CA")
        control = Control(
            options.url, token, options.worker_id, secrets.token_hex(8), queues, Path(place) if place else None,
            machine_gpus(environment), lent=not environment.get("AERIE_STORE"),
        )  # fmt: skip
        inbox = Inbox()
        place = environment.get("AERIE_SCRATCH")
        scratch = Path(place) / options.worker_id if place else Path(tempfile.mkdtemp(prefix="aerie-worker-"))
        executor = Local(scratch, environment, inbox, lambda: child(not options.no_preload))
        worker = Worker(control, doorbell(control, options.worker_id, queues, environment), executor, inbox)
        worker.install()
        with metrics_at(environment):
            return worker.run()
    except AerieError as error:
        log.error("%s", error.text())
        return 1
    finally:
        traces.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
