"""Chooses who gives the states of one unit: this process's own engine, or the server that the job names."""

from __future__ import annotations

from eagle3_core.engine.allowed import STATES_AT, read_allowed
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.posted import posted_verifier
from eagle3_core.stages.warm import warm_engine
from eagle3_core.verifier.endpoint_states import EndpointStates
from eagle3_core.verifier.sglang import SGLangVerifier
from eagle3_core.verifier.transformers import TransformersVerifier


def capturing(ctx: StageContext) -> TransformersVerifier | SGLangVerifier | EndpointStates:
    """Who captures. Raises EndpointNotAllowed, EndpointKeyRefused, PlainHttpRefused, and what `warm_engine` raises."""
    endpoint = ctx.spec.extraction.endpoint
    if endpoint is None:
        return warm_engine(ctx)
    client = read_allowed().client(endpoint, ctx.assignment.tenant, STATES_AT)
    return EndpointStates(client, ctx.spec, posted_verifier(ctx), ctx.file_roots, say=ctx.log, check=ctx.check)
