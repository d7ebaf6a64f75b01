"""The tests' own Redis: both ways to get one work, and it keeps port, password and data over a restart."""

from pathlib import Path

import pytest
from servers import redis as servers

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("binary", [servers.install, servers.from_wheel])
def test_redis_keeps_its_port_and_data_when_it_is_stopped_and_started_again(binary, tmp_path: Path):
    server = servers.start(tmp_path / "redis", binary())
    try:
        with server.client() as client:
            client.set("word", "kept")
            server.restart(hard=False)
            assert client.get("word") == b"kept"
            server.flush()
            assert client.dbsize() == 0
        server.kill()
        assert not server.answers()
    finally:
        server.stop()
