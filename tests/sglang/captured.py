"""A job whose answers are given and whose states a running server captures: what it has to do is to fetch them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.engine.server import Server
from eagle3_core.jobs.spec import parse_job
from eagle3_core.objects.local import LocalStore
from eagle3_core.stages.chain import Chain
from eagle3_core.testing import tiny_job


def job_captured_by(server: Server, folder: Path, patch: pytest.MonkeyPatch) -> tuple[Chain, LocalStore]:
    """The stages of a job of the server's verifier, in `folder`, whose operator allows the server and its sink; their store."""
    assert server.config.capture is not None
    patch.setenv("AERIE_ENDPOINTS", server.url)
    patch.setenv("AERIE_CAPTURE_SINKS", server.config.capture.sink)
    document = tiny_job(folder, answered=True)
    document["verifier"] |= {"backend": "sglang", "model": str(server.config.model), "dtype": server.config.dtype}
    document["extraction"] = {"endpoint": {"url": server.url}, "aux_layers": server.config.capture.aux_layers}
    spec, roots = parse_job(document), [folder, server.config.model]
    store = LocalStore(folder / "objects")
    return Chain(spec, store, folder / "chain", roots), store
