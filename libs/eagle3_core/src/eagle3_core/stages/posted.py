"""The verifier's folder as stages read it: only while it holds the checkpoint that the job was posted for.

A folder is no store: it can be written to while a stage reads it, and a check before a read says nothing about what
the read saw. So whoever reads it is checked after the read. Even a loaded verifier may lie in mapped files, whose
pages follow what is written over them; its stages check once more before they commit.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from eagle3_core.data.sources import resolve_folder
from eagle3_core.stages.context import StageContext
from eagle3_core.verifier.folder import POINTER, VerifierChanged, refusal
from eagle3_core.verifier.identity import Identity, inspect


def posted_verifier(ctx: StageContext) -> Identity:
    """The verifier that the folder holds now. Raises VerifierChanged unless it is the job's, and what `inspect` raises."""
    folder = _folder(ctx)
    verifier = inspect(folder, revision=ctx.spec.verifier.revision)
    if verifier.digest != (expected := ctx.assignment.sources.get("verifier", "")):
        raise refusal(
            VerifierChanged,
            f"{folder} is verifier {verifier.digest[:16]}, the job was posted for {expected[:16]}",
            "put the old checkpoint back, or post the job again",
        )
    return verifier


@contextmanager
def reading_verifier(ctx: StageContext) -> Generator[Path]:
    """The folder, to be read within the block; what was read counts only once the block is left.

    Raises as `posted_verifier` does, also where the block fails: files that change under a reader fail it in any way.
    """
    try:
        yield _folder(ctx)
    finally:
        posted_verifier(ctx)


def _folder(ctx: StageContext) -> Path:
    return resolve_folder(ctx.spec.verifier.model, ctx.file_roots, pointer=POINTER)
