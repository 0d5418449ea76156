"""Who holds which samples: a data set, dealt out to the peers of a config."""

from __future__ import annotations

from ..models import stream
from .config.tables import Config
from .data import DataError, Dataset, Samples, partition


def deal(config: Config, dataset: Dataset) -> tuple[list[Samples], list[Samples]]:
    """Every peer's training and test samples; some of its own are held out where there is no test set."""
    data, peers, seed = config.data, config.peers, config.seed
    source, shared = dataset.train, dataset.test
    extra = 0 if shared is not None else data.test or 0
    size = None if data.samples is None else data.samples + extra
    generator = stream(seed, "partition")
    match data.partition:
        case "successive":
            parts = partition.successive(len(source), peers, size)
        case "iid":
            parts = partition.iid(len(source), peers, size, generator)
        case "dirichlet":
            parts = partition.dirichlet(source.y, peers, data.alpha, generator)
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
        else:
            test.append(shared)
        if data.samples is not None:
            if data.partition == "shards":  # they follow each other: the first ones would be all
                part = stream(seed, "some of the shards", index).permutation(part)
            part = part[: data.samples]
        train.append(source.take(part))
    return train, test


def _tested(peer: int, samples: int) -> int:
    """A fifth of a peer's samples, and at least one: a peer that is not tested would count as nothing."""
    if samples < 2:
        raise DataError(
            f"peer {peer} is dealt {samples} sample, which leaves none to test it with: take fewer peers, or "
            "deal them out more evenly"
        )
    return max(1, round(0.2 * samples))
