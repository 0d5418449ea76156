"""Exact averaging (the paper's Algorithms 1 and 2): the oracle that gossip is tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import ModelError
from .network import SlicedNetwork


def average(networks: Sequence[SlicedNetwork], weights: Sequence[float] | None = None) -> None:
    """Average, in place, every partial model among the networks that implement it.

    Networks built with `cross=True` average pairs of unrelated models too. `weights` (sample counts,
    say) gives one positive number per network; by default all count the same. Coordinates that one
    network alone owns, and private ones, are left bit for bit as they were.
    """
    shares = check_weights(networks, weights)
    for owner, members in implementers(networks).items():
        if len(members) < 2:
            continue
        first = networks[members[0]]
        for index in members[1:]:
            check_schema(owner, first, networks[index])
        values = []
        for index in members:
            values.append(networks[index].read(owner))
            networks[index].check_finite(owner, values[-1])
        # The mean of differences from the first peer: equal values average to themselves, exactly.
        base = values[0].double()
        total = sum(shares[index] for index in members)
        drift = torch.zeros_like(base)
        for index, value in zip(members[1:], values[1:], strict=True):
            drift += (shares[index] / total) * (value.double() - base)
        mean = base + drift
        for index in members:
            networks[index].write(owner, mean)


def implementers(networks: Sequence[SlicedNetwork]) -> dict[str, list[int]]:
    """For every owner, the indices of the networks that own it together."""
    found: dict[str, list[int]] = {}
    for index, network in enumerate(networks):
        for owner in network.owners:
            found.setdefault(owner, []).append(index)
    return dict(sorted(found.items()))


def check_weights(
    networks: Sequence[SlicedNetwork], weights: Sequence[float] | None
) -> Sequence[float]:
    """One positive weight per network; raises, naming the peer, for anything else."""
    if weights is None:
        return [1.0] * len(networks)
    if len(weights) != len(networks):
        raise ModelError(f"{len(weights)} weights were given for {len(networks)} networks")
    for network, weight in zip(networks, weights, strict=True):
        if not 0 < weight < float("inf"):
            raise ModelError(f"peer {network.peer!r}: weight {weight} is not a positive number")
    return weights


def check_schema(owner: str, one: SlicedNetwork, other: SlicedNetwork) -> None:
    """Raise, naming the first block that differs, unless two networks may average `owner`."""
    mine, theirs = one.slicing.schema(owner), other.slicing.schema(owner)
    if mine == theirs:
        return
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            raise ModelError(
                f"model {owner!r} is not the same on {one.peer!r} and {other.peer!r}: "
                f"{_block(a)} there, {_block(b)} here"
            )
    raise ModelError(
        f"model {owner!r} has {len(mine)} blocks on {one.peer!r} and {len(theirs)} on {other.peer!r}"
    )


def _block(block: tuple[str, tuple[tuple[str, int], ...]]) -> str:
    name, axes = block
    return f"{name} [{' × '.join(f'{count} {model}'.strip() for model, count in axes)}]"
