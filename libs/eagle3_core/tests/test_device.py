"""Where a stage computes, and what it says where that cannot be."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.verifier.device import NoGpu, pick_device


def test_a_gpu_that_is_not_there_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert (pick_device("auto"), pick_device("cpu")) == ("cpu", "cpu")
    with pytest.raises(NoGpu, match="this machine shows no GPU") as caught:
        pick_device("cuda")

    assert caught.value.pointer == "/verifier/device"
    assert "worker on a machine with a GPU" in str(caught.value.remedy)
