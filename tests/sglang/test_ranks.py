"""Two tensor-parallel ranks of one engine: each has all of the residual, and one of them writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from conftest import AUX_LAYERS, FORKED, Launch, capture_to
from prompts import prompts
from references import Reference, cosine, stored

TWO_RANKS = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|0",  # cores of each rank: by default each has a NUMA node of its own
    "SGLANG_NCCL_SO_PATH": "/nowhere",  # torch brings NCCL along, which the engine would use without a GPU: gloo takes its place
}


def test_of_two_ranks_one_writes_every_prompt_once_and_its_states_are_those_of_hugging_face(
    launch: Launch, verifier: Path, sink: Path
) -> None:
    asked = prompts()[::5]
    server = launch(verifier, FORKED | TWO_RANKS, tensor_parallel=2, capture=capture_to(sink))

    with ThreadPoolExecutor(4) as clients:
        receipts = list(clients.map(server.capture, asked))

    processes = [" ".join(p.cmdline()) for p in psutil.Process(server.pid).children(recursive=True)]
    assert sum("scheduler_TP" in name for name in processes) == 2, processes
    assert sorted(path.name for path in sink.rglob("*.safetensors")) == sorted(Path(r.key).name for r in receipts)
    reference = Reference(verifier)
    for ids, receipt in zip(asked, receipts, strict=True):
        have, (layers, prenorm, _) = stored(sink.as_uri(), receipt), reference.states(ids)
        for layer, aux in zip(AUX_LAYERS, have["aux"].chunk(3, -1), strict=True):
            assert cosine(aux, layers[layer]) >= 0.99999
        assert cosine(have["final"], prenorm) >= 0.99999
