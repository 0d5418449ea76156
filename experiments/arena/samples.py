"""Samples of all peers in one tensor, and the order in which each peer sees its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...models import SgdLearner
from . import kernel


class Pool:
    """Tensors of many peers as row ranges of one; `firsts[i]` is where those of peer i begin.

    Peers that were given the same tensor, or views of one, share its rows. Otherwise rows are copied
    together once, and `views` are what the peers may hold instead of their own copies.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device):
        self.counts = [len(tensor) for tensor in tensors]
        base = _common_base(tensors)
        if base is not None:
            width = max(base[0].numel(), 1) if len(base) else 1
            self.rows = base.to(device)
            self.firsts = [int(tensor.storage_offset()) // width for tensor in tensors]
        else:
            self.rows, self.firsts = _copied(tensors, device)

    def view(self, index: int) -> Tensor:
        """The rows of one peer."""
        first = self.firsts[index]
        return self.rows[first : first + self.counts[index]]


def _common_base(tensors: Sequence[Tensor]) -> Tensor | None:
    """One tensor over the memory that all of them share, if they do and whole rows fit."""
    first = tensors[0]
    storage = first.untyped_storage()
    width = first[0].numel() if len(first) else 0
    if not width:
        return None
    for tensor in tensors:
        fits = tensor.is_contiguous() and tensor.storage_offset() % width == 0
        if not fits or tensor.untyped_storage().data_ptr() != storage.data_ptr():
            return None
        if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
            return None
    rows = storage.nbytes() // (first.element_size() * width)
    return first.as_strided((rows, *first.shape[1:]), (width, *first.stride()[1:]), 0)


def _copied(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[int]]:
    places: dict[tuple[int, int, tuple[int, ...]], int] = {}
    firsts: list[int] = []
    total = 0
    fresh: list[Tensor] = []
    for tensor in tensors:
        key = (tensor.data_ptr(), len(tensor), tensor.stride())
        if key not in places:
            places[key] = total
            total += len(tensor)
            fresh.append(tensor)
        firsts.append(places[key])
    rows = tensors[0].new_empty((total, *tensors[0].shape[1:]), device=device)
    at = 0
    for tensor in fresh:
        rows[at : at + len(tensor)] = tensor.to(device)
        at += len(tensor)
    return rows, firsts


class Shelf:
    """Inputs and labels of all learners of a group, for training or for testing."""

    def __init__(self, sets: Sequence[tuple[Tensor, Tensor]], device: torch.device):
        self.inputs = Pool([inputs for inputs, _ in sets], device)
        self.labels = Pool([labels for _, labels in sets], device)

    def pair(self, index: int) -> tuple[Tensor, Tensor]:
        """What one learner holds, as views."""
        return self.inputs.view(index), self.labels.view(index)


def draw(learners: Sequence[SgdLearner], count: int) -> Tensor:
    """The next `count` of each learner's own sample indices: those that its own `train` would take.

    The learners' orders and generators move on with it, so that training can go on without the arena.
    """
    chosen, orders = kernel.draw(
        [learner.order for learner in learners],
        [learner.generator for learner in learners],
        [len(learner.samples[1]) for learner in learners],
        count,
    )
    for learner, order in zip(learners, orders, strict=True):
        learner.order = order
    return chosen


def batches(stretch: int, batch: int, stretches: int) -> list[tuple[int, int]]:
    """Where each gradient step begins and ends; batches end with their stretch."""
    spans = [(first, min(first + batch, stretch)) for first in range(0, stretch, batch)]
    return [(k * stretch + a, k * stretch + b) for k in range(stretches) for a, b in spans]
