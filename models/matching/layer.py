"""Matching the cells of one part: sweeps over the peers, one optimal assignment per step.

An *atom* is a cell of the fused network. Every cell of a peer goes to an atom, no two of them to the
same one; a step frees one peer's cells and gives them back in the best way, all others standing still.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..errors import ModelError
from .cells import Atoms, Cells, gather
from .options import MatchOptions
from .state import History, MatchState

Ending = Literal["settled", "repeated", "tolerance", "sweep limit"]


@dataclass(frozen=True, eq=False)
class Matched:
    """The outcome for one part.

    assignments
        For each peer the atom of each of its cells. Labels are arbitrary: compare partitions.
    atoms, values
        Sums per atom, and what they read as.
    objective
        The log posterior, up to a constant, after the first pass and after every step since. Under
        `printed` and in streaming there is none: it is that of `set`, as a yardstick, and may fall.
    sweeps, ended
        Passes over the peers after the first, and why there was no further one.
    """

    assignments: tuple[np.ndarray, ...]
    atoms: Atoms
    values: np.ndarray
    objective: tuple[float, ...]
    sweeps: int
    ended: Ending

    @property
    def matched(self) -> int:
        """Cells that share their atom with another peer's."""
        return int(sum((self.atoms.counts[atoms] > 1).sum() for atoms in self.assignments))


def match(
    peers: Sequence[Cells],
    options: MatchOptions | None = None,
    *,
    mean: float | np.ndarray = 0.0,
    seed: int | np.random.Generator = 0,
    history: History | None = None,
) -> Matched:
    """Match the cells of any number of peers, whatever the number of cells of each.

    mean
        The prior mean, one number or one per column.
    seed
        Orders the peers within a sweep. The order alone can move a fused network's accuracy by a few
        points: fix it, and compare methods under the same one.
    history
        The outcome of earlier steps, for streaming; see `Stream`.
    """
    options = options or MatchOptions()
    _check(peers, history)
    columns = peers[0].values.shape[1]
    centre = np.broadcast_to(np.asarray(mean, dtype=np.float64), (columns,))
    state = MatchState(peers, options, centre, history)
    rng = np.random.default_rng(seed)
    # The widest first: the others then find atoms to match instead of making their own.
    for peer in sorted(range(len(peers)), key=lambda j: -len(peers[j].values)):
        state.step(peer)
    trace = [state.objective()]
    seen = {state.partition()}
    sweeps, ended = 0, "sweep limit"
    while sweeps < options.sweeps:
        before, changed = trace[-1], False
        for peer in rng.permutation(len(peers)):
            changed |= state.step(int(peer))
            trace.append(state.objective())
        sweeps += 1
        if not changed:
            ended = "settled"
            break
        partition = state.partition()
        if partition in seen:
            ended = "repeated"
            break
        seen.add(partition)
        joint = options.kind != "printed" and history is None
        if joint and trace[-1] - before <= options.tolerance * (1 + abs(before)):
            ended = "tolerance"
            break
    assignments = state.labels()
    # Added up afresh: thousands of steps that add and subtract leave round-off behind.
    size = 1 + max(int(atoms.max()) for atoms in assignments)
    atoms = gather(peers, assignments, max(size, len(history.atoms) if history else 0))
    if history is not None:
        atoms = history.atoms.plus(atoms)
    values = atoms.read(options.prior_precision, centre, shrink=options.shrink)
    return Matched(assignments, atoms, values, tuple(trace), sweeps, ended)


def _check(peers: Sequence[Cells], history: History | None) -> None:
    if not peers:
        raise ModelError("matching: no peers were given")
    columns = peers[0].values.shape[1]
    for j, peer in enumerate(peers):
        if peer.values.shape[1] != columns:
            raise ModelError(
                f"matching: the cells of peer {j} have {peer.values.shape[1]} columns, "
                f"those of peer 0 have {columns}"
            )
        if (peer.group is None) != (peers[0].group is None):
            raise ModelError("matching: give group labels to every peer or to none")
    if history is None:
        return
    if history.uses.shape != (len(peers), len(history.atoms)):
        raise ModelError(
            f"matching: the history knows {history.uses.shape[0]} peers, {len(peers)} were given"
        )
    if history.atoms.sums.shape[1] != columns:
        raise ModelError(
            f"matching: the history's atoms have {history.atoms.sums.shape[1]} columns, "
            f"the cells have {columns}"
        )
    if history.step < 1 or (history.uses >= history.step).any():
        raise ModelError(
            "matching: an atom was used more often than there were steps before this one"
        )
