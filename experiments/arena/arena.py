"""Simulate a swarm in one process, round by round: every peer trains, all average, every peer is tested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...models import (
    Gain,
    Learner,
    LoneTwin,
    Metrics,
    ModelError,
    PeerCountAware,
    implementers,
    measure_gain,
    training_apart,
)
from ...models.stack import (
    Group,
    GroupSpec,
    MemoryNeeds,
    Task,
    Workers,
    available_cores,
    combine_needs,
    form_group,
    free_memory,
    group_learners,
    memory_needs,
)
from ...peer import MatchedStore
from .lockstep import Averager, ExactMean, Gossip, Mixing

if TYPE_CHECKING:  # heavy imports (gossipers, compressors, scipy), needed only with `wire=`
    from .events import Lockstep, Wire, WiredAverager
    from .sharing import AutoSharing


@dataclass(frozen=True)
class Round:
    """Training and test metrics of one round, one entry per peer.

    `tests` is empty if the round was not tested. `gains` has one entry per peer with a lone twin.
    """

    index: int
    training: tuple[Metrics, ...]
    tests: tuple[Metrics, ...]
    gains: tuple[Gain, ...] = ()

    @property
    def accuracy(self) -> float:
        """The mean over peers of the accuracy on their own test samples (NaN if not tested).

        Peers without test samples are left out. Regression has no accuracy: use `loss`.
        """
        return _mean([test.accuracy for test in self.tests if test.samples])

    @property
    def loss(self) -> float:
        """The mean over peers of the loss per test sample; peers without test samples are left out."""
        return _mean([test.mean_loss for test in self.tests if test.samples])


class Arena:
    """Runs learners round by round.

        for round in Arena(learners).run(30):
            print(round.index, round.accuracy)

    Learners with equal networks and settings are stacked: their parameters become the rows of one
    tensor, and training is a few batched products for all of them. Results equal those of a loop over the
    learners, up to rounding. The learners stay usable: `learner.network` holds the current values (its
    parameters are views of its row of the stack), and `train`, `test`, `state` and `restore` still work.
    Learners that cannot be stacked (your own learner classes, unusual optimizers, modules with buffers) run
    one after the other. To save a network, call `learner.network.save(path)`. Before you pickle, copy or send
    a network yourself, call `release()`; otherwise the whole stack, with all peers' values, is pickled too.

    every
        Local training passes (of `local_samples` samples each) before each averaging.
    weights
        The weight of each learner in averages (its number of samples, for example); by default all are equal.
    test_every
        Rounds between two tests. The last round is always tested.
    mixing
        How peers average: `ExactMean()`, the default, or `Gossip(graph)`.
    device
        The torch device of the stacks, such as "cuda"; by default the networks' own device. If it is another
        device, values are copied back to the networks after each round.
    threads
        Threads that train peers in parallel; by default one per core (one in a multiprocessing worker
        process). The result does not depend on it.
    memory
        Bytes that the arena may use; by default the free memory. If more is needed, the constructor raises
        ModelError naming the largest item; `needs()` lists them all.
    stores
        Optional `MatchedStore` per learner, for partial models whose peers have layers of different widths:
        they map each peer's values to a common width, at which the model is averaged. Not supported with
        `device`.
    sharing
        `AutoSharing()` lets the swarm decide by itself which cells it shares, and with whom; the learners'
        slices are replaced, unless it has `keep_models`. Members of a group that formed itself average among
        each other whatever the graph of `Gossip(…)` is. Not supported with `wire`, `stores` or `device`.
    wire
        Simulate transmission: rounding, compression, skipped pushes, as in `Wire(compress="int8")`. Peers
        then run the same gossip code as live peers instead of one matrix product, and
        `arena.wire_simulation` counts bytes. Needs `mixing=Gossip(…)` or `Server()`; not supported with
        `device`.
    twins
        The indices of learners that get a lone twin, which trains alone: `Round.gains` then tells what these
        peers gain by taking part. The peers' own results do not change. See gossamer.models.LoneTwin.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        *,
        every: int = 1,
        weights: Sequence[float] | None = None,
        test_every: int = 1,
        mixing: Mixing | None = None,
        device: str | torch.device | None = None,
        threads: int | None = None,
        memory: int | None = None,
        stores: Sequence[MatchedStore] | None = None,
        wire: Wire | None = None,
        sharing: AutoSharing | None = None,
        twins: Sequence[int] = (),
    ):
        if not learners:
            raise ModelError("an arena needs at least one learner")
        names = Counter(learner.network.peer for learner in learners)
        if duplicates := sorted(name for name, count in names.items() if count > 1):
            raise ModelError(
                f"two networks have the same peer name, {duplicates[0]!r}: give each network its own peer= "
                "name, or their private values would be averaged"
            )
        for option, count in (("every", every), ("test_every", test_every)):
            if not isinstance(count, int) or count < 1:
                raise ModelError(f"{option}={count!r}: give a whole number, 1 or more")
        if mixing is not None and not (hasattr(mixing, "check") and hasattr(mixing, "matrices")):
            raise ModelError(
                f"mixing must be ExactMean(), Gossip(graph) or Server(), not a {type(mixing).__name__}"
            )
        if threads is not None and threads < 1:
            raise ModelError(f"{threads} threads: an arena needs at least one")
        self._learners = list(learners)
        # Before `sharing` sets samples aside to decide with: alone, a peer would train on them.
        options = {"every": every, "device": device, "threads": threads}
        self.twins = Twins([learners[index] for index in twins], **options) if twins else None
        self.sharing = sharing
        if sharing is not None:
            if wire is not None or stores or device is not None:
                raise ModelError("`sharing` cannot be combined with `wire`, `stores` or `device`")
            sharing.start(self._learners, mixing or ExactMean())
        count = len(self._learners)
        for learner in self._learners:
            if isinstance(learner, PeerCountAware):  # in an arena, every peer sees all the others
                learner.peers_seen = lambda: count
        self._every, self._test_every = every, test_every
        self._threads = threads or available_cores()
        self._device = _device(device)
        specs = group_learners(self._learners)
        network_device = self._learners[0].network.flat.device
        stack_device = self._device or network_device
        self._needs = memory_needs(
            specs, self._learners, self._threads, other_device=stack_device != network_device
        )
        if self.twins is not None:
            self._needs = combine_needs([self._needs, self.twins.needs()])
        self._wired: WiredAverager | None = None
        if wire is not None:
            if device is not None:
                raise ModelError("`wire` cannot be combined with `device`: leave out `device`")
            from .events import WiredAverager

            self._wired = WiredAverager(
                self._learners, mixing or ExactMean(), weights, wire, stores or ()
            )
            self._needs = combine_needs([self._needs, self._wired.needs()])
        self._needs.check_fits(memory if memory is not None else free_memory(stack_device))
        self._mixing, self._weights, self._stores = mixing or ExactMean(), weights, stores or ()
        self._form_groups(specs)
        if device is not None and (common := self._averager.common_width_models):
            raise ModelError(
                f"partial model {common[0]!r} is averaged at a common width, which is not supported with "
                "`device`: leave out `device`"
            )
        self._workers: Workers | None = None

    def renew(self) -> None:
        """Take over samples and slices that learners have been given since the arena was built."""
        if self.twins is not None:
            raise ModelError("`twins` have the samples that peers began with: build a new Arena")
        self._renew()

    def _renew(self) -> None:
        if self.sharing is not None and isinstance(self._mixing, Gossip):
            models = implementers([learner.network for learner in self._learners])
            groups = self.sharing.assignment.among_all_members(models, self.sharing.given_groupings)
            self._mixing = replace(self._mixing, complete=groups)
        self._form_groups(group_learners(self._learners), self._averager.step)

    def _form_groups(self, specs: Sequence[GroupSpec], step: int = 0) -> None:
        """Stack the learners. step: how many averagings there have been."""
        self._groups: list[Group] = [
            form_group(spec, self._learners, self._device) for spec in specs
        ]
        self._group_and_row = {
            index: (group, row) for group in self._groups for row, index in enumerate(group.indices)
        }
        located = (self._group_and_row[index] for index in range(len(self._learners)))
        self._averager = Averager(
            [learner.network for learner in self._learners],
            [group.locate(row) for group, row in located],
            self._mixing,
            self._weights,
            self._stores,
            step=step,
        )

    def __repr__(self) -> str:
        """How many learners were stacked, and in how many stacks."""
        stacks = [group for group in self._groups if group.stacked]
        stacked = sum(len(group.indices) for group in stacks)
        rest = len(self._learners) - stacked
        return (
            f"Arena({stacked} learners in {len(stacks)} stack{'s' * (len(stacks) != 1)}"
            f"{f', {rest} one by one' if rest else ''}; {self._needs})"
        )

    def needs(self) -> MemoryNeeds:
        """The memory that this arena needs, item by item."""
        return self._needs

    @property
    def mixing(self) -> Mixing:
        """How peers average now: with `sharing`, groups may have formed that the graph does not limit."""
        return self._mixing

    @property
    def wire_simulation(self) -> Lockstep | None:
        """The peers' gossipers and the traffic that they sent, by partial model; None without `wire`."""
        return None if self._wired is None else self._wired.lockstep

    def run(self, rounds: int) -> Iterator[Round]:
        """Train and average `rounds` times, yielding after each; stop iterating to stop early.

        Learners may be read between two rounds. Between rounds only in-place changes of their networks,
        optimizers or rates take effect; replaced objects are picked up at the next `run()`.
        """
        for group in self._groups:
            group.refresh()
        for index in range(1, rounds + 1):
            training = self.train_and_average()
            tested = index % self._test_every == 0 or index == rounds
            tests = self.test() if tested else ()
            self.write_back()
            gains: tuple[Gain, ...] = ()
            if self.twins is not None:
                self.twins.train()
                gains = self.twins.gains() if tested else ()
            yield Round(index, training, tests, gains)

    def train_and_average(self) -> tuple[Metrics, ...]:
        """Train and average once; with `sharing`, also decide what is shared from now on."""
        training = self.train()
        if self.sharing is not None:
            self.sharing.before_averaging(training)
        self.average()
        if self.sharing is not None and self.sharing.after_averaging():
            self._renew()
        return training

    def train(self, peers: Sequence[int] | None = None) -> tuple[Metrics, ...]:
        """Train every learner for one round; `run` does this, then `average`, then `test`.

        peers: train only the learners with these indices; the metrics are in the same order.
        """
        return self._run_tasks(
            peers,
            [(group, group.train(rows, self._every)) for group, rows in self._rows_by_group(peers)],
        )

    def average(self) -> None:
        """Average every partial model once."""
        if self._wired is not None:
            self._wired.average()
            return
        for tasks in self._averager.tasks():
            self._thread_pool().run(tasks)

    def test(self, peers: Sequence[int] | None = None) -> tuple[Metrics, ...]:
        """Test every learner, or only the learners with the indices `peers`, as in `train`."""
        return self._run_tasks(
            peers, [(group, group.test(rows)) for group, rows in self._rows_by_group(peers)]
        )

    def write_back(self) -> None:
        """Copy the values of stacks on another device to the learners; `run` does this after every round."""
        for group in self._groups:
            group.write_back()

    def release(self) -> None:
        """Move every network from the stack to memory of its own; call this before copying or pickling it."""
        for group in self._groups:
            group.release()

    def _rows_by_group(self, peers: Sequence[int] | None) -> list[tuple[Group, list[int]]]:
        """The groups that contain these learners (all learners if None), and the learners' rows in each."""
        if peers is None:
            return [(group, list(range(len(group.indices)))) for group in self._groups]
        rows_by_group: dict[Group, list[int]] = {}
        for peer in sorted(set(peers)):
            group, row = self._group_and_row[peer]
            rows_by_group.setdefault(group, []).append(row)
        return list(rows_by_group.items())

    def _run_tasks(
        self, peers: Sequence[int] | None, work: Sequence[tuple[Group, list[Task]]]
    ) -> tuple[Metrics, ...]:
        """Run the tasks of each group and return the metrics in the order of `peers`."""
        metrics: dict[int, Metrics] = {}
        stacked = [task for group, tasks in work if group.stacked for task in tasks]
        for measured in self._thread_pool().run(stacked):
            metrics.update(measured)
        # Not in threads: a user's own learner may use objects that are not thread-safe, such as torch's
        # global random generator.
        for task in (task for group, tasks in work if not group.stacked for task in tasks):
            metrics.update(task())
        indices = range(len(self._learners)) if peers is None else peers
        self._refuse_diverged([index for index in indices if not isfinite(metrics[index].loss)])
        return tuple(metrics[index] for index in indices)

    def _refuse_diverged(self, suspects: Sequence[int]) -> None:
        """Raise for the first of these peers whose parameters are NaN or infinite.

        Averaging checks only shared parameters, so private ones would otherwise go unnoticed. A loss that
        overflowed while all parameters are finite is only reported.
        """
        if suspects:
            self.write_back()
        for index in suspects:
            self._learners[index].network.check_all_finite()

    def _thread_pool(self) -> Workers:
        if self._workers is None:
            self._workers = Workers(self._threads)
        return self._workers


class _AloneArena(Arena):
    """An arena in which a learner may diverge: a peer may be stable only because it is averaged."""

    def _refuse_diverged(self, suspects: Sequence[int]) -> None:
        pass


class Twins:
    """The lone twins of some learners, stacked in an arena of their own, whose peers never average.

    Twins are not rows of the peers' stacks: products of stacks of another size are rounded differently, and a
    swarm with twins must have the same results as one without. options: of Arena.

    `alone` are the twins' learners, in the order of the peers' `learners`.
    """

    def __init__(self, learners: Sequence[Learner], **options: Any):
        self._learners = learners
        self.alone = [LoneTwin(learner).alone for learner in learners]
        self._arena = _AloneArena(self.alone, **options)
        self._trainings = 0

    def needs(self) -> MemoryNeeds:
        """The memory that the twins need, item by item."""
        return self._arena.needs()

    def train(self, twins: Sequence[int] | None = None) -> None:
        """Train all twins for one round, or only those with these indices among the twins."""
        with training_apart([learner.network for learner in self._learners], self._trainings):
            self._arena.train(twins)
        self._trainings += 1

    def gains(self) -> tuple[Gain, ...]:
        """Test each of the learners and its twin."""
        self._arena.write_back()
        pairs = zip(self._learners, self.alone, strict=True)
        return tuple(measure_gain(learner, alone) for learner, alone in pairs)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else nan


def _device(name: str | torch.device | None) -> torch.device | None:
    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(
            f"unknown device {str(name)!r}: give cpu, cuda or cuda:1, for example"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            f"device {str(name)!r}: torch finds no such device on this machine; leave out `device` to use "
            "the CPU"
        )
    return device
