"""Running one config in the arena and leaving its results in a folder.

Importing this loads neither torch nor the arena: the command line does so only to show its help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import console
from .errors import ConfigError
from .results import RecordFile, Results, read_records, replacing, write_csv, write_json

if TYPE_CHECKING:
    from ..models.stack import Needs
    from ..peer import MatchedStore
    from .arena import Arena, Mixing, Round
    from .build import Member
    from .config.tables import Config
    from .virtual.wire import Wire


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
        import torch

        from ..models import ModelError, implementers
        from ..models.stack import free_memory
        from .build import Swarm, members_in_order
        from .config.needs import heed

        if say:
            heed(config, "lockstep", source)
        try:
            expected_needs(config).refuse_beyond(free_memory(torch.device("cpu")))
        except ModelError as error:
            raise ConfigError(f"{source}: key 'peers': {error}") from None
        members, stores = members_in_order(Swarm(config, source))
        mixing = None
        if config.topology is not None or config.bridge or config.gossip.rule != "push":
            from .graphs import mixing_of  # scipy takes a while: only for those who have a graph

            found = implementers([member.network for member in members])
            shared = {owner: who for owner, who in found.items() if len(who) > 1}
            mixing = mixing_of(config, shared, source)
        if not config.gossip.lossy:
            return cls(config, members, mixing, stores)
        from .wiring import wiring_of

        mixing, wire = wiring_of(config, members, mixing, source)
        return cls(config, members, mixing, stores, wire)

    def arena(self, threads: int | None = None) -> Arena:
        """The members in an arena, ready to run; threads change no result."""
        from .arena import Arena

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
    from ..models import AssociativeNetwork, Layout, ModelError
    from ..models.stack import estimate

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
            from .virtual.wire import write_traffic

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
    from .study.figures import band, canvas, save

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
