"""Hostile members: what three of sixteen can do, with and without guards: `gossamer study byzantine`.

Sixteen peers learn the built-in digits by asynchronous gossip, in one process and virtual time. The hostile
ones keep their books like everybody else, but what they send is not what they have.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ...gossip import ONE, Give, Gossiper, MemoryNetwork, Message, PacedMode, introduce, run
from ...gossip.security import Guards, GuardSettings, guard
from ...peer import NetworkStore
from ..build import Member, Swarm
from ..config.tables import Config, Data, Model, Network, Training
from ..results import Record
from ..study import EachCell, Frame, Job, Study, as_text, frame_of, key_of
from . import Paper

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
            network=Network(layout="64=30=10", activation="sigmoid", output="sigmoid"),
            models=[Model(name="global", layout="64-30-10")],
            training=Training(
                local_samples=80, batch=10, rate=0.3, loss="squared", reduction="sum"
            ),
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
    for vector in gossiper.models:
        gossiper.inject(vector, ONE)
    return gossiper


# --- the study --------------------------------------------------------------------------------------

CLEAN = "clean"
"""The run in which nobody attacks: it is judged on the same peers as the attacked ones."""
TOLERANCE = 0.02
"""What guards may cost: honest peers are to stay this near the clean run."""


@dataclass(frozen=True)
class Cell:
    """One run: an attack by its name, with or without guards."""

    line: str
    guarded: bool
    setting: Setting

    @property
    def key(self) -> str:
        """Names the run by all that decides its result."""
        return key_of(json.dumps(["byzantine", asdict(self)]))


def run_cell(cell: Cell, job: Job) -> Record:
    """Run a swarm."""
    setting = cell.setting
    hostile = range(0, setting.peers, setting.peers // setting.hostile)[: setting.hostile]
    guards = GuardSettings() if cell.guarded else None
    log = logging.getLogger("gossamer.gossip.security.guards")
    level = log.level
    log.setLevel(logging.ERROR)  # hundreds of quarantines are what the study is about
    try:
        outcome = run_swarm(setting, ATTACKS.get(cell.line), guards, hostile)
    finally:
        log.setLevel(level)
    return {
        "attack": cell.line, "guarded": cell.guarded, "accuracy": outcome.accuracy,
        "quarantined": outcome.quarantined, "wronged": outcome.wronged,
    }  # fmt: skip


def byzantine(paper: Paper, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study: every attack without guards and with them."""
    setting = Setting(rounds=12) if quick else Setting()
    cells = [Cell(CLEAN, True, setting)]
    cells += [Cell(attack, guarded, setting) for attack in ATTACKS for guarded in (False, True)]
    return Study(
        paper.name, cells, EachCell(run_cell), table,
        titles={
            "summary": f"{setting.hostile} of {setting.peers} peers hostile, digits, {setting.rounds} rounds:"
            " accuracy of the honest"
        },
        latest=lambda record: f"{record['attack']}: {record['accuracy']:.3f}",
        always={CLEAN},
    )  # fmt: skip


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return a row for every attack: accuracies, whether guards bear it, and honest pairs in quarantine."""
    frame = frame_of(records, ordered=["attack"])
    clean = frame.loc[frame["attack"] == CLEAN, "accuracy"].max()
    runs = frame[frame["attack"] != CLEAN]
    found = runs.pivot_table(["accuracy", "wronged"], "attack", "guarded", observed=True)
    found = found.reindex(columns=[("accuracy", False), ("accuracy", True), ("wronged", True)])
    found.columns = ["no guards", "guards", "wronged"]
    columns = {
        "they send": found.index,
        "nobody attacks": clean,
        "no guards": found["no guards"],
        "guards": found["guards"],
        f"within {TOLERANCE:g}": [
            "yes" if a >= clean - TOLERANCE else "NO" for a in found["guards"]
        ],
        "wronged": found["wronged"],
    }
    formats = dict.fromkeys(("nobody attacks", "no guards", "guards"), ".3f")
    return {"summary": as_text(frame_of(columns), {**formats, "wronged": ".0f"})}
