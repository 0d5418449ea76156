"""Lone twins: what a peer gains by taking part in a swarm, measured against a copy of it that trains alone.

Some peers, chosen at random, get a twin for the whole run: a second network that starts with the peer's
values, trains as often as the peer, on the same samples with the same settings, and is never averaged. There
are two cheaper ways, which were rejected. How much the loss changes when values are averaged once does not
tell how good the peer would be alone, which depends on all its rounds. And twins that exist only in some of
the rounds have trained less than their peers, so the comparison would be unfair.

All differences are those of the peer minus its twin: a peer that gains has a positive difference in accuracy
and a negative one in loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from math import isfinite, isnan, nan, sqrt
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from .errors import ModelError
from .learner import Learner, PeerCountAware, WeightAware
from .metrics import Metrics
from .network import SlicedNetwork
from .slicing import seeded_rng

UPPER_QUANTILE = 0.975
"""The quantile of Student's t distribution at the upper end of a two-sided interval of 95 % confidence."""


def draws_twin(gain: float, swarm: str, peer: str) -> bool:
    """Return whether a peer that does not know how many others there are has a lone twin.

    About a fraction `gain` of all peers have one. The choice is random, but seeded by the names of swarm and
    peer, so that it is the same after a restart.
    """
    return bool(seeded_rng(0, "lone twin", swarm, peer).random() < gain)


# --- the twin ---------------------------------------------------------------------------------------


@runtime_checkable
class SampleTester(Protocol):
    """A learner that can test sample by sample."""

    def test_samples(self) -> tuple[Tensor, Tensor]:
        """Return the loss of each test sample, and whether it is correct (1, 0, or NaN in regression)."""
        ...


class LoneTwin:
    """A copy of a peer's learner (`alone`) that trains alone.

    Make it before the peer trains for the first time. Raises ModelError if the learner cannot be copied, or
    works only together with other peers. `trainings` counts the calls of `train`.
    """

    def __init__(self, learner: Learner):
        self._learner, self.alone = learner, _copy(learner)
        self.trainings = 0

    def train(self, steps: int) -> Metrics:
        """Train the twin for `steps` learner steps."""
        with training_apart([self._learner.network], self.trainings):
            metrics = self.alone.train(steps)
        self.trainings += 1
        return metrics

    def gain(self) -> Gain:
        """Test the peer and its twin on the peer's test samples, and return the comparison."""
        return measure_gain(self._learner, self.alone)

    def state(self) -> dict[str, Any]:
        """Return what a restart needs: the twin's values, the state of its learner, and its trainings."""
        return {
            "network": self.alone.network.flat,
            "learner": self.alone.state(),
            "trainings": self.trainings,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.alone.network.flat.copy_(state["network"])
        self.alone.restore(state["learner"])
        self.trainings = int(state["trainings"])


@contextmanager
def training_apart(peers: Sequence[SlicedNetwork], number: int) -> Iterator[None]:
    """Return a context in which twins train, so that the peers and torch's random state do not change.

    peers: the networks of the peers whose twins train. number: how many trainings came before this one; it
    seeds torch's random numbers (used by dropout, for example) inside the context. Raises ModelError if the
    first training changes a peer's network: then its learner was not copied completely.
    """
    before = [network.flat.clone() for network in peers] if number == 0 else []
    devices = {network.flat.device for network in peers if network.flat.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)):
        torch.default_generator.manual_seed(number)
        yield
    for network, values in zip(peers, before, strict=False):
        # Compared bit by bit, so that NaN equals NaN.
        if not torch.equal(network.flat.view(torch.uint8), values.view(torch.uint8)):
            raise ModelError(
                f"peer {network.peer!r}: training a copy of its learner changed the peer's own network, so "
                "it cannot have a lone twin; leave out `gain`"
            )


def _copy(learner: Learner) -> Learner:
    """Copy a learner and its network, but share its samples. The copy shares no partial model with others."""
    network = learner.network
    if isinstance(learner, WeightAware | PeerCountAware):
        raise ModelError(
            f"peer {network.peer!r}: {type(learner).__name__} learns together with other peers, so there is "
            "nothing to compare it with alone; leave out `gain`"
        )
    memo: dict[int, Any] = {id(tensor): tensor for tensor in _samples(learner)}
    # A network may be a row of a stack: copying its tensors as they are would copy the whole stack.
    for tensor in network.module.buffers():
        memo[id(tensor)] = tensor.clone()
    try:
        module = deepcopy(network.module, memo)
        own_model = "alone-" + hashlib.blake2b(network.peer.encode(), digest_size=8).hexdigest()
        alone = SlicedNetwork(
            module,
            {},
            peer=network.peer,
            rest=own_model,
            anatomy=network.slicing.anatomy,
            buffers=network.buffers,
        )
        memo[id(network)], memo[id(network.flat)] = alone, alone.flat
        twin = deepcopy(learner, memo)
        # If the optimizer's state is a view of a stack, the whole stack was copied: this frees it again.
        twin.restore(learner.state())
    except Exception as error:  # the network or learner may be a user's own, and raise anything
        raise ModelError(
            f"peer {network.peer!r}: its network or learner cannot be copied ({error}), so it cannot have a "
            "lone twin; leave out `gain`"
        ) from error
    return twin


def _samples(learner: object) -> Iterator[Tensor]:
    """Yield the tensors of a learner's samples, and those of a learner that it wraps."""
    for name, value in getattr(learner, "__dict__", {}).items():
        if name in ("samples", "held_out"):
            tensors = value if isinstance(value, tuple) else (value,)
            yield from (tensor for tensor in tensors if isinstance(tensor, Tensor))
        elif isinstance(value, Learner):
            yield from _samples(value)


# --- the comparison ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The mean of some differences, and its 95 % interval by Student's t distribution.

    interval: (low, high); None for fewer than two values.
    count: the number of values.
    """

    mean: float
    interval: tuple[float, float] | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Difference:
        """Return the mean and the interval of some differences."""
        differences = np.asarray(values, np.float64)
        count = len(differences)
        mean = float(differences.mean()) if count else nan
        if count < 2 or not isfinite(mean):
            return cls(mean, None, count)
        from scipy.special import stdtrit  # slow to import

        standard_error = float(differences.std(ddof=1)) / sqrt(count)
        half_width = float(stdtrit(count - 1, UPPER_QUANTILE)) * standard_error
        return cls(mean, (mean - half_width, mean + half_width), count)

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.mean:+.3f}"
        low, high = self.interval
        return f"{self.mean:+.3f} (95 % interval {low:+.3f} … {high:+.3f})"


@dataclass(frozen=True)
class Gain:
    """The test of one peer and of its lone twin.

    accuracy, loss: peer minus twin, paired sample by sample. Their intervals tell how much of a difference
        may be due to the choice of test samples, but not how much another training would change it. An
        interval is None if the learner cannot test sample by sample.
    alone_accuracy, alone_loss: those of the twin.
    """

    peer: str
    accuracy: Difference
    loss: Difference
    alone_accuracy: float
    alone_loss: float

    def as_dict(self) -> dict[str, Any]:
        """Return the gain as JSON-friendly data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Gain:
        """Return the gain from the data that `as_dict` returned, also after a round trip through JSON."""
        differences: dict[str, Difference] = {}
        for key in ("accuracy", "loss"):
            interval = data[key]["interval"]
            interval = None if interval is None else (interval[0], interval[1])
            differences[key] = Difference(**{**data[key], "interval": interval})
        return cls(**{**data, **differences})


def measure_gain(learner: Learner, alone: Learner) -> Gain:
    """Test a peer's learner and that of its lone twin, and return the comparison."""
    if isinstance(learner, SampleTester) and isinstance(alone, SampleTester):
        loss, correct = (values.cpu().double().numpy() for values in learner.test_samples())
        alone_loss, alone_correct = (
            values.cpu().double().numpy() for values in alone.test_samples()
        )
        return Gain(
            learner.network.peer,
            Difference.of(correct - alone_correct),
            Difference.of(loss - alone_loss),
            float(alone_correct.mean()) if len(alone_correct) else nan,
            float(alone_loss.mean()) if len(alone_loss) else nan,
        )
    test, twin = learner.test(), alone.test()
    return Gain(
        learner.network.peer,
        Difference(test.accuracy - twin.accuracy, None, test.samples),
        Difference(test.mean_loss - twin.mean_loss, None, test.samples),
        twin.accuracy,
        twin.mean_loss,
    )


@dataclass(frozen=True)
class SwarmGain:
    """The mean gain of the peers that have a lone twin.

    accuracy, loss: means over these peers. Their intervals are for the mean gain of all peers of the swarm,
        so they are wider if gains differ between peers. Peers without test samples are left out; in
        regression, the accuracy is NaN.
    peers: how many peers the swarm has.
    """

    accuracy: Difference
    loss: Difference
    peers: int

    @classmethod
    def of(cls, gains: Sequence[Gain], peers: int) -> SwarmGain:
        """Return the mean of the gains of some peers of a swarm that has `peers` peers."""
        tested = [gain for gain in gains if gain.loss.count]
        return cls(
            Difference.of([gain.accuracy.mean for gain in tested]),
            Difference.of([gain.loss.mean for gain in tested]),
            peers,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the gain as JSON-friendly data."""
        return asdict(self)

    def __str__(self) -> str:
        count = self.loss.count
        if not count:
            return "unknown, as no peer with a lone twin was tested"
        accuracy = "" if isnan(self.accuracy.mean) else f"accuracy {self.accuracy}, "
        note = ": no interval can be given for one peer" if count == 1 else ""
        return f"{accuracy}loss {self.loss}; {count} of {self.peers} peers{note}"
