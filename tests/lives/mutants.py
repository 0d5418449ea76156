"""Faults that the simulation must catch: each is put back by a patch, and some history must break a law.

    python -m tests.lives --mutant credit-twice --seeds 0-99 --stop

To add one, write a function that patches the code as it was with the fault, and name the laws that are
expected to break. A patch names the object that it changes, so that it fails loudly when that is renamed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from gossamer.gossip import Balances, Gossiper, Ledger
from gossamer.gossip.security import Identity, InitialEstimate, StatusHead, layer
from gossamer.peer import (
    Bootstrap,
    Engine,
    Link,
    OtherPeers,
    Roster,
    Saver,
    Settling,
    presence,
)

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutant:
    """One fault. `laws`: at least one of them breaks in some history of the first 300 seeds.

    seed: which history to look at first; the fault was caught there when this was written.
    Without laws: no drawn history reaches it, and the entry says why.
    """

    name: str
    fault: str
    laws: tuple[str, ...]
    patch: Patch
    seed: int = 0


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


def _wait_for_each_other() -> Any:
    """A newcomer that waits to hear from anybody, also from somebody who waits."""
    decide = Bootstrap._may_found

    def wait(self: Bootstrap, model: str, others: OtherPeers, now: float) -> bool:
        return not others.online_senders(model) and decide(self, model, others, now)

    return mock.patch.object(Bootstrap, "_may_found", wait)


def _one_newcomer_for_all_models() -> Any:
    """A peer that is a newcomer to all models where somebody counts in one of them."""
    decide = Bootstrap._may_found

    def wait(self: Bootstrap, model: str, others: OtherPeers, now: float) -> bool:
        elsewhere = any(
            other.counting_rounds.keys() & self._start_digests.keys()
            for other in others.known.values()
        )
        return not elsewhere and decide(self, model, others, now)

    return mock.patch.object(Bootstrap, "_may_found", wait)


def _found_after_half_a_second() -> Any:
    """A peer that takes half a second of silence for an empty swarm."""
    decide = Bootstrap._may_found

    def hasty(self: Bootstrap, model: str, others: OtherPeers, now: float) -> bool:
        self._settings = self._settings.updated(silence=0.5)
        return decide(self, model, others, now)

    return mock.patch.object(Bootstrap, "_may_found", hasty)


def _goodbye_without_invitation() -> Any:
    """A signed goodbye that only those can read who still know the card of its peer."""
    sign = layer.sign_status

    def bare(identity: Identity, swarm: str, head: StatusHead, body: bytes) -> bytes:
        return sign(identity, swarm, replace(head, issued=None, invitation=b""), body)

    return mock.patch.object(layer, "sign_status", bare)


def _judge_before_an_opinion() -> Any:
    """A newcomer that judges trained values by its own untrained ones."""
    return mock.patch.object(InitialEstimate, "hold", return_value=False)


def _begin_anew() -> Any:
    """A checkpoint whose ending is not finished, but forgotten."""
    load = Saver.load

    def forgetful(self: Saver) -> Any:
        tree = load(self)
        return None if tree is None else {**tree, "ending": None}

    return mock.patch.object(Saver, "load", forgetful)


def _leave_open() -> Any:
    """A peer that ends with transfers open."""
    return mock.patch.object(Gossiper, "reclaim", return_value=0)


def _keep_what_was_taken_back() -> Any:
    """A receiver that keeps what its sender has taken back."""
    return mock.patch.object(Balances, "give_up", return_value=None)


def _end_without_listening() -> Any:
    """Two peers that end at the same time, and each believes itself."""
    return mock.patch.object(Engine, "amend", return_value=False)


def _end_unheard() -> Any:
    """A peer that was cut off, and ends without looking who is there."""

    async def at_once(self: Settling) -> None:
        """Wait for nothing."""

    return mock.patch.object(Settling, "confirm_presence", at_once)


def _one_lease_for_all() -> Any:
    """Others that apply their own idea of a peer's lease, not the one on its card."""
    read = presence.read_card

    def short(payload: bytes) -> Any:
        card = read(payload)
        return None if card is None else replace(card, lease=2.0)

    return mock.patch.object(presence, "read_card", short)


def _no_generations() -> Any:
    """A device that goes on under a name that was given to another one."""
    return mock.patch.object(
        Link, "_receive_status_under_our_name", lambda self, payload: self.probe_delivered.set()
    )


def _believe_retained_statuses() -> Any:
    """A peer that waits for ever for one that died while the broker was down."""
    tick = Roster.tick
    return mock.patch.object(
        Roster, "tick", lambda self, now, connected=True: tick(self, now, connected=False)
    )


def _forget_goodbyes() -> Any:
    """Peers that leave it to the broker to remember what leavers said."""
    return mock.patch.object(Roster, "goodbye_was_missed", return_value=False)


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
            seed=18,
        ),
        Mutant(
            "wait-for-each-other",
            "two newcomers wait for each other, and nobody ever counts",
            ("counts-in-time", "counted"),
            _wait_for_each_other,
            seed=3,
        ),
        Mutant(
            "one-newcomer-for-all-models",
            "a peer waits to hear of models in which nobody counts",
            ("counts-in-time", "counted"),
            _one_newcomer_for_all_models,
            seed=5,
        ),
        Mutant(
            "found-after-half-a-second",
            "a peer founds a model while those who count in it are coming back",
            ("waits-for-returners",),
            _found_after_half_a_second,
            seed=166,
        ),
        Mutant(
            "goodbye-without-invitation",
            "a peer that comes back never learns who left meanwhile, where there is trust",
            ("conserved", "last-word", "ends"),
            _goodbye_without_invitation,
            seed=229,
        ),
        Mutant(
            "judge-before-an-opinion",
            "a newcomer refuses its elders; see test_trust.py, guards are off in drawn plans",
            (),
            _judge_before_an_opinion,
        ),
        Mutant(
            "begin-anew",
            "a peer that was killed after its goodbye begins anew",
            ("conserved", "one-report", "ends"),
            _begin_anew,
            seed=43,
        ),
        Mutant("leave-open", "a peer ends with transfers open", ("open-is-zero",), _leave_open),
        Mutant(
            "keep-what-was-taken-back",
            "mass that was taken back counts at its receiver too",
            ("conserved",),
            _keep_what_was_taken_back,
            seed=122,
        ),
        Mutant(
            "end-without-listening",
            "peers that end at once do not agree on the transfers between them",
            ("conserved",),
            _end_without_listening,
            seed=500,
        ),
        Mutant(
            "end-unheard",
            "a peer that was cut off ends alone beside the others; see test_ending.py",
            (),
            _end_unheard,
        ),
        Mutant(
            "one-lease-for-all",
            "others give a peer up before it does so itself",
            ("conserved", "counted", "agree"),
            _one_lease_for_all,
        ),
        Mutant(
            "no-generations",
            "a replaced device goes on under its name",
            ("errors", "ends", "counted", "conserved", "agree"),
            _no_generations,
            seed=1041,
        ),
        Mutant(
            "believe-retained-statuses",
            "a peer that died while the broker was down is waited for",
            ("ends",),
            _believe_retained_statuses,
        ),
        Mutant(
            "forget-goodbyes",
            "a broker that forgets loses what a leaver took back; see test_forgetful_broker.py",
            (),
            _forget_goodbyes,
        ),
    )
}
