"""The form of a plan on a card. Cards come from outside, so each field is checked before it is used."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import ModelError

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""A number that every JSON reader reads exactly."""
Index = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=64)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True)


class AssignmentRecord(_Record):
    """See Assignment. cells: by part and scheme, which cells have the scheme."""

    suffix: Annotated[str, Field(max_length=16, pattern="^[0-9a-f]*$")]
    peers: Annotated[list[Name], Field(min_length=1)]
    schemes: list[list[Index]]
    cells: dict[str, dict[str, list[Index]]]


class CandidateRecord(_Record):
    """See Candidate."""

    part: str
    cells: Annotated[list[Index], Field(min_length=1)]
    scheme: Index | list[Index]


class PlanRecord(_Record):
    """See Plan."""

    assignment: AssignmentRecord
    version: Count
    round: Count
    until: Count
    candidates: list[CandidateRecord]
    deciding: bool
    chosen: Count | None
    memory: dict[str, Any]
    newcomers: list[Name]


def check_record(record: object) -> None:
    """Raise ModelError unless plain data has the form of a plan."""
    try:
        PlanRecord.model_validate_json(json.dumps(record))
    except (ValidationError, TypeError, ValueError, RecursionError) as error:
        reason = error.errors()[0] if isinstance(error, ValidationError) else None
        text = repr(error) if reason is None else f"{reason['loc']}: {reason['msg']}"
        raise ModelError(f"it has not the form of a plan: {text:.200}") from None
