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
"""Names that torch's users know, and the names of the nearest settings here."""


class GossamerError(Exception):
    """Base of all errors that Gossamer raises on purpose.

    Its message is one line for the person who can fix it: what was wrong, where, and what to do.
    """


def hint(name: str, known: Iterable[str], *, are: str = "known are", cutoff: float = 0.5) -> str:
    """Return "did you mean 'x'?", or the list of known names if none is similar.

    are: the words before that list. cutoff: the least similarity, from 0 to 1.
    """
    names = list(known)
    nearest = NAMES_ELSEWHERE.get(name)
    if nearest not in names:
        nearest = next(iter(get_close_matches(name, names, n=1, cutoff=cutoff)), None)
    return f"did you mean {nearest!r}?" if nearest else f"{are} {', '.join(names) or 'none'}"


def hint_arguments(constructor: Function) -> Function:
    """Decorate an `__init__`: its TypeError for an unknown argument suggests a similar one."""
    known = list(signature(constructor).parameters)[1:]

    @wraps(constructor)
    def checked(self: object, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                suggestion = hint(name, known, are="it has", cutoff=0.6)
                raise TypeError(f"{type(self).__name__} has no argument {name!r}; {suggestion}")
        constructor(self, *args, **options)

    return cast("Function", checked)
