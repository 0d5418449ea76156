"""Stacked averaging: block by block, gather a partial model's coordinates, mix, put them back.

A block is some coordinates of all peers that implement the model, small enough to stay in cache.
Blocks share nothing, so threads take them as they come, and the result is the same for any number.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...models import SlicedNetwork, check_schema, check_weights, implementers
from . import plan
from .mixing import Mixing, fold
from .shards import Shards
from .stack import Alone, Stack
from .tiles import Tile, as_rows, span, tiles

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Mixer = Callable[[Tensor], Tensor]
"""From a block [members, coordinates] to what its members hold afterwards; one row stands for all."""


class Averager:
    """Averages every partial model of a swarm whose networks lie in stacks.

    elsewhere: those that are averaged by somebody else.
    """

    def __init__(
        self,
        networks: Sequence[SlicedNetwork],
        where: Sequence[tuple[Stack | Alone, int]],
        mixing: Mixing,
        weights: Sequence[float] | None,
        shards: Shards,
        elsewhere: Collection[str] = (),
    ):
        self._networks, self._mixing, self._shards = networks, mixing, shards
        shares = np.array(check_weights(networks, weights), dtype=np.float64)
        shared = {owner: who for owner, who in implementers(networks).items() if len(who) > 1}
        mixing.check(shared, len(networks), weights is not None)
        shared = {owner: who for owner, who in shared.items() if owner not in elsewhere}
        interned: dict[tuple[int, int], list[np.ndarray]] = {}
        self._plans = [
            _Plan(owner, who, networks, where, interned) for owner, who in shared.items()
        ]
        self._weights = {owner: shares[who] for owner, who in shared.items()}
        self._step = 0

    def tasks(self) -> list[list[Callable[[], None]]]:
        """One averaging: lists of tasks, to be done list after list (one list per exchange)."""
        rounds: list[list[Callable[[], None]]] = []
        for work in self._plans:
            matrices, self._weights[work.owner] = self._mixing.matrices(
                work.owner, work.members, self._step, self._weights[work.owner]
            )
            mixers = [self._mean(work)] if matrices is None else _products(work, fold(matrices))
            for place, mixer in enumerate(mixers):
                if len(rounds) <= place:
                    rounds.append([])
                rounds[place] += [
                    lambda w=work, b=block, m=mixer: w.mix(b, m, self._networks)
                    for block in work.blocks
                ]
        self._step += 1
        return rounds

    def _mean(self, work: _Plan) -> Mixer:
        weights = self._weights[work.owner]
        total = self._shards.total(torch.tensor(weights.sum(), dtype=torch.float64))
        shares = torch.from_numpy(weights / float(total)).to(work.like)

        def mean(block: Tensor) -> Tensor:
            # The mean of differences from one peer: equal values average to themselves, exactly.
            base = self._shards.one(block[0])
            return base + self._shards.total(shares @ (block - base))

        return mean


class _Piece:
    """Members in one stack whose model lies at the same coordinates."""

    def __init__(
        self, stack: Stack | Alone, rows: list[int], slots: list[int], where: slice | np.ndarray
    ):
        device = stack.values.device
        self.stack = stack
        self.rows = as_rows(rows, device)
        self.slots = as_rows(slots, device)
        self.tiles = tiles(where)
        self.index = (
            torch.from_numpy(where).to(device)
            if self.tiles is None and isinstance(where, np.ndarray)
            else None
        )


class _Block:
    """Coordinates first … last of a model, and the tiles that they are in every piece."""

    def __init__(self, first: int, last: int, pieces: Sequence[_Piece]):
        self.first, self.last = first, last
        self.tiles: list[list[Tile] | None] = [
            None if piece.tiles is None else span(piece.tiles, first, last) for piece in pieces
        ]


class _Plan:
    """Where one owner's values lie, prepared once."""

    def __init__(
        self,
        owner: str,
        members: list[int],
        networks: Sequence[SlicedNetwork],
        where: Sequence[tuple[Stack | Alone, int]],
        interned: dict[tuple[int, int], list[np.ndarray]],
    ):
        self.owner, self.members = owner, members
        first = networks[members[0]]
        found: dict[tuple[int, object], tuple[slice | np.ndarray, list[int], list[int]]] = {}
        stacks: dict[int, Stack | Alone] = {}
        for slot, member in enumerate(members):
            check_schema(owner, first, networks[member])
            stack, row = where[member]
            stacks[id(stack)] = stack
            place = _interned(networks[member].slicing.where(owner), interned)
            same = (place.start, place.stop) if isinstance(place, slice) else id(place)
            _, rows, slots = found.setdefault((id(stack), same), (place, [], []))
            rows.append(row)
            slots.append(slot)
        self.pieces = [
            _Piece(stacks[which], rows, slots, place)
            for (which, _), (place, rows, slots) in found.items()
        ]
        self.like = self.pieces[0].stack.values[:0, :0]
        coordinates = len(first.slicing.coordinates(owner))
        width = plan.block_width(len(members), coordinates)
        self.blocks = [
            _Block(at, min(at + width, coordinates), self.pieces)
            for at in range(0, coordinates, width)
        ]

    def mix(self, block: _Block, mixer: Mixer, networks: Sequence[SlicedNetwork]) -> None:
        """Gather, mix, check, put back."""
        values = self.like.new_empty(len(self.members), block.last - block.first)
        for piece, tiled in zip(self.pieces, block.tiles, strict=True):
            _gather(piece, tiled, block, values)
        mixed = mixer(values)
        if not bool(torch.isfinite(mixed.sum())):
            self._blame(networks)
        for piece, tiled in zip(self.pieces, block.tiles, strict=True):
            _scatter(piece, tiled, block, mixed)

    def _blame(self, networks: Sequence[SlicedNetwork]) -> None:
        """Name the peer and parameter whose value is not finite, if there is one."""
        for piece in self.pieces:
            if isinstance(piece.stack, Stack):
                piece.stack.publish()
        for member in self.members:
            network = networks[member]
            network.check_finite(self.owner, network.read(self.owner))


def _gather(piece: _Piece, tiled: list[Tile] | None, block: _Block, values: Tensor) -> None:
    source = piece.stack.values
    if tiled is None:
        assert piece.index is not None
        columns = piece.index[block.first : block.last]
        rows = source[piece.rows] if isinstance(piece.rows, slice) else source
        picked = rows.index_select(1, columns)
        if not isinstance(piece.rows, slice):
            picked = picked.index_select(0, piece.rows)
        values[piece.slots] = picked.to(values.device)
        return
    at = 0
    for tile in tiled:
        found = tile.of(source)
        found = (
            found[piece.rows]
            if isinstance(piece.rows, slice)
            else found.index_select(0, piece.rows)
        )
        target = values[:, at : at + tile.size]
        if isinstance(piece.slots, slice):
            target[piece.slots].unflatten(1, (tile.count, tile.length)).copy_(found)
        else:
            target[piece.slots] = found.reshape(-1, tile.size).to(values.device)
        at += tile.size


def _scatter(piece: _Piece, tiled: list[Tile] | None, block: _Block, mixed: Tensor) -> None:
    goal = piece.stack.values
    if mixed.ndim == 2:
        mixed = mixed[piece.slots]
    mixed = mixed.to(goal.device)
    if tiled is None:
        assert piece.index is not None
        columns = piece.index[block.first : block.last]
        if isinstance(piece.rows, slice):
            rows = goal[piece.rows]
            rows.index_copy_(1, columns, mixed.expand(len(rows), len(columns)))
        else:
            goal[piece.rows[:, None], columns] = mixed
        return
    at = 0
    for tile in tiled:
        found = tile.of(goal)
        part = mixed[..., at : at + tile.size].unflatten(-1, (tile.count, tile.length))
        found[piece.rows] = part
        at += tile.size


def _products(work: _Plan, matrices: Sequence[csr_array]) -> list[Mixer]:
    """Each matrix as the quickest product with a block that fits it."""
    like, members = work.like, len(work.members)
    mixers: list[Mixer] = []
    for matrix in matrices:
        if plan.is_dense(members, matrix.nnz):
            dense = torch.from_numpy(matrix.toarray()).to(like)
            mixers.append(lambda block, dense=dense: dense @ block)
            continue
        # A bag of weighted rows for each member is a sparse product, and torch's fastest one.
        index = torch.from_numpy(matrix.indices.astype(np.int64)).to(like.device)
        starts = torch.from_numpy(matrix.indptr[:-1].astype(np.int64)).to(like.device)
        shares = torch.from_numpy(matrix.data).to(like)
        mixers.append(
            lambda block, i=index, o=starts, s=shares: F.embedding_bag(
                i, block, o, mode="sum", per_sample_weights=s
            )
        )
    return mixers


def _interned(
    where: slice | np.ndarray, known: dict[tuple[int, int], list[np.ndarray]]
) -> slice | np.ndarray:
    """One object for equal coordinates, so that peers that slice alike are found by identity."""
    if isinstance(where, slice):
        return where
    same = known.setdefault((len(where), zlib.adler32(np.ascontiguousarray(where).tobytes())), [])
    for other in same:
        if other is where or np.array_equal(other, where):
            return other
    same.append(where)
    return where
