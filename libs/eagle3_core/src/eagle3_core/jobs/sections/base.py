"""What every part of a job is: frozen, and closed to unknown fields, so that a slip of the pen is refused."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1, le=10**12)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Share = Annotated[FiniteFloat, Field(ge=0, le=1)]


def inconsistent(detail: str, *place: str, remedy: str) -> PydanticCustomError:
    """What a validator of several fields raises: `place` leads from what it validates to the field to change.

    Without it pydantic names the section, or the whole job, and the form cannot mark the field.
    """
    return PydanticCustomError("inconsistent", "{detail}", {"detail": detail, "place": place, "remedy": remedy})


class Section(BaseModel):
    """A part of a job: frozen, and closed to unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """True is no 1: pydantic takes it for one."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        given: list[Any] = value if isinstance(value, list) else [value]
        if any(isinstance(part, bool) for part in given) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("true and false are no values of this field")
        return value
