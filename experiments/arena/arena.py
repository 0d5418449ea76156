"""Rounds of a whole swarm: train, average, test, repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...models import Learner, Metrics, ModelError, PeerCounting
from ...models.stack import (
    Group,
    Needs,
    Task,
    Workers,
    combine,
    form_group,
    free_memory,
    needs_of,
    processors,
    sort_learners,
)
from ...peer import MatchedStore
from .lockstep import Averager, ExactMean, Mixing

if TYPE_CHECKING:  # gossipers, compressors and scipy: only for those who have a wire
    from ..lockstep import Lockstep
    from ..virtual.wire import Wire
    from .wired import Wired


@dataclass(frozen=True)
class Round:
    """What the swarm knew after a round; `tests` has one entry per peer, or none if not tested."""

    index: int
    training: tuple[Metrics, ...]
    tests: tuple[Metrics, ...]

    @property
    def accuracy(self) -> float:
        """The mean over peers of the accuracy on their own tests (NaN if not tested).

        Peers without test samples are left out. Regression has no accuracy: see `loss`.
        """
        return _mean([test.accuracy for test in self.tests if test.samples])

    @property
    def loss(self) -> float:
        """The mean over peers of the loss per sample of their own tests, for those that have any."""
        return _mean([test.mean_loss for test in self.tests if test.samples])


class Arena:
    """Runs learners round by round.

        for round in Arena(learners).run(30):
            print(round.index, round.accuracy)

    Learners with equal networks and settings are stacked: their parameters become the rows of one
    tensor, and training is a few batched products for all of them. Results are those of a loop over the
    learners, to rounding. The learners stay yours: `learner.network` shows what was learned (it *is* its
    row of the stack), and `train`, `test`, `state` and `restore` go on working. Learners that cannot be
    stacked (your own kinds, unusual optimizers, modules with buffers) run one after the other. To keep a
    network, `learner.network.save(path)`; before you pickle, copy or send it yourself, `release()`, or all
    peers' values go along.

    every
        How often each learner trains its local samples between two averagings.
    weights
        One number per learner (sample counts, say); by default all count the same.
    test_every
        Rounds between two tests. The last round is always tested.
    mixing
        How peers average: `ExactMean()`, the default, or `Gossip(graph)`.
    device
        Where the stacks live, as in "cuda"; by default where the networks are. On another device than
        theirs, networks are written back after each round.
    threads
        Peers trained side by side; by default one per core (in a worker process of multiprocessing,
        one). The result does not depend on it.
    memory
        Bytes that may be taken; by default what is free. An arena that needs more is refused, by the
        name of the largest term; `needs()` tells it all.
    stores
        One per learner, where peers of different widths share a partial model: it is then averaged at
        the common width that the stores hold. Not with `device`.
    wire
        What becomes of values between peers, `Wire(compress="int8")` say: they are then averaged one by
        one, by live peers' own rules, and `arena.lockstep` has the bytes. For `Gossip` and `Server`, not
        with `device`.
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
    ):
        if not learners:
            raise ModelError("an arena needs at least one learner")
        names = Counter(learner.network.peer for learner in learners)
        if twice := sorted(name for name, count in names.items() if count > 1):
            raise ModelError(
                f"two networks are those of peer {twice[0]!r}: give each its own peer= name, or they "
                "would average what is private"
            )
        for what, count in (("every", every), ("test_every", test_every)):
            if not isinstance(count, int) or count < 1:
                raise ModelError(f"{what}={count!r}: give a whole number, 1 or more")
        if mixing is not None and not (hasattr(mixing, "check") and hasattr(mixing, "matrices")):
            raise ModelError(
                f"mixing: give ExactMean() or Gossip(graph), not a {type(mixing).__name__}"
            )
        if threads is not None and threads < 1:
            raise ModelError(f"{threads} threads: an arena needs at least one")
        self._learners = list(learners)
        count = len(self._learners)
        for learner in self._learners:
            if isinstance(learner, PeerCounting):
                learner.peers_seen = lambda: count
        self._every, self._test_every = every, test_every
        self._threads = threads or processors()
        self._device = _device(device)
        kinds = sort_learners(self._learners)
        home = self._learners[0].network.flat.device
        where = self._device or home
        self._needs = needs_of(kinds, self._learners, self._threads, moved=where != home)
        self._wired: Wired | None = None
        if wire is not None:
            if device is not None:
                raise ModelError("a wire is read on the networks' own device: leave out device")
            from .wired import Wired

            self._wired = Wired(self._learners, mixing or ExactMean(), weights, wire, stores or ())
            self._needs = combine([self._needs, self._wired.needs()])
        self._needs.refuse_beyond(memory if memory is not None else free_memory(where))
        self._groups: list[Group] = [
            form_group(kind, self._learners, self._device) for kind in kinds
        ]
        self._seats = {
            place: (group, row) for group in self._groups for row, place in enumerate(group.places)
        }
        self._averager = Averager(
            [learner.network for learner in self._learners],
            [group.locate(row) for group, row in (self._seats[k] for k in range(count))],
            mixing or ExactMean(),
            weights,
            stores or (),
        )
        if device is not None and (common := self._averager.common_width):
            raise ModelError(
                f"{common[0]!r} is averaged at a common width, which works on the networks' own device: "
                "leave out device"
            )
        self._workers: Workers | None = None

    def __repr__(self) -> str:
        """How many learners were stacked, and in how many stacks."""
        stacks = [group for group in self._groups if group.stacked]
        stacked = sum(len(group.places) for group in stacks)
        rest = len(self._learners) - stacked
        return (
            f"Arena({stacked} learners in {len(stacks)} stack{'s' * (len(stacks) != 1)}"
            f"{f', {rest} one by one' if rest else ''}; {self._needs})"
        )

    def needs(self) -> Needs:
        """The memory that this arena takes, term by term."""
        return self._needs

    @property
    def lockstep(self) -> Lockstep | None:
        """What peers have sent to each other, by model; None without a wire."""
        return None if self._wired is None else self._wired.lockstep

    def run(self, rounds: int) -> Iterator[Round]:
        """Train and average `rounds` times, yielding after each; stop iterating to stop early.

        Learners may be read between two rounds. Whoever changes their networks, optimizers or rates
        then does it in place; what was replaced is taken in when `run` is called again.
        """
        for group in self._groups:
            group.refresh()
        for index in range(1, rounds + 1):
            training = self.train()
            self.average()
            tested = index % self._test_every == 0 or index == rounds
            tests = self.test() if tested else ()
            for group in self._groups:
                group.publish()
            yield Round(index, training, tests)

    def train(self, peers: Sequence[int] | None = None) -> tuple[Metrics, ...]:
        """Every learner's training of one round; `run` does this, then `average`, then `test`.

        peers: only those learners, by their places; the metrics are in the same order.
        """
        return self._measure(
            peers, [(group, group.train(rows, self._every)) for group, rows in self._work(peers)]
        )

    def average(self) -> None:
        """One averaging of every partial model."""
        if self._wired is not None:
            self._wired.average()
            return
        for tasks in self._averager.tasks():
            self._working().run(tasks)

    def test(self, peers: Sequence[int] | None = None) -> tuple[Metrics, ...]:
        """Every learner's test, or that of some, as in `train`."""
        return self._measure(
            peers, [(group, group.test(rows)) for group, rows in self._work(peers)]
        )

    def release(self) -> None:
        """Give every network memory of its own again, before it is copied or sent elsewhere."""
        for group in self._groups:
            group.release()

    def _work(self, peers: Sequence[int] | None) -> list[tuple[Group, list[int]]]:
        """The groups that some learners are in, and their rows there."""
        if peers is None:
            return [(group, list(range(len(group.places)))) for group in self._groups]
        found: dict[Group, list[int]] = {}
        for peer in sorted(set(peers)):
            group, row = self._seats[peer]
            found.setdefault(group, []).append(row)
        return list(found.items())

    def _measure(
        self, peers: Sequence[int] | None, work: Sequence[tuple[Group, list[Task]]]
    ) -> tuple[Metrics, ...]:
        found: dict[int, Metrics] = {}
        stacked = [task for group, tasks in work if group.stacked for task in tasks]
        for measured in self._working().run(stacked):
            found.update(measured)
        # A user's own learner may share what is not made for threads, torch's generator for one.
        for task in (task for group, tasks in work if not group.stacked for task in tasks):
            found.update(task())
        asked = range(len(self._learners)) if peers is None else peers
        self._refuse_diverged([place for place in asked if not isfinite(found[place].loss)])
        return tuple(found[place] for place in asked)

    def _refuse_diverged(self, suspects: Sequence[int]) -> None:
        """Name the first of some peers whose values are no numbers any more.

        Averaging looks at what is shared; what is not would go on as NaN, unsaid. A loss too large for
        its type, with values that are finite, is the user's to see.
        """
        if suspects:
            for group in self._groups:
                group.publish()
        for place in suspects:
            self._learners[place].network.check_whole()

    def _working(self) -> Workers:
        if self._workers is None:
            self._workers = Workers(self._threads)
        return self._workers


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else nan


def _device(name: str | torch.device | None) -> torch.device | None:
    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"unknown device {str(name)!r}: say cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            f"device {str(name)!r}: this torch sees no such device; leave it out for the CPU"
        )
    return device
