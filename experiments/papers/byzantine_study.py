"""Hostile members: what three of sixteen can do, with and without guards: `gossamer study byzantine`.

Sixteen peers learn the built-in digits by asynchronous gossip, in one process and virtual time. The hostile
ones keep their books like everybody else, but what they send is not what they have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...gossip import ONE, Give, Gossiper, MemoryNetwork, Message, PacedMode, introduce, run
from ...gossip.trust import Guards, GuardSettings, guard
from ...peer import NetworkStore
from ..build import Member, Swarm
from ..config.tables import Config, Data, Model, Network, Training

Array = np.ndarray[Any, Any]
Attack = Callable[[Array, np.random.Generator], Array]

ATTACKS: dict[str, Attack] = {
    "NaN": lambda value, _: np.full_like(value, np.nan),
    "1e30": lambda value, _: np.full_like(value, 1e30),
    "random": lambda value, rng: rng.normal(0, value.std(), value.size).astype(value.dtype),
    "sign flipped": lambda value, _: -value,
    "half of it": lambda value, _: value / 2,
    "a tenth less": lambda value, _: 0.9 * value,
}
"""What a hostile member sends instead of its value. The last one stays within the guards' bounds."""


@dataclass(frozen=True)
class Setting:
    """The swarm: peers share everything, so that nothing is out of an attack's reach."""

    peers: int = 16
    hostile: int = 3
    rounds: int = 40
    seed: int = 0

    @property
    def config(self) -> Config:
        """The same swarm for every attack."""
        return Config(
            name="byzantine",
            seed=self.seed,
            peers=self.peers,
            rounds=self.rounds,
            data=Data(set="digits", samples=50),
            network=Network(layout="64=30=10"),
            models=[Model(name="global", layout="64-30-10")],
            training=Training(stretch=80, batch=10, rate=0.3),
        )


class Hostile(MemoryNetwork[Message]):
    """A network on which some senders' transfers carry something else."""

    def __init__(self, hostile: Collection[str], attack: Attack | None, seed: int):
        super().__init__(seed)
        self._hostile, self._attack = frozenset(hostile), attack
        self._noise = np.random.default_rng(seed + 1)

    def send(self, message: Message, now: float) -> None:
        """Put a hostile value in a hostile sender's transfer."""
        if isinstance(message, Give) and message.sender in self._hostile and self._attack:
            message = replace(message, value=self._attack(message.value, self._noise))
        super().send(message, now)


@dataclass(frozen=True)
class Outcome:
    """One run: the honest peers' mean accuracy, and what the guards did."""

    accuracy: float
    counters: Counter[str]
    quarantined: int
    """Pairs of an honest peer and a hostile one that it has in quarantine at the end."""
    wronged: int
    """Pairs of honest peers of whom one has the other in quarantine."""


def run_swarm(
    setting: Setting,
    attack: Attack | None,
    guards: GuardSettings | None,
    hostile: Sequence[int] = (),
) -> Outcome:
    """Train and gossip; `hostile` are the indices of the peers that attack."""
    members = Swarm(setting.config).members()
    bad = {members[index].name for index in hostile}
    clock = [0.0]
    gossipers = {member.name: _gossiper(member, number) for number, member in enumerate(members)}
    introduce(gossipers.values())
    watch: dict[str, Guards] = {}
    if guards is not None:
        for name, gossiper in gossipers.items():
            if name not in bad:
                watch[name] = Guards(guards)
                guard(gossiper, watch[name], lambda: clock[0])
    network = Hostile(bad, attack, setting.seed)
    for _ in range(setting.rounds):
        for member in members:
            member.learner.train(1)
            mode = gossipers[member.name].mode
            assert isinstance(mode, PacedMode)
            mode.request()
        clock[0] = run(gossipers, network, start=clock[0], seconds=0.1)
    clock[0] = run(gossipers, network, start=clock[0], seconds=2.0)  # what is under way arrives
    honest = [member for member in members if member.name not in bad]
    accuracy = float(np.mean([member.learner.test().accuracy for member in honest]))
    out = [(name, other) for name, each in watch.items() for other in each.quarantined(clock[0])]
    return Outcome(
        accuracy,
        sum((each.counters for each in watch.values()), Counter()),
        sum(other in bad for _, other in out),
        sum(other not in bad for _, other in out),
    )


def _gossiper(member: Member, seed: int) -> Gossiper:
    store = NetworkStore(member.network)
    gossiper = Gossiper(member.name, f"s-{member.name}", store, mode=PacedMode(2), seed=seed)
    for vector in gossiper.vectors:
        gossiper.inject(vector, ONE)
    return gossiper


@dataclass(frozen=True)
class Finding:
    """One attack, without guards and with them, against the run in which nobody attacks."""

    attack: str
    clean: float
    unguarded: float
    guarded: float
    quarantined: int
    wronged: int

    @property
    def covered(self) -> bool:
        """Whether the guards keep the honest peers within 0.02 of the clean run."""
        return self.guarded >= self.clean - 0.02


def study(
    setting: Setting | None = None,
    guards: GuardSettings | None = None,
    attacks: Sequence[str] | None = None,
    on_run: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Every attack; the clean run is judged on the same peers as the attacked ones."""
    setting, guards = setting or Setting(), guards or GuardSettings()
    hostile = list(range(0, setting.peers, setting.peers // setting.hostile))[: setting.hostile]
    on_run("clean")
    clean = run_swarm(setting, None, guards, hostile).accuracy
    findings = []
    for name in attacks or ATTACKS:
        on_run(name)
        unguarded = run_swarm(setting, ATTACKS[name], None, hostile)
        guarded = run_swarm(setting, ATTACKS[name], guards, hostile)
        findings.append(
            Finding(
                name, clean, unguarded.accuracy, guarded.accuracy,
                guarded.quarantined, guarded.wronged,
            )
        )  # fmt: skip
    return findings
