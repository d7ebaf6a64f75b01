"""Both conventions of the final state, both rules of layer numbers, and lower precision, against Hugging Face."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import AUX_LAYERS, Launch, capture_to
from prompts import IN_FLIGHT, prompts
from references import Reference, cosine, stored
from verifiers import tiny_deepseek

from eagle3_core.testing import tiny_verifier

PROMPT = [3 + (17 * i * i + 5 * i) % 310 for i in range(200)]


@pytest.mark.parametrize("layers", [(2, 4, 5), (3, 4, 6)], ids=["ids less one", "ids as they are"])
def test_a_verifier_of_deepseeks_kind_is_captured_at_the_layers_that_were_asked_for(
    launch: Launch, tmp_path: Path, layers: tuple[int, int, int]
) -> None:
    verifier, sink = tiny_deepseek(tmp_path / "verifier"), tmp_path / "sink"
    with launch(verifier, capture=capture_to(sink, aux_layers=layers)) as server:
        have = stored(sink.as_uri(), server.capture(PROMPT))

    inputs, prenorm, _ = Reference(verifier).states(PROMPT)
    for layer, aux in zip(layers, have["aux"].chunk(3, -1), strict=True):
        assert cosine(aux, inputs[layer]) >= 0.99999
        assert max(cosine(aux, inputs[layer - 1]), cosine(aux, inputs[layer + 1])) < 0.999
    assert cosine(have["final"], prenorm) >= 0.99999


def test_in_bfloat16_fifty_prompts_in_flight_together_are_near_and_nearer_than_either_neighbouring_layer(
    launch: Launch, tmp_path: Path
) -> None:
    verifier, sink, asked = tiny_verifier(tmp_path / "verifier", hidden=64), tmp_path / "sink", prompts()
    with (
        launch(verifier, dtype="bfloat16", capture=capture_to(sink)) as server,
        ThreadPoolExecutor(IN_FLIGHT) as clients,
    ):
        receipts = list(clients.map(server.capture, asked))

    reference = Reference(verifier, torch.bfloat16)
    for ids, receipt in zip(asked, receipts, strict=True):
        have = stored(sink.as_uri(), receipt)
        assert have["input_ids"].tolist() == ids
        inputs, prenorm, _ = reference.states(ids)
        for layer, aux in zip(AUX_LAYERS, have["aux"].float().chunk(3, -1), strict=True):
            near = cosine(aux, inputs[layer])
            assert near >= 0.999
            assert near > max(cosine(aux, inputs[layer - 1]), cosine(aux, inputs[layer + 1]))
        assert cosine(have["final"].float(), prenorm) >= 0.999


def test_in_bfloat16_the_final_state_may_be_normed(launch: Launch, tmp_path: Path) -> None:
    verifier, sink = tiny_verifier(tmp_path / "verifier", hidden=64), tmp_path / "sink"
    with launch(verifier, dtype="bfloat16", overlap=False, capture=capture_to(sink, final="post")) as server:
        receipt = server.capture(PROMPT)
    have = stored(sink.as_uri(), receipt)

    _, prenorm, normed = Reference(verifier, torch.bfloat16).states(PROMPT)
    assert (receipt.final, receipt.dtype) == ("post", "bfloat16")
    assert cosine(have["final"].float(), normed) >= 0.999
    assert (have["final"].float() - normed).norm() < 0.05 * normed.norm()
    assert (prenorm - normed).norm() > 0.2 * normed.norm()  # else the two conventions could not be told apart
