"""What stages ask the machines for."""

from __future__ import annotations

from eagle3_core.jobs.sections.base import Section, Threads


class StageResources(Section):
    """What one stage's units ask for."""

    threads: Threads | None = None
    """CPU threads of a unit. null = its worker's share of the cores (`aerie up --threads`). Part of what makes a digest
    reproducible: name it where workers have different machines."""


class Resources(Section):
    """What the stages ask for; only what is named differs from the default."""

    generate: StageResources = StageResources()
    extract: StageResources = StageResources()
    evaluate: StageResources = StageResources()
