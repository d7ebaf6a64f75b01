"""Chooses who writes the answers of one unit: this process's own engine, or the server that the job names.

A server is checked again for every unit, since its owner may start another model at the same address. The verifier's own
tokenizer, with which a server's tokens and texts are checked, runs in a confined process, as in prepare.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from eagle3_core.data.conversations import MESSAGES_FILE, of_prompts
from eagle3_core.data.encoding import LIMITS, ConfinedEncoder
from eagle3_core.data.tokensets import TokenSet
from eagle3_core.engine.allowed import ANSWERS_AT, read_allowed
from eagle3_core.stages.context import StageContext
from eagle3_core.stages.posted import posted_verifier
from eagle3_core.stages.warm import warm_engine
from eagle3_core.verifier.endpoint import EndpointAnswers, Words
from eagle3_core.verifier.identity import Identity
from eagle3_core.verifier.sglang import SGLangVerifier
from eagle3_core.verifier.transformers import TransformersVerifier


@contextmanager
def answering(
    ctx: StageContext, prompts: TokenSet
) -> Generator[TransformersVerifier | SGLangVerifier | EndpointAnswers]:
    """Who answers `prompts`, within the block.

    Raises EndpointNotAllowed, EndpointKeyRefused, PlainHttpRefused before anything is asked, and what `warm_engine` raises.
    """
    endpoint = ctx.spec.verifier.endpoint
    if endpoint is None:
        yield warm_engine(ctx)
        return
    client = read_allowed().client(endpoint, ctx.assignment.tenant, ANSWERS_AT)
    identity = posted_verifier(ctx)
    messages = ()
    if ctx.spec.data.regenerate.ask == "messages":
        (prepared,) = ctx.manifests("prepare")
        messages = of_prompts(ctx.fetch(prepared.file(MESSAGES_FILE)), ctx.assignment.unit.start, prompts.ids)
    with ConfinedEncoder(identity, LIMITS, ctx.spec.data.template_arguments) as encoder:
        words = Words(encoder.tokens_of, encoder.text_of, turn_ends(identity, encoder))
        yield EndpointAnswers(client, ctx.spec, identity, words, messages, say=ctx.log, check=ctx.check)


def turn_ends(identity: Identity, encoder: ConfinedEncoder) -> frozenset[int]:
    """Of the tokens that end an answer those that the chat template writes itself."""
    spelled = {token: encoder.text_of([token]) for token in identity.eos_token_ids}
    return frozenset(token for token, text in spelled.items() if text and text in identity.chat_template)
