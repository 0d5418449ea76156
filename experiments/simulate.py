"""Running one config in the arena and leaving its results in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .arena import Arena, Round
from .build import Member, Swarm
from .config import Config
from .results import RecordFile, read_records, write_csv, write_json


@dataclass(frozen=True)
class Simulation:
    """A swarm in the arena; iterate `rounds()` to run it."""

    config: Config
    members: list[Member]

    @classmethod
    def of(cls, config: Config, source: str = "config") -> Simulation:
        """Build every peer of a config."""
        members = Swarm(config, source).members()
        if config.topology is not None:
            from .live import graph_of  # scipy takes a while: only for those who have a graph

            graph_of(config, members, source)
        return cls(config, members)

    def rounds(self) -> Iterator[Round]:
        """Run the config's rounds."""
        config = self.config
        weights = [m.samples for m in self.members] if config.weights == "samples" else None
        arena = Arena(
            [member.learner for member in self.members],
            every=config.every,
            weights=weights,
            test_every=config.test_every,
        )
        yield from arena.run(config.rounds)


def simulate(
    simulation: Simulation,
    out: Path,
    *,
    networks: bool = False,
    on_round: Callable[[Round], None] = lambda _: None,
) -> list[Path]:
    """Run a simulation and leave config.json, metrics.jsonl, summary.csv and accuracy.png / .svg.

    With `networks` every peer's network is left as safetensors too. Stopped by Ctrl-C, the files hold
    what was computed until then, and KeyboardInterrupt goes on to the caller.
    """
    metrics = out / "metrics.jsonl"
    try:
        with RecordFile(metrics) as file:
            write_json(out / "config.json", simulation.config.model_dump(mode="json"))
            for round in simulation.rounds():
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
    finally:
        written = summarise(out, simulation.config.name)
    if networks:
        for member in simulation.members:
            written.append(out / f"peer-{member.name}.safetensors")
            member.network.save(written[-1])
    return written


def summarise(out: Path, title: str) -> list[Path]:
    """Draw and tabulate whatever metrics.jsonl holds; nothing if it is empty."""
    rounds: dict[int, dict[str, float]] = {}
    tasks: dict[str, str] = {}
    for record in read_records(out / "metrics.jsonl"):
        rounds.setdefault(record["round"], {})[record["peer"]] = record["accuracy"]
        tasks[record["peer"]] = record["task"]
    if not rounds:
        return []
    from .figures import (  # matplotlib takes a second: not for those who only train
        band,
        canvas,
        save,
    )

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
