"""What happens in a run, drawn from its seed: which blows, each at a moment that the job itself announces."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass

STAGES = ("prepare", "canary", "generate", "vocab", "train", "evaluate", "package")
"""Where a blow may fall. Extract is missing: its states come with generate's answers."""
SHARES = {"generate": 0.8, "train": 0.9, "evaluate": 0.8}
"""How far a stage that reports its share may be when the blow falls; the others are hit as soon as they begin."""
BLOWS_A_RUN = (2, 4)


@dataclass(frozen=True)
class Moment:
    """`blow` falls once `stage` is done to `share` (0 to 1), or has passed that."""

    blow: str
    stage: str
    share: float


def lent(seed: int, blows: Collection[str]) -> bool:
    """Whether the workers of run `seed` have no key to the store: in every other round of all blows, so that each falls in both."""
    return seed // len(blows) % 2 == 1


def draw(seed: int, blows: Iterable[str]) -> list[Moment]:
    """The moments of run `seed`, in the order in which they come. The first blow goes round all there are, seed by seed."""
    names = sorted(blows)
    rng = random.Random(seed)
    count = rng.randint(*BLOWS_A_RUN)
    chosen = [names[seed % len(names)], *rng.choices(names, k=count - 1)]
    moments = [
        Moment(blow, stage, round(rng.uniform(0, SHARES.get(stage, 0.0)), 2))
        for blow in chosen
        for stage in [rng.choice(STAGES)]
    ]
    return sorted(moments, key=lambda moment: (STAGES.index(moment.stage), moment.share))
