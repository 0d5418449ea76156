"""Base classes and value types of all tables of settings, and the settings of gossip.

A setting is declared once, here or in a subclass of these tables. Config files, device files, child processes
and the command line all use the same tables. A wrong value is reported in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from gossamer.errors import hint

from .compress import parse as parse_compressor
from .modes import check_drift


class SettingsTable(BaseModel):
    """Base class of all tables: frozen, refuses unknown keys, and does not convert types."""

    # strict: TOML has types, so peers = "16" and peers = true are mistakes, not numbers.
    # defer_build: a device reads one of some fifty tables; the others are built where they are first used.
    model_config = ConfigDict(
        defer_build=True,
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",
    )

    def updated(self, **changes: Any) -> Self:
        """Return a copy with other values, which are checked like those of a new table."""
        set_values = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**(set_values | changes))


def validation_error(text: str) -> PydanticCustomError:
    """Return a pydantic error whose message is exactly `text`."""
    return PydanticCustomError("sentence", "{text}", {"text": text})


def alternatives(text: str) -> WrapValidator:
    """Return a validator that replaces the errors of a union type, one per alternative, by this text."""

    def validate(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:  # not a `validation_error`: ", not VALUE" is added to this text
            raise PydanticCustomError("alternatives", "{text}", {"text": text}) from None

    return WrapValidator(validate)


def checked(check: Callable[[Any], object]) -> AfterValidator:
    """Return a validator that calls `check`, except for None; the text of its ValueError is the error."""

    def validate(value: Any) -> Any:
        try:
            if value is not None:
                check(value)
        except ValueError as error:
            raise validation_error(str(error)) from None
        return value

    return AfterValidator(validate)


def table_of(dataclass: type) -> BeforeValidator:
    """Return a validator that converts a table to a dataclass; an error is one line that names the key."""

    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = [field.name for field in fields(dataclass)]
        if unknown := [key for key in value if key not in known]:
            raise validation_error(
                f"unknown key {unknown[0]!r}; {hint(unknown[0], known, are='known keys are')}"
            )
        try:
            return TypeAdapter(dataclass).validate_python(value)
        except ValidationError as error:
            details = error.errors()[0]
            text = details["msg"].removeprefix("Value error, ")
            key = ".".join(map(str, details["loc"]))
            text = f"{key}: {text}, not {details['input']!r}" if key else text
            raise validation_error(text) from None

    return BeforeValidator(convert)


Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
"""A tuple of names; lists are converted, because TOML has no tuples."""
Compress = Annotated[str | None, checked(parse_compressor)]
DriftBound = Annotated[
    float | Mapping[str, float] | None,
    alternatives("should be a relative distance such as 0.05, or a table of them by model"),
    checked(check_drift),
]


class WireSettings(SettingsTable):
    """How values are encoded between peers, live or simulated."""

    dtype: Literal["float32", "float64", "float16"] = "float32"
    """Number format of values on the wire. float16 halves the traffic; the sender keeps the rounding error,
    and sends a message with a value beyond 65504, the largest float16, in float32."""
    compress: Compress = None
    """How values are compressed: `float16`, `int8` (to `int2`), `mask:0.1`, `subsample:0.1`, `top-k:0.01`,
    `low-rank:4`, or several joined by `+`, as in `top-k:0.05+int8`. The sender keeps the compression error
    and sends it later. int8 takes a quarter of the bytes at hardly any loss of accuracy. Compression costs
    the memory of one copy of the model per neighbour and direction. The peers of a swarm may choose
    differently."""
    drift: DriftBound = None
    """async: skip a push of a partial model that has changed by less than this relative distance since it was
    last pushed; a table sets it per model, `drift = {global = 0.05}`. Raise it as long as the accuracy
    allows."""


class GossipSettings(WireSettings):
    """How values are averaged: the keys of a config's `[gossip]` table that each peer uses."""

    mode: Literal["async", "steady", "rounds", "server"] = "async"
    """async: train and push, never wait; the average is exact, and every member is trusted with it. steady:
    the same pace, but peers send each other values without weight and follow them in bounded steps, so that a
    few hostile members do little harm; the average is not exact. rounds: train, then average in lockstep.
    server: train, then send all mass to the averaging server of each partial model and receive the mean."""
    hostile: Annotated[
        Annotated[int, Field(ge=0)] | Literal["auto"],
        alternatives('should be a number of neighbours, or "auto"'),
    ] = "auto"
    """steady, and with `robust`: how many neighbours of a peer may be hostile. auto: a third of them, at
    least one. To withstand one, a peer needs four neighbours; to withstand more, twice as many and one. Raise
    it if more may be hostile: peers then learn more slowly from each other."""
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """async: the fraction of its weight that a peer sends in one push; by default the weight is divided
    equally among the receivers and the peer itself."""
    robust: Literal["none", "clipped", "trimmed", "median"] = "none"
    """rounds and server: how values are combined, of which some may be hostile. none: their exact mean.
    clipped: the mean of values moved to within a radius of the own one. trimmed: per coordinate, the mean
    without the largest and the smallest. median: per coordinate. All withstand `hostile` values of those that
    are combined, count every peer once, and need not agree exactly; a server is trusted."""
    banned: Names = ()
    """Peers with which this one exchanges nothing, by their name or the id after the @, until they are
    removed from the list. `gossamer ban` adds one to a device's file; `gossamer revoke` excludes a member
    from the whole swarm for good."""

    @property
    def paced(self) -> bool:
        """Whether peers exchange at the pace of their own training, without waiting for each other."""
        return self.mode in ("async", "steady")
