"""Mass is conserved exactly under any schedule of faults, crashes, deaths, departures and births.

Values are fractions, so "exactly" means equality. What is conserved is what live peers hold, plus
transfers open at a live sender that their receiver has not credited, plus the same of dead senders
(their estate: it may still arrive). A transfer that is open at its sender and credited at its
receiver is the receiver's: counted once.

A peer may also end at any time, and take its open transfers back without their receivers' word. What a
receiver had credited of them counts twice until it hears the goodbye, and gives that weight up at the value
it has by then. So from then on weights are compared, and sums no more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gossamer.gossip import ONE, Ack, DictStore, Give, Gossiper, Message, RetryPolicy
from gossamer.gossip.compress import Links, parse
from gossamer.gossip.pushsum import portion

MODEL = "v"
LENGTH = 2
RETRY = RetryPolicy(first=1.0, recall_factor=20.0)
LOSSY_PEER = "p1"
COMPRESSORS = {
    "p0": "int3",
    "p2": "top-k:0.5",
    "p3": "subsample:0.5+int8",
    "p14": "low-rank:1+float16",
    "p15": "mask:0.5",
}
NOTHING = np.empty(0, dtype=np.float32)


def eighths(model: str, value: np.ndarray) -> np.ndarray:
    """A wire that keeps multiples of 1/8 only."""
    return np.array([Fraction(round(x * 8), 8) for x in value], dtype=object)


def exact(values: list[int]) -> np.ndarray:
    return np.array([Fraction(v) for v in values], dtype=object)


def fractions(value: np.ndarray) -> np.ndarray:
    return np.array([Fraction(float(v)) for v in value], dtype=object)


class ExactLinks(Links):
    """Compresses with float32, as always; what is read is then taken as fractions."""

    def pack(self, model: str, receiver: str, session: str, value: Any, rng: Any) -> Any:
        found = super().pack(model, receiver, session, value, rng)
        return found and (fractions(found[0]), *found[1:])

    def unpack(self, give: Give, length: int, on_its_way: Give | None = None) -> Any:
        return fractions(super().unpack(give, length, on_its_way))


def links(name: str) -> Links:
    compressor = COMPRESSORS.get(name)
    return ExactLinks(compressor and parse(compressor), {MODEL: [(1, 2)]})


def travel(message: Message) -> Message:
    """As it arrives: of a compressed value nothing but what the wire carries."""
    if isinstance(message, Give) and message.packed is not None:
        return replace(message, value=NOTHING)
    return message


@dataclass
class Amount:
    """Weight and sum: they add and subtract."""

    weight: int = 0
    sum: Any = field(default_factory=lambda: exact([0] * LENGTH))

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.weight + other.weight, self.sum + other.sum)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.weight - other.weight, self.sum - other.sum)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Amount)
            and self.weight == other.weight
            and list(self.sum) == list(other.sum)
        )


def amount(weight: int, value: np.ndarray) -> Amount:
    return Amount(weight, value * Fraction(weight))


class Swarm(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.births = 0
        self.live: dict[str, Gossiper] = {}
        self.saved: dict[str, dict[str, Any]] = {}
        self.unsaved: dict[str, Amount] = {}  # trained or injected since the last save
        self.dead: list[tuple[str, str]] = []
        self.left: list[Gossiper] = []
        self.home: list[Gossiper] = []  # ended, and took home what they held
        self.taken_back: dict[
            tuple[str, str, int], Give
        ] = {}  # by giver's session, receiver, sequence
        self.given_up = False  # whether a receiver gave up weight at a value of its own
        self.estate: list[Give] = []
        self.network: list[Message] = []
        self.expected = Amount()

    # --- helpers ---

    def lossy(self, name: str) -> Any:
        return eighths if name == LOSSY_PEER else None

    def born(self, name: str, values: list[int]) -> Gossiper:
        self.births += 1
        store = DictStore({MODEL: exact(values)})
        session = f"{name}-life-{self.births}"
        gossiper = Gossiper(
            name, session, store,
            retry=RETRY, lossy=self.lossy(name), links=links(name), seed=self.births,
        )  # fmt: skip
        self.live[name] = gossiper
        self.unsaved[name] = Amount()
        self.saved[name] = gossiper.snapshot()
        return gossiper

    def value(self, gossiper: Gossiper) -> np.ndarray:
        return gossiper.value(MODEL)

    def held(self, gossiper: Gossiper) -> Amount:
        """What a peer's books say that it holds; what it owes is not its own."""
        held = gossiper.account(MODEL).held
        return amount(held, self.value(gossiper)) + self.residue(gossiper)

    def keepers(self) -> list[Gossiper]:
        return [*self.live.values(), *self.left, *self.home]

    def reclaimed_by(self, giver: Gossiper) -> list[Give]:
        """What a giver has taken back without its receivers' word."""
        gives = [
            (session, self.taken_back.get((giver.session, receiver, sequence)))
            for receiver, session, _, sequence, _ in giver.reclaimed
        ]
        return [give for session, give in gives if give and give.receiver_session == session]

    def counted_twice(self, keepers: list[Gossiper]) -> Amount:
        """What givers have taken back that these had credited, and have not given up yet."""
        result = Amount()
        for giver in [*self.live.values(), *self.home, *self.left]:
            for give in self.reclaimed_by(giver):
                if self.credited_at(give, keepers):
                    result = result + amount(give.weight, give.value)
        return result

    def reclaim(self, gossiper: Gossiper, *, stranded_only: bool) -> None:
        for transfer in gossiper.ledger.open.values():
            give = transfer.give
            self.taken_back[give.session, give.receiver, give.sequence] = give
        gossiper.reclaim(stranded_only=stranded_only)

    def residue(self, gossiper: Gossiper) -> Amount:
        """What compressors left behind: a sum that waits for weight."""
        return Amount(
            0, exact([0] * LENGTH) + gossiper.snapshot()["vault"]["residue"].get(MODEL, 0)
        )

    def credited_at(self, give: Give, keepers: list[Gossiper]) -> bool:
        for keeper in keepers:
            if (keeper.peer, keeper.session) == (give.receiver, give.receiver_session):
                line = keeper.ledger.verdict(give.sender, give.session, give.model)
                return line == (give.sequence, "credited")
        return False

    def total(self) -> Amount:
        keepers = self.keepers()
        result = Amount() - self.counted_twice(keepers)
        open_gives = [t.give for g in self.live.values() for t in g.ledger.open.values()]
        for gossiper in [*self.live.values(), *self.home]:
            result = result + self.held(gossiper)
        for give in [*open_gives, *self.estate]:
            if not self.credited_at(give, keepers):
                result = result + amount(give.weight, give.value)
        return result

    def pick(self, number: int) -> Gossiper:
        return self.live[sorted(self.live)[number % len(self.live)]]

    def staying(self) -> list[Gossiper]:
        return [g for g in self.live.values() if not g.leaving]

    def save(self, gossiper: Gossiper) -> list[Message]:
        outgoing = [travel(message) for message in gossiper.poll()]
        self.saved[gossiper.peer] = gossiper.snapshot()
        self.unsaved[gossiper.peer] = Amount()
        return outgoing

    def receive(self, message: Message) -> None:
        gossiper = self.live.get(message.receiver)
        if gossiper is None:
            return
        injected = gossiper.account(MODEL).injected
        open_before = dict(gossiper.ledger.open)
        gossiper.handle(message, self.now)
        new = gossiper.account(MODEL).injected - injected
        self.grow(gossiper, amount(new, self.value(gossiper)))
        if isinstance(message, Ack) and (message.sender, message.session) in self.dead:
            for edge in open_before.keys() - gossiper.ledger.open.keys():
                give = open_before[edge].give
                if message.verdict == "credited":  # it had it, and died with it
                    self.lose(gossiper, amount(give.weight, give.value))

    def grow(self, gossiper: Gossiper, new: Amount) -> None:
        self.expected = self.expected + new
        self.unsaved[gossiper.peer] = self.unsaved[gossiper.peer] + new

    def lose(self, gossiper: Gossiper, gone: Amount) -> None:
        """What the dead took is missed once its last debtor's books say so; a crash unsays it."""
        self.grow(gossiper, Amount() - gone)

    def restart(self, name: str) -> None:
        self.expected = self.expected - self.unsaved[name]
        self.unsaved[name] = Amount()
        self.live[name] = Gossiper.restore(
            self.saved[name],
            DictStore({MODEL: exact([0] * LENGTH)}),
            retry=RETRY,
            lossy=self.lossy(name),
            links=links(name),
            seed=7,
        )

    def learn(self, a: Gossiper, name: str) -> None:
        """Peer a learns all there is to know about a name."""
        for dead, session in self.dead:
            if dead == name:
                a.peer_gone(dead, session)
        before = a.counters["given-up"]
        for leaver in [*self.left, *self.home]:
            if leaver.peer == name:
                a.peer_gone(name, leaver.session, leaver.statement(), leaver.reclaimed)
        self.given_up |= a.counters["given-up"] > before
        if name in self.live and name != a.peer:
            a.peer_online(name, self.live[name].session, [MODEL])

    def names(self) -> list[str]:
        gone = [*self.left, *self.home]
        known = {*self.live, *(n for n, _ in self.dead), *(g.peer for g in gone)}
        return sorted(known)

    def go_home(self, peer: Gossiper) -> None:
        for former in [*self.left, *self.home]:
            self.learn(peer, former.peer)
        peer.close()
        self.reclaim(peer, stranded_only=False)
        self.network += self.save(peer)
        del self.live[peer.peer]
        self.home.append(peer)

    # --- rules ---

    @initialize(
        values=st.lists(
            st.tuples(st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
            min_size=2,
            max_size=4,
        )
    )
    def start(self, values: list[tuple[int, int, int]]) -> None:
        for i, (a, b, samples) in enumerate(values):
            gossiper = self.born(f"p{i}", [a, b])
            gossiper.inject(MODEL, ONE * samples)
            self.grow(gossiper, self.held(gossiper))
            self.save(gossiper)
        for gossiper in self.live.values():
            for name in self.names():
                self.learn(gossiper, name)

    @rule(who=st.integers(0, 99), delta=st.integers(-5, 5))
    def train(self, who: int, delta: int) -> None:
        gossiper = self.pick(who)
        before = self.held(gossiper)
        gossiper.set_value(MODEL, self.value(gossiper) + Fraction(delta, 3))
        self.grow(gossiper, self.held(gossiper) - before)

    @rule(who=st.integers(0, 99), to=st.integers(0, 99), part=st.sampled_from([0.5, 0.25, 1.0]))
    def push(self, who: int, to: int, part: float) -> None:
        gossiper = self.pick(who)
        free = gossiper.free_neighbours(MODEL)
        share = portion(gossiper.weight(MODEL), part)
        if part == 1.0 and gossiper.peer == LOSSY_PEER:
            return  # everything at once leaves no place for what the wire loses
        if free and share and not gossiper.leaving:
            assert gossiper.push(MODEL, {free[to % len(free)]: share}, self.now)

    @rule(who=st.integers(0, 99))
    def push_to_all(self, who: int) -> None:
        gossiper = self.pick(who)
        free = gossiper.free_neighbours(MODEL)
        share = gossiper.weight(MODEL) // (len(free) + 1)
        if free and share and not gossiper.leaving:
            assert gossiper.push(MODEL, dict.fromkeys(free, share), self.now)
            self.network += self.save(gossiper)

    @rule(who=st.integers(0, 99), to=st.integers(0, 99))
    def chat(self, who: int, to: int) -> None:
        """To and fro without a fault: from then on compressed values are differences."""
        pair = self.pick(who), self.pick(to)
        for a, b in (pair, pair[::-1], pair, pair[::-1]):
            share = a.weight(MODEL) // 2
            if share and b.peer in a.free_neighbours(MODEL) and not a.leaving:
                assert a.push(MODEL, {b.peer: share}, self.now)
            for _ in range(2):
                self.network += [*self.save(a), *self.save(b)]
                self.deliver_all()

    @rule(who=st.integers(0, 99))
    def commit(self, who: int) -> None:
        self.network += self.save(self.pick(who))

    @rule()
    def commit_all(self) -> None:
        for gossiper in self.live.values():
            self.network += self.save(gossiper)

    @rule(who=st.integers(0, 99), saved=st.booleans())
    def crash(self, who: int, saved: bool) -> None:
        gossiper = self.pick(who)
        if saved:
            self.save(gossiper)  # saved, but crashed before sending
        self.restart(gossiper.peer)
        for name in self.names():
            self.learn(self.live[gossiper.peer], name)

    @precondition(lambda self: self.network)
    @rule(which=st.integers(0, 9999), keep=st.booleans())
    def deliver(self, which: int, keep: bool) -> None:
        at = which % len(self.network)
        self.receive(self.network[at] if keep else self.network.pop(at))

    @precondition(lambda self: self.network)
    @rule()
    def deliver_all(self) -> None:
        arrived, self.network = self.network, []
        for message in arrived:
            self.receive(message)
        self.commit_all()

    @precondition(lambda self: self.network)
    @rule()
    def lose_acknowledgements(self) -> None:
        self.network = [m for m in self.network if not isinstance(m, Ack)]

    @precondition(lambda self: self.network)
    @rule(which=st.integers(0, 9999))
    def drop(self, which: int) -> None:
        self.network.pop(which % len(self.network))

    @rule(who=st.integers(0, 99), wait=st.sampled_from([0.1, 3.0, 100.0]))
    def tick(self, who: int, wait: float) -> None:
        self.now += wait
        gossiper = self.pick(who)
        gossiper.tick(self.now)

    @rule(who=st.integers(0, 99), which=st.integers(0, 99))
    def recall(self, who: int, which: int) -> None:
        gossiper = self.pick(who)
        edges = sorted(gossiper.ledger.open)
        if edges:
            gossiper.recall(*edges[which % len(edges)], self.now)
            self.network += self.save(gossiper)

    @precondition(lambda self: self.births < 7)
    @rule(again=st.booleans())
    def join(self, again: bool) -> None:
        """A newcomer, perhaps under the name of one who is no more."""
        former = [n for n in self.names() if n not in self.live]
        name = former[0] if again and former else f"p{10 + self.births}"
        newcomer = self.born(name, [1000, -1000])
        newcomer.inject(MODEL, ONE, after_first_transfer=True)
        self.save(newcomer)
        for other in self.names():
            self.learn(newcomer, other)

    @rule(who=st.integers(0, 99), about=st.integers(0, 99))
    def notice(self, who: int, about: int) -> None:
        names = self.names()
        self.learn(self.pick(who), names[about % len(names)])

    @rule(who=st.integers(0, 99))
    def die(self, who: int) -> None:
        victim = self.pick(who)
        if not any(g is not victim for g in self.staying()):
            return
        before, held = self.total(), self.held(victim)
        keepers = [victim]
        owed = [
            t.give for g in self.live.values() if g is not victim for t in g.ledger.open.values()
        ]
        back = self.counted_twice(keepers)
        for give in [g for g in owed if self.credited_at(g, keepers)]:
            back = back + amount(give.weight, give.value)
        self.estate = [g for g in self.estate if not self.credited_at(g, keepers)]
        # All of them, credited or not: a receiver's crash may still undo a credit nobody heard of.
        self.estate += [t.give for t in victim.ledger.open.values()]
        # What it took back without the receiver's word dies with it, but may still arrive, or has arrived.
        undone = self.reclaimed_by(victim)
        self.estate += undone
        for give in undone:
            back = back + amount(give.weight, give.value)
        del self.live[victim.peer]
        self.dead.append((victim.peer, victim.session))
        # It takes what it held, and no more: of that, senders who were not told get theirs back.
        self.expected = self.expected - held + back
        assert self.same(self.total(), before - held + back)

    @rule(who=st.integers(0, 99))
    def leave(self, who: int) -> None:
        leaver = self.pick(who)
        if leaver.peer != LOSSY_PEER and any(g is not leaver for g in self.staying()):
            leaver.hand_over(self.now)
            self.network += self.save(leaver)

    @precondition(lambda self: any(g.leaving and g.is_drained() for g in self.live.values()))
    @rule()
    def depart(self) -> None:
        for leaver in [g for g in self.live.values() if g.leaving and g.is_drained()]:
            if len(self.live) > 1:
                self.network += self.save(leaver)
                # Who gave all its weight away takes along what is left: a residue that waits for weight,
                # and a debt, which stands in its report.
                self.expected = self.expected - self.held(leaver)
                del self.live[leaver.peer]
                self.left.append(leaver)

    @rule(who=st.integers(0, 99), about=st.integers(0, 99))
    def lose_sight(self, who: int, about: int) -> None:
        """One cannot be reached by another, until it hears of it again."""
        names = self.names()
        self.pick(who).peer_offline(names[about % len(names)])

    @precondition(lambda self: any(g.leaving for g in self.live.values()))
    @rule()
    def wait_no_longer(self) -> None:
        """Leavers take back what is on its way to peers that they cannot reach."""
        for leaver in [g for g in self.live.values() if g.leaving]:
            self.reclaim(leaver, stranded_only=True)
            leaver.hand_over(self.now)
            self.network += self.save(leaver)

    @rule(who=st.integers(0, 99))
    def end(self, who: int) -> None:
        """End now, whoever has not answered: all open transfers come back, and the goodbye says so.

        It has heard every goodbye: who has ended cannot give anything up any more.
        """
        peer = self.pick(who)
        if any(g is not peer for g in self.staying()):
            self.go_home(peer)

    # --- what must hold ---

    def same(self, one: Amount, other: Amount) -> bool:
        return one.weight == other.weight if self.given_up else one == other

    @invariant()
    def conserved(self) -> None:
        assert self.same(self.total(), self.expected)

    @invariant()
    def open_weight_is_that_of_open_transfers(self) -> None:
        for gossiper in self.live.values():
            weights: Counter[str] = Counter()
            for (_, model), transfer in gossiper.ledger.open.items():
                weights[model] += transfer.give.weight
            assert +gossiper.ledger.open_weight == +weights

    def quiet(self) -> bool:
        return not self.network and not any(g.ledger.open for g in self.live.values())

    def teardown(self) -> None:
        """Faults stop: all becomes quiet, nothing is missing, and estimates agree."""
        if not self.live:
            return
        for _ in range(60):
            for gossiper in self.live.values():
                for name in self.names():
                    self.learn(gossiper, name)
            for gossiper in list(self.live.values()):
                gossiper.tick(self.now)
                self.network += self.save(gossiper)
            self.deliver_all()
            self.depart()
            for leaver in [g for g in self.live.values() if g.leaving and not g.ledger.open]:
                if not leaver.heirs(MODEL):  # it had taken a transfer back from all that stay
                    self.go_home(leaver)
            self.conserved()
            self.now += 100.0
            if self.quiet() and not any(g.leaving for g in self.live.values()):
                break
        for gossiper in self.live.values():
            for name in self.names():
                self.learn(gossiper, name)
        assert self.quiet()
        assert not any(g.leaving for g in self.live.values())
        held = sum((self.held(g) for g in self.live.values()), Amount())
        home = sum((self.held(g) for g in self.home), Amount())
        missing = [g for g in self.estate if not self.credited_at(g, self.keepers())]
        lost = sum((amount(g.weight, g.value) for g in missing), Amount())
        assert self.counted_twice(self.keepers()).weight == 0
        assert self.same(held + home, self.expected - lost)
        if held.weight and not self.given_up:
            self.agree(held)

    def agree(self, held: Amount) -> None:
        mean = np.array([float(s / held.weight) for s in held.sum])
        spread = max(1.0, *(np.abs(self.value(g).astype(float)).max() for g in self.live.values()))
        names = sorted(self.live)
        injected = {n: self.live[n].account(MODEL).injected for n in names}
        for name in names:  # from now on in floats, and over a wire that loses nothing
            snapshot, weight = self.live[name].snapshot(), self.live[name].weight(MODEL)
            values, residue = snapshot["vault"]["values"], snapshot["vault"]["residue"]
            if weight and residue:
                values[MODEL] = values[MODEL] + residue.pop(MODEL) / weight
            for each in (values, residue):
                each.update({model: value.astype(float) for model, value in each.items()})
            store = DictStore({MODEL: np.zeros(LENGTH)})
            self.live[name] = Gossiper.restore(snapshot, store, retry=RETRY)
        for gossiper in self.live.values():
            for name in names:
                self.learn(gossiper, name)
        for _ in range(30):
            for g in self.live.values():
                for to in g.free_neighbours(MODEL):
                    share = g.weight(MODEL) // 2
                    if share:
                        g.push(MODEL, {to: share}, self.now)
                    self.settle()
        late = [n for n in names if self.live[n].account(MODEL).injected != injected[n]]
        for name in names:
            estimate = self.value(self.live[name])
            if late:  # a newcomer that added its weight at a passing estimate moved the mean
                assert (
                    np.ptp([self.value(self.live[n]) for n in names], axis=0).max() < 1e-9 * spread
                )
            else:
                assert np.abs(estimate - mean).max() < 1e-9 * spread

    def settle(self) -> None:
        messages = [m for g in self.live.values() for m in g.poll()]
        while messages:
            for message in messages:
                if message.receiver in self.live:
                    self.live[message.receiver].handle(message, self.now)
            messages = [m for g in self.live.values() for m in g.poll()]


Swarm.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    # Shrinking a schedule can outlast the test's timeout and hide it; add Phase.shrink when hunting.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
TestSwarm = Swarm.TestCase
