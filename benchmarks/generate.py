"""Greedy answers with their states kept, against transformers' own `generate` without states, on the small real verifier.

Both run in float32 on one thread, batch 32, 32 new tokens, the same prompts: `.venv/bin/python benchmarks/generate.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from rows import Row, benchmark, rate, real_verifier
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from eagle3_core.jobs.spec import VerifierSpec
from eagle3_core.verifier.base import Decoding
from eagle3_core.verifier.transformers import TransformersVerifier

PROMPTS, NEW_TOKENS = 32, 32


def prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Chat prompts of about 40 tokens that differ in their numbers."""
    texts = [
        f"<|im_start|>user\nWrite a story about {i} boats, {i * 7} birds and a town.<|im_end|>\n<|im_start|>assistant\n"
        for i in range(count)
    ]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def measure(small: bool) -> list[Row]:
    """Answer tokens per second, ours and transformers' own."""
    torch.set_num_threads(1)
    count, new_tokens = (2, 3) if small else (PROMPTS, NEW_TOKENS)
    folder = real_verifier()
    asked = prompts(Tokenizer.from_file(str(folder / "tokenizer.json")), count)
    ours = TransformersVerifier(folder, VerifierSpec(model=str(folder), dtype="float32", device="cpu"))
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    width = max(map(len, asked))
    ids = torch.tensor([[2] * (width - len(p)) + p for p in asked])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in asked])
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}

    def own() -> float:
        how = Decoding(max_new_tokens=new_tokens, batch_size=count, eos_ids=(), keep_states=True)
        answers = ours.generate(asked, how, lambda **_: None)
        return float(sum(len(a.ids) - a.prompt_len for a in answers))

    def reference() -> float:
        out = theirs.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=2, **lengths)
        return float(out.shape[1] - width) * count

    rounds = 1 if small else 2
    with torch.no_grad():
        return [Row("generate, states kept", rate(own, rounds), "answer tokens/s", rate(reference, rounds))]


if __name__ == "__main__":
    benchmark(measure)
