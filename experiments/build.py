"""From a config to peers: each with its data, its task, its sliced network and its learner."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..models import (
    AssociativeLearner,
    AssociativeNetwork,
    Layout,
    Learner,
    ModelError,
    ModelGraph,
    Proximal,
    SgdLearner,
    SlicedNetwork,
    SliceSpec,
    Start,
    mlp,
    sparse_vectors,
    stream,
)
from ..peer import MatchedStore, Matching, load_trained
from .config.tables import (
    Config,
    Model,
    TaskEntry,
    Training,
    Who,
    check_matching,
    needs_matching,
    parse_config,
)
from .data import DataError, Dataset, Samples, Task, load, partition
from .errors import ConfigError
from .networks import NamedNetwork

# Six labels have 720 permutations, more than any swarm here has peers; ten would have 3.6 million.
MOST_PERMUTED = 6


@dataclass(frozen=True)
class Member:
    """One peer of a swarm, ready to train."""

    name: str
    task: str
    samples: int
    learner: Learner

    @property
    def network(self) -> SlicedNetwork:
        """The peer's sliced network."""
        return self.learner.network


class Swarm:
    """Builds the members of a config; data is loaded once, and each member by itself on request.

    load_data: how data sets are loaded, `load` unless they are kept for another swarm.
    """

    def __init__(
        self, config: Config, source: str = "config", load_data: Callable[..., Dataset] = load
    ):
        self.config, self.source = config, source
        self._task_entries = [
            (f"tasks.{place}", entry, self._who(entry.peers, f"tasks.{place}.peers"))
            for place, entry in enumerate(config.tasks)
        ]
        self._check_dependencies()
        check_matching(config, source)
        self._sparse = config.data.set == "sparse"
        if self._sparse != ("<>" in config.network.layout):
            raise self._error(
                "network.layout",
                "the sparse vectors and the associative network (layout visible<>hidden) go together",
            )
        self._named: NamedNetwork | None = None
        if not self._sparse:
            with self._error_context("data.set"):
                name = config.data.set
                self.dataset = load_data(name, seed=config.seed, folder=Path(source).parent)
            if named := config.network.named:
                with self._error_context(self._network_key()):
                    folder = Path(source).parent
                    cells = [model.cells for model in config.models]
                    options = config.network.options
                    self._named = NamedNetwork(named, self.dataset, options, folder, cells)
            with self._error_context("data"):
                self._train, self._test = deal(config, self.dataset)
            self._tests: dict[tuple[int, Task], tuple[torch.Tensor, torch.Tensor]] = {}

    def members(self) -> list[Member]:
        """Every peer, as it is before it hears of the others."""
        return [self.member(index) for index in range(self.config.peers)]

    def matching(self, index: int) -> dict[str, Matching]:
        """How one peer's cells are matched, by partial model."""
        seed, start = self.config.seed, self._start()
        return {
            name: Matching(model.matching, model.width, model.bound, seed, start)
            for name, _, model in self._models(index)
            if model.matching != "none"
        }

    def member(self, index: int) -> Member:
        """One peer, the same whether or not the others are built."""
        return self._sparse_member(index) if self._sparse else self._member(index)

    def slices(self, index: int) -> dict[str, SliceSpec]:
        """The partial models that one peer implements, with their layouts or shares."""
        found: dict[str, SliceSpec] = {}
        for name, key, model in self._models(index):
            if name in found:
                raise self._error(f"{key}.name", f"peer {index} has a model {name!r} already")
            found[name] = model.cells
        return found

    def graph(self, index: int) -> ModelGraph:
        """The dependency order of one peer's models."""
        return ModelGraph(
            {
                name: [self._fill(other, index) for other in model.depends]
                for name, _, model in self._models(index)
            }
        )

    def _models(self, index: int) -> Iterator[tuple[str, str, Model]]:
        """The partial models of one peer: what it calls them, and the key and table that say so."""
        for place, model in enumerate(self.config.models):
            if index in self._who(model.peers, f"models.{place}.peers"):
                yield self._fill(model.name, index), f"models.{place}", model

    def _fill(self, template: str, index: int) -> str:
        text = template.replace("{peer}", str(index))
        return text.replace("{task}", self.task_name(index)) if "{task}" in text else text

    def task(self, index: int, classes: int) -> Task:
        """What one peer's labels mean: every entry that names the peer, one after the other."""
        found = Task.identity(classes)
        for key, entry, who in self._task_entries:
            if index in who:
                with self._error_context(key):
                    task = self._task_of(entry, key, classes, who.index(index))
                found = task if found.name == "identity" else found.then(task)
        return found

    def _task_of(self, entry: TaskEntry, key: str, classes: int, place: int) -> Task:
        match entry.kind:
            case "swap":
                if entry.labels is None:
                    raise self._error(f"{key}.labels", "a swap needs two labels, as in [8, 9]")
                return Task.swap(classes, *entry.labels)
            case "cycle":
                return Task.cycle(classes, entry.last)
            case "symmetric":
                if entry.last > MOST_PERMUTED:
                    text = "labels have too many permutations; at most"
                    raise self._error(f"{key}.last", f"{entry.last} {text} {MOST_PERMUTED}")
                every = Task.symmetric(classes, entry.last)
                return every[place % len(every)]
            case "swaps":
                pairs = list(combinations(range(classes), 2))
                # A stride that shares no factor with the number of pairs visits each of them once,
                # and far-apart ones first.
                return Task.swap(classes, *pairs[place * 7 % len(pairs)])
            case "modified":
                raise self._error(f"{key}.kind", "'modified' is for the sparse vectors only")

    def _is_modified(self, index: int) -> bool:
        """Whether one peer learns the modified sparse vectors."""
        for key, entry, _ in self._task_entries:
            if entry.kind != "modified":
                raise self._error(f"{key}.kind", "sparse vectors know only 'modified'")
        return any(index in who for _, _, who in self._task_entries)

    def task_name(self, index: int) -> str:
        """The task's name as it may stand in a model's name: `swap-8-9`."""
        if self._sparse:
            return "modified" if self._is_modified(index) else "plain"
        return re.sub(r"[^A-Za-z0-9]+", "-", self.task(index, self.dataset.classes).name)

    def _member(self, index: int) -> Member:
        config, training = self.config, self.config.training
        task = self.task(index, self.dataset.classes)
        with self._error_context(self._network_key()):
            if self._named:
                module = self._named.make()
            else:
                layout, kinds = self._layout(index), config.network
                module = mlp(layout, activation=kinds.activation, output=kinds.output)
                # before slices, which would be blamed for not fitting it
                self._check_fit(Layout.network(layout).cells)
        network = self._network(index, module)
        if file := trained_file(config, self.source, index):
            with self._error_context("network.trained", f"peer {index}: "):
                load_trained(network, file)
        train, test, epochs = self._train[index], self._test[index], training.epochs
        samples = training.local_samples if epochs is None else epochs * len(train)
        with self._error_context(self._network_key()):
            learner = SgdLearner(
                network,
                (self._inputs(train), task.apply(train.y)),
                self._held_out(test, task),
                local_samples=samples,
                batch=training.batch,
                reduction=training.reduction,
                rate=training.rate,
                optimizer=_optimizer(training),
                loss=training.loss,
                seed=int(stream(config.seed, "order", index).integers(2**31)),
            )
        held = Proximal(learner, training.proximal) if training.proximal else learner
        if config.fednp is not None:
            held = self._in_fednp(learner, index, len(train))
        return Member(str(index), self.task_name(index), len(train), held)

    def _in_fednp(self, learner: SgdLearner, index: int, samples: int) -> Learner:
        config = self.config
        if config.fednp is None or config.training.proximal:
            raise self._error("fednp", "pulls as training.proximal does: leave out one of them")
        weight = float(samples) if config.weights == "samples" else 1.0
        from ..models.fednp import FedNPLearner

        with self._error_context("fednp", f"peer {index}: "):
            wrapped = FedNPLearner(learner, config.fednp, teller=index == 0, seed=config.seed)
            wrapped.count_as(weight)
            return wrapped

    def _sparse_member(self, index: int) -> Member:
        config = self.config
        if config.fednp is not None:
            raise self._error("fednp", "the associative network has no last layer to predict")
        for key in ("proximal", "weight_decay"):
            if getattr(config.training, key):
                text = "the associative network learns without a gradient to add it to"
                raise self._error(f"training.{key}", text)
        with self._error_context("network.layout"):
            module = AssociativeNetwork(config.network.layout)
        network = self._network(index, module)
        bits = network.slicing.anatomy.parts[0].cells
        modified = 0 if self._is_modified(index) else None
        count = config.data.samples or 9
        whole, _, _ = sparse_vectors(0, count, bits=bits, modified=modified)
        tests = config.data.test or 100
        _, cues, expected = sparse_vectors(1000, tests, bits=bits, modified=modified)
        learner = AssociativeLearner(
            network, whole, (cues, expected),
            local_samples=config.training.local_samples, rate=config.training.rate,
        )  # fmt: skip
        return Member(str(index), self.task_name(index), count, learner)

    def _network(self, index: int, module: nn.Module) -> SlicedNetwork:
        config = self.config
        with self._error_context("models", f"peer {index}: "):
            return SlicedNetwork(
                module, self.slices(index), graph=self.graph(index), peer=str(index),
                cross=config.cross, seed=config.seed, start=self._start(),
                anatomy=self._named and self._named.anatomy, buffers=config.network.buffers,
            )  # fmt: skip

    def _start(self) -> Start:
        network = self.config.network
        return Start(
            network.start or ("uniform" if self._sparse else "normal"),
            network.gain,
            by_fan_in=not self._sparse,
            shift=network.shift,
            equal=network.equal_starts,
        )

    def _inputs(self, samples: Samples) -> torch.Tensor:
        """What the network reads: flat features for a perceptron, else samples in their own shape."""
        return samples.flat() if self._named is None else self._named.inputs(samples)

    def _held_out(self, test: Samples, task: Task) -> tuple[torch.Tensor, torch.Tensor]:
        """Test samples as a task has them; one copy for all peers that have the same of both."""
        key = (id(test), task)
        if key not in self._tests:
            self._tests[key] = self._inputs(test), task.apply(test.y)
        return self._tests[key]

    def _network_key(self) -> str:
        """The key that says which network it is."""
        network = self.config.network
        return "network." + ("name" if network.name else "entry" if network.entry else "layout")

    def _layout(self, index: int) -> str:
        """The layout of one peer's network: everybody's, or the last of another size that names it."""
        found = self.config.network.layout
        for key, size in enumerate(self.config.network.sizes):
            if index in self._who(size.peers, f"network.sizes.{key}.peers"):
                found = size.layout
        return found

    def _check_fit(self, cells: Sequence[int]) -> None:
        data, classes = self.dataset.name, self.dataset.classes
        features = self.dataset.train.flat().shape[1]
        if cells[0] != features:
            text = f"the first part has {cells[0]} cells, but {data} has {features} features"
            raise self._error("network.layout", text)
        if cells[-1] != classes and (cells[-1], classes) != (1, 2):
            text = f"the last part has {cells[-1]} cells, but {data} has {classes} classes"
            raise self._error("network.layout", text)

    def _who(self, who: Who, key: str) -> list[int]:
        """The numbers of the peers that stand at a key."""
        peers = self.config.peers
        if who == "all":
            return list(range(peers))
        chosen = list(range(who)) if isinstance(who, int) else who
        if chosen and max(chosen) >= peers:
            raise self._error(key, f"names peer {max(chosen)}, but peers are 0 to {peers - 1}")
        return chosen

    def _error(self, key: str, text: str) -> ConfigError:
        """What to raise about a key."""
        return ConfigError(f"{self.source}: key {key!r}: {text}")

    @contextmanager
    def _error_context(self, key: str, prefix: str = "") -> Iterator[None]:
        """Errors of models and data know nothing of configs: say which file and key they come from."""
        try:
            yield
        except (ModelError, DataError) as error:
            raise self._error(key, f"{prefix}{error}") from None

    def _check_dependencies(self) -> None:
        names = [model.name for model in self.config.models]
        for key, model in enumerate(self.config.models):
            self._who(model.peers, f"models.{key}.peers")
            if unknown := [other for other in model.depends if other not in names]:
                text = f"unknown model {unknown[0]!r}; models are {', '.join(names)}"
                raise self._error(f"models.{key}.depends", text)


def trained_file(config: Config, source: str, index: int) -> Path | None:
    """Return the file of the network that a peer brings along, if the config names one."""
    named = config.network.trained
    return None if named is None else Path(source).parent / named.replace("{peer}", str(index))


def _optimizer(training: Training) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None:
    options: dict[str, Any] = {"lr": training.rate, "weight_decay": training.weight_decay}
    if training.optimizer == "adam":
        return partial(torch.optim.Adam, **options)
    if training.optimizer == "momentum":
        options["momentum"] = 0.9 if training.momentum is None else training.momentum
    elif not training.weight_decay:
        return None  # the learner's own plain descent
    return partial(torch.optim.SGD, **options)


def deal(config: Config, dataset: Dataset) -> tuple[list[Samples], list[Samples]]:
    """Every peer's training and test samples; some of its own are held out where there is no test set."""
    data, peers, seed = config.data, config.peers, config.seed
    source, shared = dataset.train, dataset.test
    if data.total is not None:
        if data.total > len(source):
            raise DataError(f"{data.total} training samples asked for, there are {len(source)}")
        drawn = stream(seed, "training samples").permutation(len(source))[: data.total]
        source = source.take(np.sort(drawn))
    extra = 0 if shared is not None else data.test or 0
    size = None if data.samples is None else data.samples + extra
    generator = stream(seed, "partition")
    match data.partition:
        case "successive":
            parts = partition.successive(len(source), peers, size)
        case "iid":
            parts = partition.iid(len(source), peers, size, generator)
        case "dirichlet":
            parts = partition.dirichlet(source.y, peers, data.alpha, generator, data.minimum)
        case "shards":
            parts = partition.shards(source.y, peers, data.shards, generator)
        case "natural":
            parts = partition.by_group(source.group, peers, size, generator)
    train: list[Samples] = []
    test: list[Samples] = []
    if shared is not None:  # taken once: peers look at the same memory
        shared = shared.take(range(min(data.test or len(shared), len(shared))))
    for index, part in enumerate(parts):
        if shared is None:
            kept = stream(seed, "held out", index)
            part, held = partition.split(part, data.test or _tested(index, len(part)), kept)
            test.append(source.take(held))
        if data.samples is not None:
            if data.partition == "shards":  # they follow each other: the first ones would be all
                part = stream(seed, "some of the shards", index).permutation(part)
            part = part[: data.samples]
        train.append(source.take(part))
        if shared is not None and data.tested == "common":
            test.append(shared)
        elif shared is not None:
            chosen = partition.alike(shared.y, train[-1].y, dataset.classes)
            test.append(shared.take(chosen))
    return train, test


def _tested(peer: int, samples: int) -> int:
    """A fifth of a peer's samples, and at least one: a peer that is not tested would count as nothing."""
    if samples < 2:
        raise DataError(
            f"peer {peer} is dealt {samples} sample, which leaves none to test it with: take fewer peers, or "
            "deal them out more evenly"
        )
    return max(1, round(0.2 * samples))


def members_in_order(swarm: Swarm) -> tuple[list[Member], list[MatchedStore]]:
    """Every peer of a config, its cells matched, and its vectors as they are averaged.

    Peers that bring values of their own hear the mean of those before them and are put into its order,
    once; the others start from equal values, and are in order already. No vectors if nothing is matched:
    they are those of the networks.
    """
    config = swarm.config
    apart = needs_matching(config)
    members, stores = swarm.members(), []
    if all(model.matching == "none" for model in config.models):
        return members, stores
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, int] = {}
    for index, member in enumerate(members):
        try:
            trained = config.network.trained is not None
            store = MatchedStore(member.network, swarm.matching(index), trained=trained)
            known = {owner: sums[owner] / counts[owner] for owner in store.names() if owner in sums}
            if apart and known:
                store.keep_apart()
                for owner, mean in known.items():
                    store.write(owner, mean.astype(store.read(owner).dtype))
                store.put_in_order(member.learner)
        except ModelError as error:
            raise ConfigError(f"{swarm.source}: key 'models': peer {index}: {error}") from None
        stores.append(store)
        for owner in store.names() if apart else ():
            value = store.read(owner).astype(np.float64)
            total = sums.get(owner, np.zeros_like(value))
            if total.shape == value.shape:  # other widths are refused by whoever averages them
                sums[owner] = total + value
                counts[owner] = counts.get(owner, 0) + 1
    return members, stores


def make_learner(config: str, index: int, source: str = "config") -> Learner:
    """Build one peer of a config (given as JSON) in its own process.

    `source` is the config's file: a user's own modules stand beside it.
    """
    return _swarm(config, source).member(index).learner


@lru_cache(maxsize=4)
def _swarm(config: str, source: str) -> Swarm:
    """Peers that share a process share the data they were dealt from."""
    return Swarm(parse_config(json.loads(config)), source)
