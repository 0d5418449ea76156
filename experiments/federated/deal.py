"""From a comparison and a seed to clients: data dealt out, networks that start alike, learners."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import numpy as np
from torch import Tensor

from ...models import ModelError, SgdLearner, SlicedNetwork, stream
from ..config.tables import ConfigError
from ..data import DataError, Dataset, Samples, load, partition, tasks
from .client import Client
from .config import Comparison
from .method import Method
from .networks import inputs_of, maker


def clients_of(
    config: Comparison, method: Method, seed: int, source: str = "config"
) -> list[Client]:
    """All clients of one run. They depend on the seed, and on no method but by its rate and epochs."""
    try:
        data = _data(config.data.set, seed, source)
        make = maker(config, data)
        train, test = shares(config, data, seed)
        return [
            _client(config, method, make(str(place), seed), own, held, seed)
            for place, (own, held) in enumerate(zip(train, test, strict=True))
        ]
    except (ModelError, DataError) as error:
        raise ConfigError(f"{source}: {error}") from None


def shares(
    config: Comparison, data: Dataset, seed: int
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Every client's training and test samples, labels as its task has them."""
    train = _some(data.train, config.data.samples, seed, "training samples")
    parts = _deal(config, train, seed)
    own, held = [], []
    common: Samples | None = None
    if data.test is not None:
        common = _some(data.test, config.data.test, seed, "test samples")
    inputs = inputs_of(config, common) if common is not None else None
    for place, part in enumerate(parts):
        task = _task(config, data.classes, place)
        if common is None or inputs is None:
            part, kept = partition.split(part, 0.2, stream(seed, "held out", place))
            mine = train.take(kept)
            held.append((inputs_of(config, mine), task.apply(mine.y)))
        elif config.data.tested == "common":
            labels = common.y if config.split.tasks == "same" else task.apply(common.y)
            held.append((inputs, labels))
        else:
            chosen = alike(common.y.numpy(), train.take(part).y.numpy(), data.classes)
            mine = common.take(chosen)
            held.append((inputs_of(config, mine), task.apply(mine.y)))
        samples = train.take(part)
        own.append((inputs_of(config, samples), task.apply(samples.y)))
    return own, held


def alike(labels: np.ndarray, own: np.ndarray, classes: int) -> np.ndarray:
    """The most test samples whose classes have the same shares as in a client's own samples.

    A class that is too rare to be given one whole sample is left out.
    """
    wanted = np.bincount(own, minlength=classes) / len(own)
    there = np.bincount(labels, minlength=classes)
    scale = min(there[k] / wanted[k] for k in range(classes) if wanted[k])
    counts = np.floor(scale * wanted + 1e-9).astype(int)
    chosen = [np.flatnonzero(labels == k)[: counts[k]] for k in range(classes)]
    if not sum(map(len, chosen)):
        raise DataError(
            "a client has a class that is not among the test samples: raise data.test, or set "
            'data.tested = "common"'
        )
    return np.sort(np.concatenate(chosen))


@lru_cache(maxsize=2)
def load_once(name: str, seed: int = 0, folder: Path | None = None) -> Dataset:
    """A data set, kept for the next run of this process."""
    return load(name, seed=seed, folder=folder)


def _data(name: str, seed: int, source: str) -> Dataset:
    if ":" not in name:  # the same for all seeds
        return load_once(name)
    try:
        return load_once(name, seed, Path(source).parent)
    except DataError as error:
        raise DataError(f"key 'data.set': {error}") from None


def _client(
    config: Comparison,
    method: Method,
    network: SlicedNetwork,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    seed: int,
) -> Client:
    learner = SgdLearner(
        network, train, test,
        batch=config.training.batch,
        reduction="mean",
        rate=method.rate or config.training.rate,
        loss=config.training.loss,
        seed=int(stream(seed, "order", network.peer).integers(2**31)),
    )  # fmt: skip
    return Client(learner, method.epochs or config.training.epochs)


def _deal(config: Comparison, train: Samples, seed: int) -> Sequence[np.ndarray]:
    split, peers, generator = config.split, config.peers, stream(seed, "partition")
    match split.kind:
        case "iid":
            return partition.iid(len(train), peers, None, generator)
        case "dirichlet":
            return partition.dirichlet(train.y, peers, split.alpha, generator, split.minimum)
        case "shards":
            return partition.shards(train.y, peers, split.shards, generator)
        case "successive":
            return partition.successive(len(train), peers)
        case "natural":
            return partition.by_group(train.group, peers, None, generator)


def _task(config: Comparison, classes: int, place: int) -> tasks.Task:
    if config.split.tasks == "same":
        return tasks.identity(classes)
    pairs = list(combinations(range(classes), 2))
    # A stride that shares no factor with the number of pairs visits far-apart ones first.
    return tasks.swap(classes, *pairs[place * 7 % len(pairs)])


def _some(samples: Samples, count: int | None, seed: int, what: str) -> Samples:
    if count is None:
        return samples
    if count > len(samples):
        raise DataError(f"{count} {what} were asked for, there are {len(samples)}")
    chosen = stream(seed, what).permutation(len(samples))[:count]
    return samples.take(np.sort(chosen))
