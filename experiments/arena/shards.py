"""One simulation over several processes: which process holds which peers, and what the processes exchange.

A *rank* is one of these processes, which are connected by torch.distributed (gloo, over TCP). torchrun starts
them, on one machine or on several; `launch` is torchrun for this machine. Every rank builds, trains and tests
its own peers only. All ranks know the graph and who has which partial model, so each computes by itself which
rows of values it has to send to which rank: see `plan_exchange`. Rank 0 also writes the results.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from gossamer import __version__
from gossamer.errors import GossamerError

from ...models import Metrics, ModelError, SlicedNetwork, networks_by_model
from ..cli import console
from ..config.tables import Config, ConfigError, flat_keys

if TYPE_CHECKING:
    import networkx as nx
    from scipy.sparse import csr_array

    from .arena import Round

T = TypeVar("T")

FAILED = 2
"""The exit code of ranks that have ended because one of them failed."""


class RankError(GossamerError):
    """A rank has failed or died; the message names it."""


class _RankLost(RankError):
    """Another rank has closed its connection, or torchrun ends this rank; which rank failed is not known."""


# --- rows sent between ranks --------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """What one rank sends and receives before it multiplies its rows of values by its rows of a matrix.

    sends: for every rank, the numbers (among this rank's own rows) of the rows that this rank sends to it.
    receives: how many rows this rank receives from every rank; they arrive in ascending order.
    total_rows: how many rows all ranks together receive.
    matrix: this rank's rows of the matrix. Its columns are this rank's own rows, then those received.
    """

    sends: list[np.ndarray]
    receives: list[int]
    total_rows: int
    matrix: csr_array


def plan_exchange(matrix: csr_array, rank_of: np.ndarray, rank: int, ranks: int) -> Exchange:
    """Plan the product of a square matrix with rows of values that several ranks hold.

    A row of values is sent, once, to every other rank that has a nonzero entry in the row's column.

    rank_of: for every row, the rank that has it: both the row of values and the row of the matrix.
    """
    from scipy.sparse import csr_array

    entries = matrix.tocoo()
    nonzero = entries.data != 0
    row, column, data = entries.row[nonzero], entries.col[nonzero], entries.data[nonzero]
    count = len(rank_of)
    number_on_rank = np.zeros(count, dtype=np.int64)  # of each row, among those of its rank
    for other in range(ranks):
        rows = np.flatnonzero(rank_of == other)
        number_on_rank[rows] = np.arange(len(rows))
    is_remote = rank_of[row] != rank_of[column]
    # Every triple (rank that needs a row, rank that has it, row) once, sorted, and encoded in one integer.
    needed = np.unique(
        (rank_of[row[is_remote]] * ranks + rank_of[column[is_remote]]) * count + column[is_remote]
    )
    (target, source), sent = np.divmod(needed // count, ranks), needed % count
    sends = [number_on_rank[sent[(source == rank) & (target == other)]] for other in range(ranks)]
    received = sent[target == rank]
    own = np.flatnonzero(rank_of == rank)
    local_column = np.full(count, -1, dtype=np.int64)
    local_column[own] = np.arange(len(own))
    local_column[received] = len(own) + np.arange(len(received))
    is_own = rank_of[row] == rank
    indices = number_on_rank[row[is_own]], local_column[column[is_own]]
    local = csr_array((data[is_own], indices), shape=(len(own), len(own) + len(received)))
    receives = np.bincount(source[target == rank], minlength=ranks).tolist()
    return Exchange(sends, receives, len(needed), local)


# --- ranks ------------------------------------------------------------------------------------------


class RankGroup:
    """Ranks that exchange values with each other: all must call the same methods in the same order.

    rank: the number of this rank among them. count: how many there are.
    group: a group of torch.distributed; all processes if left out.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self._group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)

    def exchange(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send rows, in the order of the ranks that get them, and return the rows received."""
        received = rows.new_empty(sum(receives), rows.shape[1])
        with _lost_connections():
            dist.all_to_all_single(received, rows, list(receives), list(sends), group=self._group)
        return received

    def add(self, values: Tensor) -> None:
        """Replace values by their sum over the ranks."""
        with _lost_connections():
            dist.all_reduce(values, group=self._group)

    def all_gather(self, value: T) -> list[T]:
        """Return the values that the ranks give, in order."""
        values: list[Any] = [None] * self.count
        with _lost_connections():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, value: T) -> list[T] | None:
        """Return the values that the ranks give, in order, on rank 0; None on the others."""
        values: list[Any] | None = [None] * self.count if self.rank == 0 else None
        with _lost_connections():
            dist.gather_object(value, values, group=self._group, group_dst=0)
        return values


@contextmanager
def _lost_connections() -> Iterator[None]:
    """Turn gloo's errors into _RankLost."""
    try:
        yield
    except RuntimeError as error:
        raise _RankLost(str(error)) from error


def ranks_on_this_machine() -> int:
    """Return how many ranks share this machine's memory and cores: 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def join_ranks() -> Iterator[RankGroup]:
    """Connect this process with the other ranks that torchrun has started.

    Only rank 0 prints to the terminal. If a rank fails or dies, all end with exit code 2, and one of them on
    every machine prints the reason: the line of the rank that failed, or the number of the one that died.
    """
    store: Any  # torch's type has no `clone`
    store, rank, count = next(iter(rendezvous("env://")))
    # On a connection of its own, because connecting the ranks may keep that of `store` busy for long.
    notices = _Notices(PrefixStore("gossamer notices", store.clone()), rank, count)
    if rank:
        console.out.quiet = console.err.quiet = True
    signal.signal(signal.SIGTERM, _raise_ended)
    try:
        with _lost_connections():
            dist.init_process_group(
                "gloo", store=PrefixStore("gossamer", store), rank=rank, world_size=count
            )
        yield RankGroup()
        with _lost_connections():
            dist.barrier()  # no rank leaves while others still need its connection
        dist.destroy_process_group()
    except _RankLost:
        notices.end_run()
    except GossamerError as error:
        notices.tell(str(error))
        notices.end_run()
    except Exception as error:
        notices.tell(f"{type(error).__name__}: {error}")
        raise
    finally:
        notices.close()


def _raise_ended(*_: object) -> NoReturn:
    """Handle SIGTERM, which torchrun sends if another rank has died or somebody ends the run."""
    raise _RankLost


class _Notices:
    """Tells ranks why one of them has ended, by keys of the store through which torchrun connects them.

    Every rank increases a counter of its own, a heartbeat, as long as it lives.
    """

    HEARTBEAT = 0.5
    """Seconds between two changes of a rank's counter."""
    SILENCE = 5.0
    """Seconds without a change after which a rank counts as dead."""

    def __init__(self, store: Any, rank: int, count: int):
        self._store, self._rank, self._count = store, rank, count
        self._closed = threading.Event()
        self._store.add(self._counter_key(rank), 1)
        threading.Thread(target=self._beat, name="gossamer heartbeat", daemon=True).start()

    @staticmethod
    def _counter_key(rank: int) -> str:
        return f"beats of {rank}"

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store is gone: the run is over
            while not self._closed.wait(self.HEARTBEAT):
                self._store.add(self._counter_key(self._rank), 1)

    def close(self) -> None:
        """Stop changing this rank's counter."""
        self._closed.set()

    def tell(self, reason: str) -> None:
        """Tell the others why this rank fails, unless another rank has failed before."""
        with suppress(RuntimeError):
            self._store.compare_set(
                "reason", "", f"{reason} (rank {self._rank} of {self._count}, {_host()})"
            )

    def end_run(self) -> NoReturn:
        """Raise RankError on the first rank of this machine that calls this, and end the others silently."""
        # torchrun would end this rank before it knows the reason.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        first, reason = True, "the connection to the other ranks is lost"
        with suppress(RuntimeError):
            reason = self._reason()
            first = self._store.add(f"printed on {_host()}", 1) == 1
        if not first:
            raise SystemExit(FAILED)
        console.err.quiet = False
        raise RankError(reason)

    def _reason(self) -> str:
        """Return why the run has ended: the reason that a rank has stored, or which ranks are silent."""
        before = self._counters()
        until = time.monotonic() + self.SILENCE
        while time.monotonic() < until:
            if self._store.check(["reason"]):
                return self._store.get("reason").decode()
            time.sleep(0.05)
        after = self._counters()
        if dead := [rank for rank in range(self._count) if before[rank] == after[rank]]:
            names = " and ".join(f"rank {rank}" for rank in dead)
            return (
                f"{names} of {self._count} died: killed, or out of memory; look at that machine's log, or "
                "simulate fewer peers"
            )
        return "the ranks were told to end"

    def _counters(self) -> list[int]:
        return [self._store.add(self._counter_key(rank), 0) for rank in range(self._count)]


def _host() -> str:
    return socket.gethostname()


def launch(ranks: int, function: Callable[..., T] | str, *arguments: object) -> list[T]:
    """Start ranks on this machine by torchrun, and return what each returns, in order.

    function: a function of a module, or a program to run. Raises SystemExit if a rank fails: the ranks have
    printed why.
    """
    import logging
    from uuid import uuid4

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Ranks print the cause of a failure in one line; torchrun's own log would hide it.
    logging.disable(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", max_restarts=0,
    )  # fmt: skip
    try:
        results = elastic_launch(config, function)(*arguments)
    except ChildFailedError as error:
        exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if len(exits) == ranks and all(
            code < 0 for code in exits.values()
        ):  # no rank could print why
            raise RankError(
                f"all {ranks} ranks died: killed, or out of memory; simulate fewer peers"
            ) from None
        raise SystemExit(max(FAILED, *exits.values())) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    finally:
        logging.disable(logging.NOTSET)
    return [results[rank] for rank in sorted(results)]


# --- which rank has which peers ---------------------------------------------------------------------


def divide_peers(peers: int, ranks: int, graph: nx.Graph | None) -> np.ndarray:
    """Return the rank of every peer: equally many peers per rank, and few links between ranks."""
    if graph is None:
        return np.arange(peers) * ranks // peers
    from ...topology import partition

    return partition(graph, ranks)


class Shard:
    """The peers of this rank, and what it has to know of the peers on other ranks.

    ranks: all ranks. on_machine: how many of them share this machine's memory and cores.
    rank_of: the rank of every peer. own_peers: the numbers of the peers of this rank, ascending.
    models: the partial models that more than one peer has, each with the numbers of all its peers.
    sizes: how many coordinates each partial model has.

    networks: those of `own_peers`, in order.
    """

    def __init__(self, ranks: RankGroup, rank_of: np.ndarray, networks: Sequence[SlicedNetwork]):
        self.ranks, self.rank_of = ranks, rank_of
        self.rank, self.on_machine = ranks.rank, ranks_on_this_machine()
        self.own_peers: list[int] = np.flatnonzero(rank_of == self.rank).tolist()
        # By model: the peers of one rank that have it, its schema and its size.
        own_models: dict[str, tuple[list[int], Any, int]] = {}
        for model, indices in networks_by_model(networks).items():
            slicing = networks[indices[0]].slicing
            peers = [self.own_peers[index] for index in indices]
            own_models[model] = peers, slicing.schema(model), len(slicing.coordinates(model))
        first: dict[str, tuple[list[int], Any, int]] = {}
        members: dict[str, list[int]] = {}
        for models in ranks.all_gather(own_models):
            for model, (peers, schema, size) in models.items():
                first_peers, expected, _ = first.setdefault(model, (peers, schema, size))
                if schema != expected:
                    raise ModelError(
                        f"model {model!r} is not the same on the peers {first_peers[0]} and {peers[0]}: give "
                        "both the same cells of it"
                    )
                members.setdefault(model, []).extend(peers)
        shared = sorted(model for model, peers in members.items() if len(peers) > 1)
        self.models = {model: sorted(members[model]) for model in shared}
        self.sizes = {model: first[model][2] for model in shared}

    @property
    def peers(self) -> int:
        """The number of peers on all ranks."""
        return len(self.rank_of)

    def all_by_peer(self, values: Sequence[T]) -> list[T]:
        """Return the values of all peers, in order; values: those of this rank's peers."""
        return self._in_order(self.ranks.all_gather(values))

    def by_peer_on_first(self, values: Sequence[T]) -> list[T] | None:
        """Return the values of all peers, in order, on rank 0; None on the others."""
        gathered = self.ranks.gather(values)
        return None if gathered is None else self._in_order(gathered)

    def gather_round(self, round: Round) -> Round:
        """Return a round with the metrics of all peers on rank 0; on the others, with those of their own."""
        metrics = round.training, round.tests
        arrays = [np.array([(m.loss, m.correct, m.samples) for m in each]) for each in metrics]
        gathered = self.ranks.gather((*arrays, round.gains))
        if gathered is None:
            return round
        training, tests, gains = zip(*gathered, strict=True)
        return replace(
            round,
            training=self._metrics(training),
            tests=self._metrics(tests),
            gains=tuple(sorted(chain.from_iterable(gains), key=lambda gain: int(gain.peer))),
        )

    def _metrics(self, by_rank: Sequence[np.ndarray]) -> tuple[Metrics, ...]:
        if not len(by_rank[0]):  # the round was not tested
            return ()
        rows = self._in_order([rows.tolist() for rows in by_rank])
        return tuple(Metrics(loss, correct, int(samples)) for loss, correct, samples in rows)

    def _in_order(self, by_rank: Sequence[Sequence[T]]) -> list[T]:
        peers = np.argsort(self.rank_of, kind="stable")
        values = list(chain.from_iterable(by_rank))
        ordered: list[Any] = [None] * len(peers)
        for peer, value in zip(peers.tolist(), values, strict=True):
            ordered[peer] = value
        return ordered


# --- configs ----------------------------------------------------------------------------------------


def require_agreement(ranks: RankGroup, facts: Mapping[str, object], source: str) -> None:
    """Raise ConfigError, which names the first key that differs, unless all ranks have the same facts."""
    expected, *_ = by_rank = ranks.all_gather(dict(facts))
    for rank, actual in enumerate(by_rank):
        for key in chain(expected, actual):
            first, other = expected.get(key), actual.get(key)
            if first != other:
                raise ConfigError(
                    f"{source}: {key} is {first} on rank 0 and {other} on rank {rank}: start all ranks "
                    "with the same config, data and version of gossamer"
                )


def facts_of(config: Config) -> dict[str, object]:
    """Return what must be equal on all ranks: the versions, and every key of the config."""
    keys = flat_keys(config.model_dump(mode="json"))
    return {
        "the version of gossamer": __version__,
        "the version of torch": torch.__version__,
        **{f"key {key!r}": value for key, value in keys.items()},
    }
