"""The Postgres of the tests: wherever its programs come from, it keeps what was committed, and gives every test its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from servers import postgres


@pytest.mark.parametrize("programs", [postgres.install, postgres.from_wheel])
@pytest.mark.slow
def test_what_was_committed_survives_a_kill(tmp_path: Path, programs: Callable[[], Path]):
    server = postgres.Postgres(tmp_path, programs())
    with server.connect() as client:
        client.execute("CREATE TABLE kept (n int)")
        client.execute("INSERT INTO kept VALUES (1)")
    server.restart(hard=True)
    with server.connect() as client:
        assert client.execute("SELECT n FROM kept").fetchall() == [(1,)]
    one, two = server.database(), server.database()
    assert one != two
    server.drop(one)
    server.close()
    with pytest.raises(psycopg.OperationalError):
        server.connect()
