"""Which peers average which cells: an `Assignment`, the slices of each peer that follow from it, and the
values of its groups."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..anatomy import Anatomy, ParameterMap
from ..errors import ModelError
from ..slicing import Coordinates, ModelGraph, Slicing, slice_if_contiguous

if TYPE_CHECKING:
    from ..network import SlicedNetwork

GLOBAL = 0
"""The scheme of cells that all peers average."""
OWN = 1
"""The scheme of cells that every peer keeps for itself."""
MAX_GROUPINGS = 30
"""The most schemes in one assignment: `codes` has one bit for each."""

MAX_PEER_NAME = 16
"""The longest name of a peer that becomes a part of the name of its own model without being shortened."""

Labels = tuple[int, ...]
"""The number of every peer's group, in the order of the swarm's peers."""

Group = tuple[int, ...]
"""The numbers of the peers of one group."""

Given = dict[str, dict[str, list[int]]]
"""The cells of a peer's partial models, as they were given by hand: by model and part."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """For every cell of a network, the peers that average it together.

        assignment = Assignment.shared(anatomy, ["anna", "ben", "carl"])
        assignment = assignment.change(anatomy.names[-1], [8, 9], OWN)
        network.reslice(*assignment.slices("anna"), anatomy=anatomy)

    peers
        The names of all peers of the swarm.
    schemes
        A scheme says who averages a cell. For each, the group of every peer: all in one group (GLOBAL), each
        alone (OWN), or another grouping of the peers. Peers of one group average together.
    scheme_of
        The scheme of every cell.
    suffix
        The end of the names of the partial models. With a suffix that depends on the assignment (`named`),
        no two assignments have models of the same name and different coordinates. It is empty while all peers
        share everything, and where only one assignment is used.
    given
        How many of the schemes the swarm began with, if partial models were given by hand; 0 if it began by
        sharing everything. Later schemes have the groups that peers have decided on.
    """

    anatomy: Anatomy
    peers: tuple[str, ...]
    schemes: tuple[Labels, ...]
    scheme_of: np.ndarray
    suffix: str = ""
    given: int = 0

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

        anatomy: that of all networks, perhaps `with_norm_parts`. Raises ModelError if their models average in
        a way that no assignment describes.
        """
        given = {network.peer: given_cells(network.slicing) for network in networks}
        assignment = cls.by_hand(anatomy, given)
        for network in networks:
            assignment.check_averages(network.peer, averaged_by_hand(network.slicing))
        return assignment

    @classmethod
    def by_hand(cls, anatomy: Anatomy, given: Mapping[str, Given]) -> Assignment:
        """Return the assignment in which peers average the cells of partial models of the same name.

        given: the cells of every peer's models. Each peer must `check_averages` too.
        """
        shared = cls.shared(anatomy, list(given))
        numbers: dict[str, int] = {}  # of models, by name
        model_of = np.full((len(given), int(anatomy.first_cells[-1])), -1)
        cells_of_model: dict[str, dict[str, list[int]]] = {}
        for row, (peer, models) in enumerate(given.items()):
            for model, cells_by_part in models.items():
                if cells_of_model.setdefault(model, cells_by_part) != cells_by_part:
                    raise ModelError(
                        f"peer {peer} gives other cells to partial model {model!r} than others do: give the "
                        "same ones, in the same order, or other names"
                    )
                number = numbers.setdefault(model, len(numbers))
                for part, cells in cells_by_part.items():
                    index = anatomy.find(part)
                    if not all(0 <= cell < anatomy.parts[index].cells for cell in cells):
                        raise ModelError(
                            f"peer {peer}: model {model!r} lists cells that part {part!r} does not have"
                        )
                    model_of[row, anatomy.first_cells[index] + np.array(cells, int)] = number
        # Cells with equal columns are in the same model on every peer, so they have the same scheme.
        columns, column_of = np.unique(model_of, axis=1, return_inverse=True)
        labels = [renumbered(column) for column in columns.T.tolist()]
        schemes = tuple(dict.fromkeys([*shared.schemes, *labels]))
        if len(schemes) > MAX_GROUPINGS:
            raise ModelError(
                f"the partial models divide peers in {len(schemes)} ways; at most {MAX_GROUPINGS} are allowed"
            )
        scheme_of_column = np.array([schemes.index(grouping) for grouping in labels])
        scheme_of = scheme_of_column[column_of.ravel()]
        return replace(shared, schemes=schemes, scheme_of=scheme_of, given=len(schemes))

    def check_averages(self, peer: str, averaged: np.ndarray) -> None:
        """Raise ModelError if a peer would average values that its own partial models keep private.

        averaged: for every coordinate, whether one of the peer's partial models averages it.
        """
        for code in np.unique(self.codes[~averaged]).tolist():
            groups = self.peer_groups(code)
            is_known = peer in self.peers
            own_group = groups[self.peers.index(peer)] if is_known else None
            if groups.count(own_group) > 1 or (code == 1 << GLOBAL and not is_known):
                raise ModelError(
                    f"peer {peer}: weights between the cells of different partial models must be averaged by "
                    "the peers that have both models: let one model depend on the other, or average across "
                    "models"
                )

    def change(
        self, part: str, cells: Sequence[int] | np.ndarray, scheme: int | Labels
    ) -> Assignment:
        """Return an assignment in which cells of a part have another scheme.

        scheme: the number of a scheme, or the group of every peer.
        """
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
        """Return the assignment with its digest as suffix, or no suffix if all peers share everything.

        With partial models given by hand there always is one, because one of these may be called `global`.
        """
        without_suffix = replace(self, suffix="")
        has_suffix = self.given or self.scheme_of.any()
        return replace(self, suffix=without_suffix.digest if has_suffix else "")

    @property
    def is_named_by_content(self) -> bool:
        """Whether `named` made the suffix, for these peers or before the last of them joined.

        Peers that join (`with_peers`) leave the suffix as it is.
        """
        return any(
            self._first_peers(count).named().suffix == self.suffix
            for count in range(len(self.peers), 0, -1)
        )

    def _first_peers(self, count: int) -> Assignment:
        """Return the assignment with only the first `count` peers."""
        schemes = tuple(labels[:count] for labels in self.schemes)
        return replace(self, peers=self.peers[:count], schemes=schemes)

    @cached_property
    def groupings(self) -> tuple[int, ...]:
        """The schemes in use that divide the peers into groups."""
        return tuple(scheme for scheme in np.unique(self.scheme_of).tolist() if scheme > OWN)

    @property
    def formed(self) -> tuple[int, ...]:
        """The `groupings` that were decided while the swarm trained; the others were given by hand."""
        return tuple(scheme for scheme in self.groupings if scheme >= self.given)

    def groups_of(self, peer: str) -> Labels:
        """Return the group of a peer in each of the `groupings`."""
        index = self.peers.index(peer)
        return tuple(self.schemes[scheme][index] for scheme in self.groupings)

    def models_of_formed_groups(self, models: Iterable[str]) -> frozenset[str]:
        """Return those of `models` that belong to groups which were decided while the swarm trained.

        The graph of the swarm was not made for these groups: it may leave the members of one unconnected. So
        all members of such a group are neighbours.
        """
        models_of_groups = {
            self.model(scheme, peer) for scheme in self.formed for peer in self.peers
        }
        return frozenset(
            model for model in models if models_of_groups.intersection(model.split("&"))
        )

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

    def joined(self, peer: str, example: str, schemes: Iterable[int] | None = None) -> Assignment:
        """Return the assignment in which a peer is in the groups of another one, `example`.

        schemes: the schemes in which it joins the groups of `example`; by default all.
        """
        index, example_index = self.peers.index(peer), self.peers.index(example)
        chosen = range(OWN + 1, len(self.schemes)) if schemes is None else schemes
        all_labels = [list(labels) for labels in self.schemes]
        for scheme in chosen:
            all_labels[scheme][index] = all_labels[scheme][example_index]
        return replace(self, schemes=tuple(map(renumbered, all_labels)))

    def cells(self, part: str, scheme: int) -> np.ndarray:
        """Return the indices of the cells of a part that have a scheme."""
        index = self.anatomy.find(part)
        first, end = self.anatomy.first_cells[index : index + 2]
        return np.flatnonzero(self.scheme_of[first:end] == scheme)

    def slices(self, peer: str) -> tuple[dict[str, dict[str, list[int]]], ModelGraph]:
        """Return a peer's slices and the dependencies of its partial models.

        The models of a grouping are called `group2-0`, `group2-1`, … after its scheme and the group. They
        depend on `global`, and the peer's own model depends on all others. Weights between cells of two
        groupings are averaged by the peers that are in the same group of both, so the slices need
        `cross=True`. A peer that is not one of `peers` belongs to no group: it keeps the cells of groups for
        itself.
        """
        slices: dict[str, dict[str, list[int]]] = {}
        for scheme in np.unique(self.scheme_of).tolist():
            model = slices.setdefault(self.model(scheme, peer), {})
            for part in self.anatomy.names:
                if cells := self.cells(part, scheme).tolist():
                    model[part] = sorted([*model.get(part, []), *cells])
        global_model, own_model = self.model(GLOBAL, peer), self.model(OWN, peer)
        groups = [model for model in slices if model not in (global_model, own_model)]
        if global_model in slices:
            depends = {global_model: [], **{model: [global_model] for model in groups}}
        else:
            depends = {model: [] for model in groups}
        if own_model in slices:
            depends[own_model] = [model for model in depends if model != own_model]
        return slices, ModelGraph(depends)

    def model(self, scheme: int, peer: str) -> str:
        """Return the name of the partial model to which a peer's cells of a scheme belong."""
        ending = f"-{self.suffix}" if self.suffix else ""
        if scheme == GLOBAL:
            return f"global{ending}"
        if scheme == OWN or peer not in self.peers:
            return f"local-{_short_name(peer)}{ending}"
        return f"group{scheme}-{self.schemes[scheme][self.peers.index(peer)]}{ending}"

    @cached_property
    def codes(self) -> np.ndarray:
        """The code of every coordinate of the flat vector: bit s is set if one of its cells has scheme s."""
        bits = 1 << self.scheme_of.astype(np.int64)
        return np.concatenate(
            [_bits_of_coordinates(bits, parameter) for parameter in self.anatomy.parameters]
        )

    def blocks_of(self, cells: np.ndarray) -> list[tuple[int, int, Coordinates]]:
        """Return the coordinates that belong to some cells, in blocks that are averaged alike.

        cells: numbered through the whole network. A block is its code (see `codes`), the code of only its
        cells that are not in `cells`, and its coordinates.
        """
        if (found := self._blocks.get(cells.tobytes())) is not None:
            return found
        code_of_cell = 1 << self.scheme_of.astype(np.int64)
        is_chosen = np.zeros(len(code_of_cell), bool)
        is_chosen[cells] = True
        # One integer per coordinate, so that equal ones are found by one comparison. From its lowest bit: the
        # code of all cells, the code of cells that are not chosen, and whether a cell is chosen.
        other_code, chosen_flag = code_of_cell << MAX_GROUPINGS, 1 << 2 * MAX_GROUPINGS
        key_of_cell = np.where(is_chosen, chosen_flag, other_code) | code_of_cell
        coordinates: dict[int, list[Coordinates]] = {}
        for parameter in self.anatomy.parameters:
            keys = [key_of_cell[cells] for cells in _cells_of(parameter)]
            if not any((axis_keys >= chosen_flag).any() for axis_keys in keys):
                continue
            span = self.anatomy.spans[parameter.name]
            if all(
                (axis_keys == axis_keys[0]).all() for axis_keys in keys
            ):  # a whole part is chosen
                joined = int(np.bitwise_or.reduce([axis_keys[0] for axis_keys in keys]))
                coordinates.setdefault(joined, []).append(span)
                continue
            key_of_coordinate = _bits_of_coordinates(key_of_cell, parameter)
            with_chosen = np.flatnonzero(key_of_coordinate >= chosen_flag)
            for key, indices in _by_value(key_of_coordinate[with_chosen]):
                coordinates.setdefault(key, []).append(span.start + with_chosen[indices])
        mask = (1 << MAX_GROUPINGS) - 1
        blocks = [
            (key & mask, key >> MAX_GROUPINGS & mask, slice_if_contiguous(np.r_[tuple(pieces)]))
            for key, pieces in coordinates.items()
        ]
        return self._blocks.setdefault(cells.tobytes(), blocks)

    @cached_property
    def _blocks(self) -> dict[bytes, list[tuple[int, int, Coordinates]]]:
        """The results of `blocks_of`, by cells: many candidates change the same cells."""
        return {}

    def peer_groups(self, code: int) -> Labels:
        """Return the group of every peer for coordinates with a code; see `codes`.

        Two peers average such a coordinate together if they are in the same group under all its schemes.
        """
        groupings = [labels for scheme, labels in enumerate(self.schemes) if code >> scheme & 1]
        return renumbered(zip(*groupings, strict=True))

    def groups_at(self, coordinates: np.ndarray) -> Iterator[tuple[Group, np.ndarray]]:
        """Yield the groups of peers that average some coordinates, and which coordinates each averages.

        A group has the numbers of its peers. A group of one peer means that it keeps its own value.
        """
        for code, indices in _by_value(self.codes[coordinates]):
            columns = coordinates[indices]
            for group in members(self.peer_groups(code)):
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
        return sum(count * (max(self.peer_groups(code)) + 1) for code, count in pairs)

    @cached_property
    def digest(self) -> str:
        """A short hash of the assignment."""
        data = json.dumps(self.as_record(), sort_keys=True).encode()
        return hashlib.blake2b(data, digest_size=4).hexdigest()

    def as_record(self) -> dict[str, Any]:
        """Return the assignment as plain data, which `from_record` reads."""
        return {
            **({"given": self.given} if self.given else {}),  # so that other digests stay what they were
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
            given = int(record.get("given", 0))
            peers = tuple(record["peers"])
            count = len(peers)
            scheme_of = np.full(anatomy.first_cells[-1], -1)
            for part, by_scheme in record["cells"].items():
                first, end = anatomy.first_cells[(index := anatomy.find(part)) : index + 2]
                for scheme, cells in by_scheme.items():
                    scheme_of[first:end][cells] = int(scheme)
            is_valid = (
                len(set(peers)) == count > 0
                and {len(labels) for labels in schemes} == {count}
                and schemes[: OWN + 1] == ((0,) * count, tuple(range(count)))
                and len(schemes) <= MAX_GROUPINGS
                and 0 <= scheme_of.min() <= scheme_of.max() < len(schemes)
                and 0 <= given <= len(schemes)
            )
            if not is_valid:
                raise ValueError
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError):
            raise ModelError(
                "an assignment's record is invalid, or not for the cells of this network"
            ) from None
        return cls(anatomy, peers, schemes, scheme_of, str(record.get("suffix", "")), given)


class GroupValues:
    """The layout of a vector that gossip averages, with the mean values of all groups of an assignment.

    From it a peer that joins late finds its groups: it tests the values of each on its held-out samples, and
    joins those whose loss is lowest.

    The vector has one entry per group, and the values at the group's coordinates. Every peer that has groups
    contributes 1 and its own values to each of them (`pack`). A group's mean is the mean of the values
    divided by the mean of that entry, which is right even before gossip has reached all peers equally.

    newcomers: peers of the assignment that have no groups yet.
    """

    def __init__(self, assignment: Assignment, newcomers: Collection[str]):
        self._assignment = assignment
        peers = assignment.peers
        has_groups = [number for number, name in enumerate(peers) if name not in newcomers]
        self._groups: list[tuple[frozenset[int], np.ndarray]] = []
        for code in np.unique(assignment.codes).tolist():
            if code == 1 << GLOBAL or code >> OWN & 1:  # no group averages these coordinates
                continue
            labels, columns = assignment.peer_groups(code), np.flatnonzero(assignment.codes == code)
            for group in dict.fromkeys(labels[number] for number in has_groups):
                peer_numbers = frozenset(n for n in has_groups if labels[n] == group)
                self._groups.append((peer_numbers, columns))
        # Where the values of each group begin, and where those of the last one end.
        sizes = (len(columns) for _, columns in self._groups)
        self._starts = np.cumsum([len(self._groups), *sizes])
        content = [assignment.digest, sorted(newcomers)]
        self.name = hashlib.blake2b(json.dumps(content).encode(), digest_size=4).hexdigest()
        """The name of the layout: only vectors of the same layout may be averaged."""
        example_of: dict[tuple[int, ...], str] = {}
        for number in has_groups:
            example_of.setdefault(assignment.groups_of(peers[number]), peers[number])
        # For every combination of groups that occurs, the name of one peer that is in these groups.
        self._examples = tuple(example_of.values())

    @property
    def size(self) -> int:
        """The length of the vector."""
        return int(self._starts[-1])

    def examples_for(self, peer: str) -> list[str]:
        """Return one peer for every combination of groups that a peer may join; itself if there is none.

        The groups of partial models that were given by hand must be the same.
        """
        schemes = self._assignment.schemes[: self._assignment.given]
        index = self._assignment.peers.index

        def groups_by_hand(name: str) -> list[int]:
            return [labels[index(name)] for labels in schemes[OWN + 1 :]]

        groups_of_peer = groups_by_hand(peer)
        return [
            example for example in self._examples if groups_by_hand(example) == groups_of_peer
        ] or [peer]

    def pack(self, peer: str, values: np.ndarray) -> np.ndarray:
        """Return a peer's contribution; values: its flat parameter vector."""
        vector, index = np.zeros(self.size, np.float32), self._assignment.peers.index(peer)
        for number, (peer_numbers, columns) in enumerate(self._groups):
            if index in peer_numbers:
                vector[number] = 1.0
                vector[self._starts[number] : self._starts[number + 1]] = values[columns]
        return vector

    def values_in_groups_of(
        self, example: str, vector: np.ndarray, values: np.ndarray
    ) -> np.ndarray | None:
        """Return a copy of `values` with the means of the groups that the peer `example` is in.

        None while gossip has not brought the values of one of these groups.

        vector: the mean over peers of their contributions.
        """
        values, index = values.copy(), self._assignment.peers.index(example)
        for number, (peer_numbers, columns) in enumerate(self._groups):
            if index in peer_numbers:
                if not vector[number] > 0:
                    return None
                total = vector[self._starts[number] : self._starts[number + 1]]
                values[columns] = total / vector[number]
        return values


def _short_name(peer: str) -> str:
    """Return a peer's name if it fits into the name of a partial model; else its beginning and a digest."""
    if len(peer) <= MAX_PEER_NAME:
        return peer
    digest = hashlib.blake2b(peer.encode(), digest_size=4).hexdigest()
    return f"{peer[: MAX_PEER_NAME - 1 - len(digest)]}-{digest}"


def given_cells(slicing: Slicing) -> Given:
    """Return the cells of a peer's partial models, by model and part."""
    parts = slicing.anatomy.names
    return {
        model: {
            part: cells.tolist()
            for part, cells in zip(parts, slicing.cells[model], strict=True)
            if len(cells)
        }
        for model in slicing.models
    }


def models_of_cells(anatomy: Anatomy, given: Given, cells: np.ndarray) -> dict[str, list[int]]:
    """Return which of some cells each of a peer's partial models has; models without any are left out.

    cells: numbered through the whole network.
    """
    cells_of_model: dict[str, list[int]] = {}
    for model, cells_by_part in given.items():
        numbers = [
            anatomy.first_cells[anatomy.find(part)] + np.array(cells_of_part, int)
            for part, cells_of_part in cells_by_part.items()
        ]
        among = np.intersect1d(np.concatenate([np.zeros(0, int), *numbers]), cells)
        if len(among):
            cells_of_model[model] = among.tolist()
    return cells_of_model


def averaged_by_hand(slicing: Slicing) -> np.ndarray:
    """Return, for every coordinate, whether one of a peer's partial models averages it."""
    averaged = np.zeros(slicing.anatomy.size, bool)
    for model in slicing.averaged_models:
        averaged[slicing.coordinates(model)] = True
    return averaged


def renumbered(labels: Iterable[object]) -> Labels:
    """Return labels replaced by numbers from 0, in the order in which each first appears."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(label, len(numbers)) for label in labels)


def members(labels: Labels) -> list[Group]:
    """Return the groups, each as the numbers of its peers."""
    groups: list[list[int]] = [[] for _ in range(max(labels) + 1)]
    for peer, group in enumerate(labels):
        groups[group].append(peer)
    return [tuple(group) for group in groups]


def _cells_of(parameter: ParameterMap) -> Iterator[np.ndarray]:
    """Yield the cells on each axis of a parameter, and each cell that all its values belong to."""
    yield from (axis for axis in parameter.axes if axis is not None)
    yield from (np.array([c]) for c in (parameter.cell, parameter.extra_cell) if c is not None)


def _bits_of_coordinates(bits: np.ndarray, parameter: ParameterMap) -> np.ndarray:
    """Return, for every coordinate of a parameter, the bits of all its cells, joined by `or`.

    bits: an integer per cell.
    """
    joined = np.zeros(parameter.shape, np.int64)
    for number, axis in enumerate(parameter.axes):
        if axis is not None:
            shape = [1] * len(parameter.shape)
            shape[number] = len(axis)
            joined |= bits[axis].reshape(shape)
    for cell in (parameter.cell, parameter.extra_cell):
        if cell is not None:
            joined |= bits[cell]
    return joined.ravel()


def _by_value(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the distinct numbers of an array, each with its indices; fast if there are few."""
    is_remaining = np.ones(len(values), bool)
    while is_remaining.any():
        value = values[is_remaining.argmax()]
        is_equal = values == value
        yield int(value), np.flatnonzero(is_equal)
        is_remaining &= ~is_equal
