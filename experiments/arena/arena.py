"""The arena: simulates a swarm in one process, whose peers train, average and are tested round by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gossamer import __version__
from gossamer.errors import hint_arguments

from ...models import (
    Callback,
    CallbackList,
    Gain,
    Learner,
    LoneTwin,
    Metrics,
    ModelError,
    PeerCountAware,
    Progress,
    find_device,
    measure_gain,
    networks_by_model,
    training_apart,
)
from ...models.stack import (
    NO_SAMPLES,
    Group,
    GroupSpec,
    LoopGroup,
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
from ...peer import MatchedStore, PeerError, load_checkpoint, save_checkpoint
from .lockstep import Averager, ExactMean, Gossip, Mixing, Robust, Steady

if TYPE_CHECKING:  # heavy imports, needed only with `wire`, `shard` or `sharing`
    from .events import Lockstep, Wire, WiredAverager
    from .shards import Shard
    from .sharing import AutoSharing


@dataclass(frozen=True)
class Round:
    """Training and test metrics of one round, one entry per peer.

    index: the number of the round, from 1.
    training: measured while training. tests: of the peers' test samples; empty if the round was not
    tested. gains: what peers gain by taking part, one entry per peer with a lone twin. stopped_by: the class
    of the callback that made this round the last; empty if none did.
    """

    index: int
    training: tuple[Metrics, ...]
    tests: tuple[Metrics, ...]
    gains: tuple[Gain, ...] = ()
    stopped_by: str = ""

    @property
    def accuracy(self) -> float:
        """The mean over peers of the accuracy on their own test samples; NaN if the round was not tested.

        Peers without test samples are left out. Regression has no accuracy: use `loss`.
        """
        return _mean([test.accuracy for test in self.tests if test.samples])

    @property
    def loss(self) -> float:
        """The mean over peers of the loss per test sample; peers without test samples are left out."""
        return _mean([test.mean_loss for test in self.tests if test.samples])


def frame(rounds: Iterable[Round], peers: Sequence[str] | None = None) -> Any:
    """Run rounds, and return their tests as a pandas DataFrame.

        frame(Arena(learners).run(30)).groupby("round")["accuracy"].mean()

    It has a row for every test of a peer, with the columns `round`, `peer`, `accuracy`, `loss` and one for
    every named metric. peers: their names; their numbers if left out.
    """
    import pandas as pd

    return pd.DataFrame(
        {
            "round": each.index,
            "peer": number if peers is None else peers[number],
            "accuracy": test.accuracy,
            "loss": test.mean_loss,
            **test.values,
        }
        for each in rounds
        for number, test in enumerate(each.tests)
    )


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
        How many times a learner trains on `local_samples` samples in a round, before values are averaged.
    weights
        The weight of each learner in averages (its number of samples, for example); by default all are equal.
    test_every
        Rounds from one test to the next. The last round is always tested.
    mixing
        How peers average: `ExactMean()`, the default, gives all peers of a partial model its exact mean;
        `Gossip(graph)` lets neighbours exchange values a few times; `Server()` averages as a server would.
    device
        The torch device of the stacks, such as "cuda"; by default the networks' own device. If it is another
        device, values are copied back to the networks after each round.
    threads
        Threads that train peers in parallel; by default one per core (one in a multiprocessing worker
        process; with `shard`, ranks share the cores). The result does not depend on it.
    memory
        Bytes that the arena may use; by default the free memory. If more is needed, the constructor raises
        ModelError naming the largest item; `needs()` lists them all.
    stores
        A `MatchedStore` for each learner, for partial models whose peers have layers of different widths.
        Stores map each peer's values to a common width, at which the model is averaged. Not supported with
        `device`.
    sharing
        `AutoSharing()` lets the swarm decide by itself which cells it shares, and with whom; the learners'
        slices are replaced, unless it has `keep_models`. Cells that only a group shares are averaged among
        its peers as if `Gossip(…)` linked all of them. Not supported with `wire`, `stores` or `device`.
    wire
        How values change on the way from peer to peer: rounded, compressed or skipped, as in
        `Wire(compress="int8")`. Peers then run the same gossip code as live peers instead of one matrix
        product, and `arena.wire_simulation` counts bytes. Needs `mixing=Gossip(…)` or `Server()`; not
        supported with `device`.
    twins
        The indices of learners that get a lone twin, which trains alone: `Round.gains` then tells what these
        peers gain by taking part. The peers' own results do not change. See gossamer.models.LoneTwin.
    shard
        Which peers of a larger swarm the learners are, if it is divided among several processes; see
        shards.py. `mixing` is that of the whole swarm; all else is of these learners only. Not supported
        with `wire`, `stores` or `sharing`.
    """

    @hint_arguments
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
        shard: Shard | None = None,
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
        if isinstance(mixing, Steady | Robust) and wire is None:
            kind = type(mixing).__name__
            raise ModelError(f"{kind}(…) is simulated message by message: add wire=Wire()")
        if threads is not None and threads < 1:
            raise ModelError(f"{threads} threads: an arena needs at least one")
        self._learners = list(learners)
        # Before `sharing` holds samples out for its decisions: a peer that trains alone would use them too.
        options = {"every": every, "device": device, "threads": threads}
        self.twins = Twins([learners[index] for index in twins], **options) if twins else None
        self.sharing = sharing
        if sharing is not None:
            if wire is not None or stores or device is not None:
                raise ModelError(
                    "`sharing` cannot be combined with `wire`, `stores` or `device`: leave these out"
                )
            sharing.start(self._learners, mixing or ExactMean())
        if shard is not None and (wire is not None or stores or sharing is not None):
            raise ModelError(
                "`shard` cannot be combined with `wire`, `stores` or `sharing`: leave these out"
            )
        self._shard = shard
        count = len(self._learners) if shard is None else shard.peers
        for learner in self._learners:
            if isinstance(learner, PeerCountAware):  # in an arena, every peer sees all the others
                learner.peers_seen = lambda: count
        self._every, self._test_every = every, test_every
        ranks_here = 1 if shard is None else shard.on_machine
        self._threads = threads or max(1, available_cores() // ranks_here)
        self._device = None if device is None else find_device(device)
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
        self._needs.check_fits(
            memory if memory is not None else free_memory(stack_device) // ranks_here
        )
        self._mixing, self._weights, self._stores = mixing or ExactMean(), weights, stores or ()
        self._form_groups(specs)
        if device is not None and (common := self._averager.common_width_models):
            raise ModelError(
                f"partial model {common[0]!r} is averaged at a common width, which is not supported with "
                "`device`: leave out `device`"
            )
        self._workers: Workers | None = None
        self._restored_rounds = 0
        """How many rounds a restored state has behind it; the next `run` begins after them."""
        self._round = 0

    def renew(self) -> None:
        """Stack the learners anew, after they were given other samples or slices."""
        if self.twins is not None:
            raise ModelError("twins cannot be given other samples or slices: build a new Arena")
        self._renew()

    def _renew(self) -> None:
        """Stack the learners anew, and let the peers of groups average as if all were neighbours."""
        if self.sharing is not None and isinstance(self._mixing, Gossip):
            models = networks_by_model([learner.network for learner in self._learners])
            groups = self.sharing.assignment.models_of_formed_groups(models)
            self._mixing = replace(self._mixing, complete=groups)
        self._form_groups(group_learners(self._learners), self._averager.step)

    def _form_groups(self, specs: Sequence[GroupSpec], step: int = 0) -> None:
        """Stack the learners in groups that can be trained together.

        step: how often the learners have been averaged, which determines the graph of the next exchange.
        """
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
            shard=self._shard,
        )

    def __repr__(self) -> str:
        """Return how many learners were stacked, in how many stacks, and the memory that they need."""
        stacks = [group for group in self._groups if group.stacked]
        stacked = sum(len(group.indices) for group in stacks)
        rest = len(self._learners) - stacked
        return (
            f"Arena({stacked} learners in {len(stacks)} stack{'s' * (len(stacks) != 1)}"
            f"{f', {rest} one by one' if rest else ''}; {self._needs})"
        )

    def needs(self) -> MemoryNeeds:
        """Return the memory that this arena needs, item by item."""
        return self._needs

    def one_by_one(self) -> list[str]:
        """Return sentences that say which learners are not stacked, why, and what their training has cost."""
        return [
            f"{len(group.indices)} of {len(self._learners)} peers train one by one ({group.reason}), which "
            f"took {group.seconds:.1f} s of processor time"
            for group in self._groups
            if isinstance(group, LoopGroup) and group.reason != NO_SAMPLES
        ]

    @property
    def mixing(self) -> Mixing:
        """How peers average now; with `sharing`, it changes when groups form."""
        return self._mixing

    @property
    def wire_simulation(self) -> Lockstep | None:
        """The peers' gossipers and the traffic that they sent, by partial model; None without `wire`."""
        return None if self._wired is None else self._wired.lockstep

    def run(self, rounds: int, callbacks: Sequence[Callback] = ()) -> Iterator[Round]:
        """Train and average `rounds` times, yielding after each; stop iterating to stop early.

        Learners may be read between two rounds. Between rounds only in-place changes of their networks,
        optimizers or rates take effect; replaced objects are picked up at the next `run()`.

        After `restore`, `run(30)` continues with the round after that of the state, up to round 30.

        callbacks: objects that follow the run, and may stop it; see gossamer.models.Callback. Not with
            `shard`.
        """
        first, self._restored_rounds = self._restored_rounds + 1, 0
        callback_list = CallbackList(callbacks)
        if callback_list and self._shard is not None:
            raise ModelError("`callbacks` cannot be combined with `shard`: leave out one of them")
        self.refresh()
        stop = callback_list.start(Progress(first - 1, rounds, self._learners))
        with callback_list.ending():
            for index in range(first, 0 if stop else rounds + 1):  # no rounds if stopped
                training = self.train_and_average()
                if callback_list:
                    self.write_back()
                trained = self._by_name(training) if callback_list else {}
                progress = Progress(index, rounds, self._learners, trained)
                stop = callback_list.round(progress)
                tested = index % self._test_every == 0 or index == rounds or stop
                tests = self.test() if tested else ()
                gains: tuple[Gain, ...] = ()
                if self.twins is not None:
                    self.twins.train()
                    if tested:
                        self.write_back()  # gains are measured with the learners' own values
                        gains = self.twins.gains()
                self.write_back()  # after tests, which may recompute statistics of batch norm
                if tested and callback_list:
                    by_name = self._by_name(tests)
                    stop = callback_list.test(replace(progress, tests=by_name)) or stop
                self._round = index
                yield Round(index, training, tests, gains, callback_list.stopped_by)
                if stop:
                    return

    def _by_name(self, metrics: Sequence[Metrics]) -> dict[str, Metrics]:
        """Return metrics of all learners by the names of their peers."""
        names = (learner.network.peer for learner in self._learners)
        return dict(zip(names, metrics, strict=True))

    def state(self) -> dict[str, Any]:
        """Return all that `restore` needs to continue, bit for bit; call it between two rounds of `run`.

        It consists of numbers, text, lists, dicts and tensors; `save` writes it to a file. Raises ModelError
        for an arena with `wire`, `stores`, `sharing` or `shard`, whose state is not in the learners alone.
        """
        self._check_resumable()
        return {
            "round": self._round,
            "peers": {learner.network.peer: learner_state(learner) for learner in self._learners},
            "averager": self._averager.state(),
            "twins": None if self.twins is None else self.twins.state(),
            "torch": torch.get_rng_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, in an arena that was built in the same way.

        Raises ModelError, which names the difference, if the learners are not the same.
        """
        self._check_resumable()
        peers, names = state["peers"], [learner.network.peer for learner in self._learners]
        if [*peers] != names:
            raise ModelError(
                f"the state has the peers {', '.join(peers):.80}, the arena {', '.join(names):.80}: build "
                "the same learners in the same order"
            )
        if (state["twins"] is None) != (self.twins is None):
            raise ModelError("the state and the arena differ in `twins`: build the same arena")
        for learner in self._learners:
            restore_learner(learner, peers[learner.network.peer])
        self._averager.restore(state["averager"])
        if self.twins is not None:
            self.twins.restore(state["twins"])
        torch.set_rng_state(state["torch"])
        self._restored_rounds = self._round = int(state["round"])

    def save(self, path: str | Path) -> None:
        """Write the arena's state to a file, without pickle; see `state`."""
        save_checkpoint(Path(path), {"arena": self.state(), "gossamer": __version__})

    def load(self, path: str | Path) -> None:
        """Continue from a file that `save` wrote; see `restore`."""
        self.restore(read_arena_state(Path(path))["arena"])

    def _check_resumable(self) -> None:
        """Raise ModelError if some of the arena's state is outside the learners, where it is not saved."""
        parts = {
            "wire": self._wired, "stores": self._stores, "sharing": self.sharing, "shard": self._shard,
        }  # fmt: skip
        if given := [name for name, value in parts.items() if value]:
            raise ModelError(
                f"an arena with `{given[0]}` cannot be saved and continued: leave out `{given[0]}`, or run "
                "all rounds at once"
            )

    def train_and_average(self) -> tuple[Metrics, ...]:
        """Train and average once; with `sharing`, also decide what is shared from now on."""
        if self.sharing is not None:
            self.sharing.before_training()
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

    def refresh(self) -> None:
        """Copy into the stacks the tensors that were replaced in learners; `run` does this first."""
        for group in self._groups:
            group.refresh()

    def stacked_values(self) -> Tensor | None:
        """Return the parameters of all learners, one row each, if they all are the rows of one stack.

        The learners share this memory. None if they are not stacked, in several stacks, or not on the CPU.
        """
        group = self._groups[0]
        if len(self._groups) > 1 or not group.stacked or self._device is not None:
            return None
        values = group.locate(0)[0].values
        return values if values.device.type == "cpu" else None

    def write_back(self) -> None:
        """Copy the values of stacks on another device to the learners; `run` does this after every round."""
        for group in self._groups:
            group.write_back()

    def release(self) -> None:
        """Move every network from the stack to memory of its own; call this before copying or pickling it."""
        for group in self._groups:
            group.release()

    def _rows_by_group(self, peers: Sequence[int] | None) -> list[tuple[Group, list[int]]]:
        """Return the groups of these learners (of all, if None), and the learners' rows in each group."""
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
        overflowed while all parameters are finite does not end the run.
        """
        if suspects:
            self.write_back()
        for index in suspects:
            self._learners[index].network.check_all_finite()

    def _thread_pool(self) -> Workers:
        """Return the threads that train and average, which start when they are first needed."""
        if self._workers is None:
            self._workers = Workers(self._threads)
        return self._workers


class _TwinArena(Arena):
    """An arena of lone twins, which may diverge: some networks are stable only because they are averaged."""

    def _refuse_diverged(self, suspects: Sequence[int]) -> None:
        pass


class Twins:
    """The lone twins of some learners, which train in an arena of their own and never average.

    Twins are not rows of the peers' stacks: they would change the size of the stacks, and thus how
    products are rounded; but a swarm with twins must have the same results as one without.

    learners: the learners that get a twin. options: those of `Arena`.
    alone: the twins, in the order of `learners`.
    """

    def __init__(self, learners: Sequence[Learner], **options: Any):
        self._learners = learners
        self.alone = [LoneTwin(learner).alone for learner in learners]
        self._arena = _TwinArena(self.alone, **options)
        self._trainings = 0

    def needs(self) -> MemoryNeeds:
        """Return the memory that the twins need, item by item."""
        return self._arena.needs()

    def train(self, twins: Sequence[int] | None = None) -> None:
        """Train all twins for one round, or only those with these indices among the twins."""
        with training_apart([learner.network for learner in self._learners], self._trainings):
            self._arena.train(twins)
        self._trainings += 1

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"twins": list(map(learner_state, self.alone)), "trainings": self._trainings}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for twin, saved in zip(self.alone, state["twins"], strict=True):
            restore_learner(twin, saved)
        self._trainings = int(state["trainings"])
        self._arena.refresh()

    def gains(self) -> tuple[Gain, ...]:
        """Test each of the learners and its twin, and return how much better the learner is."""
        self._arena.write_back()
        pairs = zip(self._learners, self.alone, strict=True)
        return tuple(measure_gain(learner, alone) for learner, alone in pairs)


def learner_state(learner: Learner) -> dict[str, Any]:
    """Return a learner's values and state, which `restore_learner` takes."""
    return {"network": learner.network.flat.detach().clone(), "learner": learner.state()}


def restore_learner(learner: Learner, saved: Mapping[str, Any]) -> None:
    """Give a learner the values and the state of a saved one; ModelError if its network has another size."""
    values = saved["network"]
    if values.shape != learner.network.flat.shape:
        raise ModelError(
            f"peer {learner.network.peer!r}: the state has {values.numel()} parameters, its network "
            f"{learner.network.flat.numel()}: build the same network"
        )
    learner.network.flat.copy_(values)
    learner.restore(saved["learner"])


def read_arena_state(path: Path) -> dict[str, Any]:
    """Read a file that `Arena.save` or `gossamer simulate --checkpoint` wrote; raises ModelError."""
    try:
        tree = load_checkpoint(path)
    except PeerError as error:
        raise ModelError(str(error)) from None
    if tree is None:
        raise ModelError(f"{path}: there is no such file")
    if "arena" not in tree:
        raise ModelError(f"{path}: is a checkpoint of a live peer, not of a simulation")
    if (version := tree["gossamer"]) != __version__:
        raise ModelError(
            f"{path}: was written by version {version} of gossamer, and this is {__version__}: continue it "
            "with that version, or start again from round 1"
        )
    return tree


def _mean(values: Sequence[float]) -> float:
    """Return the mean; NaN if there are no values."""
    return float(np.mean(values)) if values else nan
