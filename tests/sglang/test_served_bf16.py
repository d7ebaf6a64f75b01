"""In bfloat16 chain decoder and engine round otherwise: pooled lengths must agree within the stated gap, and do."""

from __future__ import annotations

import pytest
from trained import House

PROMPTS = 32


@pytest.fixture(scope="module")
def house(cpu_engine: None, tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("house"), prompts=PROMPTS, dtype="bfloat16")


def test_in_bfloat16_serving_keeps_the_promised_length_within_the_gap_that_the_gate_allows(house: House) -> None:
    outcome = house.served(speed_in_flight=[])

    report, rows = outcome.result, house.rows(outcome)
    promised, delivered = report["acceptance_length"]["mean"], report["acceptance_length_served"]["mean"]
    assert len(rows) == PROMPTS
    assert promised > 1.1, "nothing was accepted, so nothing was compared"
    assert abs(delivered - promised) <= 0.03 * promised
    assert (report["serving"]["dtype"], report["serving"]["exact"], report["serving"]["lossless"]) == (
        "bfloat16", False, True,
    )  # fmt: skip
    assert not [reason for reason in report["reasons"] if "SGLang" in reason]
