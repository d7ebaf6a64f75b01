"""The model card: what a drafter is worth and where not, what it was made of, and how to serve it.

Every figure comes from the report of the evaluation or the results of the stages; nothing is rounded up, and training
accuracy does not appear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_core.drafter.config import DrafterConfig
from eagle3_core.evaluate.gate import thresholds
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.verifier.contract import CaptureContract


@dataclass(frozen=True)
class CardFacts:
    """What the card is written from."""

    spec: JobSpec
    config: DrafterConfig
    contract: CaptureContract
    digest: str
    report: Mapping[str, Any]
    """The combined report (`evaluate.report.combine`)."""
    vocab: Mapping[str, Any]
    train: Mapping[str, Any]
    prepare: Mapping[str, Any]
    parameters: int
    sglang_layers: Sequence[int]
    """The captured layers as SGLang counts them for this verifier's class."""


def write_card(facts: CardFacts) -> str:
    """The card as Markdown."""
    parts = (_head(facts), _figures(facts), _serving(facts), _making(facts), _limits(facts))
    return "\n".join("\n".join(part) for part in parts)


def _head(facts: CardFacts) -> list[str]:
    spec, contract = facts.spec, facts.contract
    return [
        f"# {spec.name}",
        "",
        f"An {'EAGLE-3.1' if facts.config.algorithm == 'eagle3.1' else 'EAGLE-3'} draft model "
        f"({facts.parameters / 1e6:.1f} M parameters) for `{contract.verifier_name}` (revision {contract.revision}). "
        f"Digest `{facts.digest[:16]}`. Verdict of its gate: **{facts.report['verdict']}**"
        + (f" ({'; '.join(facts.report['reasons'])})." if facts.report["reasons"] else ".")
        + f" The gate asked for: {thresholds(spec.evaluation.gate)}.",
        "",
    ]


def _figures(facts: CardFacts) -> list[str]:
    report, evaluation = facts.report, facts.spec.evaluation
    length = report["acceptance_length"]
    served, serving = report.get("acceptance_length_served"), report.get("serving")
    tasks_served: Mapping[str, Any] = served["by_task"] if served else {}
    rows = [
        f"| {name} | {task['prompts']} | {task['mean']:.3f} | {task['ci_low']:.3f} to {task['ci_high']:.3f} |"
        + _cell(tasks_served.get(name))
        for name, task in length["by_task"].items()
    ]
    by_position = " / ".join("-" if share is None else f"{share:.3f}" for share in report["acceptance_by_position"])
    speed = report.get("predicted_speedup")
    lines = [
        "## What it is worth",
        "",
        f"Measured by drafting and verifying {report['prompts']} held-out prompts greedily, {evaluation.num_steps} drafted "
        f"tokens a verify call, answers of at most {evaluation.max_new_tokens} tokens, verifier in {facts.spec.verifier.dtype}. "
        "Acceptance length = (tokens after the first) / (verify calls); 1.0 is useless.",
        "",
        "| task | prompts | acceptance length | 95 % interval over prompts |"
        + (f" served by {serving['engine']} |" if serving else ""),
        "|---|---|---|---|" + ("---|" if serving else ""),
        f"| **all, pooled over tokens** | {report['prompts']} | **{length['mean']:.3f}** | "
        f"{length['ci_low']:.3f} to {length['ci_high']:.3f} |" + _cell(served),
        *rows,
        f"| mean over tasks | | {length['macro']:.3f} | |" + (f" {served['macro']:.3f} |" if served else ""),
        "",
        f"- Acceptance of draft 1, 2, ..., given that those before were accepted: {by_position}.",
        f"- Drafted answers equal the verifier's own: {'yes' if report['lossless'] else 'NO'}"
        + (f" (near-ties: {report['near_tie_share']:.1%} of the prompts)." if report["near_tie_share"] else "."),
        f"- Answers that repeat an 8-gram: {report['looping_share']:.1%}. Looping makes acceptance look better than it is.",
        f"- 8-grams of the held-out answers that also occur in training answers: {report['seen_ngram_share']:.1%}.",
    ]
    if speed:
        lines.append(
            f"- Predicted speed-up at batch 1 on {speed['device']} with {_count(speed['threads'], 'thread')}: "
            f"{speed['factor']:.2f} "
            f"(below 1 under an acceptance length of {speed['break_even_acceptance_length']:.2f}). Measure on your own machine."
        )
    return [*lines, *(_delivery(serving, report["prompts"]) if serving else []), ""]


def _cell(served: Mapping[str, Any] | None) -> str:
    return f" {served['mean']:.3f} |" if served else ""


def _delivery(serving: Mapping[str, Any], prompts: int) -> list[str]:
    """What the engine that serves made of the promise."""
    same = prompts - serving["prompts_counted_otherwise"]
    where = "a CPU: no figure for GPUs" if serving["device"] == "cpu" else f"this {serving['device']}"
    times = [
        f"{at['factor']:.2f} with {at['in_flight']} in flight ({at['plain_tokens_per_s']:.0f} to "
        f"{at['drafted_tokens_per_s']:.0f} tokens/s)"
        for at in serving["speedup"]
    ]
    return [
        f"- Served by {serving['engine']} in {serving['dtype']}: the same tokens in the same verify calls on {same} of "
        f"{prompts} prompts; its answers with the drafter equal those without: {'yes' if serving['lossless'] else 'NO'}.",
        *([f"- Speed-up measured in serving on {where}: {', '.join(times)}."] if times else []),
    ]


def _serving(facts: CardFacts) -> list[str]:
    steps = facts.spec.evaluation.num_steps
    ours, theirs = list(facts.config.aux_layers), list(facts.sglang_layers)
    return [
        "## Serve it",
        "",
        "In the folder of this card, with `VERIFIER` set to where the verifier lies:",
        "",
        "```bash",
        f"VERIFIER=/path/to/{facts.contract.verifier_name}",
        "",
        "# SGLang",
        "python -m sglang.launch_server \\",
        '  --model-path "$VERIFIER" \\',
        "  --speculative-algorithm EAGLE3 \\",
        "  --speculative-draft-model-path ./sglang \\",
        f"  --speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}",
        "",
        "# vLLM",
        'vllm serve "$VERIFIER" \\',
        "  --speculative-config "
        f"""'{{"model": "./speculators", "method": "eagle3", "num_speculative_tokens": {steps}}}'""",
        "```",
        "",
        "SGLang's algorithm must be `EAGLE3`: with `EAGLE` the server starts and accepts nothing. Its own "
        "`spec_accept_length` counts the free first token; compare (tokens - 1) / verify calls.",
        "",
        f"Layers: the drafter reads the inputs of layers {ours} (`hidden_states[i]` of transformers), and "
        f"`speculators/config.json` says so. `sglang/config.json` says {theirs}, which are the same states as SGLang "
        "counts them for this verifier's model class.",
        "",
        "`speculators/` is the same drafter for that library and for vLLM. It refers to the verifier by the path it was "
        "trained with: the command above goes past it; for others, set `speculators_config.verifier.name_or_path` in its "
        "`config.json` after moving either.",
        "",
    ]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _making(facts: CardFacts) -> list[str]:
    spec, training, train, vocab = facts.spec, facts.spec.training, facts.train, facts.vocab
    tasks = facts.prepare.get("tasks") or {}
    total = sum(tasks.values()) or 1
    shares = ", ".join(f"{name} {count / total:.0%}" for name, count in sorted(tasks.items()))
    answers = "the verifier's own greedy answers" if spec.data.regenerate.enabled else "the answers of the data sets"
    clamped = f" ({vocab['requested']} were asked for, the data holds no more)" if vocab["clamped"] else ""
    validation = f", {train['val_loss']:.4f} on held-out samples" if train.get("val_loss") is not None else ""
    return [
        "## How it was made",
        "",
        f"- Text: {train['samples']} samples with {answers}" + (f" ({shares})." if shares else "."),
        f"- Draft vocabulary: {vocab['draft_vocab_size']} of {facts.config.vocab_size} tokens{clamped}; they cover "
        f"{vocab['coverage']:.1%} of the answers' tokens ({str(vocab['coverage_on']).replace('_', ' ')} samples).",
        f"- States: inputs of layers {list(facts.config.aux_layers)}, stored in {facts.contract.stored_dtype}, captured by "
        f"{facts.contract.engine} {facts.contract.engine_version} ({facts.contract.capture_pass} pass).",
        f"- Training: {train['steps']} steps, {train['epochs']} epochs, {train['supervised_tokens']} supervised tokens, "
        f"loss {train['loss']:.4f}{validation}; `{training.loss}`, {training.ttt_steps} steps deep, "
        f"{training.step_weights} step weights, learning rate {training.lr:g}, seed {training.seed}.",
        "",
    ]


def _limits(facts: CardFacts) -> list[str]:
    return [
        "## Limits",
        "",
        "- The interval covers the choice of prompts, not the training seed, and only the tasks in the table.",
        "- Measured greedily and in chains; sampling at a temperature and draft trees were not measured.",
        f"- Belongs to exactly this verifier, tokenizer and chat template (`contract.json`, {facts.contract.verifier[:16]}). "
        "With another quantisation or system prompt, measure again.",
        f"- Trained on samples of at most {facts.spec.training.max_seq_len or facts.spec.data.max_seq_len} tokens; "
        f"positions are set up for {facts.config.max_position_embeddings}.",
        "",
    ]
