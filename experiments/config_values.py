"""Kinds of values that stand in configs. A wrong one is one sentence, whatever else it could have been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from ..gossip.compress import parse as parse_compressor
from ..gossip.drift import check_drift
from ..gossip.mqtt_options import check_keepalive, check_packet
from ..gossip.topics import check_name


def sentence(text: str) -> PydanticCustomError:
    """An error that says just this."""
    return PydanticCustomError("sentence", "{text}", {"text": text})


def _either(text: str) -> WrapValidator:
    """One error for all alternatives; pydantic would report each, under a path nobody wrote."""

    def validate(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise PydanticCustomError("alternatives", "{text}", {"text": text}) from None

    return WrapValidator(validate)


def _checked(check: Callable[[Any], object]) -> AfterValidator:
    """Let a function of ours check a value; what it raises is the error's text."""

    def validate(value: Any) -> Any:
        try:
            if value is not None:
                check(value)
        except ValueError as error:
            raise sentence(str(error)) from None
        return value

    return AfterValidator(validate)


def _check_duration(value: float | str | dict[str, Any]) -> None:
    from .virtual.distributions import TimeError, parse  # scipy: only for those who have [time]

    try:
        parse(value, "it")
    except TimeError as error:
        raise ValueError(str(error).removeprefix("it: ").removeprefix("it ")) from None


def _check_folder(name: str) -> None:
    """A config's name is a folder's and a swarm's: it may neither leave the one nor break the other."""
    check_name("config's own", name)
    if not name.strip("."):
        raise ValueError(
            f"the config's own name {name!r} is no folder's: use a letter or digit too"
        )


Name = Annotated[str, _checked(_check_folder)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Chance = Annotated[float, Field(ge=0, le=1)]
# A number takes the first so many peers, a list names them, "all" is everybody.
Who = Annotated[
    Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]] | Literal["all"],
    _either("should be a number of peers, a list of peers' numbers, or 'all'"),
]
Topology = Annotated[str | dict[str, Any] | None, _either("should be a graph's name or a table")]
# The part of a network's cells that a model has.
Share = Annotated[
    Chance | dict[str, Chance] | None,
    _either("should be a fraction from 0 to 1, or a table of them by part"),
]
# Seconds that something takes: a number, or a distribution's name with its parameters.
Duration = Annotated[
    float | str | dict[str, Any],
    _either("should be a number of seconds, a distribution such as 'exponential:1', or a table"),
    _checked(_check_duration),
]
# Bytes of the largest packet that a broker is sent.
Packet = Annotated[int | None, _checked(check_packet)]
# Seconds of silence before a link to a broker is tested.
Keepalive = Annotated[int | None, _checked(check_keepalive)]
# A compressor's name, and how far a model may move unheard: live peers' knobs, used by two files.
Compress = Annotated[str | None, _checked(parse_compressor)]
DriftBound = Annotated[
    float | dict[str, float] | None,
    _either("should be a relative distance such as 0.05, or a table of them by model"),
    _checked(check_drift),
]
