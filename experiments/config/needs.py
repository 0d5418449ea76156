"""Keys of a config that do nothing unless something else is so: told, instead of ignored.

`NEEDS` is the whole list. `warn_unused_keys` looks at one config that is about to be run,
`refuse_unused_axes` at a sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from ...gossip import LinkSettings
from ...peer import LifeSettings
from ..cli import console
from ..errors import ConfigError
from .tables import Config, Experiment

Run = Literal["lockstep", "virtual", "live", "compare"]


@dataclass(frozen=True)
class Case:
    """A key in a config, and what is done with it: `table` is the one that the key stands in."""

    config: Any
    run: Run
    table: Any
    sweep: bool = False

    @property
    def sparse(self) -> bool:
        """Whether peers have the associative network and its vectors."""
        return self.config.data.set == "sparse"

    @property
    def on_graph(self) -> bool:
        """Whether there is a topology."""
        return self.config.topology is not None


@dataclass(frozen=True)
class Need:
    """What a key needs to have an effect.

    key: its path; `*` stands for a place in a list, and a table's path for all its keys.
    needs: ends the sentence "has no effect here: ….".
    met: whether it has an effect.
    told: what happens if a config has the key all the same. `live` says nothing, since the same file is
        run by live peers, who use it; in a sweep all of them are refused.
    """

    key: str
    needs: str
    met: Callable[[Case], bool]
    told: Literal["refused", "warned", "live"] = "warned"


def _exchanges(case: Case) -> bool:
    gossip = case.config.gossip
    if case.run == "lockstep":
        return case.on_graph or (gossip.mode == "rounds" and bool(gossip.lossy_keys))
    return gossip.mode != "server"


def _mode(case: Case) -> bool:
    gossip = case.config.gossip
    has_default_exchanges = case.on_graph and gossip.exchanges is None
    return case.run != "lockstep" or bool(gossip.lossy_keys) or has_default_exchanges


def _tolerance(case: Case) -> bool:
    gossip = case.config.gossip
    return case.on_graph and gossip.mode == "rounds" and gossip.exchanges is None


def _fraction(case: Case) -> bool:
    return case.run == "virtual" or (case.run == "live" and case.config.gossip.mode == "async")


def _each(
    keys: str,
    needs: str,
    met: Callable[[Case], bool],
    told: Literal["refused", "warned", "live"] = "warned",
) -> Iterator[Need]:
    """The same need of several keys of one table: `table: key key`."""
    table, _, names = keys.partition(": ")
    return (Need(f"{table}.{name}", needs, met, told) for name in names.split())


def _dealt(partition: str) -> Callable[[Case], bool]:
    return lambda case: case.config.data.partition == partition and not case.sparse


_LIVE = "it is for live peers (gossamer swarm)"

NEEDS: tuple[Need, ...] = (
    Need(
        "time",
        "a Simulation runs in lockstep; call simulate_in_time of gossamer.experiments.arena, or "
        "gossamer simulate; live peers have a time of their own",
        lambda case: case.run == "virtual",
        "refused",
    ),
    Need(
        "sweep",
        "this is one run; expand of gossamer.experiments.study.sweep lists all of them, and gossamer sweep "
        "runs them",
        lambda case: case.sweep,
        "refused",
    ),
    Need("name", "a result does not depend on it", lambda case: not case.sweep),
    Need("test_every", "a sweep looks at the last round alone", lambda case: not case.sweep),
    Need(
        "rounds",
        "time.seconds says when to stop: leave out one of them",
        lambda case: case.run != "virtual" or not (case.config.time and case.config.time.seconds),
    ),
    *_each(
        "data: partition total tested",
        "all peers have the same sparse vectors",
        lambda case: not case.sparse,
    ),
    *_each("data: minimum alpha", 'it is for partition = "dirichlet"', _dealt("dirichlet")),
    Need("data.shards", 'it is for partition = "shards"', _dealt("shards")),
    Need("tasks.*.labels", 'they are for kind = "swap"', lambda case: case.table.kind == "swap"),
    Need(
        "tasks.*.last",
        'it is for the kinds "cycle" and "symmetric"',
        lambda case: case.table.kind in ("cycle", "symmetric"),
    ),
    *_each(
        "network: activation output",
        "it is for a perceptron, given by its layout",
        lambda case: not case.config.network.name_or_entry and not case.sparse,
    ),
    Need(
        "network.buffers",
        "it is for networks with batch norm, given by a name or an entry",
        lambda case: case.config.network.name_or_entry is not None,
    ),
    *_each(
        "network: start gain shift",
        "it is for starting values, which network.trained replaces",
        lambda case: case.config.network.trained is None,
    ),
    *_each(
        "training: batch epochs reduction optimizer weight_decay loss",
        "the associative network has no gradients",
        lambda case: not case.sparse,
    ),
    Need(
        "gossip.mode",
        "without a topology peers in lockstep are averaged exactly, and on one with gossip.exchanges all "
        "modes make as many",
        _mode,
        "live",
    ),
    Need(
        "gossip.exchanges",
        "it needs a topology, or a [time] table: else peers in lockstep are averaged exactly; a server "
        "makes none",
        _exchanges,
    ),
    Need(
        "gossip.tolerance",
        'it needs a topology, and mode = "rounds" without gossip.exchanges',
        _tolerance,
    ),
    Need("gossip.rule", "it needs a topology", lambda case: case.on_graph),
    Need("gossip.fraction", 'it needs a [time] table, or live peers in mode = "async"', _fraction),
    *_each(
        "gossip: "
        + " ".join([*LifeSettings.model_fields, *LinkSettings.model_fields, "per_process"]),
        _LIVE,
        lambda case: case.run == "live",
        "live",
    ),
    Need("trust", _LIVE, lambda case: case.run == "live", "live"),
    Need(
        "time.slowdown",
        "it needs time.stragglers above 0",
        lambda case: bool(case.config.time and case.config.time.stragglers),
    ),
    *_each(
        "time.churn: leave arrive link_down link_up",
        "it is a chance, and events come from time.churn.trace: leave out one of them",
        lambda case: bool(case.config.time) and not getattr(case.config.time.churn, "trace", None),
    ),
)

REFUSED_IN_COMPARISONS: tuple[Need, ...] = tuple(
    Need(key, f"a comparison's {why}", lambda case: False, "refused")
    for key, why in (
        ("every", "clients train training.epochs passes in a round"),
        ("weights", "methods weigh clients as their papers do"),
        ("training.local_samples", "clients train whole epochs: write training.epochs"),
        ("training.proximal", "proximal term is the method fedprox"),
        ("training.reduction", "methods are written for the mean loss of a batch"),
        ("network.sizes", "methods average networks of one size"),
        ("network.trained", "clients start from the same values"),
        ("network.equal_starts", "clients start from the same values"),
    )
)
"""Keys of the tables that comparisons share with swarms, which comparisons do not have."""


def warn_unused_keys(config: Experiment, run: Run, source: str = "config") -> None:
    """Say on the terminal which keys of a config have no effect in a run, a line for each.

    Those that would make it another kind of run are a ConfigError.
    """
    for key, need in unused(config, run):
        if need.told == "refused":
            raise ConfigError(_line(source, key, need))
        if need.told == "warned":
            console.warn(_line(source, key, need))


def _line(source: str, key: str, need: Need) -> str:
    return f"{source}: key {key!r}: has no effect here: {need.needs}"


def unused(config: Experiment, run: Run) -> Iterator[tuple[str, Need]]:
    """Keys that were set to something, with no effect in a run."""
    for need in NEEDS if run != "compare" else REFUSED_IN_COMPARISONS + NEEDS:
        for key, table in _set_in(config, need.key.split(".")):
            if not need.met(Case(config, run, table)):
                yield key, need


def refuse_unused_axes(
    axes: Mapping[str, Sequence[Any]], configs: Sequence[Config], source: str = "config"
) -> None:
    """Raise for a key that is swept, with several values, and has an effect in none of the runs."""
    for key in (key for key, values in axes.items() if len(values) > 1):
        pattern = ".".join("*" if step.isdigit() else step for step in key.split("."))
        for need in NEEDS:
            if need.told == "refused" or not f"{pattern}.".startswith(f"{need.key}."):
                continue
            cases = (_case(config, key) for config in configs)
            if not any(need.met(case) for case in cases):
                raise ConfigError(
                    f"{source}: key 'sweep.{key}': has no effect here, and its rows would be equal: "
                    f"{need.needs}"
                )


def _case(config: Config, key: str) -> Case:
    table: Any = config
    for step in key.split(".")[:-1]:
        table = table[int(step)] if isinstance(table, list) else getattr(table, step, None)
    return Case(config, _kind(config), table, sweep=True)


def _set_in(table: Any, steps: Sequence[str], above: str = "") -> Iterator[tuple[str, Any]]:
    """Where a key was set to another value than its default: its path, and the table it stands in."""
    step, *rest = steps
    if step == "*":
        for place, each in enumerate(table):
            yield from _set_in(each, rest, f"{above}{place}.")
    elif isinstance(table, BaseModel) and step in type(table).model_fields:
        value = getattr(table, step)
        if rest:
            yield from _set_in(value, rest, f"{above}{step}.")
        elif step in table.model_fields_set and value != type(table).model_fields[step].default:
            yield f"{above}{step}", table


def warn_unused_in_sweep(
    config: Config, axes: Mapping[str, Sequence[Any]], runs: Sequence[Config], source: str
) -> None:
    """Say which keys of a config have no effect in any run of its sweep, apart from those that are swept."""
    everywhere = [{key for key, _ in unused(run, _kind(run))} for run in runs]
    for key, need in unused(config, _kind(runs[0])):
        if need.told == "warned" and key not in axes and all(key in one for one in everywhere):
            console.warn(_line(source, key, need))


def _kind(config: Config) -> Run:
    return "lockstep" if config.time is None else "virtual"
