"""Fields of a statement, checked and never converted: its signature says who wrote it, not that it is sound.

`bytes(field)` of a number would allocate as many bytes, `int(field)` of an infinity raises what nobody
expects, `str(field)` of a list that is nested a thousand deep too. Whatever is not what it should be is a
ValueError here.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, TypeGuard


def data(value: Any, length: int | None = None) -> bytes:
    """Bytes, of a certain length if one is named."""
    if not isinstance(value, bytes) or length not in (None, len(value)):
        raise ValueError("not bytes, or of another length")
    return value


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def texts(value: Any) -> list[str]:
    """A list of texts."""
    if not isinstance(value, list):
        raise ValueError("not a list")
    return [text(each) for each in value]


def number(value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError("not a number")
    return float(value)


def count(value: Any) -> int:
    """A whole number that fits 63 bits."""
    if not is_count(value):
        raise ValueError("not a count")
    return value


def state_of(body: bytes) -> str | None:
    """The state that a status says its peer is in; None if it cannot be read."""
    try:
        state = json.loads(body)["state"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return state if isinstance(state, str) else None


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is such a number."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
