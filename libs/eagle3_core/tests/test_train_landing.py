"""The end of a run only copies: memory for the drafter was made ready beside the steps."""

from __future__ import annotations

import torch

from eagle3_core.drafter.losses import Objective
from eagle3_core.drafter.testing import random_drafter, random_teacher, tiny_config
from eagle3_core.jobs.spec import Training
from eagle3_core.train.replica import Place, Replica


def test_a_trained_drafter_lands_in_memory_made_ready_at_the_start_and_a_second_one_in_its_own() -> None:
    config = tiny_config()
    place = Place(torch.device("cpu"), torch.float32)
    replica = Replica(random_drafter(config), random_teacher(config), Objective(3), Training(), place)
    ready = {name: tensor.data_ptr() for name, tensor in replica._landing._room.items()}

    first, second = replica.drafter(), replica.drafter()

    assert {name: weight.data_ptr() for name, weight in first.weights.items()} == ready
    masters = replica._flat.masters()
    assert masters.keys() == ready.keys()
    for name, master in masters.items():
        assert torch.equal(first.weights[name], master)
        assert torch.equal(second.weights[name], master)
        assert len({t.data_ptr() for t in (master, first.weights[name], second.weights[name])}) == 3
