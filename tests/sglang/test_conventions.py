"""Both conventions of the final state, both rules of layer numbers, and lower precision, against Hugging Face."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from captured import job_captured_by
from conftest import AUX_LAYERS, CPU_ARGS, Launch, capture_to
from prompts import IN_FLIGHT, prompts
from references import Reference, cosine, stored
from verifiers import tiny_deepseek, tiny_kimi

from eagle3_core.testing import tiny_verifier
from eagle3_core.verifier.endpoint_states import CaptureDiffers

PROMPT = [3 + (17 * i * i + 5 * i) % 310 for i in range(200)]


@pytest.mark.parametrize(
    ("layers", "final", "overlap"),
    [((2, 4, 5), "pre", True), ((3, 4, 6), "post", False)],
    ids=["ids less one, before the norm", "ids as they are, behind the norm, one pass after the other"],
)
def test_a_verifier_of_deepseeks_kind_is_captured_at_the_layers_and_on_the_side_of_the_norm_that_were_asked_for(
    launch: Launch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layers: tuple[int, int, int],
    final: str,
    overlap: bool,
) -> None:
    verifier, sink = tiny_deepseek(tmp_path / "verifier"), tmp_path / "sink"
    with launch(verifier, overlap=overlap, capture=capture_to(sink, aux_layers=layers, final=final)) as server:
        receipt = server.capture(PROMPT)
        if final == "post":  # which a job does not take for the state before the norm
            job, _ = job_captured_by(server, tmp_path / "job", monkeypatch)
            with pytest.raises(CaptureDiffers, match="captures with final norm post, the job wants pre"):
                job.run("extract")

    have, (inputs, prenorm, normed) = stored(sink.as_uri(), receipt), Reference(verifier).states(PROMPT)
    for layer, aux in zip(layers, have["aux"].chunk(3, -1), strict=True):
        assert cosine(aux, inputs[layer]) >= 0.99999
        assert max(cosine(aux, inputs[layer - 1]), cosine(aux, inputs[layer + 1])) < 0.999
    assert receipt.final == final
    torch.testing.assert_close(have["final"], prenorm if final == "pre" else normed, rtol=1e-4, atol=1e-3)
    assert (prenorm - normed).norm() > 0.1 * normed.norm()  # else the two conventions could not be told apart


@pytest.mark.parametrize("layers", [(2, 4, 5), (3, 4, 6)], ids=["ids less one", "ids as they are"])
def test_kimis_wrapper_is_captured_at_the_layers_of_the_language_model_within(
    launch: Launch, tmp_path: Path, layers: tuple[int, int, int]
) -> None:
    language, sink = tiny_deepseek(tmp_path / "language"), tmp_path / "sink"
    kimi, args = tiny_kimi(tmp_path / "kimi", language), (*CPU_ARGS, "--skip-server-warmup")  # which sends an image
    with launch(kimi, capture=capture_to(sink, aux_layers=layers), engine_args=args) as server:
        receipt = server.capture(PROMPT)
        served = server.client.get("/model_info")

    have, (inputs, prenorm, _) = stored(sink.as_uri(), receipt), Reference(language).states(PROMPT)
    assert served["architectures"] == ["KimiK25ForConditionalGeneration"]
    for layer, aux in zip(layers, have["aux"].chunk(3, -1), strict=True):
        assert cosine(aux, inputs[layer]) >= 0.99999
        assert max(cosine(aux, inputs[layer - 1]), cosine(aux, inputs[layer + 1])) < 0.999
    torch.testing.assert_close(have["final"], prenorm, rtol=1e-4, atol=1e-3)


def test_in_bfloat16_fifty_prompts_in_flight_together_are_near_and_nearer_than_either_neighbouring_layer(
    launch: Launch, tmp_path: Path
) -> None:
    verifier, sink, asked = tiny_verifier(tmp_path / "verifier", hidden=64), tmp_path / "sink", prompts()
    with (
        launch(verifier, dtype="bfloat16", capture=capture_to(sink)) as server,
        ThreadPoolExecutor(IN_FLIGHT) as clients,
    ):
        receipts = list(clients.map(server.capture, asked))

    assert {(receipt.final, receipt.dtype) for receipt in receipts} == {("pre", "bfloat16")}
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
