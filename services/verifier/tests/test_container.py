"""What the plug-in writes, safetensors' own reader reads."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from aerie_verifier.container import container

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 9), DTYPES)
def test_the_librarys_reader_finds_the_parts_joined_in_order(lengths, width, dtype):
    parts = [torch.randn(n, width).to(dtype) for n in lengths]
    ids = torch.arange(sum(lengths), dtype=torch.int32)

    read = load(bytes(container({"input_ids": [ids], "aux": parts})))

    assert set(read) == {"aux", "input_ids"}
    assert read["aux"].dtype == dtype
    assert torch.equal(read["aux"], torch.cat(parts))
    assert torch.equal(read["input_ids"], ids)


def test_rows_cut_from_a_batch_are_taken_as_they_are():
    batch_N3 = torch.arange(30, dtype=torch.float32).reshape(10, 3)

    read = load(bytes(container({"aux": [batch_N3[2:4], batch_N3[7:8]], "every_second": [batch_N3[:, ::2]]})))

    assert torch.equal(read["aux"], batch_N3[[2, 3, 7]])
    assert torch.equal(read["every_second"], batch_N3[:, ::2])
