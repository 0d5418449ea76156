"""Running one config in the arena, in lockstep or in virtual time, and leaving its results in a folder.

Whose accuracy counts at a moment of virtual time: peers that are present at that moment, each by its latest
test until then. A peer that has left counts no more, whatever it knew; one that is back but was not tested
since counts by the test before it left. Curves, means and sweeps all follow this rule.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ...gossip.compress import Traffic
from ...models import AssociativeNetwork, Layout, ModelError
from ...models.stack import Needs, estimate, free_memory
from ...peer import MatchedStore
from ..build import Member, Swarm, members_in_order
from ..cli import console
from ..config.needs import warn_unused_keys
from ..config.tables import Config
from ..errors import ConfigError
from ..live.layout import shared_owners
from ..results import RecordFile, Results, read_records, replacing, write_csv, write_json
from .arena import Arena, Round
from .events import Wire
from .learning import LearningSimulation, Reading, wiring_of
from .lockstep import Mixing
from .network import World


@dataclass(frozen=True)
class Simulation:
    """A swarm in the arena; iterate `rounds()` to run it."""

    config: Config
    members: list[Member]
    mixing: Mixing | None = None
    stores: list[MatchedStore] | None = None
    """The peers' vectors, where a partial model is averaged at a common width."""
    wire: Wire | None = None
    """What becomes of values between peers, where it is not the values themselves that arrive."""

    @classmethod
    def of(cls, config: Config, source: str = "config", *, say: bool = True) -> Simulation:
        """Build every peer of a config, unless it can be told beforehand that they do not fit.

        A config with [time] or [sweep] is refused: it is not one run in lockstep. say: name keys that have
        no effect in lockstep, on the terminal.
        """
        if say:
            warn_unused_keys(config, "lockstep", source)
        try:
            expected_needs(config).refuse_beyond(free_memory(torch.device("cpu")))
        except ModelError as error:
            raise ConfigError(f"{source}: key 'peers': {error}") from None
        members, stores = members_in_order(Swarm(config, source))
        mixing = None
        if config.topology is not None or config.bridge or config.gossip.rule != "push":
            from ..graphs import mixing_of  # scipy takes a while: only for those who have a graph

            mixing = mixing_of(config, shared_owners(members), source)
        if not config.gossip.lossy:
            return cls(config, members, mixing, stores)
        mixing, wire = wiring_of(config, members, mixing, source)
        return cls(config, members, mixing, stores, wire)

    def arena(self, threads: int | None = None) -> Arena:
        """The members in an arena, ready to run; threads change no result."""
        config = self.config
        weights = [m.samples for m in self.members] if config.weights == "samples" else None
        return Arena(
            [member.learner for member in self.members],
            every=config.every,
            weights=weights,
            test_every=config.test_every,
            mixing=self.mixing,
            stores=self.stores,
            wire=self.wire,
            threads=threads,
        )

    def rounds(self, arena: Arena | None = None) -> Iterator[Round]:
        """Run the config's rounds, in a new arena if none is given."""
        yield from (arena or self.arena()).run(self.config.rounds)


def expected_needs(config: Config) -> Needs:
    """What a config's swarm will need at least, from the config alone: no data is loaded for it."""
    layout = config.network.layout
    try:
        if "<>" in layout:
            module = AssociativeNetwork(layout)
            features, parameters = module.hidden.shape[1], 2 * module.hidden.numel()
        else:
            cells = Layout.network(layout).cells
            features = cells[0]
            parameters = sum((a + 1) * b for a, b in pairwise(cells))
    except ModelError:
        features = parameters = 0  # building it says what is wrong, and where
    if config.network.named:  # its size is known once it is built, and the arena then looks again
        features = parameters = 0
    peers, data = config.peers, config.data
    row = 4 * features + 8
    # A slice of part of a network has an index for every coordinate, which peers that are cut alike
    # share; a whole network has none.
    whole = [model.layout for model in config.models] == [layout.replace("=", "-")]
    return estimate(
        peers=peers,
        parameters=parameters,
        slots={"sgd": 0, "momentum": 1, "adam": 2}[config.training.optimizer],
        sample_bytes=peers * (data.samples or 0) * row,
        index_bytes=0 if whole or not config.models else 8 * parameters,
    )


def simulate(
    simulation: Simulation,
    results: Results,
    *,
    networks: bool = False,
    on_round: Callable[[Round], None] = lambda _: None,
) -> list[Path]:
    """Run a simulation and leave config.json, metrics.jsonl, summary.csv and accuracy.png / .svg.

    Where values are compressed, rounded or skipped, traffic.csv has the bytes of each shared model. With
    `networks` every peer's network is left as safetensors too. Stopped by Ctrl-C, the files hold what was
    computed until then, and KeyboardInterrupt goes on to the caller.
    """
    # First, since it refuses what does not fit: until then no folder is taken.
    arena = simulation.arena()
    with results.begun() as out:
        return _simulate(simulation, arena, out, networks=networks, on_round=on_round)


def _simulate(
    simulation: Simulation,
    arena: Arena,
    out: Path,
    *,
    networks: bool,
    on_round: Callable[[Round], None],
) -> list[Path]:
    try:
        with RecordFile(out / "metrics.jsonl") as file:
            write_json(out / "config.json", simulation.config.model_dump(mode="json"))
            console.err.print(str(arena.needs()), soft_wrap=True)
            for round in simulation.rounds(arena):
                for member, test in zip(simulation.members, round.tests, strict=False):
                    file.write(
                        {
                            "round": round.index,
                            "peer": member.name,
                            "task": member.task,
                            "accuracy": test.accuracy,
                            "loss": test.mean_loss,
                        }
                    )
                on_round(round)
    except KeyboardInterrupt:
        if networks:
            save_networks(simulation.members, out)
        raise
    finally:
        written = summarise(out, simulation.config.name)
        if arena.lockstep is not None:
            written.append(write_traffic(out / "traffic.csv", arena.lockstep.counted()))
    return [*written, *(save_networks(simulation.members, out) if networks else [])]


def save_networks(members: Sequence[Member], out: Path) -> list[Path]:
    """Leave every peer's network, as it is now, as safetensors."""
    files = []
    for member in members:
        files.append(out / f"peer-{member.name}.safetensors")
        with replacing(files[-1]) as part:
            member.network.save(part)
    return files


def summarise(out: Path, title: str) -> list[Path]:
    """Draw and tabulate whatever metrics.jsonl holds; nothing if it is empty."""
    rounds: dict[int, dict[str, float]] = {}
    tasks: dict[str, str] = {}
    for record in read_records(out / "metrics.jsonl"):
        rounds.setdefault(record["round"], {})[record["peer"]] = record["accuracy"]
        tasks[record["peer"]] = record["task"]
    if not rounds:
        return []
    from ..study.figures import band, canvas, save

    last = rounds[max(rounds)]
    table = out / "summary.csv"
    write_csv(
        table, ["peer", "task", "accuracy"], ([p, tasks[p], f"{a:.4f}"] for p, a in last.items())
    )
    figure, axes = canvas(
        f"{len(last)} peers; line: mean, band: worst to best peer, each on its own task"
    )
    band(axes, {index: list(by_peer.values()) for index, by_peer in rounds.items()})
    axes.set(title=title, xlabel="round", ylabel="accuracy")
    return [table, *save(figure, out / "accuracy")]


# --- in virtual time ----------------------------------------------------------------------------------

RULE = "peers that are there at the time, each by its latest test on its own task"
"""Whose accuracy counts, for captions."""
_MARKS = 100  # moments at which a curve is drawn

Test = tuple[float, int, float]
"""When, after how many rounds of the peer's own, and the accuracy."""
Presence = Mapping[str, Sequence[tuple[float, float]]]
"""Per peer when it came and when it left, in order; infinity if it did not leave."""


def simulate_in_time(
    config: Config,
    results: Results,
    source: str = "config",
    *,
    networks: bool = False,
    threads: int = 1,
    on_start: Callable[[float], None] = lambda seconds: None,
    on_test: Callable[[Reading], None] = lambda _: None,
    on_mean: Callable[[Mean], None] = lambda _: None,
) -> list[Path]:
    """Run a config with a [time] table.

    Leaves config.json, metrics.jsonl, presence.csv (who was there when, where peers come and go),
    summary.csv, accuracy.png / .svg, and traffic.csv: for each shared model the bytes of values that were
    sent, and what compression and skipped pushes saved. With `networks` every peer's network is left as
    safetensors too. Stopped by Ctrl-C, the files hold what there was until then; a config that cannot be
    run takes no folder.

    on_mean: called about a hundred times, and at the end, with what the peers that are there have.
    """
    tests: dict[str, list[Test]] = {}
    next_mean = 0.0

    def note(tested: Reading) -> None:
        nonlocal next_mean
        member = run.members[tested.peer]
        file.write(
            {
                "time": tested.time,
                "round": tested.round,
                "peer": member.name,
                "task": member.task,
                "accuracy": tested.metrics.accuracy,
                "loss": tested.metrics.mean_loss,
            }
        )
        row = (tested.time, tested.round, tested.metrics.accuracy)
        insort(tests.setdefault(member.name, []), row)
        on_test(tested)
        if tested.time >= next_mean:
            next_mean = tested.time + run.seconds / _MARKS
            on_mean(Mean.of(tests, presence, tested.time))

    warn_unused_keys(config, "virtual", source)
    # First, since it finds what is wrong with the config: until then no folder is taken.
    run = LearningSimulation(config, source, threads=threads, on_test=note)
    names = [member.name for member in run.members]
    presence = presence_of(run.world, names)
    with results.begun() as out:
        with RecordFile(out / "metrics.jsonl") as file:
            on_start(run.seconds)
            write_json(out / "config.json", config.model_dump(mode="json"))
            write_presence(out / "presence.csv", presence)
            try:
                run.run()
                on_mean(Mean.of(tests, presence, run.seconds))
            except KeyboardInterrupt:
                run.stop()
                if networks:
                    save_networks(run.members, out)
                raise
            finally:
                sizes = run.events.counted()
                written = [
                    *summarise_times(out, config.name),
                    write_traffic(out / "traffic.csv", sizes),
                ]
        return [*written, *(save_networks(run.members, out) if networks else [])]


@dataclass(frozen=True)
class Mean:
    """The mean accuracy of those who count at a moment, and how many they are; NaN if nobody does."""

    time: float
    accuracy: float
    peers: int

    @classmethod
    def of(cls, tests: Mapping[str, Sequence[Test]], presence: Presence, time: float) -> Mean:
        """By the rule of `accuracies_at`."""
        counted = accuracies_at(time, tests, presence)
        return cls(time, fmean(counted.values()) if counted else math.nan, len(counted))


def write_traffic(path: Path, counted: Iterable[tuple[str, int, Traffic]]) -> Path:
    """A table of bytes that were sent, and what was saved and distorted, from a row for each model.

    Sizes are those of the values alone: headers and answers are left out.
    """
    header = ["model", "bytes", "plain_bytes", "skipped", "mean_distortion", "worst_distortion"]
    rows = [
        [name, size, size + each.saved, each.skipped, f"{each.mean_distortion:.4g}", f"{each.worst:.4g}"]
        for name, size, each in counted
    ]  # fmt: skip
    write_csv(path, header, rows)
    return path


def summarise_times(out: Path, title: str) -> list[Path]:
    """Draw and tabulate whatever metrics.jsonl and presence.csv hold; nothing if nobody was tested."""
    tests: dict[str, list[Test]] = {}
    tasks: dict[str, str] = {}
    for record in read_records(out / "metrics.jsonl"):
        row = (record["time"], record["round"], record["accuracy"])
        tests.setdefault(record["peer"], []).append(row)
        tasks[record["peer"]] = record["task"]
    if not tests:
        return []
    from ..study.figures import band, canvas, save  # matplotlib takes a second

    for rows in tests.values():
        rows.sort()
    presence = read_presence(out / "presence.csv")
    end = max(rows[-1][0] for rows in tests.values())
    mean, here = Mean.of(tests, presence, end), accuracies_at(end, tests, presence)
    table = out / "summary.csv"
    lines = [
        [p, tasks[p], tests[p][-1][1], f"{tests[p][-1][2]:.4f}", "yes" if p in here else "no"]
        for p in sorted(tests, key=lambda peer: (len(peer), peer))
    ]
    lines.append(["mean", "", "", f"{mean.accuracy:.4f}", f"{mean.peers}"])
    write_csv(table, ["peer", "task", "rounds", "accuracy", "there"], lines)
    figure, axes = canvas(
        f"{len(tests)} peers; line: mean, band: worst to best, of {RULE}; at the last test "
        f"{mean.accuracy:.3f}, the mean of {mean.peers}"
    )
    band(axes, curve(tests, presence))
    axes.set(title=title, xlabel="virtual time in seconds", ylabel="accuracy")
    return [table, *save(figure, out / "accuracy")]


def curve(
    tests: Mapping[str, Sequence[Test]], presence: Presence | None = None
) -> dict[Any, list[float]]:
    """At moments from the first test to the last, the accuracy of everybody who counts, if any do."""
    first = min(rows[0][0] for rows in tests.values())
    last = max(rows[-1][0] for rows in tests.values())
    accuracies: dict[Any, list[float]] = {}
    for mark in range(_MARKS + 1):
        time = last if mark == _MARKS else first + (last - first) * mark / _MARKS
        if here := accuracies_at(time, tests, presence or {}):
            accuracies[time] = list(here.values())
    return accuracies


# --- presence ---------------------------------------------------------------------------------------


def accuracies_at(
    time: float, tests: Mapping[str, Sequence[Test]], presence: Presence
) -> dict[str, float]:
    """The accuracy of every peer that counts at a moment. Tests of a peer are sorted by time.

    A peer without an entry in `presence` is there all the time; at the very moment of leaving it is not.
    """
    accuracies: dict[str, float] = {}
    for peer, rows in tests.items():
        place = bisect_right(rows, time, key=lambda row: row[0])
        stays = presence.get(peer, [(-math.inf, math.inf)])
        if place and any(start <= time < end for start, end in stays):
            accuracies[peer] = rows[place - 1][2]
    return accuracies


def presence_of(world: World, names: Sequence[str]) -> Presence:
    """When peers come and go in a world; empty if nobody does."""
    if not world.churns:
        return {}
    return {
        name: [(float(a), float(b)) for a, b in zip(starts, ends, strict=True) if a < math.inf]
        for name, starts, ends in zip(names, world.starts, world.ends, strict=True)
    }


def write_presence(path: Path, presence: Presence) -> None:
    """A table of who was there from when until when, without those who were there all the time."""
    rows = ([peer, start, end] for peer, stays in presence.items() for start, end in stays)
    write_csv(path, ["peer", "from", "until"], rows)


def read_presence(path: Path) -> Presence:
    """What `write_presence` wrote; empty if there is no such file."""
    presence: dict[str, list[tuple[float, float]]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                stay = (float(row["from"]), float(row["until"]))
                presence.setdefault(row["peer"], []).append(stay)
    return presence
