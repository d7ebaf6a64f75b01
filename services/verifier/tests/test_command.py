"""`aerie-verifier` ends when it is told to, and says what is wrong; off, the plug-in costs an engine nothing."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path


def command(config: Path) -> list[str]:
    return [sys.executable, "-m", "aerie_verifier", str(config), "--log", str(config.with_suffix(".log"))]


def test_a_server_that_is_still_starting_ends_at_once_when_it_is_told_to(tmp_path: Path) -> None:
    engine, began, config = tmp_path / "python", tmp_path / "began", tmp_path / "server.json"
    engine.write_text(f"#!/bin/sh\necho began > {began}\nexec sleep 1000\n")
    engine.chmod(0o755)
    os.mkfifo(began)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config.write_text(json.dumps({"model": str(tmp_path), "python": str(engine)}))

    with (
        os.fdopen(os.open(began, os.O_RDONLY | os.O_NONBLOCK)) as heard,
        subprocess.Popen(command(config), stdout=subprocess.PIPE) as running,
    ):
        assert select.select([heard], [], [], 60)[0]
        running.send_signal(signal.SIGTERM)
        try:
            said, _ = running.communicate(timeout=60)
        finally:
            running.kill()

    assert (running.returncode, said) == (0, b"")


def test_a_field_that_is_wrong_is_named(tmp_path: Path) -> None:
    config = tmp_path / "server.json"
    config.write_text(json.dumps({"modle": "x"}))

    ran = subprocess.run(command(config), capture_output=True, text=True, check=False)

    assert (ran.returncode, "modle" in ran.stderr) == (1, True)


def test_a_plug_in_that_is_off_imports_nothing() -> None:
    program = "import sys; from aerie_verifier.plugin import register; register(); print(*sys.modules)"

    ran = subprocess.run([sys.executable, "-c", program], env={}, capture_output=True, text=True, check=True)

    assert not {"torch", "pydantic", "eagle3_core", "aerie_verifier.attach"} & set(ran.stdout.split())
