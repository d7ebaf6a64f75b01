"""The command that people type starts a server that captures, and takes all of it along when it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from conftest import CPU_ARGS, FORKED, PATIENCE_S, capture_to, cpu_environment
from references import stored

from eagle3_core.engine.capture import capture_request, receipt_of
from eagle3_core.engine.client import Client


def lives(process: psutil.Process) -> bool:
    """Whether it runs: what is dead and not yet reaped by the machine's first process does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_command_says_where_it_captures_and_leaves_no_process_when_it_is_told_to_end(
    verifier: Path, sink: Path, tmp_path: Path
) -> None:
    ids, config = list(range(10, 150)), tmp_path / "server.json"
    fields = {
        "model": str(verifier),
        "device": "cpu",
        "dtype": "float32",
        "engine_args": CPU_ARGS,
        "start_s": PATIENCE_S,
    }
    config.write_text(json.dumps({**fields, "capture": capture_to(sink).model_dump(mode="json")}))
    command = [sys.executable, "-m", "aerie_verifier", str(config), "--log", str(tmp_path / "log")]

    with subprocess.Popen(command, env={**cpu_environment(), **FORKED}, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            url = running.stdout.readline().strip()
            receipt = receipt_of(Client(url).post("/generate", capture_request(ids)), ids)
            processes = psutil.Process(running.pid).children(recursive=True)
            running.send_signal(signal.SIGTERM)
            status = running.wait()
        finally:
            running.kill()

    assert stored(sink.as_uri(), receipt)["input_ids"].tolist() == ids
    assert status == 0
    assert len(processes) >= 3
    assert not [process for process in processes if lives(process)]
