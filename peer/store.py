"""A sliced network as gossip sees it: named flat vectors, what they are made of, and whether they agree."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..gossip import Array, Gossiper, SchemaEntry, Store, schema_hash
from ..models import Learner, ModelError, SlicedNetwork
from .settings import Matching

if TYPE_CHECKING:
    from ..models.matching import CommonWidth


class NetworkStore:
    """The vectors that a network averages live in the network itself; nothing is kept here."""

    def __init__(self, network: SlicedNetwork):
        self._network = network

    def names(self) -> Iterable[str]:
        """The averaged models: partial models and, with cross-model averaging, pairs of them."""
        return self._network.averaged_models

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """A fresh gather of the owner's coordinates."""
        return self._network.read(name).cpu().numpy()

    def write(self, name: str, value: np.ndarray[Any, Any]) -> None:
        """Scatter values back into the network."""
        self._network.write(name, value)


def schema_entries(
    network: SlicedNetwork, owner: str, common: CommonWidth | None = None
) -> list[SchemaEntry]:
    """What an owner's vector is made of, block by block, in words that two peers can compare.

    Peers of different widths agree where they have a `common` one.
    """
    dtype = str(network.flat.dtype).removeprefix("torch.")
    wide = common is not None and owner in common.averaged_models
    slicing = common.slicing if common is not None and wide else network.slicing
    return [
        (
            f"{name} ({' × '.join(model for model, _ in axes if model)})",
            [count for _, count in axes],
            dtype,
        )
        for name, axes in slicing.schema(owner)
    ]


def schema_hashes(network: SlicedNetwork, common: CommonWidth | None = None) -> dict[str, str]:
    """The hash that messages about each owner carry."""
    return {
        owner: schema_hash(schema_entries(network, owner, common))
        for owner in network.averaged_models
    }


class MatchedStore(NetworkStore):
    """The vectors of one peer, for its gossiper.

    matching: per partial model; without any, vectors are the network's own.
    trained: whether the network brings values of its own; else, in models of a common width, it starts
        from the common values.
    """

    def __init__(
        self, network: SlicedNetwork, matching: Mapping[str, Matching], *, trained: bool = False
    ):
        super().__init__(network)
        _check(network, matching)
        self._aligned = [model for model, how in matching.items() if how.kind == "align"]
        fused = {model: how for model, how in matching.items() if how.kind == "fuse"}
        self.common: CommonWidth | None = _common_width(network, fused) if fused else None
        self._wide: dict[str, Array] = {}
        """Vectors of the common width, as they were written last."""
        self._heard: dict[str, Array] | None = None
        self._last: Array | None = None
        if self.common is not None:
            dtype = super().read(self.common.averaged_models[0]).dtype
            if trained:
                self._wide = {
                    o: np.zeros(self.common.size(o), dtype) for o in self.common.averaged_models
                }
            else:
                for owner, value in _starts(network, self.common, fused).items():
                    self.write(owner, value.astype(dtype))

    @property
    def is_staging(self) -> bool:
        """Whether what is heard is kept beside the network, which is not in order yet."""
        return self._heard is not None

    def entries(self, name: str) -> list[SchemaEntry]:
        """What a vector is made of."""
        return schema_entries(self._network, name, self.common)

    def read(self, name: str) -> Array:
        """The vector that is averaged: what was heard while apart, else the network's own values."""
        self._last = self._read(name)
        return self._last

    def write(self, name: str, value: Array) -> None:
        """Take over an averaged vector; while apart, the network does not see it."""
        if self._heard is not None:
            self._heard[name] = value
        elif self.common is not None and name in self.common.averaged_models:
            self._wide[name] = value
            super().write(name, self.common.extract(name, value))
        else:
            super().write(name, value)

    def take_last_read(self) -> Array | None:
        """Return what was read last, once: gathering a vector again is not cheap."""
        last, self._last = self._last, None
        return last

    def start_staging(self) -> None:
        """From now on hold what is heard beside the network, until `match_cells`."""
        self._heard = {}

    def match_cells(self, learner: Learner) -> int:
        """Match the network's cells against what was heard, and be one with the network again.

        Vectors then have the network's own values, in the neighbours' order. Returns how many cells
        changed their places, or, in models of a common width, how many took free ones.
        """
        heard, self._heard = self._heard or {}, None
        moved = self._align(learner, heard)
        if self.common is None:
            return moved
        known = {owner: heard[owner] for owner in self.common.averaged_models if owner in heard}
        if known:
            from ..models.matching import find_indices

            before = self._wide | known
            self.common = find_indices(self._network, self.common, before)
            self._wide = before
            moved += _taken(self.common, known)
        return moved

    def _align(self, learner: Learner, heard: Mapping[str, Array]) -> int:
        models = [model for model in self._aligned if model in heard]
        if not models:
            return 0
        from ..models.matching import align, permute_optimizer

        wide = () if self.common is None else self.common.averaged_models
        reference = {owner: value for owner, value in heard.items() if owner not in wide}
        found = align(self._network, reference, models=models)
        found.apply(self._network)
        optimizer = getattr(learner, "optimizer", None)
        if isinstance(optimizer, torch.optim.Optimizer):
            permute_optimizer(optimizer, self._network, found)
        return found.moved

    # --- checkpoints ----------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """What the network does not hold, of the same moment as the network."""
        indices = {} if self.common is None else self.common.indices
        return {
            "wide": dict(self._wide),
            "heard": None if self._heard is None else dict(self._heard),
            "places": {model: list(parts) for model, parts in indices.items()},
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Go on from a snapshot; the network's own values are restored elsewhere."""
        self._wide = dict(data["wide"])
        self._heard = None if data["heard"] is None else dict(data["heard"])
        if self.common is not None:
            from ..models.matching import CommonWidth

            layouts = {model: self.common.slicing.layout(model) for model in self.common.models}
            self.common = CommonWidth(self._network.slicing, layouts, data["places"])

    def _read(self, name: str) -> Array:
        if self._heard is not None and name in self._heard:
            return self._heard[name]
        own = super().read(name)
        if self.common is None or name not in self.common.averaged_models:
            return own
        return self.common.embed(name, own, self._wide[name])


def _check(network: SlicedNetwork, matching: Mapping[str, Matching]) -> None:
    for model, how in matching.items():
        if model not in network.models:
            raise ModelError(
                f"peer {network.peer!r}, matching: there is no model {model!r} here; models are "
                f"{', '.join(network.models)}"
            )
        if how.kind not in ("align", "fuse"):
            raise ModelError(
                f"peer {network.peer!r}, matching of {model!r}: {how.kind!r} is unknown; there are align, "
                "fuse"
            )


def _common_width(network: SlicedNetwork, fused: Mapping[str, Matching]) -> CommonWidth:
    """The peer's first places in vectors as wide as the models may become."""
    from ..models.matching import CommonWidth

    slicing = network.slicing
    where = f"peer {network.peer!r}, matching"
    if slicing.cross:
        raise ModelError(
            f"{where}: fuse does not go with cross-model averaging, whose weights have no common width; "
            "use align, or leave out cross"
        )
    for model in slicing.models:
        for other in slicing.graph.dependencies(model):
            if (model in fused) != (other in fused):
                lacking = other if model in fused else model
                raise ModelError(
                    f"{where}: {model!r} depends on {other!r}, so weights between them are averaged at the "
                    f"width of both; fuse {lacking!r} as well, or neither"
                )
    bounds = {}
    for model, how in fused.items():
        bound = how.bound or how.width
        if bound is None:
            raise ModelError(
                f"{where}: {model!r} is fused, which needs its common width: a layout at least as wide as "
                "the widest peer's slice, such as 64-100-10"
            )
        bounds[model] = bound
    return CommonWidth(slicing, bounds)


def _starts(
    network: SlicedNetwork, common: CommonWidth, fused: Mapping[str, Matching]
) -> dict[str, Array]:
    """Common starting values; cells between the width and the bound are free, which is zero."""
    from ..models.matching import CommonWidth

    if lacking := sorted(model for model, how in fused.items() if how.width is None):
        raise ModelError(
            f"peer {network.peer!r}, matching: {lacking[0]!r} has a bound but no width to start from; "
            "give both"
        )
    widths = {model: how.width for model, how in fused.items() if how.width is not None}
    start = CommonWidth(network.slicing, widths)
    bounds = {model: common.slicing.layout(model) for model in fused}
    inside = CommonWidth(start.slicing, bounds)
    return {
        owner: inside.embed(owner, start.start(fused[owner].seed, fused[owner].start)[owner])
        for owner in start.averaged_models
    }


def _taken(common: CommonWidth, heard: Mapping[str, Array]) -> int:
    """How many of the peer's cells are at places that were free: all zero in what was heard."""
    anatomy = common.slicing.anatomy
    used = np.zeros(int(anatomy.first_cells[-1]), dtype=bool)
    flat = common.flat(heard)
    for parameter in anatomy.parameters:
        first = anatomy.offsets[parameter.name]
        where = np.nonzero(flat[first : first + parameter.size].reshape(parameter.shape))
        for axis, cells in zip(where, parameter.axes, strict=True):
            if cells is not None:
                used[cells[axis]] = True
    return sum(
        int((~used[anatomy.first_cells[part] + common.slicing.cells[model][part][indices]]).sum())
        for model in common.models
        for part, indices in enumerate(common.indices[model])
        if 0 < part < len(anatomy.parts) - 1
    )


_RECENT = 4  # received values per model by which a peer judges that it agrees with its neighbours


class Agreement:
    """Remembers, per model, how far the last few received values were from the peer's own."""

    def __init__(self, models: Iterable[str], store: Store) -> None:
        self._store = store
        self._recent: dict[str, deque[float]] = {v: deque(maxlen=_RECENT) for v in models}

    def add(self, model: str, mine: Array, received: Array) -> None:
        """Note a value that was credited, and the peer's own as it was then."""
        self._recent[model].append(_distance(mine, received))

    def values(self) -> dict[str, Array]:
        """The peer's values as they are, for `reset_changed`."""
        return {model: self._store.read(model) for model in self._recent}

    def reset_changed(self, before: dict[str, Array], tolerance: float) -> None:
        """Begin anew where values are no longer what they were: what was heard says little of them."""
        for model, old in before.items():
            if _distance(old, self._store.read(model)) > tolerance:
                self._recent[model].clear()

    def forget(self) -> None:
        """Begin anew everywhere."""
        for seen in self._recent.values():
            seen.clear()

    def disagreement(self) -> dict[str, float]:
        """Per model that was heard of, the largest relative distance to lately received values."""
        return {model: max(seen) for model, seen in self._recent.items() if seen}

    def reached(self, gossiper: Gossiper, tolerance: float) -> bool:
        """Whether, for every model that has neighbours, the last few values received agree.

        Values that are on their way must agree too: what is not credited is taken back, and an old
        value would disturb the agreement.
        """
        return (
            not gossiper.stranded_transfers()
            and all(
                len(self._recent[model]) == _RECENT and max(self._recent[model]) <= tolerance
                for model in gossiper.models
                if gossiper.neighbours(model)
            )
            and all(
                _distance(self._store.read(model), transfer.give.value) <= tolerance
                for (_, model), transfer in gossiper.ledger.open.items()
            )
        )


def _distance(mine: Array, other: Array) -> float:
    """How far another value is from ours, relative to ours."""
    return float(np.linalg.norm(mine - other)) / (float(np.linalg.norm(mine)) or 1.0)
