"""From a config to peers: each with its data, its task, its sliced network and its learner."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import nn

from ..models import (
    AssociativeLearner,
    AssociativeNetwork,
    Learner,
    ModelError,
    ModelGraph,
    SgdLearner,
    SlicedNetwork,
    Start,
    mlp,
    sparse_vectors,
    stream,
)
from .config import Config, ConfigError, TaskEntry, Who
from .data import DataError, Dataset, Samples, Task, load, partition, tasks

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
    """Builds the members of a config; data is loaded once, and each member by itself on request."""

    def __init__(self, config: Config, source: str = "config"):
        self.config, self.source = config, source
        for key, entry in enumerate(config.tasks):
            self._who(entry.peers, f"tasks.{key}.peers")
        self._check_dependencies()
        self._sparse = config.data.set == "sparse"
        if self._sparse != ("<>" in config.network.layout):
            raise self._error(
                "network.layout",
                "the sparse vectors and the associative network (layout visible<>hidden) go together",
            )
        if not self._sparse:
            with self._blaming("data.set"):
                self.dataset = load(config.data.set)
            with self._blaming("data"):
                self._deal(self.dataset)

    def members(self) -> list[Member]:
        """Every peer."""
        return [self.member(index) for index in range(self.config.peers)]

    def member(self, index: int) -> Member:
        """One peer, the same whether or not the others are built."""
        return self._sparse_member(index) if self._sparse else self._member(index)

    def slices(self, index: int) -> dict[str, str]:
        """The partial models that one peer implements, with their layouts."""
        task = self.task_name(index)
        found: dict[str, str] = {}
        for key, model in enumerate(self.config.models):
            if index in self._who(model.peers, f"models.{key}.peers"):
                name = _fill(model.name, index, task)
                if name in found:
                    raise self._error(
                        f"models.{key}.name", f"peer {index} has a model {name!r} already"
                    )
                found[name] = model.layout
        return found

    def graph(self, index: int) -> ModelGraph:
        """The dependency order of one peer's models."""
        task = self.task_name(index)
        return ModelGraph(
            {
                _fill(model.name, index, task): [_fill(d, index, task) for d in model.depends]
                for model in self.config.models
                if index in self._who(model.peers, "models.peers")
            }
        )

    def task(self, index: int, classes: int) -> Task:
        """What one peer's labels mean: every entry that names the peer, one after the other."""
        found = tasks.identity(classes)
        for key, entry in enumerate(self.config.tasks):
            who = self._who(entry.peers, f"tasks.{key}.peers")
            if index in who:
                with self._blaming(f"tasks.{key}"):
                    task = self._one_task(entry, f"tasks.{key}", classes, who.index(index))
                found = task if found.name == "identity" else found.then(task)
        return found

    def task_name(self, index: int) -> str:
        """The task's name as it may stand in a model's name: `swap-8-9`."""
        if self._sparse:
            return "modified" if self._is_modified(index) else "plain"
        return re.sub(r"[^A-Za-z0-9]+", "-", self.task(index, self.dataset.classes).name)

    def _member(self, index: int) -> Member:
        config = self.config
        task = self.task(index, self.dataset.classes)
        with self._blaming("network.layout"):
            module = mlp_from(config)
        network = self._network(index, module)
        self._check_fit(network)
        train, test = self._train[index], self._test[index]
        learner = SgdLearner(
            network,
            (train.flat(), task.apply(train.y)),
            (test.flat(), task.apply(test.y)),
            stretch=config.training.stretch,
            batch=config.training.batch,
            reduction=config.training.reduction,
            rate=config.training.rate,
            optimizer=_optimizer(config),
            loss=config.training.loss,
            seed=int(stream(config.seed, "order", index).integers(2**31)),
        )
        return Member(str(index), self.task_name(index), len(train), learner)

    def _sparse_member(self, index: int) -> Member:
        config = self.config
        with self._blaming("network.layout"):
            module = AssociativeNetwork(config.network.layout)
        network = self._network(index, module)
        bits = network.slicing.anatomy.parts[0].cells
        modified = 0 if self._is_modified(index) else None
        count = config.data.samples or 9
        whole, _, _ = sparse_vectors(0, count, bits=bits, modified=modified)
        tests = config.data.test or 100
        _, partial, expected = sparse_vectors(1000, tests, bits=bits, modified=modified)
        learner = AssociativeLearner(
            network, whole, (partial, expected),
            stretch=config.training.stretch, rate=config.training.rate,
        )  # fmt: skip
        return Member(str(index), self.task_name(index), count, learner)

    def _network(self, index: int, module: nn.Module) -> SlicedNetwork:
        config = self.config
        kind = config.network.start or ("uniform" if self._sparse else "normal")
        start = Start(
            kind,
            config.network.gain,
            by_fan_in=not self._sparse,
            shift=config.network.shift,
            equal=config.network.equal_starts,
        )
        with self._blaming("models", f"peer {index}: "):
            return SlicedNetwork(
                module, self.slices(index), graph=self.graph(index), peer=str(index),
                cross=config.cross, seed=config.seed, start=start,
            )  # fmt: skip

    def _deal(self, dataset: Dataset) -> None:
        """Split the data over peers, and each peer's own where there is no test set."""
        data, peers, seed = self.config.data, self.config.peers, self.config.seed
        train = dataset.train
        extra = 0 if dataset.test is not None else data.test or 0
        size = None if data.samples is None else data.samples + extra
        generator = stream(seed, "partition")
        match data.partition:
            case "successive":
                parts = partition.successive(len(train), peers, size)
            case "iid":
                parts = partition.iid(len(train), peers, size, generator)
            case "dirichlet":
                parts = partition.dirichlet(train.y, peers, data.alpha, generator)
            case "shards":
                parts = partition.shards(train.y, peers, data.shards, generator)
            case "natural":
                parts = partition.by_group(train.group, peers, size, generator)
        self._train: list[Samples] = []
        self._test: list[Samples] = []
        shared = dataset.test
        if shared is not None:  # taken once: peers look at the same memory
            shared = shared.take(range(min(data.test or len(shared), len(shared))))
        for index, part in enumerate(parts):
            if shared is None:
                kept = stream(seed, "held out", index)
                part, held = partition.split(part, data.test or 0.2, kept)
                self._test.append(train.take(held))
            else:
                self._test.append(shared)
            if data.samples is not None:
                part = part[: data.samples]
            self._train.append(train.take(part))

    def _check_fit(self, network: SlicedNetwork) -> None:
        parts = network.slicing.anatomy.parts
        features = self.dataset.train.flat().shape[1]
        if parts[0].cells != features:
            raise self._error(
                "network.layout",
                f"the first part has {parts[0].cells} cells, but {self.dataset.name} has {features} features",
            )
        wanted = {self.dataset.classes} | ({1} if self.dataset.classes == 2 else set())
        if parts[-1].cells not in wanted:
            raise self._error(
                "network.layout",
                f"the last part has {parts[-1].cells} cells, but {self.dataset.name} has "
                f"{self.dataset.classes} classes",
            )

    def _check_dependencies(self) -> None:
        names = [model.name for model in self.config.models]
        for key, model in enumerate(self.config.models):
            self._who(model.peers, f"models.{key}.peers")
            for other in model.depends:
                if other not in names:
                    raise self._error(
                        f"models.{key}.depends",
                        f"unknown model {other!r}; models are {', '.join(names)}",
                    )

    def _one_task(self, entry: TaskEntry, key: str, classes: int, place: int) -> Task:
        match entry.kind:
            case "swap":
                if entry.labels is None:
                    raise self._error(f"{key}.labels", "a swap needs two labels, as in [8, 9]")
                return tasks.swap(classes, *entry.labels)
            case "cycle":
                return tasks.cycle(classes, entry.last)
            case "symmetric":
                if entry.last > MOST_PERMUTED:
                    raise self._error(
                        f"{key}.last",
                        f"{entry.last} labels have too many permutations; at most {MOST_PERMUTED}",
                    )
                every = tasks.symmetric(classes, entry.last)
                return every[place % len(every)]
            case "swaps":
                pairs = list(combinations(range(classes), 2))
                # A stride that shares no factor with the number of pairs visits each of them once,
                # and far-apart ones first.
                return tasks.swap(classes, *pairs[place * 7 % len(pairs)])
            case "modified":
                raise self._error(f"{key}.kind", "'modified' is for the sparse vectors only")

    def _is_modified(self, index: int) -> bool:
        for key, entry in enumerate(self.config.tasks):
            if entry.kind != "modified":
                raise self._error(f"tasks.{key}.kind", "sparse vectors know only 'modified'")
        return any(index in self._who(entry.peers, "tasks.peers") for entry in self.config.tasks)

    def _who(self, who: Who, key: str) -> list[int]:
        peers = self.config.peers
        if who == "all":
            return list(range(peers))
        chosen = list(range(who)) if isinstance(who, int) else who
        if chosen and max(chosen) >= peers:
            raise self._error(key, f"names peer {max(chosen)}, but peers are 0 to {peers - 1}")
        return chosen

    def _error(self, key: str, text: str) -> ConfigError:
        return ConfigError(f"{self.source}: key {key!r}: {text}")

    @contextmanager
    def _blaming(self, key: str, prefix: str = "") -> Iterator[None]:
        """Errors of models and data know nothing of configs: say which file and key they come from."""
        try:
            yield
        except (ModelError, DataError) as error:
            raise self._error(key, f"{prefix}{error}") from None


def mlp_from(config: Config) -> nn.Sequential:
    """The perceptron that a config describes."""
    network = config.network
    return mlp(network.layout, activation=network.activation, output=network.output)


def _fill(template: str, peer: int, task: str) -> str:
    return template.replace("{peer}", str(peer)).replace("{task}", task)


def _optimizer(
    config: Config,
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None:
    rate = config.training.rate
    match config.training.optimizer:
        case "sgd":
            return None
        case "momentum":
            return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)
        case "adam":
            return lambda parameters: torch.optim.Adam(parameters, lr=rate)
