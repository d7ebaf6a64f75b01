"""What SGLang loads (entry point group `sglang.srt.plugins`): nothing at all unless capture or traffic is on.

SGLang logs a plug-in that fails and serves without it. A server that was asked for more must not do that, so whatever
is wrong ends the process: with SystemExit, the one exception that the engine's loader lets through.
"""

from __future__ import annotations

import os


def register() -> None:
    """Attach the hooks if `AERIE_CAPTURE` or `AERIE_TRAFFIC` is set. Raises SystemExit when they cannot be."""
    if not (os.environ.get("AERIE_CAPTURE") or os.environ.get("AERIE_TRAFFIC")):
        return
    from aerie_verifier.attach import attach
    from eagle3_core.errors import AerieError

    try:
        attach()
    except AerieError as error:
        raise SystemExit(error.text()) from error
    except Exception as error:
        raise SystemExit(
            f"error capture.config: the capture plug-in failed: {type(error).__name__}: {error}"
        ) from error
