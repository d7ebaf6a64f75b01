"""The demo's verifier is made once, whole or not at all, and holds the weights that its package carries."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import verifier
from safetensors import safe_open
from tokenizers import Tokenizer

from eagle3_core.verifier.identity import inspect

SCRIPT = Path(verifier.__file__)


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache that two processes filled at the same time."""
    folder = tmp_path_factory.mktemp("cache")
    with ThreadPoolExecutor() as both:
        first, second = both.map(lambda _: run_script("--cache", folder), range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == second.stdout == f"{folder}/verifiers/smollm2-135m-instruct-fp32\n"
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def folder(cache):
    return cache / "verifiers" / "smollm2-135m-instruct-fp32"


def test_the_verifier_lies_in_the_cache_that_the_user_names(tmp_path, monkeypatch):
    made = []
    monkeypatch.setenv("AERIE_CACHE", str(tmp_path))
    monkeypatch.setitem(verifier.verifier.__globals__, "_whole", lambda folder, _: made.append(folder) or True)

    folder = verifier.verifier()

    assert folder == made[0] == tmp_path / "verifiers" / "smollm2-135m-instruct-fp32"


def test_rows_of_each_head_return_to_their_halves():
    interleaved = np.array([[0], [10], [1], [11], [100], [110], [101], [111]], np.float32)

    assert verifier.halves_apart(interleaved, 2)[:, 0].tolist() == [0, 1, 10, 11, 100, 101, 110, 111]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.3.attn_k.weight", "model.layers.3.self_attn.k_proj.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
    ],
)
def test_tensors_get_their_hugging_face_names(theirs, ours):
    assert verifier.hugging_face_name(theirs)[0] == ours


def test_a_number_that_was_stored_in_float32_is_written_as_it_was_meant():
    assert verifier.shortest(9.999999747378752e-06) == 1e-05
    assert np.float32(verifier.shortest(9.999999747378752e-06)) == np.float32(9.999999747378752e-06)


@pytest.mark.slow
def test_two_processes_at_once_leave_one_whole_folder(cache, folder):
    assert [path.name for path in (cache / "verifiers").iterdir()] == [folder.name]
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "converted-from.json",
    }  # fmt: skip


@pytest.mark.slow
def test_whoever_may_read_what_its_maker_makes_may_read_all_of_it(folder, tmp_path):
    (made := tmp_path / "made").mkdir()
    (made / "file").touch()

    assert folder.stat().st_mode == made.stat().st_mode
    assert {path.stat().st_mode for path in folder.iterdir()} == {(made / "file").stat().st_mode}


@pytest.mark.slow
def test_it_is_the_verifier_that_the_demo_speaks_of(folder):
    who = inspect(folder)

    assert (who.model_type, who.num_layers, who.hidden_size, who.num_heads, who.num_kv_heads) == (
        "llama",
        30,
        576,
        9,
        3,
    )
    assert (who.vocab_size, who.tie_word_embeddings, who.eos_token_ids, who.bos_token_id) == (49152, True, (2,), 1)


@pytest.mark.slow
def test_digits_stand_alone_even_after_two_spaces(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    assert tokenizer.encode("x  12<|im_end|>").tokens == ["x", "ĠĠ", "1", "2", "<|im_end|>"]


@pytest.mark.slow
def test_the_second_time_nothing_is_written(cache, folder):
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

    assert run_script("--cache", cache).stdout.strip() == str(folder)

    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.slow
def test_a_folder_that_is_not_whole_is_made_again(cache, folder):
    (folder / "tokenizer.json").unlink()

    assert run_script("--cache", cache).returncode == 0

    assert inspect(folder).num_layers == 30
    assert len(list((cache / "verifiers").iterdir())) == 1
    assert json.loads((folder / "converted-from.json").read_text())["by"] == verifier.CONVERTER


@pytest.mark.slow
def test_it_says_what_the_capital_of_france_is(folder):
    """The rotary order of q and k, the tied head and the template are right, or this comes out as noise."""
    import torch
    from transformers import AutoModelForCausalLM

    from eagle3_core.data.templates import Chat

    chat = Chat.of(inspect(folder))
    prompt = chat.prompt([{"role": "user", "content": "What is the capital of France?"}])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[
        0, len(prompt) :
    ]

    assert (
        chat.tokenizer.decode(said.tolist(), skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"
    )
    with safe_open(folder / "model.safetensors", "numpy") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118
