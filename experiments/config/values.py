"""Kinds of values that stand in configs alone. A wrong one is one sentence, whatever else it could be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ...gossip import check_name, checked, either


def _check_duration(value: float | str | dict[str, Any]) -> None:
    from ..virtual.distributions import TimeError, parse  # scipy: only for those who have [time]

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


Name = Annotated[str, checked(_check_folder)]
Chance = Annotated[float, Field(ge=0, le=1)]
# A number takes the first so many peers, a list names them, "all" is everybody.
Who = Annotated[
    Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]] | Literal["all"],
    either("should be a number of peers, a list of peers' numbers, or 'all'"),
]
Topology = Annotated[str | dict[str, Any] | None, either("should be a graph's name or a table")]
# The part of a network's cells that a model has.
Share = Annotated[
    Chance | dict[str, Chance] | None,
    either("should be a fraction from 0 to 1, or a table of them by part"),
]
# Seconds that something takes: a number, or a distribution's name with its parameters.
Duration = Annotated[
    float | str | dict[str, Any],
    either("should be a number of seconds, a distribution such as 'exponential:1', or a table"),
    checked(_check_duration),
]
