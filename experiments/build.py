"""Builds the peers that a config describes, each with its data, task, sliced network and learner."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import nn

from gossamer.entry import EntryError

from ..gossip.compress import CompressError
from ..gossip.compress import parse as parse_compressor
from ..models import (
    SCORE_EVERY,
    AssociativeLearner,
    AssociativeNetwork,
    Layout,
    Learner,
    LoaderLearner,
    ModelError,
    ModelGraph,
    OptimizerFactory,
    SgdLearner,
    SlicedNetwork,
    SliceSpec,
    Start,
    epoch_length,
    find_callbacks,
    find_device,
    find_loss,
    find_metrics,
    find_optimizer,
    find_scheduler,
    log_priors,
    mlp,
    networks_by_model,
    seeded_rng,
    sparse_vectors,
)
from ..peer import MatchedStore, Matching, blocks, load_trained, schema_entries
from .config.needs import refuse_conflicts
from .config.tables import (
    Config,
    Model,
    PeerSelection,
    TaskEntry,
    Training,
    check_matching,
    needs_matching,
    parse_config,
)
from .data import DataError, Dataset, PeerDatasets, Samples, Task, load_or_stream, partition
from .errors import ConfigError
from .networks import NamedNetwork, find_function
from .results import write_json

MAX_PERMUTED_LABELS = 6
"""The most labels that a "symmetric" task permutes: 6 labels have 720 permutations, more than any swarm here
has peers; 10 labels would have 3.6 million."""


def choose_twins(gain: float, peers: int, seed: int) -> list[int]:
    """Return the indices of the peers with a lone twin: a fraction `gain` of them, at least one.

    They depend only on the seed and the number of peers, so no result can influence the choice.
    """
    if not gain:
        return []
    count = min(peers, max(1, round(gain * peers)))
    return sorted(seeded_rng(seed, "lone twins").permutation(peers)[:count].tolist())


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
    """Builds the members of a config. Data is loaded once, in the constructor; members are built on request.

    source: the config's file, for error messages and for paths relative to it.
    load_data: the function that loads data sets; pass one with a cache to load them once for several swarms.
    only: the peers that can be built, if not all: samples of the others are not copied.
    """

    def __init__(
        self,
        config: Config,
        source: str = "config",
        load_data: Callable[..., Dataset | PeerDatasets] = load_or_stream,
        only: Sequence[int] | None = None,
    ):
        self.config, self.source = config, source
        self._peers = range(config.peers) if only is None else only
        self._task_entries = [
            (f"tasks.{number}", entry, self._select_peers(f"tasks.{number}.peers", entry.peers))
            for number, entry in enumerate(config.tasks)
        ]
        self._model_entries = [
            (f"models.{number}", model, self._select_peers(f"models.{number}.peers", model.peers))
            for number, model in enumerate(config.models)
        ]
        self._sizes = [
            (size.layout, self._select_peers(f"network.sizes.{number}.peers", size.peers))
            for number, size in enumerate(config.network.sizes)
        ]
        self._check_dependencies()
        check_matching(config, source)
        if config.fednp is not None:
            refuse_conflicts("fednp", config, source)
        folder = Path(source).parent
        with self._error_context("callbacks"):
            find_callbacks(config.callbacks, folder)
        self._sparse = config.data.set == "sparse"
        if self._sparse != ("<>" in config.network.layout):
            raise self._error(
                "network.layout",
                "the sparse vectors and the associative network (layout visible<>hidden) need each other: "
                "use both or neither",
            )
        self._named_network: NamedNetwork | None = None
        self._streams: PeerDatasets | None = None
        if self._sparse:
            refuse_conflicts("sparse", config, source)
            return
        with self._error_context("data.set"):
            loaded = load_data(config.data.set, seed=config.seed, folder=folder)
            self._streams = loaded if isinstance(loaded, PeerDatasets) else None
            self.dataset = loaded.example() if isinstance(loaded, PeerDatasets) else loaded
        if self._streams is not None:
            refuse_conflicts("streams", config, source)
        if network_name := config.network.name_or_entry:
            with self._error_context(self._network_key()):
                cells = [model.cells for model in config.models]
                options = config.network.options
                self._named_network = NamedNetwork(
                    network_name, self.dataset, options, folder, cells
                )
            if config.network.buffers != "average" and not self._named_network.anatomy.statistics:
                raise self._error(
                    "network.buffers", f"{network_name} has no batch norm; leave it out"
                )
        with self._error_context("training.metrics"):
            self._metrics = find_metrics(
                [find_function(n, folder) if ":" in n else n for n in config.training.metrics]
            )
        with self._error_context("data"):
            if self._streams is None:
                self._train, self._test = split_data(config, self.dataset, self._peers)
        self._test_tensors: dict[tuple[int, Task], tuple[torch.Tensor, torch.Tensor]] = {}

    def members(self) -> list[Member]:
        """Return all peers (or those of `only`), each with its values before any averaging."""
        return [self.member(index) for index in self._peers]

    def matching(self, index: int) -> dict[str, Matching]:
        """Return how one peer's cells are matched, by partial model; models without matching are left out."""
        seed, start = self.config.seed, self._start()
        return {
            name: Matching(model.matching, model.width, model.bound, seed, start)
            for name, _, model in self._models(index)
            if model.matching != "none"
        }

    def member(self, index: int) -> Member:
        """Return one peer; the result does not depend on whether the others are built."""
        return self._sparse_member(index) if self._sparse else self._member(index)

    def slices(self, index: int) -> dict[str, SliceSpec]:
        """Return the slices of the partial models that one peer has, as layouts or shares of cells."""
        slices: dict[str, SliceSpec] = {}
        for name, key, model in self._models(index):
            if name in slices:
                raise self._error(f"{key}.name", f"peer {index} has two models named {name!r}")
            slices[name] = model.cells
        if self.config.sharing == "auto" and not self.config.models:
            return {"global": 1.0}
        return slices

    def graph(self, index: int) -> ModelGraph:
        """Return the graph of which of one peer's models depend on which."""
        return ModelGraph(
            {
                name: [self._fill_name(other, index) for other in model.depends]
                for name, _, model in self._models(index)
            }
        )

    def _models(self, index: int) -> Iterator[tuple[str, str, Model]]:
        """Yield the partial models of one peer: the model's name, its key in the config and its table."""
        for key, model, peers in self._model_entries:
            if index in peers:
                yield self._fill_name(model.name, index), key, model

    def _fill_name(self, template: str, index: int) -> str:
        """Return a model's name with {peer} and {task} replaced."""
        name = template.replace("{peer}", str(index))
        return name.replace("{task}", self.task_name(index)) if "{task}" in name else name

    def task(self, index: int, classes: int) -> Task:
        """Return how one peer's labels are changed: all task entries that name the peer, composed."""
        composed = Task.identity(classes)
        for key, entry, peers in self._task_entries:
            if index in peers:
                with self._error_context(key):
                    task = self._task_of(entry, key, classes, peers[index])
                composed = task if composed.name == "identity" else composed.then(task)
        return composed

    def _task_of(self, entry: TaskEntry, key: str, classes: int, position: int) -> Task:
        """Return the task that an entry gives to one peer; position: its index among the entry's peers."""
        match entry.kind:
            case "swap":
                if entry.labels is None:
                    raise self._error(f"{key}.labels", "a swap needs two labels, as in [8, 9]")
                return Task.swap(classes, *entry.labels)
            case "cycle":
                return Task.cycle(classes, entry.last)
            case "symmetric":
                if entry.last > MAX_PERMUTED_LABELS:
                    text = "labels have too many permutations; at most"
                    raise self._error(f"{key}.last", f"{entry.last} {text} {MAX_PERMUTED_LABELS}")
                permutations = Task.all_permutations(classes, entry.last)
                return permutations[position % len(permutations)]
            case "swaps":
                pairs = list(combinations(range(classes), 2))
                # A stride of 7 visits every pair once if the number of pairs is no multiple of 7, and
                # spreads the pairs of the first few peers over all labels.
                return Task.swap(classes, *pairs[position * 7 % len(pairs)])
            case "modified":
                raise self._error(
                    f"{key}.kind", "'modified' can only be used with the sparse vectors"
                )

    def _is_modified(self, index: int) -> bool:
        """Return whether one peer learns the modified sparse vectors."""
        for key, entry, _ in self._task_entries:
            if entry.kind != "modified":
                raise self._error(f"{key}.kind", "the sparse vectors support only 'modified'")
        return any(index in peers for _, _, peers in self._task_entries)

    def task_name(self, index: int) -> str:
        """Return the name of one peer's task in a form that a model's name may contain, as in `swap-8-9`."""
        if self._sparse:
            return "modified" if self._is_modified(index) else "plain"
        return re.sub(r"[^A-Za-z0-9]+", "-", self.task(index, self.dataset.classes).name)

    def _member(self, index: int) -> Member:
        config, training = self.config, self.config.training
        task = self.task(index, self.dataset.classes)
        with self._error_context(self._network_key()):
            if self._named_network:
                module = self._named_network.make()
            else:
                layout, table = self._layout(index), config.network
                module = mlp(layout, activation=table.activation, output=table.output)
                # Checked before slices are made: their errors would not name the layout as the cause.
                self._check_fit(Layout.network(layout).cells)
        with self._error_context("training.device"):
            module = module.to(device=find_device(training.device))
        with self._error_context("training.dtype"):
            if training.dtype == "float64" and training.device.startswith("mps"):
                raise ModelError("mps has no float64; write float32, or another device")
            module = module.to(dtype=getattr(torch, training.dtype))
        network = self._network(index, module)
        if file := trained_file(config, self.source, index):
            with self._error_context("network.trained", f"peer {index}: "):
                load_trained(network, file)
        # Names are checked here. Arguments are checked by torch when the learner calls these functions, so
        # the functions are wrapped: their errors name the key too.
        with self._error_context("training.optimizer"):
            if (optimizer := _optimizer(training)) is not None:
                optimizer = self._error_context("training.optimizer")(optimizer)
        scheduler = None
        with self._error_context("training.scheduler"):
            if training.scheduler is not None:
                scheduler = find_scheduler(training.scheduler)
                scheduler = self._error_context("training.scheduler")(scheduler)
        with self._error_context("training.loss"):
            loss = find_loss(training.loss)
        options: dict[str, Any] = {
            "batch": training.batch, "reduction": training.reduction, "rate": training.rate,
            "optimizer": optimizer, "scheduler": scheduler, "proximal": training.proximal, "loss": loss,
            "metrics": self._metrics,
            "seed": int(seeded_rng(config.seed, "order", index).integers(2**31)),
        }  # fmt: skip
        if self._streams is not None:
            return self._stream_member(index, network, task, options)
        train, test, epochs = self._train[index], self._test[index], training.epochs
        samples = training.local_samples if epochs is None else epochs * len(train)
        with self._error_context(self._network_key()):
            learner = SgdLearner(
                network,
                (self._inputs(train), task.apply(train.y)),
                self._test_data(test, task),
                local_samples=samples,
                score_every=SCORE_EVERY
                if config.gossip.mode == "steady" and not config.fednp
                else 0,
                **options,
            )
        with self._error_context("training.prior"):
            learner.log_prior = self._log_prior(index)
        if config.fednp is not None:
            learner = self._fednp_learner(learner, index, len(train))
        return Member(str(index), self.task_name(index), len(train), learner)

    def _stream_member(
        self, index: int, network: SlicedNetwork, task: Task, options: dict[str, Any]
    ) -> Member:
        """Return a peer whose samples are read while it trains."""
        assert self._streams is not None
        training, named = self.config.training, self._named_network

        def prepare(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.flatten(1) if named is None else named.order(x), task.apply(y)

        with self._error_context("data.set", f"peer {index}: "):
            train, test = self._streams.train(index), self._streams.test(index)
            count, local = epoch_length(train), training.local_samples
            for key, needs_count in (
                ("training.epochs", training.epochs is not None),
                ("weights", self.config.weights == "samples"),
            ):
                if needs_count and count is None:
                    text = f"the data of peer {index} have no length; leave the key out"
                    raise self._error(key, text)
            if training.epochs is not None:
                local = training.epochs * (count or 0)
            learner = LoaderLearner(
                network, train, test, local_samples=local, prepare=prepare, **options
            )
        return Member(str(index), self.task_name(index), count or local, learner)

    def _log_prior(self, index: int) -> torch.Tensor | None:
        """Return the log-priors of classes that one peer adds to its logits; None if it adds none.

        Only "auto" looks at the labels of other peers.
        """
        match self.config.training.prior:
            case "none":
                return None
            case "own":
                priors, row = log_priors([self._class_counts(index)], "own"), 0
            case "auto":
                priors, row = self._auto_priors, index
        return None if priors is None else torch.from_numpy(priors[row])

    @cached_property
    def _auto_priors(self) -> np.ndarray | None:
        """The log-priors of all peers, [peers, classes]; None if class shares differ by chance only."""
        counts = [self._class_counts(index) for index in range(self.config.peers)]
        return log_priors(counts, "auto")

    def _class_counts(self, index: int) -> np.ndarray:
        """Return how many training samples of each class one peer has, by the labels of its task."""
        classes = self.dataset.classes
        labels = self.task(index, classes).apply(self._train[index].y)
        return torch.bincount(labels, minlength=classes).numpy()

    def _fednp_learner(self, learner: SgdLearner, index: int, samples: int) -> Learner:
        config = self.config
        assert config.fednp is not None
        weight = float(samples) if config.weights == "samples" else 1.0
        from ..models.fednp import FedNPLearner

        with self._error_context("fednp", f"peer {index}: "):
            # FedNP computes the number of peers from a count to which exactly one peer adds 1.
            wrapped = FedNPLearner(
                learner, config.fednp, counting_peer=index == 0, seed=config.seed
            )
            wrapped.set_weight(weight)
            return wrapped

    def _sparse_member(self, index: int) -> Member:
        config = self.config
        with self._error_context("network.layout"):
            module = AssociativeNetwork(config.network.layout)
        network = self._network(index, module)
        bits = network.slicing.anatomy.parts[0].cells
        modified = 0 if self._is_modified(index) else None
        # The paper trains on the vectors 0 to 8; vectors from number 1000 on are used for tests.
        count = config.data.samples or 9
        train, _, _ = sparse_vectors(0, count, bits=bits, modified=modified)
        tests = config.data.test or 100
        _, incomplete, expected = sparse_vectors(1000, tests, bits=bits, modified=modified)
        learner = AssociativeLearner(
            network, train, (incomplete, expected),
            local_samples=config.training.local_samples, rate=config.training.rate,
        )  # fmt: skip
        return Member(str(index), self.task_name(index), count, learner)

    def _network(self, index: int, module: nn.Module) -> SlicedNetwork:
        config = self.config
        with self._error_context("models", f"peer {index}: "):
            return SlicedNetwork(
                module, self.slices(index), graph=self.graph(index), peer=str(index),
                cross=config.cross, seed=config.seed, start=self._start(),
                anatomy=self._named_network and self._named_network.anatomy, buffers=config.network.buffers,
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
        """Return the network's inputs: flat features for a perceptron, else samples in their own shape."""
        network = self._named_network
        inputs = samples.flat() if network is None else network.order(samples.x)
        dtype = getattr(torch, self.config.training.dtype)
        return inputs.to(dtype) if inputs.is_floating_point() else inputs

    def _test_data(self, test: Samples, task: Task) -> tuple[torch.Tensor, torch.Tensor]:
        """Return test inputs and the task's labels; peers with the same samples and task share one copy."""
        key = (id(test), task)
        if key not in self._test_tensors:
            device = torch.device(self.config.training.device)
            inputs, labels = self._inputs(test), task.apply(test.y)
            self._test_tensors[key] = inputs.to(device), labels.to(device)
        return self._test_tensors[key]

    def _network_key(self) -> str:
        """Return the config's key that chooses the network, for error messages."""
        network = self.config.network
        return "network." + ("name" if network.name else "entry" if network.entry else "layout")

    def _layout(self, index: int) -> str:
        """Return the layout of one peer's network: that of the last entry of network.sizes that names it."""
        layouts = (layout for layout, peers in reversed(self._sizes) if index in peers)
        return next(layouts, self.config.network.layout)

    def _check_fit(self, cells: Sequence[int]) -> None:
        """Raise if the first or last layer does not fit the data set; cells: how many each layer has."""
        data, classes = self.dataset.name, self.dataset.classes
        features = self.dataset.train.flat().shape[1]
        if cells[0] != features:
            text = f"the first layer has {cells[0]} cells, but {data} has {features} features"
            raise self._error("network.layout", text)
        if cells[-1] != classes and (cells[-1], classes) != (1, 2):
            text = f"the last layer has {cells[-1]} cells, but {data} has {classes} classes"
            raise self._error("network.layout", text)
        if cells[-1] == 1 and self.config.training.prior != "none":
            text = "needs one output for each class, and the last layer has a single cell"
            raise self._error("training.prior", f"{text}: give it two, or leave the key out")

    def _select_peers(self, key: str, selection: PeerSelection) -> Mapping[int, int]:
        """Return the selected peers' indices, each with its first position; key: for an error."""
        indices, count = select_peers(selection, self.config.peers), self.config.peers
        if (last := max(indices, default=-1)) >= count:
            raise self._error(key, f"names peer {last}, but peers are 0 to {count - 1}")
        return {peer: position for position, peer in reversed([*enumerate(indices)])}

    def _error(self, key: str, text: str) -> ConfigError:
        """Return an error that names the config's file and a key."""
        return ConfigError(f"{self.source}: key {key!r}: {text}")

    @contextmanager
    def _error_context(self, key: str, prefix: str = "") -> Iterator[None]:
        """Turn errors of models and data into a ConfigError that names the config's file and a key."""
        try:
            yield
        except (ModelError, DataError, EntryError) as error:
            raise self._error(key, f"{prefix}{error}") from None

    def _check_dependencies(self) -> None:
        """Raise ConfigError if a model depends on an unknown model."""
        names = [model.name for model in self.config.models]
        for key, model, _ in self._model_entries:
            if unknown := [other for other in model.depends if other not in names]:
                text = f"unknown model {unknown[0]!r}; models are {', '.join(names)}"
                raise self._error(f"{key}.depends", text)


def select_peers(selection: PeerSelection, peers: int) -> list[int]:
    """Return the indices of selected peers; of a larger number than there are, one too many, for an error."""
    if isinstance(selection, list):
        return selection
    return [*range(peers if selection == "all" else min(selection, peers + 1))]


def trained_file(config: Config, source: str, index: int) -> Path | None:
    """Return the file of the trained network that a peer starts from; None if the config names none."""
    path = config.network.trained
    return None if path is None else Path(source).parent / path.replace("{peer}", str(index))


def _optimizer(training: Training) -> OptimizerFactory | None:
    """Return a function that makes the config's optimizer; None for SgdLearner's own plain SGD."""
    plain = training.optimizer == "sgd" and not training.weight_decay
    if plain and training.scheduler is None:
        return None
    options: dict[str, Any] = {}
    if training.weight_decay:
        options["weight_decay"] = training.weight_decay
    if training.momentum is not None:
        options["momentum"] = training.momentum
    in_torch = training.scheduler is not None
    return find_optimizer(training.optimizer, training.rate, in_torch=in_torch, **options)


def split_data(
    config: Config, dataset: Dataset, only: Sequence[int]
) -> tuple[dict[int, Samples], dict[int, Samples]]:
    """Return the training samples, and the test samples, of the peers `only`, by peer.

    If the data set has no test set, some of each peer's samples are held out to test it.
    """
    data, peers, seed = config.data, config.peers, config.seed
    source, test_set = dataset.train, dataset.test
    if data.total is not None:
        if data.total > len(source):
            raise DataError(
                f"data.total asks for {data.total} training samples, but there are only {len(source)}"
            )
        drawn = seeded_rng(seed, "training samples").permutation(len(source))[: data.total]
        source = source.take(np.sort(drawn))
    held_out = 0 if test_set is not None else data.test or 0
    size = None if data.samples is None else data.samples + held_out
    generator = seeded_rng(seed, "partition")
    match data.partition:
        case "successive":
            indices_by_peer = partition.successive(len(source), peers, size)
        case "iid":
            indices_by_peer = partition.iid(len(source), peers, size, generator)
        case "dirichlet":
            indices_by_peer = partition.dirichlet(
                source.y, peers, data.alpha, generator, data.minimum
            )
        case "shards":
            indices_by_peer = partition.shards(source.y, peers, data.shards, generator)
        case "natural":
            indices_by_peer = partition.by_group(source.group, peers, size, generator)
    train: dict[int, Samples] = {}
    test: dict[int, Samples] = {}
    if test_set is not None:  # copied once: all peers share this memory
        test_set = test_set.take(range(min(data.test or len(test_set), len(test_set))))
    for index in only:
        indices = indices_by_peer[index]
        if test_set is None:
            test_count = data.test or _default_test_count(index, len(indices))
            indices, test_indices = partition.split(
                indices, test_count, seeded_rng(seed, "held out", index)
            )
            test[index] = source.take(test_indices)
        if data.samples is not None:
            if data.partition == "shards":
                # Samples are in the order of the shards: unshuffled, the first ones would be of one shard.
                indices = seeded_rng(seed, "some of the shards", index).permutation(indices)
            indices = indices[: data.samples]
        train[index] = source.take(indices)
        if test_set is not None and data.tested == "common":
            test[index] = test_set
        elif test_set is not None:
            same_classes = partition.with_class_shares(test_set.y, train[index].y, dataset.classes)
            test[index] = test_set.take(same_classes)
    return train, test


def _default_test_count(peer: int, samples: int) -> int:
    """Return a fifth of a peer's samples, and at least one: without test samples a peer has no accuracy."""
    if samples < 2:
        raise DataError(
            f"peer {peer} has {samples} sample, which leaves none to test it with: use fewer peers, or split "
            "the data more evenly"
        )
    return max(1, round(0.2 * samples))


def matched_members(swarm: Swarm) -> tuple[list[Member], list[MatchedStore]]:
    """Return all peers of a config, in order, with their cells matched, and the stores of averaged vectors.

    If peers start from different values, the cells of each peer are matched once to the mean of the peers
    before it; if they start from equal values, cells have the same order already. There are no stores if no
    model is matched: then the networks' own vectors are averaged.
    """
    config = swarm.config
    different_starts = needs_matching(config)
    members, stores = swarm.members(), []
    if all(model.matching == "none" for model in config.models):
        return members, stores
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, int] = {}
    for index, member in enumerate(members):
        try:
            trained = config.network.trained is not None
            store = MatchedStore(member.network, swarm.matching(index), trained=trained)
            means = {model: sums[model] / counts[model] for model in store.names() if model in sums}
            if different_starts and means:
                store.start_staging()
                for model, mean in means.items():
                    store.write(model, mean.astype(store.read(model).dtype))
                store.match_cells(member.learner)
        except ModelError as error:
            raise ConfigError(f"{swarm.source}: key 'models': peer {index}: {error}") from None
        stores.append(store)
        for model in store.names() if different_starts else ():
            value = store.read(model).astype(np.float64)
            total = sums.get(model, np.zeros_like(value))
            if total.shape == value.shape:  # else averaging will raise an error about the widths
                sums[model] = total + value
                counts[model] = counts.get(model, 0) + 1
    return members, stores


def make_learner(config: str, index: int, source: str = "config") -> Learner:
    """Build one peer of a config (given as JSON) in its own process.

    source: the config's file; a user's own modules are imported from its folder.
    """
    return _swarm(config, source).member(index).learner


@lru_cache(maxsize=4)
def _swarm(config: str, source: str) -> Swarm:
    """Return a config's swarm, cached so that peers in the same process load their data once."""
    return Swarm(parse_config(json.loads(config)), source)


def shared_models(members: list[Member]) -> dict[str, list[int]]:
    """Return the partial models that more than one peer has, each with the indices of its peers."""
    peers_of_model = networks_by_model([member.network for member in members])
    return {model: peers for model, peers in peers_of_model.items() if len(peers) > 1}


@dataclass(frozen=True)
class PeerFacts:
    """What a results folder says about a peer: name, task, partial models and number of samples."""

    name: str
    task: str
    models: tuple[str, ...]
    samples: int

    @classmethod
    def of(cls, member: Member) -> PeerFacts:
        """Return the facts about a member; they do not keep its network in memory."""
        return cls(member.name, member.task, tuple(member.network.models), member.samples)


def write_peers(path: Path, peers: Sequence[PeerFacts], graph: nx.Graph | None) -> None:
    """Write the peers of a swarm and the links between them.

    graph: its nodes are the peers' numbers; None if every peer may reach every other.
    """
    links = None if graph is None else [[peers[a].name, peers[b].name] for a, b in graph.edges]
    write_json(path, {"peers": [asdict(peer) for peer in peers], "links": links})


def check_compression(
    config: Config, members: list[Member], peers_of_model: dict[str, list[int]], source: str
) -> None:
    """Raise ConfigError if gossip.compress or gossip.drift does not fit the shared models or other settings.

    Checked here so that the user sees one error instead of one from every peer.
    """
    gossip = config.gossip
    if gossip.drift is not None and gossip.mode != "async":
        raise ConfigError(
            f"{source}: key 'gossip.drift': in {gossip.mode} mode peers wait for every push, so no push can "
            'be skipped; use mode = "async"'
        )
    drift_by_model = gossip.drift if isinstance(gossip.drift, Mapping) else {}
    unknown = sorted(set(drift_by_model) - set(peers_of_model))
    if unknown:
        raise ConfigError(
            f"{source}: key 'gossip.drift': no peers share a model {unknown[0]!r}; shared models: "
            f"{', '.join(peers_of_model) or 'none'}"
        )
    if gossip.compress is None:
        return
    if gossip.dtype != "float32" or config.trust.private:
        other = "trust.private" if config.trust.private else "gossip.dtype"
        raise ConfigError(
            f"{source}: key 'gossip.compress': cannot be combined with {other}; leave one of them out"
        )
    compressor = parse_compressor(gossip.compress)
    for model, peers in peers_of_model.items():
        try:
            compressor.check_shapes(blocks(schema_entries(members[peers[0]].network, model)))
        except CompressError as error:
            raise ConfigError(
                f"{source}: key 'gossip.compress': model {model!r}: {error}"
            ) from None
