"""The memory that stacked training and averaging will need, before they start, and what is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import AssociativeLearner, Learner, ModelError, SgdLearner
from . import plan
from .groups import Kind

WORK = "work space"
BLOCK_BYTES = 1 << 20
"""One block of averaging, peers × coordinates: read, mixed and written back while in cache."""


@dataclass(frozen=True)
class Term:
    """One kind of memory. `held`: bytes of it that are taken already, by the learners themselves."""

    name: str
    bytes: int
    held: int = 0


@dataclass(frozen=True)
class Needs:
    """All that a swarm needs; `str()` of it is one line."""

    terms: tuple[Term, ...]

    @property
    def total(self) -> int:
        """Bytes of all terms."""
        return sum(term.bytes for term in self.terms)

    @property
    def more(self) -> int:
        """Bytes that are not taken yet."""
        return sum(max(term.bytes - term.held, 0) for term in self.terms)

    @property
    def largest(self) -> Term:
        """The term with the most bytes."""
        return max(self.terms, key=lambda term: term.bytes)

    def __str__(self) -> str:
        parts = [
            f"{term.name} {amount(term.bytes)}"
            for term in sorted(self.terms, key=lambda term: -term.bytes)
            if term.bytes
        ]
        return f"memory: {amount(self.total)} ({', '.join(parts)})"

    def refuse_beyond(self, room: int | None) -> None:
        """Raise, naming the largest term, if what is still needed does not fit into `room` bytes."""
        if room is None or self.more <= room:
            return
        raise ModelError(
            f"this swarm needs {amount(self.more)} more memory and {amount(room)} are free; the largest "
            f"term is {self.largest.name} with {amount(self.largest.bytes)}: take fewer peers, a smaller "
            "network or fewer samples"
        )


def amount(count: float) -> str:
    """Return a number of bytes with a unit: 1.5 kB, 2.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def estimate(
    *,
    peers: int,
    parameters: int,
    slots: int = 0,
    sample_bytes: int = 0,
    test_bytes: int = 0,
    index_bytes: int = 0,
    threads: int = 1,
    step_values: int = 0,
    element: int = 4,
    held: bool = False,
) -> Needs:
    """Return the needs of one group of alike peers, before any of them is built.

    slots: values that the optimizer keeps per parameter (momentum 1, Adam 2). sample_bytes,
    test_bytes: of all peers together. index_bytes: of the coordinates of partial models that do not
    follow each other without a gap. step_values: activations of one step of one peer. held: whether
    the learners exist, with values and samples of their own.
    """
    values = peers * parameters * element
    together = plan.peers_per_task(peers, parameters, step_values)
    task = together * (3 * parameters + 2 * step_values) * element
    work = threads * (task + 3 * BLOCK_BYTES)
    return Needs(
        (
            Term(f"parameters of {peers:,} peers", values, values if held else 0),
            Term("optimizer state", slots * values),
            Term("training samples", sample_bytes, sample_bytes if held else 0),
            Term("test samples", test_bytes, test_bytes if held else 0),
            Term("coordinates of partial models", index_bytes, index_bytes if held else 0),
            Term(WORK, work),
        )
    )


def combine(needs: Iterable[Needs]) -> Needs:
    """Return the needs of several groups; work space is used by one after the other."""
    terms: dict[str, Term] = {}
    for term in (term for need in needs for term in need.terms):
        old = terms.get(term.name, Term(term.name, 0))
        most = max(old.bytes, term.bytes) if term.name == WORK else old.bytes + term.bytes
        terms[term.name] = Term(term.name, most, old.held + term.held)
    return Needs(tuple(terms.values()))


def needs_of(
    kinds: Sequence[Kind], learners: Sequence[Learner], threads: int, moved: bool
) -> Needs:
    """Return the needs of learners that exist. `moved`: the stack is on another device, nothing is shared."""
    return combine(
        _of_kind(kind, [learners[place] for place in kind.places], threads, moved) for kind in kinds
    )


def _of_kind(kind: Kind, learners: Sequence[Learner], threads: int, moved: bool) -> Needs:
    network = learners[0].network
    step_values = 0
    train: list[Tensor] = []
    test: list[Tensor] = []
    index: dict[int, int] = {}
    for learner in learners:
        if isinstance(learner, SgdLearner | AssociativeLearner):
            own = learner.samples
            train += [own] if isinstance(own, Tensor) else own
            test += learner.held_out
        slicing = learner.network.slicing
        for model in slicing.owners:
            where = slicing.where(model)
            if not isinstance(where, slice):
                index[id(where)] = where.nbytes
    if isinstance(learners[0], SgdLearner):
        cells = sum(part.cells for part in network.slicing.anatomy.parts)
        step_values = 2 * learners[0].batch * cells
    needs = estimate(
        peers=len(learners),
        parameters=len(network.flat),
        slots=len(kind.rule.state_names) if kind.rule is not None else 0,
        sample_bytes=_unique_bytes(train),
        test_bytes=_unique_bytes(test),
        index_bytes=sum(index.values()),
        threads=threads,
        step_values=step_values,
        element=network.flat.element_size(),
        held=True,
    )
    if moved:
        return Needs(tuple(Term(term.name, term.bytes) for term in needs.terms))
    return needs


def _unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory behind some tensors, what they share counted once."""
    found = {
        (tensor.data_ptr(), tensor.numel()): tensor.numel() * tensor.element_size()
        for tensor in tensors
    }
    return sum(found.values())


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can still be taken on a device; None where it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    rooms = [room for room in (_meminfo(), _control_group()) if room is not None]
    return min(rooms, default=None)


def _meminfo() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text("utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return None


def _control_group() -> int | None:
    """What a container is still allowed to take; page cache, which can be dropped, counts as free."""
    folder = Path("/sys/fs/cgroup")
    try:
        most = (folder / "memory.max").read_text("utf-8").strip()
        used = int((folder / "memory.current").read_text("utf-8"))
        lines = (folder / "memory.stat").read_text("utf-8").splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return None
    return None if most == "max" else max(int(most) - used + cached, 0)
