"""Aligning by weights: coordinate ascent, one optimal assignment per slice of a part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from ..anatomy import Anatomy
from ..network import SlicedNetwork
from .rows import blocks, flat_order


def by_weights(
    network: SlicedNetwork,
    values: np.ndarray,
    known: np.ndarray,
    models: Sequence[str],
    parts: Sequence[int],
    passes: int,
) -> tuple[np.ndarray, list[float]]:
    """Raise Σ own · reference over known coordinates until no slice can be permuted to more.

    Returns for every cell the one that takes its place, and the sum before and after every pass.
    """
    slicing = network.slicing
    anatomy = slicing.anatomy
    flat = network.flat.double().cpu().numpy()
    target = np.where(known, values, 0.0)
    slices = [
        anatomy.firsts[part] + slicing.cells[model][part]
        for part in parts
        for model in models
        if len(slicing.cells[model][part])
    ]
    stay = np.arange(int(anatomy.firsts[-1]))
    agreement = [float(flat @ target)]
    take = _first_pass(anatomy, flat, target, slices, stay)
    mine = flat[flat_order(anatomy, take)]
    if mine @ target <= agreement[0]:  # it looked at few columns, and they led astray
        take, mine = stay, flat
    agreement.append(float(mine @ target))
    everything = np.ones(len(stay), dtype=bool)
    for _ in range(passes):
        for cells in slices:
            trial = _best(anatomy, take, cells, mine, target, everything)
            moved = flat[flat_order(anatomy, trial)]
            if moved @ target > mine @ target:
                take, mine = trial, moved
        agreement.append(float(mine @ target))
        if agreement[-1] == agreement[-2]:
            break
    return take, agreement


def _first_pass(
    anatomy: Anatomy,
    flat: np.ndarray,
    target: np.ndarray,
    slices: Sequence[np.ndarray],
    stay: np.ndarray,
) -> np.ndarray:
    """Slice after slice, comparing only columns whose other end is in its place already."""
    settled = np.ones(len(stay), dtype=bool)
    settled[np.concatenate([stay[:0], *slices])] = False
    take, mine = stay, flat
    for cells in slices:
        take = _best(anatomy, take, cells, mine, target, settled)
        mine = flat[flat_order(anatomy, take)]
        settled[cells] = True
    return take


def _best(
    anatomy: Anatomy,
    take: np.ndarray,
    cells: np.ndarray,
    mine: np.ndarray,
    target: np.ndarray,
    settled: np.ndarray,
) -> np.ndarray:
    """The permutation with one slice assigned anew; unchanged where nothing is gained."""
    score = np.zeros((len(cells), len(cells)))  # [own cell, place]
    for block in blocks(anatomy, cells):
        where = block.where[:, settled[block.others].all(axis=1)]
        score += mine[where] @ target[where].T
    _, best = linear_sum_assignment(-score.T)
    gain = score[best, np.arange(len(cells))].sum() - np.trace(score)
    if gain <= 1e-9 * (1 + np.abs(score).max()):
        return take  # ties are not worth moving for
    trial = take.copy()
    trial[cells] = take[cells[best]]
    return trial
