"""Tables of settings: the base of all of them, the kinds of their values, and how peers gossip.

A knob is declared once, here or in a table that builds on these. Configs, devices' files, child processes
and the command line inherit the tables. A wrong value is one sentence.
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

from gossamer.names import hint

from .compress import parse as parse_compressor
from .modes import check_drift


class SettingsTable(BaseModel):
    """The base of all tables: frozen, without unknown keys, and each value of its own type."""

    # strict: TOML has types, so peers = "16" or peers = true is a mistake, not a number
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",
    )

    def updated(self, **changes: Any) -> Self:
        """Return a copy with other values, which are checked like those of a new table."""
        stated = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**(stated | changes))


def sentence(text: str) -> PydanticCustomError:
    """Return an error that says just this."""
    return PydanticCustomError("sentence", "{text}", {"text": text})


def either(text: str) -> WrapValidator:
    """Give all alternatives of a value one error; pydantic reports each, under a path nobody wrote."""

    def validate(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise PydanticCustomError("alternatives", "{text}", {"text": text}) from None

    return WrapValidator(validate)


def checked(check: Callable[[Any], object]) -> AfterValidator:
    """Let a function check a value, unless it is None; what it raises is the error's text."""

    def validate(value: Any) -> Any:
        try:
            if value is not None:
                check(value)
        except ValueError as error:
            raise sentence(str(error)) from None
        return value

    return AfterValidator(validate)


def table_of(kind: type) -> BeforeValidator:
    """Turn a table into a dataclass; its mistakes are one sentence that names the key."""

    def make(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = [field.name for field in fields(kind)]
        if unknown := [key for key in value if key not in known]:
            raise sentence(
                f"unknown key {unknown[0]!r}; {hint(unknown[0], known, are='known keys are')}"
            )
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            text = first["msg"].removeprefix("Value error, ")
            place = ".".join(map(str, first["loc"]))
            raise sentence(f"{place}: {text}, not {first['input']!r}" if place else text) from None

    return BeforeValidator(make)


Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
"""Names in order. A list will do: TOML has no tuples."""
Compress = Annotated[str | None, checked(parse_compressor)]
DriftBound = Annotated[
    float | Mapping[str, float] | None,
    either("should be a relative distance such as 0.05, or a table of them by model"),
    checked(check_drift),
]


class WireSettings(SettingsTable):
    """What becomes of values between peers: of live ones, simulated ones and a comparison's clients."""

    dtype: Literal["float32", "float64", "float16"] = "float32"
    """Values on the wire. float16 halves the traffic; what it rounds off stays with the sender, and a message
    with a value that it cannot hold (beyond 65504) goes in float32."""
    compress: Compress = None
    """How values are compressed: `float16`, `int8` (to `int2`), `mask:0.1`, `subsample:0.1`, `top-k:0.01`,
    `low-rank:4`, or several joined by `+`, as in `top-k:0.05+int8`. What is left out stays with the sender
    and follows later; int8 takes a quarter of the bytes and hardly shows. Costs a copy of the vector per
    neighbour and direction. Peers of one swarm need not agree on it."""
    drift: DriftBound = None
    """async: skip a push of a partial model that has moved less than this relative distance since it was last
    pushed; a table gives each its own, `drift = {global = 0.05}`. Raise it while the accuracy allows."""


class GossipSettings(WireSettings):
    """How values are averaged; the keys of a config's `[gossip]` that every peer knows."""

    mode: Literal["async", "rounds", "server"] = "async"
    """async: train and push, never wait. rounds: train, then average in lockstep. server: train, then
    give everything to the averaging server of each partial model and take the mean home."""
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """async: the share of its weight that a peer gives away in one push; if left out, the neighbours and
    the peer itself get equal parts."""
