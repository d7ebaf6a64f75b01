"""What is written piece by piece, the format's own reader reads, and the digest is the file's."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.digests import digest_file
from eagle3_core.tensor_table import read_table
from eagle3_core.train import streamed
from eagle3_core.train.streamed import write_tensors


@pytest.mark.parametrize("piece_bytes", [16, 1 << 24], ids=["many pieces", "one piece"])
def test_the_librarys_reader_finds_every_tensor_and_the_digest_is_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(streamed, "PIECE_BYTES", piece_bytes)
    tensors = {
        "weight/b": torch.randn(7, 5), "weight/a": torch.randn(6, 4).T, "step/a": torch.tensor(3.0),
        "bf": torch.randn(3, 3).bfloat16(), "none": torch.empty(0, 4), "ids": torch.arange(9),
    }  # fmt: skip
    expected = dict(tensors)

    digest, size = write_tensors(tmp_path / "state.safetensors", tensors)

    read = load_file(tmp_path / "state.safetensors")
    assert tensors == {}
    assert set(read) == set(expected)
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    assert read["bf"].dtype == torch.bfloat16
    assert digest == digest_file(tmp_path / "state.safetensors")
    assert size == (tmp_path / "state.safetensors").stat().st_size


def test_the_file_keeps_every_rule_of_the_format(tmp_path: Path) -> None:
    write_tensors(tmp_path / "state.safetensors", {"w": torch.ones(3, 2), "odd": torch.ones(1).bfloat16()})

    entries = read_table(tmp_path / "state.safetensors").entries

    assert {name: (entry.dtype, entry.shape) for name, entry in entries.items()} == {
        "w": ("F32", (3, 2)),
        "odd": ("BF16", (1,)),
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_state_on_a_gpu_is_written_as_it_is_there(tmp_path: Path) -> None:
    state = {"w": torch.randn(1 << 20, device="cuda"), "step/w": torch.tensor(2.0)}
    expected = {name: tensor.cpu() for name, tensor in state.items()}

    write_tensors(tmp_path / "state.safetensors", state)

    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in load_file(tmp_path / "state.safetensors").items()
    )
