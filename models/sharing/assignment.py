"""Which peers average which cells: an `Assignment`, and the slices of each peer that follow from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..anatomy import Anatomy, ParameterMap
from ..errors import ModelError
from ..slicing import ModelGraph, Places, as_slice

if TYPE_CHECKING:
    from ..network import SlicedNetwork

GLOBAL = 0
"""The scheme of cells that all peers average."""
OWN = 1
"""The scheme of cells that every peer keeps for itself."""
MAX_GROUPINGS = 30
"""The most groupings in one assignment: coordinates keep their schemes as bits of one integer."""

MAX_PEER = 16
"""The longest name of a peer that is in the name of its own model as it is."""

Labels = tuple[int, ...]
"""The group of every peer, in the order of the swarm's peers."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """For every cell of a network, the peers that average it together.

        assignment = Assignment.shared(anatomy, ["anna", "ben", "carl"])
        assignment = assignment.change(anatomy.names[-1], [8, 9], OWN)
        network.reslice(*assignment.slices("anna"), anatomy=anatomy)

    peers
        The names of all peers of the swarm.
    schemes
        The groups of the peers under each scheme: all in one group (GLOBAL), each alone (OWN), or a grouping
        that was found.
    scheme_of
        The scheme of every cell.
    suffix
        Ends the names of the partial models, so that no two assignments have models of the same name and
        different coordinates; empty while all peers share everything, or to keep the names short.
    """

    anatomy: Anatomy
    peers: tuple[str, ...]
    schemes: tuple[Labels, ...]
    scheme_of: np.ndarray
    suffix: str = ""

    @classmethod
    def shared(cls, anatomy: Anatomy, peers: Sequence[str]) -> Assignment:
        """Return the assignment under which all peers average every cell."""
        count = len(peers)
        schemes = ((0,) * count, tuple(range(count)))
        cells = np.full(anatomy.first_cells[-1], GLOBAL)
        return cls(anatomy, tuple(peers), schemes, cells)

    @classmethod
    def of(cls, networks: Sequence[SlicedNetwork], anatomy: Anatomy) -> Assignment:
        """Return the assignment by which the networks' own partial models average.

        anatomy: that of all networks, perhaps with norms as parts of their own. Raises ModelError if their
        models average in a way that no assignment describes.
        """
        peers, names = len(networks), dict[str, int]()
        # Numbers of models: of every peer's cells, and of what averages its coordinates, negative if nothing.
        model_of = np.full((peers, int(anatomy.first_cells[-1])), -1)
        averaged_by = np.repeat(-1 - np.arange(peers)[:, None], anatomy.size, axis=1)
        for row, network in enumerate(networks):
            for model in network.models:
                number = names.setdefault(model, len(names))
                for part, cells in enumerate(network.slicing.cells[model]):
                    model_of[row, anatomy.first_cells[part] + cells] = number
            for model in network.averaged_models:
                number = names.setdefault(model, len(names))
                averaged_by[row, network.slicing.coordinates(model)] = number
        shared = cls.shared(anatomy, [network.peer for network in networks])
        columns, column_of = np.unique(model_of, axis=1, return_inverse=True)
        labels = [renumbered(column) for column in columns.T.tolist()]
        schemes = tuple(dict.fromkeys([*shared.schemes, *labels]))
        if len(schemes) > MAX_GROUPINGS:
            raise ModelError(
                f"the partial models divide peers in {len(schemes)} ways; there may be {MAX_GROUPINGS}"
            )
        scheme_of = np.array([schemes.index(one) for one in labels])[column_of.ravel()]
        found = replace(shared, schemes=schemes, scheme_of=scheme_of)
        if not found._averages_like(averaged_by) or not _same_coordinates(networks):
            raise ModelError(
                "weights between the cells of different partial models must be averaged by the peers that "
                "have both models: let one model depend on the other, or average across models"
            )
        return found

    def _averages_like(self, averaged_by: np.ndarray) -> bool:
        """Return whether the same peers average every coordinate; averaged_by: a model's number by peer."""
        for code in np.unique(self.codes).tolist():
            groups = np.array(self.together(code))
            block = averaged_by[:, self.codes == code]
            firsts = block[[int(np.argmax(groups == group)) for group in range(groups.max() + 1)]]
            apart = np.diff(np.sort(firsts, axis=0), axis=0)
            if (block != firsts[groups]).any() or not apart.all():
                return False
        return True

    def change(
        self, part: str, cells: Sequence[int] | np.ndarray, scheme: int | Labels
    ) -> Assignment:
        """Return an assignment that gives cells of a part to a scheme, or to a new grouping of the peers."""
        schemes = self.schemes
        if not isinstance(scheme, int):
            labels = renumbered(scheme)
            if len(labels) != len(self.peers):
                raise ModelError(f"{len(labels)} groups were given for {len(self.peers)} peers")
            if labels not in schemes:
                schemes = (*schemes, labels)
                if len(schemes) > MAX_GROUPINGS:
                    raise ModelError(f"an assignment has at most {MAX_GROUPINGS} groupings")
            scheme = schemes.index(labels)
        scheme_of = self.scheme_of.copy()
        scheme_of[self.anatomy.first_cells[self.anatomy.find(part)] + np.asarray(cells, int)] = (
            scheme
        )
        return replace(self, schemes=schemes, scheme_of=scheme_of)

    def named(self) -> Assignment:
        """Return the assignment with a suffix made from its content; none if all peers share everything."""
        bare = replace(self, suffix="")
        return replace(self, suffix=bare.digest if self.scheme_of.any() else "")

    @property
    def is_named_by_content(self) -> bool:
        """Whether the suffix is that of `named`, for these peers or for those before some of them joined."""
        return any(
            replace(
                self, peers=self.peers[:count], schemes=tuple(each[:count] for each in self.schemes)
            )
            .named()
            .suffix
            == self.suffix
            for count in range(len(self.peers), 0, -1)
        )

    @cached_property
    def groupings(self) -> tuple[int, ...]:
        """The schemes in use that divide the peers into groups."""
        return tuple(scheme for scheme in np.unique(self.scheme_of).tolist() if scheme > OWN)

    def groups_of(self, peer: str) -> Labels:
        """Return the group of a peer in each of the `groupings`."""
        place = self.peers.index(peer)
        return tuple(self.schemes[scheme][place] for scheme in self.groupings)

    def among_all_members(self, models: Iterable[str], given: int) -> frozenset[str]:
        """Return those of the models that groups share which have formed by themselves.

        Their members average among each other whatever the swarm's graph is. given: the number of schemes
        with which the swarm began.
        """
        formed = {
            self.model(scheme, peer)
            for scheme in self.groupings
            if scheme >= given
            for peer in self.peers
        }
        return frozenset(model for model in models if formed.intersection(model.split("&")))

    def with_peers(self, names: Iterable[str]) -> Assignment:
        """Return the assignment with more peers, each of them alone in every grouping.

        The partial models of the other peers keep their names.
        """
        peers, schemes = self.peers, self.schemes
        for name in names:
            peers = (*peers, name)
            schemes = tuple(
                (*labels, 0 if scheme == GLOBAL else max(labels) + 1)
                for scheme, labels in enumerate(schemes)
            )
        return replace(self, peers=peers, schemes=schemes)

    def joined(self, peer: str, example: str) -> Assignment:
        """Return the assignment with a peer in the groups that another one is in."""
        place, other = self.peers.index(peer), self.peers.index(example)
        schemes = [list(labels) for labels in self.schemes]
        for labels in schemes[OWN + 1 :]:
            labels[place] = labels[other]
        return replace(self, schemes=tuple(map(renumbered, schemes)))

    def cells(self, part: str, scheme: int) -> np.ndarray:
        """Return the indices of the cells of a part that have a scheme."""
        index = self.anatomy.find(part)
        first, end = self.anatomy.first_cells[index : index + 2]
        return np.flatnonzero(self.scheme_of[first:end] == scheme)

    def slices(self, peer: str) -> tuple[dict[str, dict[str, list[int]]], ModelGraph]:
        """Return a peer's slices and the dependencies of its partial models.

        A grouping's models are called `group2-0`, `group2-1`, … after its scheme and the group. Groups depend
        on `global`, the peer's own model on all others. Weights between cells of two groupings are averaged
        by the peers that are together in both, so slice with `cross=True`. A peer that is not one of `peers`
        belongs to no group: it keeps the cells of groups for itself.
        """
        slices: dict[str, dict[str, list[int]]] = {}
        for scheme in np.unique(self.scheme_of).tolist():
            model = slices.setdefault(self.model(scheme, peer), {})
            for part in self.anatomy.names:
                if cells := self.cells(part, scheme).tolist():
                    model[part] = sorted([*model.get(part, []), *cells])
        everywhere = self.model(GLOBAL, peer)
        depends = {everywhere: []}
        own = self.model(OWN, peer)
        groups = [model for model in slices if model not in (everywhere, own)]
        depends |= {model: [everywhere] for model in groups}
        if everywhere not in slices:
            depends = {model: [] for model in groups}
        if own in slices:
            depends[own] = [model for model in depends if model != own]
        return slices, ModelGraph(depends)

    def model(self, scheme: int, peer: str) -> str:
        """Return the name of the partial model to which a peer's cells of a scheme belong."""
        ending = f"-{self.suffix}" if self.suffix else ""
        if scheme == GLOBAL:
            return f"global{ending}"
        if scheme == OWN or peer not in self.peers:
            return f"local-{_short(peer)}{ending}"
        return f"group{scheme}-{self.schemes[scheme][self.peers.index(peer)]}{ending}"

    @cached_property
    def codes(self) -> np.ndarray:
        """For every coordinate of the flat vector, the schemes of its cells, as bits."""
        bits = 1 << self.scheme_of.astype(np.int64)
        return np.concatenate([_spread(bits, one) for one in self.anatomy.parameters])

    def blocks_of(self, cells: np.ndarray) -> list[tuple[int, int, Places]]:
        """Return the coordinates that belong to some cells, in blocks that are averaged alike.

        cells: numbered through the whole network. A block is its code (see `codes`), the code of its other
        cells alone, and its coordinates.
        """
        key = cells.tobytes()
        if key not in self._blocks:
            bits = 1 << self.scheme_of.astype(np.int64)
            chosen = np.zeros(len(bits), bool)
            chosen[cells] = True
            kinds = np.where(chosen, 1 << 2 * MAX_GROUPINGS, bits << MAX_GROUPINGS) | bits
            pieces: dict[int, list[np.ndarray]] = {}
            for one in self.anatomy.parameters:
                if any(chosen[each].any() for each in _cells_of(one)):
                    kind_of = _spread(kinds, one)
                    inside = np.flatnonzero(kind_of >> 2 * MAX_GROUPINGS)
                    start = self.anatomy.spans[one.name].start
                    for kind, places in _by_value(kind_of[inside]):
                        pieces.setdefault(kind, []).append(start + inside[places])
            mask = (1 << MAX_GROUPINGS) - 1
            self._blocks[key] = [
                (kind & mask, kind >> MAX_GROUPINGS & mask, as_slice(np.concatenate(places)))
                for kind, places in pieces.items()
            ]
        return self._blocks[key]

    @cached_property
    def _blocks(self) -> dict[bytes, list[tuple[int, int, Places]]]:
        """What `blocks_of` has found, by cells: many candidates change the same cells."""
        return {}

    def together(self, code: int) -> Labels:
        """Return the groups of peers that average coordinates with a code: together in all its schemes."""
        chosen = [labels for scheme, labels in enumerate(self.schemes) if code >> scheme & 1]
        return renumbered(zip(*chosen, strict=True))

    def groups_at(self, coordinates: np.ndarray) -> Iterator[tuple[Labels, np.ndarray]]:
        """Yield the groups of peers that average some coordinates, and which coordinates each averages.

        Peers are given by their numbers. A group of one peer means that it keeps its own value.
        """
        for code, places in _by_value(self.codes[coordinates]):
            columns = coordinates[places]
            for group in members(self.together(code)):
                yield group, columns

    def average(self, rows: np.ndarray, coordinates: np.ndarray) -> np.ndarray:
        """Return some coordinates of all peers' values, [peers, coordinates], averaged as assigned."""
        averaged = rows.copy()
        for group, columns in self.groups_at(coordinates):
            block = np.array(group)[:, None], columns
            averaged[block] = rows[block].mean(axis=0)
        return averaged[:, coordinates]

    @cached_property
    def distinct_values(self) -> int:
        """How many different values the swarm holds: fewer mean more sharing."""
        codes, counts = np.unique(self.codes, return_counts=True)
        pairs = zip(codes.tolist(), counts.tolist(), strict=True)
        return sum(count * (max(self.together(code)) + 1) for code, count in pairs)

    @cached_property
    def digest(self) -> str:
        """A short text that differs between assignments that are not the same."""
        data = json.dumps(self.as_record(), sort_keys=True).encode()
        return hashlib.blake2b(data, digest_size=4).hexdigest()

    def as_record(self) -> dict[str, Any]:
        """Return the assignment as plain data, which `from_record` reads."""
        return {
            "suffix": self.suffix,
            "peers": list(self.peers),
            "schemes": [list(labels) for labels in self.schemes],
            "cells": {
                part: {str(scheme): cells for scheme in np.unique(self.scheme_of).tolist()
                       if (cells := self.cells(part, scheme).tolist())}
                for part in self.anatomy.names
            },
        }  # fmt: skip

    @classmethod
    def from_record(cls, anatomy: Anatomy, record: dict[str, Any]) -> Assignment:
        """Return the assignment that `as_record` described, of cells of this anatomy."""
        try:
            schemes = tuple(renumbered(labels) for labels in record["schemes"])
            peers = tuple(record["peers"])
            count = len(peers)
            scheme_of = np.full(anatomy.first_cells[-1], -1)
            for part, by_scheme in record["cells"].items():
                first, end = anatomy.first_cells[(index := anatomy.find(part)) : index + 2]
                for scheme, cells in by_scheme.items():
                    scheme_of[first:end][cells] = int(scheme)
            valid = (
                len(set(peers)) == count > 0
                and {len(labels) for labels in schemes} == {count}
                and schemes[: OWN + 1] == ((0,) * count, tuple(range(count)))
                and len(schemes) <= MAX_GROUPINGS
                and 0 <= scheme_of.min() <= scheme_of.max() < len(schemes)
            )
            if not valid:
                raise ValueError
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError):
            raise ModelError("an assignment does not describe the cells of this network") from None
        return cls(anatomy, peers, schemes, scheme_of, str(record.get("suffix", "")))


def _short(peer: str) -> str:
    """Return a peer's name if it fits into the name of a partial model; else its beginning and a digest."""
    if len(peer) <= MAX_PEER:
        return peer
    digest = hashlib.blake2b(peer.encode(), digest_size=4).hexdigest()
    return f"{peer[: MAX_PEER - 1 - len(digest)]}-{digest}"


def _same_coordinates(networks: Sequence[SlicedNetwork]) -> bool:
    """Return whether every model has the same coordinates, in the same order, on all peers that have it."""
    first: dict[str, np.ndarray] = {}
    return all(
        np.array_equal(first.setdefault(model, coordinates), coordinates)
        for network in networks
        for model in network.averaged_models
        for coordinates in [network.slicing.coordinates(model)]
    )


def renumbered(labels: Iterable[object]) -> Labels:
    """Return labels as numbers in the order of their first appearance."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(label, len(numbers)) for label in labels)


def members(labels: Labels) -> list[tuple[int, ...]]:
    """Return the numbers of the peers of every group."""
    groups: list[list[int]] = [[] for _ in range(max(labels) + 1)]
    for peer, group in enumerate(labels):
        groups[group].append(peer)
    return [tuple(group) for group in groups]


def _cells_of(parameter: ParameterMap) -> Iterator[np.ndarray]:
    """Yield the cells on each axis of a parameter, and those that all its values belong to."""
    yield from (axis for axis in parameter.axes if axis is not None)
    yield np.array([c for c in (parameter.cell, parameter.extra_cell) if c is not None], int)


def _spread(bits: np.ndarray, parameter: ParameterMap) -> np.ndarray:
    """Return, for every coordinate of a parameter, the bits of all its cells together."""
    found = np.zeros(parameter.shape, np.int64)
    for number, axis in enumerate(parameter.axes):
        if axis is not None:
            shape = [1] * len(parameter.shape)
            shape[number] = len(axis)
            found |= bits[axis].reshape(shape)
    for cell in (parameter.cell, parameter.extra_cell):
        if cell is not None:
            found |= bits[cell]
    return found.ravel()


def _by_value(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the different numbers in an array, and where each is; fast if there are few."""
    left = np.ones(len(values), bool)
    while left.any():
        value = values[left.argmax()]
        is_equal = values == value
        yield int(value), np.flatnonzero(is_equal)
        left &= ~is_equal
