"""The base class of Gossamer's errors, and hints in their messages about unknown names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

NAMES_ELSEWHERE = {
    "lr": "rate",
    "learning_rate": "rate",
    "batch_size": "batch",
    "epochs": "local_samples",
    "criterion": "loss",
    "proximal_mu": "mu",
}
"""Names that torch's users know, and what the nearest thing is called here."""


class GossamerError(Exception):
    """Base of all errors that Gossamer raises on purpose.

    Its message is one line for the person who can fix it: what was wrong, where, and what to do.
    """


def hint(name: str, known: Iterable[str], *, are: str = "known are", cutoff: float = 0.5) -> str:
    """Return "did you mean 'x'?", or the list of known names if none is similar.

    are: the words before that list.
    """
    names = list(known)
    near = [each for each in [NAMES_ELSEWHERE.get(name)] if each in names]
    near = near or get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else f"{are} {', '.join(names) or 'none'}"


def hint_arguments(constructor: Function) -> Function:
    """Decorate an `__init__`: the TypeError for an argument that it does not have names the one meant."""
    known = list(signature(constructor).parameters)[1:]

    @wraps(constructor)
    def checked(self: object, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                near = hint(name, known, are="it has", cutoff=0.6)
                raise TypeError(f"{type(self).__name__} has no argument {name!r}; {near}")
        constructor(self, *args, **options)

    return cast("Function", checked)
