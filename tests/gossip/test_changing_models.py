"""Partial models that change while a swarm runs: weight is conserved exactly, and models are never mixed.

Every peer goes through versions of its models at its own time, forwards and sometimes back. Messages are
lost, repeated and reordered, processes crash and restart from what they saved, peers join and leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gossamer.gossip import (
    ENDED_KEPT,
    ONE,
    Account,
    Ack,
    DictStore,
    Give,
    Gossiper,
    Message,
    Mode,
    RetryPolicy,
    RoundsMode,
    ServerMode,
)

PEERS = ("ann", "bob", "cas", "dan")
VERSIONS = 4
RETRY = RetryPolicy(first=1.0, recall_factor=20.0)


def values_of(version: int) -> dict[str, np.ndarray]:
    """The models of a version: of different lengths, and each with its own meaning as its first value."""
    return {
        f"{name}-v{version}": np.array([meaning + 10.0 * version, *[0.0] * version])
        for name, meaning in (("global", 1.0), ("group", 2.0))
    }


class ChangingSwarm(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.stores: dict[str, DictStore] = {}
        self.gossipers: dict[str, Gossiper] = {}
        self.saved: dict[str, tuple[dict[str, np.ndarray], dict[str, Any]]] = {}
        self.network: list[Message] = []
        self.left: list[Gossiper] = []
        """Peers that have ended, with the weight that they kept."""

    def pick(self, number: int) -> Gossiper:
        return self.gossipers[sorted(self.gossipers)[number % len(self.gossipers)]]

    def save(self, gossiper: Gossiper) -> None:
        outgoing = gossiper.poll()
        store = self.stores[gossiper.peer]
        copies = {name: np.array(store.read(name)) for name in store.names()}
        self.saved[gossiper.peer] = copies, gossiper.snapshot(values=False)
        self.network += outgoing

    def meet(self, gossiper: Gossiper) -> None:
        for other in self.gossipers.values():
            if other is not gossiper:
                gossiper.peer_online(other.peer, other.session, other.models)

    @initialize()
    def start(self) -> None:
        for peer in PEERS:
            store = DictStore(values_of(0))
            gossiper = Gossiper(peer, f"{peer}-1", store, retry=RETRY, seed=1)
            self.stores[peer], self.gossipers[peer] = store, gossiper
            for model in gossiper.models:
                gossiper.inject(model, ONE)
        for gossiper in self.gossipers.values():
            self.meet(gossiper)
            self.save(gossiper)

    @rule(who=st.integers(0, 99), version=st.integers(0, VERSIONS - 1))
    def change(self, who: int, version: int) -> None:
        gossiper = self.pick(who)
        store = self.stores[gossiper.peer] = DictStore(values_of(version))
        gossiper._balances.store = store
        gossiper.update_models()
        for model in gossiper.models:
            if not gossiper.injected(model):
                gossiper.inject(model, ONE)
        self.meet(gossiper)
        self.save(gossiper)  # before others hear of the new models

    @rule(who=st.integers(0, 99))
    def hear_of_the_others(self, who: int) -> None:
        self.meet(self.pick(who))

    @rule(who=st.integers(0, 99), to=st.integers(0, 99), model=st.integers(0, 1))
    def push(self, who: int, to: int, model: int) -> None:
        gossiper = self.pick(who)
        name = gossiper.models[model]
        free, share = gossiper.free_neighbours(name), gossiper.weight(name) // 2
        if free and share:
            assert gossiper.push(name, {free[to % len(free)]: share}, self.now)
            self.save(gossiper)

    @precondition(lambda self: len(self.gossipers) + len(self.left) < len(PEERS) + 3)
    @rule(version=st.integers(0, VERSIONS - 1), founds=st.booleans())
    def join(self, version: int, founds: bool) -> None:
        """A newcomer brings its weight at once, or with the first value that it receives."""
        peer = f"new{len(self.gossipers) + len(self.left)}"
        store = self.stores[peer] = DictStore(values_of(version))
        gossiper = self.gossipers[peer] = Gossiper(peer, f"{peer}-1", store, retry=RETRY, seed=2)
        for model in gossiper.models:
            gossiper.inject(model, ONE, after_first_transfer=not founds)
        self.meet(gossiper)
        self.save(gossiper)

    @precondition(lambda self: len(self.gossipers) > 2)
    @rule(who=st.integers(0, 99))
    def leave(self, who: int) -> None:
        """A peer ends with a goodbye, which all others hear: it takes back what is on its way."""
        gossiper = self.gossipers.pop(self.pick(who).peer)
        gossiper.close()
        gossiper.reclaim()
        self.left.append(gossiper)
        self.network = [each for each in self.network if each.receiver != gossiper.peer]
        for other in self.gossipers.values():
            other.peer_gone(
                gossiper.peer, gossiper.session, gossiper.statement(), gossiper.reclaimed
            )
            self.save(other)

    @precondition(lambda self: self.network)
    @rule(which=st.integers(0, 9999), keep=st.booleans())
    def deliver(self, which: int, keep: bool) -> None:
        at = which % len(self.network)
        message = self.network[at] if keep else self.network.pop(at)
        receiver = self.gossipers.get(message.receiver)
        if receiver is not None:  # else it has left
            receiver.handle(message, self.now)
            self.save(receiver)

    @precondition(lambda self: self.network)
    @rule(which=st.integers(0, 9999))
    def lose(self, which: int) -> None:
        self.network.pop(which % len(self.network))

    @precondition(lambda self: self.network)
    @rule()
    def lose_acknowledgements(self) -> None:
        self.network = [each for each in self.network if not isinstance(each, Ack)]

    @rule(who=st.integers(0, 99), wait=st.sampled_from([0.1, 3.0, 100.0]))
    def tick(self, who: int, wait: float) -> None:
        self.now += wait
        gossiper = self.pick(who)
        gossiper.tick(self.now)
        self.save(gossiper)

    @rule(who=st.integers(0, 99))
    def crash(self, who: int) -> None:
        peer = self.pick(who).peer
        copies, snapshot = self.saved[peer]
        store = self.stores[peer] = DictStore({name: np.array(v) for name, v in copies.items()})
        self.gossipers[peer] = Gossiper.restore(snapshot, store, retry=RETRY, seed=7)
        self.meet(self.gossipers[peer])

    def is_credited(self, give: Give) -> bool:
        everybody = {each.peer: each for each in (*self.gossipers.values(), *self.left)}
        ledger = everybody[give.receiver].ledger
        return ledger.verdict(give.sender, give.session, give.model) == (give.sequence, "credited")

    @invariant()
    def weight_is_conserved(self) -> None:
        accounts: dict[str, int] = {}
        for gossiper in (*self.gossipers.values(), *self.left):
            for model in (*gossiper.models, *gossiper.retired_models):
                account = gossiper.account(model)
                accounts[model] = accounts.get(model, 0) + account.held - account.injected
            for transfer in gossiper.ledger.open.values():
                if not self.is_credited(transfer.give):
                    accounts[transfer.give.model] += transfer.give.weight
        assert not any(accounts.values()), accounts

    @invariant()
    def models_are_never_mixed(self) -> None:
        for gossiper in self.gossipers.values():
            for model in gossiper.models:
                version = int(model[-1])
                expected = values_of(version)[model]
                np.testing.assert_allclose(gossiper.value(model), expected)


TestChangingSwarm = ChangingSwarm.TestCase
TestChangingSwarm.settings = settings(
    max_examples=40, stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


def pair(mode: Callable[[str], Mode] | None = None) -> tuple[Gossiper, Gossiper]:
    """Two neighbours with one model each."""
    made = []
    for peer in ("ann", "bob"):
        store = DictStore({"old": np.array([1.0 if peer == "ann" else 3.0])})
        gossiper = Gossiper(peer, f"{peer}-1", store, retry=RETRY, mode=mode and mode(peer))
        gossiper.inject("old", ONE)
        made.append(gossiper)
    ann, bob = made
    ann.peer_online("bob", bob.session, ["old"])
    bob.peer_online("ann", ann.session, ["old"])
    return ann, bob


def switch(gossiper: Gossiper) -> None:
    """Replace the model `old` by `new`."""
    gossiper._balances.store = DictStore({"new": np.array([7.0, 7.0])})
    gossiper.update_models()


def test_a_repeated_transfer_of_a_retired_model_gets_the_answer_it_got_before() -> None:
    """Its acknowledgement was lost: a refusal now would let the sender take back what was credited."""
    ann, bob = pair()
    ann.push("old", {"bob": ONE // 2}, 0.0)
    (give,) = ann.poll()
    bob.handle(give, 0.0)
    bob.poll()
    switch(bob)
    bob.handle(give, 1.0)
    (ack,) = bob.poll()
    assert isinstance(ack, Ack)
    assert ack.verdict == "credited"
    assert bob.account("old").held == ONE + ONE // 2


def test_a_new_transfer_of_a_retired_model_goes_back_even_if_both_have_changed() -> None:
    ann, bob = pair()
    ann.push("old", {"bob": ONE // 2}, 0.0)
    (give,) = ann.poll()
    switch(bob)
    switch(ann)
    bob.handle(give, 0.0)
    for ack in bob.poll():
        ann.handle(ack, 0.0)
    assert ann.account("old").held == ONE
    assert ann.models == ("new",)
    assert ann.retired_models == ("old",)
    assert not ann.ledger.open


def through_servers(peer: str) -> ServerMode:
    """The old model is averaged by ann, a new one by bob."""
    return ServerMode(peer, {"old": "ann"}, lambda _: "bob")


@pytest.mark.parametrize("mode", [lambda _: RoundsMode(1), through_servers])
def test_rounds_go_on_with_the_models_that_are_left(mode: Callable[[str], Mode]) -> None:
    ann, bob = pair(mode)
    assert isinstance(ann.mode, RoundsMode | ServerMode)
    assert isinstance(bob.mode, RoundsMode | ServerMode)

    def play(number: int) -> None:
        for peer in (ann, bob):
            peer.mode.begin_round(peer, number)
        for _ in range(6):
            for peer, other in ((ann, bob), (bob, ann)):
                peer.tick(0.0)
                for message in peer.poll():
                    other.handle(message, 0.0)
        assert ann.mode.finished(number)
        assert bob.mode.finished(number)

    play(0)
    assert ann.value("old") == bob.value("old") == 2.0
    for peer, other in ((ann, bob), (bob, ann)):
        switch(peer)
        assert peer.mode.finished(0), "a model that begins now is not part of a round that is over"
        peer.inject("new", ONE)
        peer.peer_online(other.peer, other.session, ["new"])
    ann.set_value("new", np.array([1.0, 5.0]))
    play(1)
    assert ann.account("new").held == bob.account("new").held == ONE
    assert np.array_equal(ann.value("new"), [4.0, 6.0])
    assert np.array_equal(bob.value("new"), [4.0, 6.0])
    again = mode("ann")
    again.update_models(["new"])
    again.restore(ann.mode.snapshot())
    assert again.snapshot() == ann.mode.snapshot()


def test_names_of_models_that_ended_long_ago_are_forgotten_and_their_weight_is_not() -> None:
    """Except while a transfer of one is open: its receiver may still answer."""
    ann, bob = pair()
    ann.push("old", {"bob": ONE // 4}, 0.0)
    (give,) = ann.poll()
    count = 3 * ENDED_KEPT
    for number in range(count):
        ann._balances.store = DictStore({f"v{number}": np.zeros(1)})
        ann.update_models()
        ann.inject(f"v{number}", ONE)
        if number == count // 2:
            assert ann.account("old").open == ONE // 4
            bob.handle(give, 0.0)
            for ack in bob.poll():
                ann.handle(ack, 0.0)
    ended = [f"v{number}" for number in range(count - 1)][-ENDED_KEPT:]
    assert ann.retired_models == tuple(sorted(ended))
    injected = (1 + count - 1 - ENDED_KEPT) * ONE
    assert ann.forgotten == Account(injected - ONE // 4, 0, injected)
    again = Gossiper.restore(ann.snapshot(), DictStore({f"v{count - 1}": np.zeros(1)}))
    assert again.forgotten == ann.forgotten
    assert again.retired_models == ann.retired_models


def test_a_snapshot_keeps_what_is_left_of_retired_models() -> None:
    ann, _ = pair()
    ann.push("old", {"bob": ONE // 4}, 0.0)
    switch(ann)
    store = DictStore({"new": np.array([7.0, 7.0])})
    again = Gossiper.restore(ann.snapshot(), store, retry=RETRY)
    assert again.retired_models == ("old",)
    assert again.account("old") == ann.account("old")
