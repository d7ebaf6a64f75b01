"""One API process: takes a port, says where it is, serves until it is told to stop.

Others find it by `run_dir/server.json`, written (atomically) once it answers and removed when it ends. On SIGTERM those
who wait in long polls are let go first, so that stopping takes no longer than the request under way.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from alembic.util import CommandError
from sqlalchemy.exc import SQLAlchemyError

from aerie_api.app import create_app
from aerie_api.house import House, Parts
from aerie_api.metrics import registry_of
from aerie_api.settings import Settings, TlsIncomplete
from eagle3_core.errors import AerieError
from eagle3_core.telemetry import logs, traces
from eagle3_core.telemetry.scrape import Scrapable

GRACE_S = 10
KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than clients (httpx: 5 s) and proxies (60 s) keep theirs. Whoever closes it
first must be who sends next, or a request meets a closed connection."""
logger = logging.getLogger("aerie_api")


class PortTaken(AerieError):
    """The address cannot be listened on."""

    code, status = "server.address", 409


class StartFailed(AerieError):
    """The server did not come up."""

    code, status = "server.start", 500


class PlaceUnusable(AerieError):
    """A folder or a file that the settings name cannot be used."""

    code, status = "server.place", 422


class Server(uvicorn.Server):
    """uvicorn that announces itself."""

    def __init__(self, house: House, listening: socket.socket, metrics_url: str | None = None) -> None:
        config = uvicorn.Config(
            create_app(house.settings, house=house), log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=KEEP_ALIVE_S, lifespan="on",
            ssl_certfile=house.settings.tls_cert, ssl_keyfile=house.settings.tls_key,
        )  # fmt: skip
        _load_certificate(config)
        super().__init__(config)
        self._house = house
        self._listening = listening
        self._metrics_url = metrics_url
        self._loop: asyncio.AbstractEventLoop | None = None
        self.file = house.settings.run_dir / "server.json"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say where."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            scheme = "https" if self._house.settings.tls_cert else "http"
            logger.info("serving at %s", announce(self.file, self._listening, scheme, self._metrics_url))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take the word back, then stop."""
        withdraw(self.file)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let waiting workers and readers go, then stop. A signal handler: it takes no locks itself."""
        if self._loop is not None:
            for bell in self._house.bells.values():
                self._loop.call_soon_threadsafe(bell.close)
        super().handle_exit(sig, frame)


def _load_certificate(config: uvicorn.Config) -> None:
    """Load uvicorn's configuration, the certificate with it. Raises TlsIncomplete."""
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise TlsIncomplete(
            f"{config.ssl_certfile} with {config.ssl_keyfile}: {error.strerror or error}",
            remedy="give a certificate chain and its own unencrypted key, both PEM, readable by this process",
        ) from None


def listen(settings: Settings) -> socket.socket:
    """A socket on the address of `settings`. Raises PortTaken.

    Its connections take over that they send at once: asyncio sees to that only for sockets that name their protocol, and
    without it the body of an answer waits 40 ms for the client's word on the headers.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host, settings.port), family=family, backlog=256)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise PortTaken(
            f"cannot listen on {settings.host} port {settings.port}: {str(error.strerror).partition(' (while')[0]}",
            remedy="stop what listens there, or choose another port (--port, AERIE_PORT; 0 takes a free one)",
        ) from None


def announce(file: Path, listening: socket.socket, scheme: str, metrics_url: str | None) -> str:
    """Write `file` (url, pid, started_at, metrics_url); returns the url."""
    host, port = listening.getsockname()[:2]
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    told = {"url": url, "pid": os.getpid(), "started_at": time.time(), "metrics_url": metrics_url}
    temporary.write_text(json.dumps(told) + "\n")
    temporary.replace(file)
    return url


def withdraw(file: Path) -> None:
    """Remove `file` if it is this process's."""
    try:
        if json.loads(file.read_text()).get("pid") == os.getpid():
            file.unlink()
    except (FileNotFoundError, ValueError):
        return


def opened(settings: Settings) -> House:
    """The house over the places that `settings` name. Raises DatabaseInUse, WeakToken, PlaceUnusable, StoreUnfit."""
    try:
        house = House(settings, Parts())
        try:
            logger.info("object store: %s", house.store.probe().told())
        except BaseException:
            house.close()
            raise
        return house
    except (OSError, UnicodeDecodeError) as error:
        place = getattr(error, "filename", None) or settings.token_file
        raise PlaceUnusable(
            f"{place} cannot be used: {getattr(error, 'strerror', None) or error}",
            remedy="name folders that this process may write: AERIE_RUN_DIR, AERIE_DATA_DIR, AERIE_STORE",
        ) from error
    except (SQLAlchemyError, CommandError) as error:
        raise PlaceUnusable(
            f"the database cannot be opened: {getattr(error, 'orig', None) or error}",
            remedy="name another AERIE_DATA_DIR, or the version of Aerie that made this one; move a damaged file away",
        ) from error


@contextmanager
def metrics_of(house: House) -> Generator[str | None]:
    """Serve the metrics of `house` during the block, at the URL that it gives; None = none. Raises MetricsAddress."""
    port = house.settings.metrics_port
    if port == "off":
        yield None
        return
    with closing(Scrapable(registry_of(house), house.settings.metrics_host, port)) as scrapable:
        logger.info("metrics at %s", scrapable.url)
        yield scrapable.url


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises PortTaken, MetricsAddress, DatabaseInUse, WeakToken, PlaceUnusable, TlsIncomplete, StartFailed.
    """
    logs.configure()
    traces.configure("aerie-api")
    for sig in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises what it caught again, once it has stopped
        signal.signal(sig, lambda *_: sys.exit(0))
    with closing(listen(settings)) as listening:
        house = opened(settings)
        with metrics_of(house) as metrics_url:
            server = Server(house, listening, metrics_url)
            server.run(sockets=[listening])
        traces.close()
        if not server.started:
            raise StartFailed("the API did not start", remedy="the log above says why")
