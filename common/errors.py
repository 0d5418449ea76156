"""The base class of Gossamer's errors, and hints in their messages about unknown names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class GossamerError(Exception):
    """Base of all errors that Gossamer raises on purpose.

    Its message is one line for the person who can fix it: what was wrong, where, and what to do.
    """


def hint(name: str, known: Iterable[str], *, are: str = "known are", cutoff: float = 0.5) -> str:
    """Return "did you mean 'x'?", or the list of known names if none is similar.

    are: the words before that list.
    """
    names = list(known)
    near = get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else f"{are} {', '.join(names) or 'none'}"
