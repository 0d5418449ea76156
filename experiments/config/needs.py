"""Finds keys of a config that do not fit its run, so that the user is told instead of misled.

Some have no effect: `data.alpha`, for example, needs partition = "dirichlet". `NEEDS` lists what each such
key needs. `warn_unused_keys` checks a config before it is run, `refuse_unused_axes` the keys of a sweep.
Others exclude each other: `CONFLICTS` lists them, and `refuse_conflicts` checks a config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from ...gossip import LinkSettings
from ...peer import LifecycleSettings
from ..cli import console
from ..errors import ConfigError
from .tables import NOT_FOREVER, Config, Data, Experiment, needs_matching

Run = Literal["lockstep", "virtual", "live", "compare"]
"""How a config is run: simulated in lockstep or in virtual time, by live peers, or in a comparison."""
Reaction = Literal["refuse", "warn", "accept"]
"""What happens if a config has a key without effect: an error, a warning, or nothing. The last is for keys
that only live peers use, because they run the same file. In a sweep, all of them are errors."""


@dataclass(frozen=True)
class Case:
    """One use of a key: the config that sets it, and how the config is run.

    table: the table that contains the key.
    """

    config: Any
    run: Run
    table: Any

    @property
    def sparse(self) -> bool:
        """Whether peers have the associative network and the sparse vectors."""
        return self.config.data.set == "sparse"

    @property
    def on_graph(self) -> bool:
        """Whether there is a topology."""
        return self.config.topology is not None


@dataclass(frozen=True)
class Need:
    """What a key needs to have an effect.

    key: the key's path; `*` stands for any index in a list, and the path of a table for all its keys.
    reason: why the key has no effect; ends the message "has no effect here: …".
    met: returns whether the key has an effect.
    """

    key: str
    reason: str
    met: Callable[[Case], bool]
    reaction: Reaction = "warn"


def _uses_exchanges(case: Case) -> bool:
    gossip = case.config.gossip
    if case.run == "lockstep" and gossip.mode != "steady" and gossip.robust == "none":
        return case.on_graph or (gossip.mode == "rounds" and bool(gossip.lossy_keys))
    return gossip.mode != "server"


def _uses_mode(case: Case) -> bool:
    gossip = case.config.gossip
    if gossip.mode == "steady" or gossip.robust != "none":
        return True
    has_default_exchanges = case.on_graph and gossip.exchanges is None
    return case.run != "lockstep" or bool(gossip.lossy_keys) or has_default_exchanges


def _needs(
    keys: str, reason: str, met: Callable[[Case], bool], reaction: Reaction = "warn"
) -> Iterator[Need]:
    """Yield the same need for several keys of one table; keys: written as "table: key key"."""
    table, _, names = keys.partition(": ")
    return (Need(f"{table}.{name}", reason, met, reaction) for name in names.split())


def _has_partition(partition: str) -> Callable[[Case], bool]:
    """Return a function that tests whether samples are split in the given way."""
    return lambda case: case.config.data.partition == partition and not case.sparse


_LIVE = "it is for live peers (gossamer swarm)"

NEEDS: tuple[Need, ...] = (
    Need(
        "time",
        "a Simulation runs in lockstep; call simulate_in_time of gossamer.experiments.arena, or "
        "gossamer simulate; live peers run in real time",
        lambda case: case.run == "virtual",
        "refuse",
    ),
    Need(
        "sweep",
        "this is a single run; gossamer sweep runs all combinations, and expand of "
        "gossamer.experiments.study.sweep lists them",
        lambda case: False,
        "refuse",
    ),
    Need(
        "rounds",
        "time.seconds decides when to stop: leave out one of them",
        lambda case: case.run != "virtual" or not (case.config.time and case.config.time.seconds),
    ),
    *_needs(
        "data: partition total tested",
        "all peers have the same sparse vectors",
        lambda case: not case.sparse,
    ),
    *_needs(
        "data: minimum alpha", 'it is for partition = "dirichlet"', _has_partition("dirichlet")
    ),
    Need("data.shards", 'it is for partition = "shards"', _has_partition("shards")),
    *(
        Need(
            f"{entries}.*.peers", "it selects no peer", lambda case: case.table.peers not in (0, [])
        )
        for entries in ("tasks", "models", "network.sizes", "time.partitions")
    ),
    Need("tasks.*.labels", 'they are for kind = "swap"', lambda case: case.table.kind == "swap"),
    Need(
        "tasks.*.last",
        'it is for the kinds "cycle" and "symmetric"',
        lambda case: case.table.kind in ("cycle", "symmetric"),
    ),
    *_needs(
        "network: activation output sizes",
        "it is for a perceptron, given by its layout",
        lambda case: not case.config.network.name_or_entry and not case.sparse,
    ),
    Need(
        "network.buffers",
        "it is for networks with batch norm, given by a name or an entry",
        lambda case: case.config.network.name_or_entry is not None,
    ),
    *_needs(
        "network: start gain shift",
        "it is for starting values, which network.trained replaces",
        lambda case: case.config.network.trained is None,
    ),
    *_needs(
        "training: batch epochs reduction optimizer scheduler momentum weight_decay loss",
        "the associative network has no gradients",
        lambda case: not case.sparse,
    ),
    Need(
        "training.metrics", "the associative network has no classes", lambda case: not case.sparse
    ),
    Need(
        "models.*.matching",
        "cells of peers that start from equal values have the same order: set network.equal_starts = false, "
        "or network.trained",
        lambda case: (
            case.run == "live" or case.table.matching == "fuse" or needs_matching(case.config)
        ),
    ),
    Need(
        "dry_run",
        'it is for sharing = "auto"',
        lambda case: case.config.sharing == "auto",
    ),
    Need(
        "cross",
        'with sharing = "auto", weights between models are always averaged by the peers that share both',
        lambda case: case.config.sharing != "auto" or bool(case.config.models),
    ),
    Need(
        "gossip.mode",
        "without a topology, exact means are computed in lockstep; with a topology and gossip.exchanges, all "
        "modes make the same number of exchanges",
        _uses_mode,
        "accept",
    ),
    Need(
        "gossip.exchanges",
        "it needs a topology or a [time] table, without which exact means are computed in lockstep; in "
        'mode = "server" there are no exchanges',
        _uses_exchanges,
    ),
    Need(
        "gossip.tolerance",
        'it needs a topology, and mode = "rounds" without gossip.exchanges',
        lambda case: (
            case.on_graph
            and case.config.gossip.mode == "rounds"
            and case.config.gossip.exchanges is None
        ),
    ),
    Need(
        "gossip.hostile",
        'it is for mode = "steady", and for gossip.robust = "clipped" or "trimmed"',
        lambda case: (
            case.config.gossip.mode == "steady"
            or case.config.gossip.robust in ("clipped", "trimmed")
        ),
    ),
    Need("gossip.rule", "it needs a topology", lambda case: case.on_graph),
    Need(
        "gossip.fraction",
        'it needs a [time] table, or live peers in mode = "async"',
        lambda case: (
            case.run == "virtual" or (case.run == "live" and case.config.gossip.mode == "async")
        ),
    ),
    *_needs(
        "gossip: "
        + " ".join(
            [*LifecycleSettings.model_fields, *LinkSettings.model_fields, "per_process", "banned"]
        ),
        _LIVE,
        lambda case: case.run == "live",
        "accept",
    ),
    Need(
        "gossip.dtype",
        "float32 and float64 differ between live peers; simulated messages are exact unless float16 or "
        "compressed",
        lambda case: case.run == "live" or case.config.gossip.dtype == "float16",
        "accept",
    ),
    Need("trust", _LIVE, lambda case: case.run == "live", "accept"),
    Need(
        "time.slowdown",
        "it needs time.stragglers above 0",
        lambda case: bool(case.config.time and case.config.time.stragglers),
    ),
    *_needs(
        "time.churn: leave link_down",
        "it is a probability, but events are read from time.churn.trace: leave out one of them",
        lambda case: not case.table.trace,
    ),
    Need(
        "time.churn.arrive",
        "it needs time.churn.leave above 0, and no time.churn.trace",
        lambda case: not case.table.trace and case.table.leave > 0,
    ),
    Need(
        "time.churn.link_up",
        "it needs time.churn.link_down above 0, and no time.churn.trace",
        lambda case: not case.table.trace and case.table.link_down > 0,
    ),
)

UNUSED_IN_SWEEPS: tuple[Need, ...] = (
    Need("test_every", "a sweep uses only the test of the last round", lambda case: False),
    Need("gain", "a sweep does not measure it", lambda case: False),
    Need("callbacks", "a sweep does not call them", lambda case: False),
)

REFUSED_IN_COMPARISONS: tuple[Need, ...] = tuple(
    Need(key, f"a comparison's {text}", lambda case: False, "refuse")
    for key, text in (
        ("every", "clients train training.epochs passes in a round"),
        ("weights", "methods weigh clients as their papers do"),
        ("gain", "clients are compared with those of the method local, which train alone"),
        ("training.local_samples", "clients train whole epochs: write training.epochs"),
        ("training.proximal", "proximal term is the method fedprox"),
        ("training.reduction", "methods are written for the mean loss of a batch"),
        ("network.sizes", "methods average networks of one size"),
        ("network.trained", "clients start from the same values"),
        ("network.equal_starts", "clients start from the same values"),
    )
)
"""Keys that comparisons do not support, of the tables that their configs share with those of swarms."""


@dataclass(frozen=True)
class Conflict:
    """Keys that cannot be combined with something else, each with the reason.

    text: the error, in which {key} and {reason} stand for the first such key that a config sets.
    reasons: by key; `gossip.mode=steady` refuses that value alone, a key by itself any but the default.
    """

    text: str
    reasons: Mapping[str, str]


# Keys of inexact or skipped messages, and reasons that several conflicts share.
_LOSSY = ("gossip.compress", "gossip.drift", "gossip.dtype=float16")
_MESSAGES = "messages are simulated in one process"
_NEIGHBOURS = "what peers know of their neighbours"
_PUSH_ONLY = "peers that send messages divide their mass by the rule 'push'"
_NO_WEIGHT = "values are combined without weight"
_ONE_DECIDES = "one hostile member could decide what all share"
_NOT_WITH_AUTO_SHARING = {
    "data.set=sparse": "sparse vectors, which are not learned by gradients",
    "fednp": "FedNP, whose loss is not a sum over samples",
    "training.proximal": "a penalty beside the loss of samples",
    "network.sizes": "networks of several sizes",
}

CONFLICTS = {
    "shards": Conflict(
        "key '{key}': not over several processes: {reason}; leave out the key, or use one process",
        {
            "time": "virtual time is simulated in one process",
            "callbacks": "callbacks see all peers",
            "sharing": "what peers share is decided in one process",
            "fednp": "FedNP is simulated in one process",
            "training.metrics": "named metrics are not sent to rank 0",
            "training.prior=auto": '"auto" compares the labels of all peers',
            **dict.fromkeys(("gossip.mode=steady", "gossip.robust", *_LOSSY), _MESSAGES),
            "models.*.matching": "cells are matched in one process",
        },
    ),
    "checkpoints": Conflict(
        "key '{key}': checkpoints do not hold {reason}; leave out the key, or --checkpoint and --resume",
        {
            "sharing": "the measurements by which peers decide",
            **dict.fromkeys(("gossip.mode=steady", "gossip.robust"), _NEIGHBOURS),
            **dict.fromkeys(_LOSSY, "what was sent over each link"),
            "models.*.matching": "cells at a common width",
        },
    ),
    "auto": Conflict(
        "key 'sharing': peers cannot decide what they share with {reason} ({key}); leave one of them out",
        {
            **_NOT_WITH_AUTO_SHARING,
            "models.*.matching": "matched cells",
            **dict.fromkeys(_LOSSY, "inexact or skipped messages"),
        },
    ),
    "virtual": Conflict(
        "key '{key}': not in virtual time: {reason}; leave out the key, or [time]",
        {"gossip.rule": _PUSH_ONLY, "sharing": "each peer goes on by itself, and none decides"},
    ),
    "messages": Conflict(
        "key '{key}': not with gossip.compress, drift or float16: {reason}; leave out one of them",
        {"gossip.rule": _PUSH_ONLY},
    ),
    "live": Conflict(
        "key '{key}': not with live peers: {reason}; leave out the key, or run gossamer simulate",
        {"gossip.rule": _PUSH_ONLY},
    ),
    "live auto": Conflict(
        "key 'sharing': live peers cannot decide what they share with {reason} ({key}); leave one of them "
        "out",
        {"dry_run": "a dry run, which is for gossamer simulate", **_NOT_WITH_AUTO_SHARING},
    ),
    "steady": Conflict(
        "key '{key}': not with gossip.mode = 'steady': {reason}",
        {
            "gossip.compress": "a compressor's error stays with weight, and values have none; leave it out, "
            'or set dtype = "float16"',
            "gossip.drift": "neighbours judge values by the last ones that they saw; leave it out",
            **dict.fromkeys(
                ("gossip.fraction", "gossip.rule"), "no weight is given away; leave it out"
            ),
            "sharing": f"{_ONE_DECIDES}; name the partial models",
            "models.*.matching": "cells are matched by averages with weight; leave matching out",
            "network.trained": "a network that was trained before is matched when it joins; leave it out",
        },
    ),
    "robust": Conflict(
        "key '{key}': not with gossip.robust: {reason}; leave one of them out",
        {
            **dict.fromkeys(("gossip.compress", "gossip.rule", "weights"), _NO_WEIGHT),
            "gossip.drift": "peers combine every value, so none can be skipped",
            "sharing": _ONE_DECIDES,
            "models.*.matching": "cells are matched by averages with weight",
        },
    ),
    "fednp": Conflict(
        "key '{key}': not with fednp: {reason}; leave one of them out",
        {
            "gain": "a peer that trains with FedNP cannot be compared with one alone",
            "training.proximal": "FedNP has a penalty of its own",
        },
    ),
    "sparse": Conflict(
        "key '{key}': the associative network {reason}; leave the key out",
        {
            "fednp": "has no last layer, which FedNP needs",
            **dict.fromkeys(
                ("training.proximal", "training.weight_decay"), "does not learn by gradients"
            ),
            **dict.fromkeys(("training.device", "training.dtype"), "runs on the cpu in float32"),
            "training.prior": "has no classes",
        },
    ),
    "streams": Conflict(
        "key '{key}': needs samples in memory, and data.set gives data that is read while peers train; leave "
        "it out",
        dict.fromkeys(
            [
                *(f"data.{key}" for key in Data.model_fields if key != "set"),
                *("training.prior", "fednp", "gain", "sharing"),
            ],
            "",
        ),
    ),
}
"""What excludes other keys: several processes, checkpoints, sharing = "auto" in lockstep and live, virtual
time, inexact messages in lockstep, live peers, steady gossip, robust means, FedNP, sparse vectors, and
data that is not in memory."""


def refuse_conflicts(name: str, config: Experiment, source: str = "config") -> None:
    """Raise ConfigError, which names the key, if a config has one that CONFLICTS[name] excludes."""
    conflict = CONFLICTS[name]
    for refused, reason in conflict.reasons.items():
        pattern, _, value = refused.partition("=")
        for key, table in _set_keys(config, pattern.split(".")):
            if not value or value == getattr(table, key.rpartition(".")[2]):
                raise ConfigError(f"{source}: {conflict.text.format(key=key, reason=reason)}")


def warn_unused_keys(config: Experiment, run: Run, source: str = "config") -> None:
    """Print a warning for every key of a config that has no effect in a run, and for a prior that may harm.

    Raises ConfigError for keys that belong to another type of run, such as [sweep].
    """
    if run != "live":
        refuse_forever(config, source)
    for key, need in unused(config, run):
        if need.reaction == "refuse":
            raise ConfigError(_message(source, key, need))
        if need.reaction == "warn":
            console.warn(_message(source, key, need))
    _warn_prior([config], source)


def refuse_forever(config: Experiment, source: str = "config") -> None:
    """Raise ConfigError if a config for a simulation does not say when it ends."""
    ends = (
        isinstance(config, Config) and config.time is not None and config.time.seconds is not None
    )
    if config.rounds == "forever" and not ends:
        raise ConfigError(f"{source}: {NOT_FOREVER}")


def _warn_prior(configs: Sequence[Experiment], source: str) -> None:
    """Print a warning if peers with a prior are tested on the common test set, not on their class shares."""
    if any(c.training.prior != "none" and c.data.tested == "common" for c in configs):
        console.warn(
            f"{source}: key 'training.prior': fits tests with the peer's own class shares, which a common "
            'test set does not have, so accuracy on it falls: set data.tested = "own"'
        )


def _message(source: str, key: str, need: Need) -> str:
    return f"{source}: key {key!r}: has no effect here: {need.reason}"


def unused(config: Experiment, run: Run, extra: Sequence[Need] = ()) -> Iterator[tuple[str, Need]]:
    """Yield the keys that a config sets, to other values than the default, without effect in a run.

    extra: further needs beside NEEDS; a comparison has REFUSED_IN_COMPARISONS instead.
    """
    for need in (*(REFUSED_IN_COMPARISONS if run == "compare" else extra), *NEEDS):
        for key, table in _set_keys(config, need.key.split(".")):
            if not need.met(Case(config, run, table)):
                yield key, need


_NAME = Need("name", "results do not depend on it", lambda case: False)


def refuse_unused_axes(
    axes: Mapping[str, Sequence[Any]], configs: Sequence[Config], source: str = "config"
) -> None:
    """Raise ConfigError if a sweep varies a key that has no effect in any of its runs.

    axes: the values of each swept key. configs: those of the runs.
    """
    for key in (key for key, values in axes.items() if len(values) > 1):
        pattern = ".".join("*" if step.isdigit() else step for step in key.split("."))
        for need in (_NAME, *UNUSED_IN_SWEEPS, *NEEDS):
            if need.reaction == "refuse" or not f"{pattern}.".startswith(f"{need.key}."):
                continue
            cases = (_case(config, key) for config in configs)
            if not any(need.met(case) for case in cases):
                raise ConfigError(
                    f"{source}: key 'sweep.{key}': has no effect here, so its rows would be equal: "
                    f"{need.reason}"
                )


def _case(config: Config, key: str) -> Case:
    """Return the case of a key that is swept, in one run of the sweep."""
    table: Any = config
    for step in key.split(".")[:-1]:
        table = table[int(step)] if isinstance(table, list) else getattr(table, step, None)
    return Case(config, _run_of(config), table)


def _set_keys(table: Any, steps: Sequence[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys that match a path and are set to another value than the default.

    steps: the path below `table`, in which "*" matches any index. prefix: the path of `table` itself. Each
    result is the key's full path and the table that contains the key.
    """
    step, *rest = steps
    if step == "*":
        for index, entry in enumerate(table):
            yield from _set_keys(entry, rest, f"{prefix}{index}.")
    elif isinstance(table, BaseModel) and step in type(table).model_fields:
        value = getattr(table, step)
        if rest:
            yield from _set_keys(value, rest, f"{prefix}{step}.")
        elif step in table.model_fields_set and value != type(table).model_fields[step].default:
            yield f"{prefix}{step}", table


def warn_unused_in_sweep(
    config: Config, axes: Mapping[str, Sequence[Any]], runs: Sequence[Config], source: str
) -> None:
    """Print a warning for every key, except the swept ones, that has no effect in any run of a sweep."""
    for key, need in unused_in_sweep(config, axes, runs):
        if need.reaction == "warn":
            console.warn(_message(source, key, need))
    _warn_prior(runs, source)


def unused_in_sweep(
    config: Config, axes: Mapping[str, Sequence[Any]], runs: Sequence[Config]
) -> Iterator[tuple[str, Need]]:
    """Yield the keys, except the swept ones, that have no effect in any run of a sweep; see `unused`."""
    extra = UNUSED_IN_SWEEPS
    unused_by_run = [{key for key, _ in unused(run, _run_of(run), extra)} for run in runs]
    for key, need in unused(config, _run_of(runs[0]), extra):
        if key not in axes and all(key in keys for keys in unused_by_run):
            yield key, need


def _run_of(config: Config) -> Run:
    """Return how `gossamer simulate` runs a config."""
    return "lockstep" if config.time is None else "virtual"
