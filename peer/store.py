"""A sliced network for gossip: one flat vector per partial model, its schema, and how far vectors agree.

Also vectors of measured values, which are averaged over all peers like partial models; and the network for
others to use while the peer learns: a copy in memory that computes outputs, and a file. The thread that
trains brings both up to date between two rounds.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from gossamer import __version__
from gossamer.files import atomic_path, write_atomically

from ..gossip import ONE, Array, Gossiper, SchemaEntry, Store, schema_hash
from ..models import Learner, ModelError, RuleOptimizer, SlicedNetwork
from .exits import PeerError
from .settings import Matching

if TYPE_CHECKING:
    from ..gossip.compress import Shapes
    from ..models.matching import CommonWidth

_log = logging.getLogger(__name__)


class NetworkStore:
    """Reads and writes the vectors that a network averages; the network itself holds their values."""

    def __init__(self, network: SlicedNetwork):
        self._network = network
        self.extra: dict[str, Array] = {}
        """Vectors that are averaged too, but are not part of the network."""
        self.own_model: str | None = None
        """A partial model that is this peer's own: no card names it, so no other peer can ask for it."""

    def names(self) -> Iterable[str]:
        """Return the names of the vectors: partial models, pairs with cross-model averaging, and `extra`."""
        averaged = (model for model in self._network.averaged_models if model != self.own_model)
        return (*averaged, *self.extra)

    def read(self, name: str) -> Array:
        """Return the vector's values: a view of the network if they are contiguous, else a copy."""
        if name in self.extra:
            return self.extra[name]
        return self._network.values(name).cpu().numpy()

    def write(self, name: str, value: Array) -> None:
        """Write values to the vector's coordinates in the network."""
        if name in self.extra:
            self.extra[name] = value
        else:
            self._network.write(name, value)


def schema_entries(
    network: SlicedNetwork, model: str, common: CommonWidth | None = None
) -> list[SchemaEntry]:
    """Return the schema of a partial model's vector: name, shape and dtype of each parameter in it.

    Two peers can average the vector if their schemas are equal. With a `common` width, peers of different
    widths have equal schemas.
    """
    dtype = str(network.flat.dtype).removeprefix("torch.")
    has_common_width = common is not None and model in common.averaged_models
    slicing = common.slicing if common is not None and has_common_width else network.slicing
    return [
        (
            f"{name} ({' × '.join(axis_model for axis_model, _ in axes if axis_model)})",
            [count for _, count in axes],
            dtype,
        )
        for name, axes in slicing.schema(model)
    ]


def blocks(entries: Sequence[SchemaEntry]) -> Shapes:
    """Return the shapes of the parameters in a model's schema entries."""
    return [tuple(int(size) for size in shape) for _, shape, _ in entries]


class MatchedStore(NetworkStore):
    """The vectors of one peer, with matching of cells: see settings.Matching.

    While `is_staging`, received vectors are kept beside the network instead of written into it. Models that
    are fused have a *common width*: their vectors have room for the cells of peers of any width.

    matching: per partial model; models without matching are read from and written to the network.
    trained: whether the network keeps its values; else, in models of a common width, it starts from common
        starting values.
    """

    def __init__(
        self, network: SlicedNetwork, matching: Mapping[str, Matching], *, trained: bool = False
    ):
        super().__init__(network)
        _check_matching(network, matching)
        self._aligned = [model for model, each in matching.items() if each.kind == "align"]
        self._fused = {model: each for model, each in matching.items() if each.kind == "fuse"}
        fused = self._fused
        self.common_width: CommonWidth | None = _common_width(network, fused) if fused else None
        self._common_vectors: dict[str, Array] = {}
        """Vectors of the common width, as they were written last."""
        self._staged: dict[str, Array] | None = None
        if self.common_width is not None:
            dtype = super().read(self.common_width.averaged_models[0]).dtype
            if trained:
                self._common_vectors = {
                    m: np.zeros(self.common_width.size(m), dtype)
                    for m in self.common_width.averaged_models
                }
            else:
                _check_untrained(network, fused)
                for model, value in _common_start(self.common_width, fused).items():
                    self.write(model, value.astype(dtype))

    @property
    def is_staging(self) -> bool:
        """Whether received vectors are kept beside the network, whose cells are not matched yet."""
        return self._staged is not None

    def schema(self, name: str) -> list[SchemaEntry]:
        """Return the schema of a vector, at the common width if it has one; see schema_entries."""
        if name in self.extra:
            return [(name, [self.extra[name].size], str(self.extra[name].dtype))]
        return schema_entries(self._network, name, self.common_width)

    def read(self, name: str) -> Array:
        """Return the vector to average: a received one while staging, else the network's own values."""
        if self._staged is not None and name in self._staged:
            return self._staged[name]
        own = super().read(name)
        if self.common_width is None or name not in self.common_width.averaged_models:
            return own
        return self.common_width.embed(name, own, self._common_vectors[name])

    def write(self, name: str, value: Array) -> None:
        """Write an averaged vector; while staging, the network stays as it is."""
        if self._staged is not None and name not in self.extra:
            self._staged[name] = value
        elif self.common_width is not None and name in self.common_width.averaged_models:
            self._common_vectors[name] = value
            super().write(name, self.common_width.extract(name, value))
        else:
            super().write(name, value)

    def start_staging(self) -> None:
        """Keep received vectors beside the network, until `match_cells` is called."""
        self._staged = {}

    def match_cells(self, learner: Learner) -> int:
        """Match the network's cells with the received vectors, and end staging.

        The vectors then have the network's own values, in the neighbours' order of cells. Returns how many
        cells were permuted, or, in models of a common width, got an index that was not in use.
        """
        received, self._staged = self._staged or {}, None
        moved = self._align(learner, received)
        if self.common_width is None:
            return moved
        received_common = {
            m: received[m] for m in self.common_width.averaged_models if m in received
        }
        if received_common:
            from ..models.matching import clear_untrained_cells, find_indices

            start = _common_start(self.common_width, self._fused)
            trained = clear_untrained_cells(self.common_width, received_common, start)
            self._common_vectors = self._common_vectors | received_common
            vectors = self._common_vectors | trained
            self.common_width = find_indices(self._network, self.common_width, vectors)
            moved += _count_newly_used(self.common_width, trained)
        return moved

    def _align(self, learner: Learner, received: Mapping[str, Array]) -> int:
        models = [model for model in self._aligned if model in received]
        if not models:
            return 0
        from ..models.matching import align, permute_optimizer

        common_models = () if self.common_width is None else self.common_width.averaged_models
        reference = {model: v for model, v in received.items() if model not in common_models}
        permutation = align(self._network, reference, models=models)
        permutation.apply(self._network)
        optimizer = getattr(learner, "optimizer", None)
        if isinstance(optimizer, RuleOptimizer | torch.optim.Optimizer):
            permute_optimizer(optimizer, self._network, permutation)
        return permutation.moved

    # --- checkpoints ----------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return the data that the network does not hold; the keys are part of the checkpoint's format."""
        indices = {} if self.common_width is None else self.common_width.indices
        return {
            "wide": dict(self._common_vectors),
            "heard": None if self._staged is None else dict(self._staged),
            "places": {model: list(parts) for model, parts in indices.items()},
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restore a snapshot; the network's own values are restored elsewhere."""
        self._common_vectors = dict(data["wide"])
        self._staged = None if data["heard"] is None else dict(data["heard"])
        if self.common_width is not None:
            from ..models.matching import CommonWidth

            layouts = {
                model: self.common_width.slicing.layout(model) for model in self.common_width.models
            }
            self.common_width = CommonWidth(self._network.slicing, layouts, data["places"])


def _check_matching(network: SlicedNetwork, matching: Mapping[str, Matching]) -> None:
    for model, each in matching.items():
        if model not in network.models:
            raise ModelError(
                f"peer {network.peer!r}, matching: there is no model {model!r} here; models are "
                f"{', '.join(network.models)}"
            )
        if each.kind not in ("align", "fuse"):
            raise ModelError(
                f"peer {network.peer!r}, matching of {model!r}: {each.kind!r} is unknown; write align or fuse"
            )


def _common_width(network: SlicedNetwork, fused: Mapping[str, Matching]) -> CommonWidth:
    """Return the common widths of fused models, at their bounds; the peer's cells have the first indices."""
    from ..models.matching import CommonWidth

    slicing = network.slicing
    prefix = f"peer {network.peer!r}, matching"
    if slicing.cross:
        raise ModelError(
            f"{prefix}: fuse does not work with cross-model averaging, whose weights have no common width; "
            "use align, or leave out cross"
        )
    for model in slicing.models:
        for other in slicing.graph.dependencies(model):
            if (model in fused) != (other in fused):
                not_fused = other if model in fused else model
                raise ModelError(
                    f"{prefix}: {model!r} depends on {other!r}, so weights between them are averaged at the "
                    f"width of both; fuse {not_fused!r} as well, or neither"
                )
    bounds = {}
    for model, matching in fused.items():
        bound = matching.bound or matching.width
        if bound is None:
            raise ModelError(
                f"{prefix}: {model!r} is fused, which needs its common width: a layout at least as wide as "
                "the widest peer's slice, such as 64-100-10"
            )
        bounds[model] = bound
    return CommonWidth(slicing, bounds)


def _check_untrained(network: SlicedNetwork, fused: Mapping[str, Matching]) -> None:
    """Raise ModelError unless common starting values fill all cells of the network."""
    from ..models.matching import CommonWidth

    if without_width := sorted(model for model, each in fused.items() if each.width is None):
        raise ModelError(
            f"peer {network.peer!r}, matching: {without_width[0]!r} has a bound but no width to start from; "
            "give both"
        )
    CommonWidth(network.slicing, {m: each.width for m, each in fused.items() if each.width})


def _common_start(common: CommonWidth, fused: Mapping[str, Matching]) -> dict[str, Array]:
    """Return the common starting values; cells between the width and the bound are unused, which is zero.

    Models without a width have none.
    """
    from ..models import Layout
    from ..models.matching import CommonWidth, with_layouts

    bounds = {model: common.slicing.layout(model) for model in common.models}
    widths = {m: Layout.slice(each.width) for m, each in fused.items() if each.width is not None}
    narrow = with_layouts(common.slicing, bounds | widths)
    at_width, at_bound = CommonWidth(narrow, bounds | widths), CommonWidth(narrow, bounds)
    return {
        model: at_bound.embed(model, at_width.start(fused[model].seed, fused[model].start)[model])
        for model in at_width.averaged_models
        if model in widths
    }


def _count_newly_used(common: CommonWidth, vectors: Mapping[str, Array]) -> int:
    """Return how many of the peer's cells have an index that was unused: all zero in the vectors."""
    anatomy = common.slicing.anatomy
    used = np.zeros(int(anatomy.first_cells[-1]), dtype=bool)
    flat = common.flat(vectors)
    for parameter in anatomy.parameters:
        first = anatomy.offsets[parameter.name]
        nonzero = np.nonzero(flat[first : first + parameter.size].reshape(parameter.shape))
        for indices, cells in zip(nonzero, parameter.axes, strict=True):
            if cells is not None:
                used[cells[indices]] = True
    return sum(
        int((~used[anatomy.first_cells[part] + common.slicing.cells[model][part][indices]]).sum())
        for model in common.models
        for part, indices in enumerate(common.indices[model])
        if 0 < part < len(anatomy.parts) - 1
    )


_RECENT_VALUES = 4
"""Number of received values per model that must be close to the peer's own for agreement."""


class Agreement:
    """Relative distances, per model, between the last few received values and the peer's own."""

    def __init__(self, models: Iterable[str], store: Store) -> None:
        self._store = store
        self._recent: dict[str, deque[float]] = {m: deque(maxlen=_RECENT_VALUES) for m in models}

    def add(self, model: str, own: Array, distance: float) -> None:
        """Add the distance of a value that was credited from the peer's own value at that time."""
        if model in self._recent:
            self._recent[model].append(distance / _norm(own))

    def values(self) -> dict[str, Array]:
        """Return copies of the peer's current values, per model, for `reset_changed`."""
        return {model: np.array(self._store.read(model)) for model in self._recent}

    def reset_changed(self, before: dict[str, Array], tolerance: float) -> None:
        """Forget the distances of models whose values have changed by more than the tolerance."""
        for model, old in before.items():
            if _distance(old, self._store.read(model)) > tolerance:
                self._recent[model].clear()

    def forget(self) -> None:
        """Forget all distances."""
        for distances in self._recent.values():
            distances.clear()

    def disagreement(self) -> dict[str, float]:
        """Return the largest relative distance to the last received values, per model with any."""
        return {model: max(distances) for model, distances in self._recent.items() if distances}

    def reached(self, gossiper: Gossiper, tolerance: float) -> bool:
        """Return whether the last few received values agree, in every model that has neighbours.

        Values in open transfers must agree too: a transfer that is not credited is taken back, and an old
        value would change the peer's own.
        """
        return (
            not gossiper.stranded_transfers()
            and all(
                len(self._recent[model]) == _RECENT_VALUES and max(self._recent[model]) <= tolerance
                for model in gossiper.models
                if model in self._recent and gossiper.neighbours(model)
            )
            and all(
                _distance(self._store.read(model), transfer.give.value) <= tolerance
                for (_, model), transfer in gossiper.ledger.open.items()
                if model in self._recent
            )
        )


def _distance(own: Array, other: Array) -> float:
    """Return the distance between two values, relative to the norm of the own one."""
    return float(np.linalg.norm(own - other)) / _norm(own)


def _norm(own: Array) -> float:
    return float(np.linalg.norm(own)) or 1.0


class SwarmMean:
    """The mean over peers of a vector that each of them may change from time to time.

    It is averaged under its own name, as one of the store's `extra` vectors. A peer whose vector changes adds
    the difference to its estimate of the mean, so gossip need not begin anew. Every peer's vector counts
    once, whatever the peer's weight is.
    """

    def __init__(self, store: NetworkStore, name: str, size: int):
        self._store, self.name = store, name
        self.contribution: Array | None = None
        """This peer's own vector as it is part of the mean; None before `contribute` has added one."""
        store.extra[name] = np.zeros(size, np.float32)

    @property
    def value(self) -> Array:
        """The mean as this peer knows it."""
        return self._store.extra[self.name]

    def contribute(self, gossiper: Gossiper, own: Array) -> None:
        """Make a vector this peer's part of the mean; has no effect while the peer holds no weight."""
        weight = gossiper.weight(self.name)
        if weight:
            change = own if self.contribution is None else own - self.contribution
            # The estimate is sum / weight, and a peer's share of the sum is its vector times ONE.
            self._store.extra[self.name] = self.value + (change * (ONE / weight)).astype(np.float32)
            self.contribution = own

    def reset(self) -> None:
        """Begin anew, without weight."""
        self._store.extra[self.name] = np.zeros_like(self.value)
        self.contribution = None

    def remove(self) -> None:
        """Average the vector no longer."""
        del self._store.extra[self.name]

    def snapshot(self) -> dict[str, Any]:
        """Return what a restarted process needs; the keys are part of the checkpoint's format."""
        return {"value": self.value, "added": self.contribution}

    def restore(self, data: dict[str, Any]) -> None:
        """Continue from a snapshot."""
        self._store.extra[self.name] = np.array(data["value"])
        self.contribution = None if data["added"] is None else np.array(data["added"])


# --- the network for others to use ---------------------------------------------------------------

NETWORK_FORMAT = "gossamer-network-1"
"""Identifies the form of the JSON file beside a network."""


class NetworkCopy:
    """A copy of a peer's network, in eval mode; any thread may call it. `copy(x)` returns its outputs."""

    def __init__(self, network: SlicedNetwork) -> None:
        self._network = network
        self._lock = threading.Lock()
        self._module = deepcopy(network.module).eval().requires_grad_(False)
        self.round = 0
        """The round after which the copy was made."""

    def update(self, round_number: int) -> None:
        """Copy the values of the peer's network; only the thread that trains it may call this."""
        with self._lock, torch.no_grad():
            source = self._network.module.state_dict()
            for name, value in self._module.state_dict().items():
                value.copy_(source[name])
            self.round = round_number

    def __call__(self, *inputs: Any) -> Any:
        """Return the network's outputs, all of them from one and the same state of its values."""
        with self._lock, torch.no_grad():
            return self._module(*inputs)


@dataclass(frozen=True)
class About:
    """What a network's file holds: written as JSON beside it, and inside it as metadata.

    schema: per partial model, the hash of its parameters' names and shapes.
    entry, arguments: the function that makes a learner with such a network, if known.
    """

    peer: str
    swarm: str
    session: str
    round: int
    accuracy: float | None
    time: str
    schema: Mapping[str, str]
    entry: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    version: str = __version__
    format: str = NETWORK_FORMAT


FIRST_PAUSE_DIVISOR = 32.0
"""Divides the first pause between two writings of a network; half as much divides the next one, and so on."""


@dataclass
class NetworkFile:
    """Writes a peer's network to a safetensors file, and a small JSON file about it beside it.

    Both are replaced atomically, the network first. pause: seconds from one writing to the next; the first
    pauses are shorter, as a network learns most at the beginning.
    """

    path: Path
    pause: float
    entry: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    _next_at: float = field(default=-inf, init=False)
    _pause_divisor: float = field(default=FIRST_PAUSE_DIVISOR, init=False)
    _is_failing: bool = field(default=False, init=False)

    def write_if_due(
        self, network: SlicedNetwork, now: float, wall: float, *, force: bool = False, **about: Any
    ) -> None:
        """Write the files if the last time is long enough ago; log the first of several failures.

        now: by the monotonic clock. wall: by the wall clock. force: write in any case. about: other fields of
        About.
        """
        if now < self._next_at and not force:
            return
        self._next_at = now + self.pause / self._pause_divisor
        self._pause_divisor = max(1.0, self._pause_divisor / 2.0)
        try:
            self.write(network, wall, **about)
        except (OSError, SafetensorError) as error:
            if not self._is_failing:
                _log.warning(
                    "peer %s: its network cannot be written to %s: %s; it is tried again every %g s",
                    network.peer, self.path, getattr(error, "strerror", None) or error, self.pause,
                )  # fmt: skip
            self._is_failing = True
        else:
            self._is_failing = False

    def write(self, network: SlicedNetwork, wall: float, **about: Any) -> None:
        """Write both files; raises OSError or SafetensorError."""
        accuracy = about.pop("accuracy")
        about_text = json.dumps(
            asdict(
                About(
                    accuracy=accuracy if isfinite(accuracy) else None,
                    time=datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds"),
                    schema={m: schema_hash(schema_entries(network, m)) for m in network.averaged_models},
                    entry=self.entry, arguments=self.arguments, **about,
                )
            )
        )  # fmt: skip
        with atomic_path(self.path) as temporary:
            network.save(temporary, about=about_text)
        write_atomically(about_path(self.path), about_text + "\n")


def about_path(network: Path) -> Path:
    """Return the path of the JSON file beside a network's file: NAME.safetensors → NAME.network.json."""
    return network.with_suffix(".network.json")


def read_about(network: Path) -> dict[str, Any]:
    """Return what a network's file says of itself, by the fields of About; PeerError if it says nothing."""
    try:
        with safe_open(network, framework="pt") as file:
            about = json.loads((file.metadata() or {})["about"])
        if about["format"] != NETWORK_FORMAT:
            raise PeerError(
                f"{network}: was written by another version of gossamer ({about['version']})"
            )
        return about
    except FileNotFoundError:
        raise PeerError(f"{network}: cannot be read: there is no such file") from None
    except OSError as error:
        raise PeerError(f"{network}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise PeerError(f"{network}: is not a safetensors file: {error}") from None
    except (KeyError, ValueError, TypeError):
        raise PeerError(f"{network}: does not say which peer made it, and how") from None
