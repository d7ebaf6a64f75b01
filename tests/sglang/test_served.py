"""A drafter served by the real engine takes the verify calls that the chain decoder promised; a wrong one is found out.

A small random verifier repeats itself, so a drafter learns something of it in seconds, and there is something to accept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import cpu_variables
from drafters import lean_on_its_layers

from eagle3_core.data.tokensets import TokenSet
from eagle3_core.drafter.export import write_sglang
from eagle3_core.drafter.model import Drafter
from eagle3_core.jobs.graph import STAGES
from eagle3_core.jobs.spec import JobSpec, parse_job
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import Manifest, fetch_file, read_manifest
from eagle3_core.shards.manifest import contract_of
from eagle3_core.stages import evaluate, served
from eagle3_core.stages.chain import Chain, Outcome
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.evaluate import _drafter as load_drafter
from eagle3_core.stages.generate import ANSWERS_FILE
from eagle3_core.testing import tiny_job

PROMPTS, IN_FLIGHT = 8, [1, 4]


def job(folder: Path) -> dict[str, Any]:
    document = tiny_job(folder, train=64, held_out=PROMPTS)
    document["data"] |= {"max_seq_len": 128, "unit_samples": 64}
    document["data"]["regenerate"] |= {"max_new_tokens": 40, "batch_size": 32}
    document["training"] |= {"epochs": 4, "lr": 5e-3, "batch_tokens": 512}
    document["vocab"]["draft_vocab_size"] = None
    document["evaluation"] |= {"max_new_tokens": 40, "unit_prompts": PROMPTS, "batch_size": PROMPTS}
    document["evaluation"]["speed_in_flight"] = IN_FLIGHT
    return document


class House:
    """One job whose drafter is trained once, and evaluated as a test asks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.document = folder, job(folder)
        self.store = LocalStore(folder / "store")
        self.trained = self.chain(parse_job(self.document))
        self.trained.run("train")

    def chain(self, spec: JobSpec) -> Chain:
        return Chain(spec, self.store, self.folder / "chain", (self.folder,))

    def served(self, **evaluation: Any) -> Outcome:
        """Evaluate's outcome through SGLang, with the stages before it as they are."""
        self.document["verifier"]["backend"] = "sglang"
        self.document["evaluation"] |= evaluation
        self.chain_served = self.chain(parse_job(self.document))
        for name in STAGES:
            if name not in ("canary", "evaluate", "package"):
                self.chain_served.seed(name, self.trained.run(name).outputs)
        return self.chain_served.run("evaluate")

    def leaning(self, ctx: StageContext, trained: Manifest) -> Drafter:
        """What was trained, made to lean on its own layers."""
        drafter = load_drafter(ctx, trained)
        answers = read_manifest(self.store, self.trained.run("generate").outputs[0].manifest).file(ANSWERS_FILE)
        texts = TokenSet.load(fetch_file(self.store, answers, self.folder))
        verifier = Path(self.document["verifier"]["model"])
        lean_on_its_layers(
            drafter, contract_of(trained).aux_layers, verifier, [texts.sample(i)[0].tolist() for i in range(len(texts))]
        )
        return drafter

    def rows(self, outcome: Outcome) -> list[dict[str, Any]]:
        """Of `prompts.json`."""
        entry = read_manifest(self.store, outcome.outputs[0].manifest).file("prompts.json")
        return json.loads(fetch_file(self.store, entry, self.folder).read_bytes())


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """The worker's settings are those of this environment, whose engine runs on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cpu_variables(sys.executable).items():
            patch.setenv(name, value)
        yield House(tmp_path_factory.mktemp("house"))


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
    monkeypatch.setattr(evaluate, "_drafter", house.leaning)

    report = house.served(speed_in_flight=[]).result

    promised, delivered = report["acceptance_length"]["mean"], report["acceptance_length_served"]["mean"]
    assert promised > 1.5
    assert delivered < 0.7 * promised
    assert (report["verdict"], report["serving"]["lossless"]) == ("fail", True)
    (reason,) = [reason for reason in report["reasons"] if "SGLang" in reason]
    assert f"promises an acceptance length of {promised}, SGLang 0.5.23 delivers {delivered}" in reason
