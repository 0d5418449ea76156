"""Faults that the simulation must catch: each is put back by a patch, and some history must break a law.

    python -m tests.lives --mutant credit-twice --seeds 0-99 --stop

To add one, write a function that patches the code as it was with the fault, and name the laws that are
expected to break. A patch names the object that it changes, so that it fails loudly when that is renamed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from gossamer.gossip.ledger import Ledger

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutant:
    """One fault. `laws`: at least one of them breaks in some history of the first hundred seeds."""

    name: str
    fault: str
    laws: tuple[str, ...]
    patch: Patch


def _credit_twice() -> Any:
    """A receiver that does not write down what it credited."""
    return mock.patch.object(Ledger, "decide", autospec=True, side_effect=lambda *_: None)


@contextlib.contextmanager
def _forget_open_transfers() -> Iterator[None]:
    """A checkpoint without the open transfers: a restart loses their mass."""
    restore = Ledger.restore

    def forgetful(data: dict[str, Any]) -> Ledger:
        return restore({**data, "open": []})

    with mock.patch.object(Ledger, "restore", side_effect=forgetful):
        yield


MUTANTS = {
    mutant.name: mutant
    for mutant in (
        Mutant(
            "credit-twice",
            "a repeated transfer is credited again",
            ("conserved",),
            _credit_twice,
        ),
        Mutant(
            "forget-open-transfers",
            "a restarted peer forgets what it had sent",
            ("conserved",),
            _forget_open_transfers,
        ),
    )
}
