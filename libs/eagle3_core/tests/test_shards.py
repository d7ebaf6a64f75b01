"""Shards: what is written is read, and what is damaged is named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hostile import damaged, odd_documents, outcome, tensor_files
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3_core.digests import digest_bytes
from eagle3_core.errors import AerieError
from eagle3_core.objects.local import LocalStore
from eagle3_core.objects.manifest import Manifest, UnitWriter, read_manifest
from eagle3_core.objects.protocol import ObjectDamaged
from eagle3_core.shards.codecs import codec_called
from eagle3_core.shards.format import SampleRefused, kept_positions
from eagle3_core.shards.layout import METADATA_KEY, ShardHeader, UnknownCodec
from eagle3_core.shards.manifest import ShardDamaged, shard_entries
from eagle3_core.shards.reader import ShardSet
from eagle3_core.shards.writer import ShardWriter
from eagle3_core.verifier.base import States, StatesNotFinite
from eagle3_core.verifier.contract import CaptureContract, ContractMismatch

H, V = 4, 50


def contract(**changes: object) -> CaptureContract:
    digests = {name: "d" for name in ("verifier", "config_digest", "tokenizer_digest", "chat_template_digest")}
    return CaptureContract(
        **{
            **digests, "verifier_name": "toy", "revision": "local", "hidden_size": H, "num_layers": 8, "vocab_size": V,
            "aux_layers": (2, 4, 5), "dtype": "float32", "stored_dtype": "bfloat16", "kv_cache_dtype": "float32",
            "attention": "slots", "engine": "toy", "engine_version": "1", "capture_pass": "decode", **changes,
        }
    )  # fmt: skip


def states_of(tokens: int, seed: int = 0) -> States:
    draw = torch.Generator().manual_seed(seed)
    return States(torch.randn(tokens, 3 * H, generator=draw), torch.randn(tokens, H, generator=draw))


def write(root: Path, samples: list[dict], *, shard_bytes: int = 1 << 20, unit: int = 0, **changes: object) -> Manifest:
    store, scratch = LocalStore(root / "store"), root / "scratch"
    scratch.mkdir(exist_ok=True)
    own = contract(**changes)
    shards = ShardWriter(scratch, own, codec="raw", shard_bytes=shard_bytes)
    for i, sample in enumerate(samples):
        shards.add(
            f"s{i}", "task", sample["ids"], sample["mask"], sample.get("states") or states_of(len(sample["ids"]), i)
        )
    out = UnitWriter(store, tenant="t", job_id="j", stage="extract", unit=(unit, 0, 1), unit_key="k", fence=1)
    return read_manifest(store, out.commit(shards.close(out), contract=own.model_dump(mode="json")))


def read(root: Path, *manifests: Manifest) -> ShardSet:
    return ShardSet(LocalStore(root / "store"), manifests, root / "scratch")


def sample(tokens: int, supervised: int = 2) -> dict:
    return {"ids": [i % V for i in range(tokens)], "mask": [int(i >= tokens - supervised) for i in range(tokens)]}


drawn_samples = st.lists(
    st.lists(st.tuples(st.integers(0, V - 1), st.integers(0, 1)), min_size=1, max_size=12).map(
        lambda pairs: {"ids": [i for i, _ in pairs], "mask": [m for _, m in pairs]}
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(samples=drawn_samples, shard_bytes=st.integers(2048, 6000))
def test_what_is_written_is_read_in_any_split_over_files(samples, shard_bytes):
    with tempfile.TemporaryDirectory() as folder:
        manifest = write(Path(folder), samples, shard_bytes=shard_bytes)
        shards = read(Path(folder), manifest)

        assert len(shards) == len(samples)
        assert shards.lengths.tolist() == [len(s["ids"]) for s in samples]
        for i, want in enumerate(samples):
            have, states = shards.sample(i), states_of(len(want["ids"]), i)
            mask = [0, *want["mask"], 0]
            kept = [p for p in range(len(want["ids"])) if any(mask[p : p + 3])]
            assert (have.id, have.task) == (f"s{i}", "task")
            assert have.input_ids.tolist() == want["ids"]
            assert have.loss_mask.tolist() == want["mask"]
            assert have.final_index.tolist() == kept
            assert torch.equal(have.aux, states.aux.bfloat16())
            assert torch.equal(have.final, states.final[kept].bfloat16())
        for entry, counts in shard_entries(manifest):
            assert entry.size <= shard_bytes or counts.samples == 1


@settings(max_examples=40, deadline=None)
@given(where=st.integers(0, 1 << 30), flip=st.integers(1, 255), cut=st.booleans())
def test_a_flipped_byte_or_a_truncation_anywhere_names_its_file(where, flip, cut):
    with tempfile.TemporaryDirectory() as folder:
        manifest = write(Path(folder), [sample(9), sample(7)], shard_bytes=2100)
        path = Path(folder) / "store" / manifest.files[1].key
        data = bytearray(path.read_bytes())
        place = where % len(data)
        if cut:
            del data[place:]
        else:
            data[place] ^= flip
        path.write_bytes(data)

        with pytest.raises(ObjectDamaged, match=r"shard-00001\.safetensors"):
            read(Path(folder), manifest)


NAMES = ("input_ids", "loss_mask", "sample_offsets", "final_index", "aux", "final")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_that_a_manifest_vouches_for_are_whole_samples_or_a_named_fault(data):
    with tempfile.TemporaryDirectory() as folder:
        manifest = write(Path(folder), [sample(9), sample(7)])
        (entry,) = manifest.files
        path = Path(folder) / "store" / entry.key
        odd = damaged(path.read_bytes()) | tensor_files(NAMES) | odd_documents | st.binary(max_size=40)
        path.write_bytes(content := data.draw(odd))
        vouched = entry.model_copy(update={"size": len(content), "blake3": digest_bytes(content)})

        shards, error = outcome(lambda: read(Path(folder), manifest.model_copy(update={"files": [vouched]})))
        lengths = None
        if shards is not None:
            lengths, error = outcome(lambda: [shards.sample(i).tokens for i in range(len(shards))])

        match error:
            case None:
                assert lengths == [9, 7]
            case ShardDamaged() | UnknownCodec():
                assert "shard-00000.safetensors" in error.detail
            case _:
                assert isinstance(error, SampleRefused | StatesNotFinite)
                assert error.context["sample"]


def test_equal_samples_make_equal_bytes(tmp_path):
    first, second = (write(tmp_path / name, [sample(9), sample(5)]) for name in ("a", "b"))

    assert [f.blake3 for f in first.files] == [f.blake3 for f in second.files]
    assert first.content() == second.content()


def test_totals_and_entries_count_the_same(tmp_path):
    manifest = write(tmp_path, [sample(9), sample(7), sample(5, supervised=0)], shard_bytes=2100)

    assert manifest.summary["samples"] == 3
    assert manifest.summary["tokens"] == 21
    assert manifest.summary["supervised_tokens"] == 4
    assert manifest.summary["final_states"] == 6
    assert manifest.summary["shards"] == len(shard_entries(manifest)) > 1
    assert manifest.summary["bytes"] == sum(f.size for f in manifest.files)


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        ([0, 0, 0, 1, 1, 0, 0], [2, 3, 4, 5]),
        ([1, 0, 0, 0, 0, 0, 1], [0, 1, 5, 6]),
        ([0, 0, 0], []),
        ([1], [0]),
        ([1, 1, 1], [0, 1, 2]),
    ],
)
def test_final_states_are_kept_beside_supervised_tokens_only(mask, kept):
    assert kept_positions(torch.tensor(mask, dtype=torch.uint8)).tolist() == kept


@pytest.mark.parametrize(
    ("part", "column", "named"),
    [("aux", 0, "layer 2"), ("aux", H, "layer 4"), ("aux", 2 * H + 1, "layer 5"), ("final", 1, "final norm")],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_no_number_names_its_sample_and_layer(tmp_path, part, column, named, value):
    states = states_of(6)
    getattr(states, part)[5, column] = value

    with pytest.raises(StatesNotFinite, match=rf"sample s1: .*{named}"):
        write(tmp_path, [sample(4), {**sample(6), "states": states}])


def test_a_state_that_overflows_when_it_is_stored_is_found_on_reading(tmp_path):
    states = states_of(6)
    states.aux[2, 0] = 3.4e38  # finite in float32, infinite in bfloat16

    manifest = write(tmp_path, [{**sample(6), "states": states}])

    with pytest.raises(StatesNotFinite, match="sample s0: the input of layer 2"):
        read(tmp_path, manifest).sample(0)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"ids": [], "mask": []}, "no tokens"),
        ({"ids": [1, 2], "mask": [1]}, "2 tokens, a mask"),
        ({"ids": [1, V], "mask": [0, 1]}, "outside 0..49"),
        ({"ids": [1, 2], "mask": [0, 2]}, "other than 0 and 1"),
        ({"ids": [1, 2], "mask": [0, 1], "states": states_of(3)}, "aux is"),
        ({"ids": [1, 2], "mask": [0, 1], "states": States(torch.zeros(2, 3), torch.zeros(2, H))}, "aux is"),
    ],
)
def test_a_sample_whose_parts_do_not_fit_is_refused_by_name(tmp_path, broken, says):
    with pytest.raises(SampleRefused, match=f"sample s0: .*{says}"):
        write(tmp_path, [broken])


def rewritten(root: Path, manifest: Manifest, change, header=lambda h: h) -> Manifest:
    """`manifest` with its shard replaced by one that `change` altered, its digest in order."""
    store, entry = LocalStore(root / "store"), manifest.files[0]
    path = store.root / entry.key
    tensors = load_file(path)
    change(tensors)
    with safe_open(path, framework="pt") as file:
        old = ShardHeader.model_validate_json(file.metadata()[METADATA_KEY])
    other = root / "other.safetensors"
    save_file(
        {k: v.contiguous() for k, v in tensors.items()}, other, metadata={METADATA_KEY: header(old).model_dump_json()}
    )
    out = UnitWriter(store, tenant="t", job_id="j", stage="extract", unit=(0, 0, 1), unit_key="k", fence=2)
    out.add_file(entry.name, other, **entry.meta)
    return read_manifest(store, out.commit({}, contract=manifest.contract))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.update(sample_offsets=torch.tensor([0, 9, 9])), "sample_offsets do not rise"),
        (lambda t: t.update(sample_offsets=torch.tensor([0, 12, 9])), "sample_offsets do not rise"),
        (lambda t: t.update(sample_offsets=torch.tensor([0, 14])), "1 samples, 2 ids, 2 tasks"),
        (lambda t: t.update(aux=t["aux"][:, :-1]), "aux .* do not fit"),
        (lambda t: t.update(aux=t["aux"].float()), "aux is F32"),
        (lambda t: t.update(final=t["final"][:-1]), "final .* do not fit"),
        (lambda t: t.update(final_index=t["final_index"].flip(0)), "final_index does not rise"),
        (lambda t: t.update(input_ids=t["input_ids"].long()), "input_ids is I64"),
        (lambda t: t.update(input_ids=t["input_ids"] - 1), "it holds token -1"),
        (lambda t: t.update(input_ids=t["input_ids"] + V), f"tokens go from 0 to {V - 1}"),
        (lambda t: t.update(loss_mask=t["loss_mask"] * 2), "other than 0 and 1"),
        (lambda t: t.update(loss_mask=1 - t["loss_mask"]), "4 supervised tokens in the manifest, 10 in the file"),
        (lambda t: t.pop("loss_mask"), "loss_mask"),
        (lambda t: t.pop("aux"), "aux"),
    ],
)
def test_a_shard_that_contradicts_itself_is_named(tmp_path, change, says):
    manifest = rewritten(tmp_path, write(tmp_path, [sample(9), sample(5)]), change)

    with pytest.raises(ShardDamaged, match=rf"shard-00000\.safetensors .*{says}"):
        read(tmp_path, manifest)


def test_a_shard_of_a_later_codec_or_schema_is_not_guessed_at(tmp_path):
    manifest = write(tmp_path, [sample(9)])
    newer = rewritten(tmp_path, manifest, lambda t: None, lambda h: h.model_copy(update={"schema_version": 2}))
    coded = rewritten(tmp_path, manifest, lambda t: None, lambda h: h.model_copy(update={"codec": "zip"}))

    with pytest.raises(ShardDamaged, match="schema version 2"):
        read(tmp_path, newer)
    with pytest.raises(UnknownCodec, match=r"shard-00000\.safetensors.*'zip'"):
        read(tmp_path, coded)
    with pytest.raises(UnknownCodec):
        codec_called("zip")


def test_units_captured_differently_do_not_mix(tmp_path):
    one, other = write(tmp_path, [sample(5)]), write(tmp_path, [sample(5)], unit=1, aux_layers=(1, 4, 5))

    with pytest.raises(ContractMismatch, match=r"extract unit 0 has aux_layers=\(2, 4, 5\), extract unit 1"):
        read(tmp_path, one, other)


def test_units_from_decoding_and_from_prefill_do_mix(tmp_path):
    one, other = write(tmp_path, [sample(5)]), write(tmp_path, [sample(6)], unit=1, capture_pass="prefill")

    assert read(tmp_path, one, other).lengths.tolist() == [5, 6]


def test_a_manifest_without_a_contract_or_counts_is_refused(tmp_path):
    manifest = write(tmp_path, [sample(5)])
    bare = manifest.model_copy(update={"contract": None})
    uncounted = manifest.model_copy(update={"files": [manifest.files[0].model_copy(update={"meta": {}})]})

    for broken, says in ((bare, "no capture contract"), (uncounted, "does not say what shard-00000")):
        with pytest.raises(ShardDamaged, match=says):
            read(tmp_path, broken)
    with pytest.raises(ShardDamaged, match="no shards"):
        read(tmp_path)


def test_many_files_are_read_in_any_order_with_few_of_them_open(tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3_core.shards.reader.OPEN_FILES", 2)
    manifest = write(tmp_path, [sample(n) for n in range(3, 11)], shard_bytes=1)

    shards = read(tmp_path, manifest)

    assert len(manifest.files) == 8
    for i in (7, 0, 3, 7, 1):
        assert torch.equal(shards.sample(i).aux, states_of(i + 3, i).aux.bfloat16())
    with pytest.raises(IndexError):
        shards.sample(8)


def test_every_refusal_says_what_to_do(tmp_path):
    with pytest.raises(AerieError) as caught:
        write(tmp_path, [{"ids": [V], "mask": [1]}])

    assert caught.value.remedy
