"""A drafter served by the real engine takes the verify calls that the chain decoder promised; a wrong one is found out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trained import IN_FLIGHT, PROMPTS, House

from eagle3_core.drafter.export import write_sglang
from eagle3_core.stages import evaluate, served


@pytest.fixture(scope="module")
def house(cpu_engine: None, tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("house"))


def test_serving_takes_the_promised_verify_calls_on_every_prompt_and_that_very_drafter_is_packaged(
    house: House,
) -> None:
    outcome = house.served()

    counts = [((r["tokens"], r["calls"]), (r["served"]["tokens"], r["served"]["calls"])) for r in house.rows(outcome)]
    report = outcome.result
    assert len(counts) == PROMPTS
    assert [delivered for _, delivered in counts] == [promised for promised, _ in counts]
    assert report["acceptance_length_served"] == report["acceptance_length"]
    assert report["acceptance_length"]["mean"] > 1.1, "nothing was accepted, so nothing was compared"
    assert (report["serving"]["engine"], report["serving"]["lossless"]) == ("SGLang 0.5.23", True)
    assert [at["in_flight"] for at in report["serving"]["speedup"]] == IN_FLIGHT
    assert all(at["factor"] > 0 for at in report["serving"]["speedup"])
    assert not [reason for reason in report["reasons"] if "SGLang" in reason]
    packaged = house.chain_served.run("package").result
    assert packaged["report"]["serving"]["drafter"] == report["serving"]["drafter"]


def test_a_drafter_exported_for_the_layers_beside_its_own_is_found_out_by_serving_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classic: another numbering of layers. The server starts, drafts and answers rightly; it only accepts less."""

    def shifted(drafter: Any, folder: Path, dtype: Any) -> None:
        write_sglang(drafter, folder, dtype)
        config = json.loads((folder / "config.json").read_text())
        ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in ids]
        (folder / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(served, "write_sglang", shifted)
    monkeypatch.setattr(evaluate, "trained_drafter", house.leaning)

    report = house.served(speed_in_flight=[]).result

    promised, delivered = report["acceptance_length"]["mean"], report["acceptance_length_served"]["mean"]
    assert promised > 1.5
    assert delivered < 0.7 * promised
    assert (report["verdict"], report["serving"]["lossless"]) == ("fail", True)
    (reason,) = [reason for reason in report["reasons"] if "SGLang" in reason]
    assert f"promises an acceptance length of {promised}, SGLang 0.5.23 delivers {delivered}" in reason
