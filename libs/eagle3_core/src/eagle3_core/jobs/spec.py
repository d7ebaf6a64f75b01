"""The job: the one model that API, command line, worker, stages and documentation share.

Unknown fields are errors, every field says what it does, every default is sourced or measured. A value that this
version cannot carry out is not in the schema, so a job is refused when it is posted and not hours later.
The parts lie in `sections/`, a module a topic; everyone imports them from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, cast

from pydantic import Field, ValidationError, model_validator

from eagle3_core import patterns
from eagle3_core.errors import InvalidRequest, json_pointer
from eagle3_core.faults import headline, own_faults, sentence
from eagle3_core.jobs.sections.base import Section, inconsistent
from eagle3_core.jobs.sections.evaluation import Evaluation, Gate
from eagle3_core.jobs.sections.resources import Resources, StageResources
from eagle3_core.jobs.sections.sources import (
    Data,
    DatasetSpec,
    Endpoint,
    EngineTuning,
    Regenerate,
    ServerAddress,
    VerifierSpec,
)
from eagle3_core.jobs.sections.states import Extraction, Vocab
from eagle3_core.jobs.sections.training import Training

__all__ = [
    "Data", "DatasetSpec", "Endpoint", "EngineTuning", "Evaluation", "Extraction", "Gate", "JobSpec", "Regenerate", "Resources",
    "Section", "ServerAddress", "StageResources", "Training", "VerifierSpec", "Vocab", "parse_job",
]  # fmt: skip

MAX_FAULTS = 50
"""Faults of one document that are listed."""

NEAR_TIE_LOGIT_GAP = {"float32": 0.0, "bfloat16": 0.25, "float16": 0.03125}
"""Two units in the last place of a logit between 16 and 32, in which different batch shapes may round differently."""


class JobSpec(Section):
    """One job: from prompts to a measured, packaged drafter."""

    name: Annotated[str, Field(pattern=patterns.JOB_NAME)]
    """Name of the drafter; unique among living jobs and finished drafters of a tenant."""

    verifier: VerifierSpec
    """The large model."""

    datasets: Annotated[tuple[DatasetSpec, ...], Field(min_length=1, max_length=64)]
    """Training data, one source or many, mixed by weight."""

    data: Data = Data()
    extraction: Extraction = Extraction()
    vocab: Vocab = Vocab()
    training: Training = Training()
    evaluation: Evaluation
    resources: Resources = Resources()
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Of two waiting jobs of a tenant the one with the higher priority goes first. Takes nothing from other tenants."""

    metadata: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
        Field(max_length=16),
    ] = Field(default_factory=dict)
    """Up to 16 free key-value pairs, kept and shown, never interpreted."""

    @property
    def near_tie_logit_gap(self) -> float:
        """The gap that counts as a tie: the one asked for, or what the verifier's precision explains."""
        asked = self.evaluation.near_tie_logit_gap
        return NEAR_TIE_LOGIT_GAP[self.verifier.dtype] if asked is None else asked

    @model_validator(mode="after")
    def _answers_can_be_had(self) -> JobSpec:
        for wrong, detail, place, remedy in _answer_rules(self.verifier, self.data.regenerate):
            if wrong:
                raise inconsistent(detail, *place.split("."), remedy=remedy)
        return self

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        training = self.training
        if (cut := training.max_seq_len) is not None and cut > self.data.max_seq_len:
            raise inconsistent(
                f"training.max_seq_len is {cut}: it may only be smaller than data.max_seq_len, {self.data.max_seq_len}",
                "training", "max_seq_len",
                remedy=f"lower training.max_seq_len to {self.data.max_seq_len}, or raise data.max_seq_len to {cut}",
            )  # fmt: skip
        gate, most = self.evaluation.gate, self.evaluation.num_steps + 1
        for name in ("min_mean", "min_ci_low", "min_macro", "min_task"):
            if (least := getattr(gate, name)) is not None and least >= most:
                raise inconsistent(
                    f"evaluation.gate.{name} is {least:g}, and a verify call of {most - 1} drafted tokens yields at most "
                    f"{most}: no drafter would pass", "evaluation", "gate", name,
                    remedy=f"set evaluation.gate.{name} below {most}, or raise evaluation.num_steps",
                )  # fmt: skip
        if training.gpus is not None and self.verifier.device == "cpu":
            raise inconsistent(
                "training.gpus asks for GPUs, and verifier.device is cpu", "training", "gpus",
                remedy="leave training.gpus out, or set verifier.device to auto or cuda",
            )  # fmt: skip
        return self


def _answer_rules(verifier: VerifierSpec, regenerate: Regenerate) -> Iterable[tuple[bool, str, str, str]]:
    """What must not be asked of who writes the answers: (whether it is, in words, the field, the remedy)."""
    endpoint, at = verifier.endpoint, "data.regenerate"
    yield (
        regenerate.temperature > 0 and verifier.backend != "sglang" and endpoint is None,
        f"{at}.temperature above 0 needs a verifier.endpoint or verifier.backend sglang, and it is {verifier.backend}",
        f"{at}.temperature", f"set {at}.temperature to 0, or verifier.backend to sglang, or name a verifier.endpoint",
    )  # fmt: skip
    for name, asked in (("top_p", regenerate.top_p < 1), ("seed", regenerate.seed is not None)):
        yield (
            asked and regenerate.temperature == 0, f"{at}.{name} is for sampled answers, and {at}.temperature is 0",
            f"{at}.{name}", f"leave {at}.{name} out, or set a {at}.temperature above 0",
        )  # fmt: skip
    yield (
        regenerate.seed is not None and endpoint is None, f"{at}.seed needs a verifier.endpoint, and there is none",
        f"{at}.seed", f"leave {at}.seed out, or name a verifier.endpoint",
    )  # fmt: skip
    yield (
        regenerate.ask == "messages" and (endpoint is None or endpoint.api != "openai"),
        f"{at}.ask messages needs a verifier.endpoint with api openai, and there is none", f"{at}.ask",
        f"leave {at}.ask out, or name such an endpoint",
    )  # fmt: skip
    yield (
        endpoint is not None and not regenerate.enabled,
        f"verifier.endpoint writes answers, and {at}.enabled is false", "verifier.endpoint",
        f"leave verifier.endpoint out, or set {at}.enabled to true",
    )  # fmt: skip
    yield (
        endpoint is not None and endpoint.retokenize and endpoint.api == "sglang",
        "verifier.endpoint.retokenize is for api openai: SGLang's own says its tokens", "verifier.endpoint.retokenize",
        "leave verifier.endpoint.retokenize out",
    )  # fmt: skip


def parse_job(document: Any) -> JobSpec:
    """`document` (decoded JSON) as a job. Raises InvalidRequest that names the first offending field and lists all."""
    if (where := _no_text(document)) is not None:
        raise InvalidRequest(
            "half a surrogate pair and NUL are no text, and not everything that stores or sends it could hold them",
            remedy="send the document as UTF-8, without NUL",
            pointer=json_pointer(where),
        )
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        found = own_faults(error.errors(), document)
        faults = [{"pointer": _place_of(fault), "detail": sentence(fault, JobSpec)} for fault in found[:MAX_FAULTS]]
        raise InvalidRequest(
            headline(faults[0]["detail"], len(found)),
            remedy=_remedy_of(found[0]),
            pointer=faults[0]["pointer"],
            faults=faults,
        ) from None


def _place_of(fault: Mapping[str, Any]) -> str:
    """The pointer of the field to change: where pydantic found the fault, and on from there as its validator says."""
    return json_pointer((*fault["loc"], *fault.get("ctx", {}).get("place", ())))


def _remedy_of(fault: Mapping[str, Any]) -> str:
    """What to do about `fault`: as its validator says, else by the kind of fault and the field."""
    context: Mapping[str, Any] = fault.get("ctx", {})
    name = ".".join(map(str, fault["loc"])) or "the document"
    by_kind = {
        "inconsistent": context.get("remedy", ""),
        "extra_forbidden": f"take {name} out, or spell it as docs/job.md does, which lists the fields of a job",
        "missing": f"add {name}; docs/job.md lists the fields of a job",
    }
    return by_kind.get(fault["type"], f"correct {name}; docs/job.md and /openapi.json say what it may hold")


def _no_text(value: Any, place: tuple[str | int, ...] = ()) -> tuple[str | int, ...] | None:
    """Where `value` holds a string with what is no text; None if nowhere. A key is named by what it lies in."""
    if isinstance(value, str):
        return place if any("\ud800" <= c <= "\udfff" or c == "\0" for c in value) else None
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        document = cast("dict[Any, Any]", value)
        if any(_no_text(key) is not None for key in document):
            return place
        entries = document.items()
    elif isinstance(value, list):
        entries = enumerate(cast("list[Any]", value))
    return next((found for key, part in entries if (found := _no_text(part, (*place, key))) is not None), None)
