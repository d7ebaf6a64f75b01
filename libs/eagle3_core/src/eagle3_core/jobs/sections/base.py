"""What every part of a job is: frozen, and closed to unknown fields, so that a slip of the pen is refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[FiniteFloat, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of a job: frozen, and closed to unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
