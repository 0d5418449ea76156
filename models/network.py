"""Sliced networks: a torch module as views of one flat tensor, cut into partial models; exact averaging."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .anatomy import Anatomy, Buffers
from .discovery import BATCH_NORMS, discover_for, named_tensors
from .errors import ModelError
from .slicing import ModelGraph, SliceSpec, Slicing, Start, starting_values

LAYER_ORDER = "layer_order"
"""The metadata key of a saved network that lists its values in the order in which layers run."""


class SlicedNetwork:
    """Wraps a module; reading or writing a partial model is one gather or scatter.

    The module stays an ordinary torch module: train it with any optimizer, call it, save it. Only do
    not replace its parameters or move it to another device or dtype: build it there instead.

        network = SlicedNetwork(mlp("64=32=10"), {"global": "64-24-10"}, peer="anna", seed=1)
        network.read("global")            # the coordinates that "global" averages
        network(x)                        # the module's own forward

    module
        Chains of Linear layers are understood as they are; other modules are traced with `example`, or
        carry an `anatomy()`. One that cannot be traced may still be shared whole (`{"all": 1.0}`) or not
        at all (`{}`).
    slices, graph, cross
        See Slicing.
    example, parts, channels, check
        An example input for modules whose parts must be found, and help for the search: see
        `discover`. Peers of one architecture may pass `anatomy=discover(module, x)` instead, found once.
    buffers
        What happens to batch norm's statistics. `average`: they follow their cells, and are averaged
        with the weights that gossip gives to everything else (means of means and of variances; the
        spread of the peers' means is not added to the variance). `local`: they and their norm's gains
        and biases stay with the peer (FedBN). `recompute`: they are the peer's own, and the learner
        takes them anew from its samples before it tests. Counters always stay local. Where slices are
        partial, prefer `recompute` or `local`: a shared cell hears private cells too, so what it does
        differs from peer to peer, and averaged statistics fit nobody well.
    peer
        The peer's name: it seeds private values and appears in errors. Use one name per peer.
    rest
        The model that takes cells no slice claims, `{peer}` standing for the peer's name. None makes
        unclaimed cells an error.
    seed, start
        Starting values; `seed=None` keeps the values that the module has. Peers of one swarm use the
        same seed.
    """

    def __init__(
        self,
        module: nn.Module,
        slices: Mapping[str, SliceSpec],
        *,
        graph: ModelGraph | None = None,
        peer: str = "peer",
        rest: str | None = "local-{peer}",
        cross: bool = False,
        anatomy: Anatomy | None = None,
        example: Tensor | tuple[Tensor, ...] | None = None,
        parts: Mapping[str, Sequence[str]] | None = None,
        channels: int | None = None,
        check: bool = True,
        buffers: Buffers = "average",
        seed: int | None = None,
        start: Start | None = None,
    ):
        if not isinstance(module, nn.Module):
            raise ModelError(f"a sliced network wraps a torch module, not {module!r}")
        if not isinstance(slices, Mapping):
            raise ModelError(
                f"slices: give a dict from a model's name to its cells, as in {{'all': 1.0}}, not {slices!r}"
            )
        self.module = module
        self.peer = peer
        self.buffers: Buffers = buffers
        if anatomy is None:
            anatomy = discover_for(
                slices.values(), module, example, parts=parts, channels=channels, check=check
            )
        anatomy = anatomy.with_buffers(buffers)
        name = rest.replace("{peer}", peer) if rest is not None else None
        self.slicing = Slicing(anatomy, slices, graph=graph, rest=name, cross=cross)
        self.flat = torch.cat([value.detach().reshape(-1) for value in self._tensors()])
        self.rebind(self.flat)
        if module not in _HOOKED:
            module.register_state_dict_post_hook(_own_memory)
            _HOOKED.add(module)
        self._where: dict[str, slice | Tensor] = {}
        for owner in self.slicing.owners:
            where = self.slicing.where(owner)
            self._where[owner] = (
                where if isinstance(where, slice) else torch.from_numpy(where).to(self.flat.device)
            )
        if seed is not None:
            current = self.flat.double().cpu().numpy()
            values = starting_values(self.slicing, current, seed=seed, peer=peer, start=start)
            self.flat.copy_(torch.from_numpy(values))

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def __repr__(self) -> str:
        """Which model has which cells, and how many values each owner averages."""
        models = ", ".join(f"{m} {self.slicing.layout(m).as_slice()}" for m in self.models)
        owned = ", ".join(f"{one} {len(self.slicing.coordinates(one))}" for one in self.owners)
        private = len(self.slicing.private)
        return f"SlicedNetwork({self.peer}: cells {models}; values {owned}, private {private})"

    @property
    def models(self) -> tuple[str, ...]:
        """The partial models that this peer implements."""
        return self.slicing.models

    @property
    def owners(self) -> tuple[str, ...]:
        """What averages values of this network: partial models and, across models, pairs of them."""
        return self.slicing.owners

    def read(self, owner: str) -> Tensor:
        """The values that `owner` averages, in the order that all its peers share (a copy)."""
        where = self._find(owner)
        if isinstance(where, slice):
            return self.flat[where].clone()
        return self.flat.index_select(0, where)

    def write(self, owner: str, values: Tensor | np.ndarray) -> None:
        """Replace the values that `owner` averages."""
        where = self._find(owner)
        values = torch.as_tensor(values)
        count = where.stop - where.start if isinstance(where, slice) else len(where)
        if values.shape != (count,):
            raise ModelError(
                f"{owner!r} averages {count} coordinates of peer {self.peer!r}, "
                f"but {tuple(values.shape)} values were given"
            )
        if isinstance(where, slice):
            self.flat[where] = values.to(self.flat)
        else:
            self.flat.scatter_(0, where, values.to(self.flat))

    def rebind(self, flat: Tensor) -> None:
        """Let the module's tensors be views of `flat`, into which the caller has copied their values."""
        self.flat = flat
        views = self.slicing.anatomy.views(flat).values()
        for value, view in zip(self._tensors(), views, strict=True):
            value.data = view

    def own_buffers(self) -> dict[str, Tensor]:
        """The buffers that are not in the flat tensor: counters, and statistics that are not averaged."""
        in_flat = self.slicing.anatomy.spans
        return {name: v for name, v in self.module.named_buffers() if name not in in_flat}

    @torch.no_grad()
    def recompute(self, inputs: Tensor, batch: int = 250) -> None:
        """Take batch norm's statistics anew from `inputs`: plain means over batches, no momentum."""
        if not len(inputs):
            raise ModelError(f"peer {self.peer!r} has no samples to recompute its statistics from")
        norms = [one for one in self.module.modules() if isinstance(one, BATCH_NORMS)]
        kept = [(one.momentum, one.training) for one in norms]
        training = self.module.training
        self.module.eval()
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # torch's word for a plain mean
                norm.train()
            # Batches of about equal size: a last one of a single sample has no variance.
            for some in inputs.tensor_split(-(-len(inputs) // batch)):
                self.module(some)
        finally:
            self.module.train(training)
            for norm, (momentum, was) in zip(norms, kept, strict=True):
                norm.momentum = momentum
                norm.train(was)

    def check_finite(self, owner: str, values: Tensor) -> None:
        """Raise, naming peer, model and parameter, if a value of `owner` is NaN or infinite."""
        bad = torch.nonzero(~torch.isfinite(values))
        if len(bad):
            coordinate = int(self.slicing.coordinates(owner)[int(bad[0, 0])])
            self._refuse(f"peer {self.peer!r}, model {owner!r}", len(bad), coordinate)

    def check_all_finite(self) -> None:
        """Raise, naming peer and parameter, if any value of the network is NaN or infinite, shared or not."""
        bad = torch.nonzero(~torch.isfinite(self.flat))
        if len(bad):
            self._refuse(f"peer {self.peer!r}", len(bad), int(bad[0, 0]))

    def save(self, path: str | Path) -> None:
        """Write the module's state as safetensors, with slices and layer order as readable metadata."""
        state = {name: value.contiguous() for name, value in self.module.state_dict().items()}
        slices = {
            model: [cells.tolist() for cells in self.slicing.cells[model]] for model in self.models
        }
        metadata = {
            "peer": self.peer,
            "slices": json.dumps(slices),
            LAYER_ORDER: json.dumps(self._run_order(list(state))),
        }
        save_file({name: value.clone() for name, value in state.items()}, path, metadata)

    def load(self, path: str | Path) -> None:
        """Read a state written by `save`; the flat tensor and its views stay in place."""
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        own = {name: tuple(value.shape) for name, value in self.module.state_dict().items()}
        for name, shape in own.items():
            if name not in state:
                raise ModelError(
                    f"{path}: is the file of a different network: it has no tensor {name!r}"
                )
            if tuple(state[name].shape) != shape:
                raise ModelError(
                    f"{path}: is the file of a different network: {name!r} is "
                    f"{tuple(state[name].shape)} there and {shape} here"
                )
        self.module.load_state_dict(state)

    def _run_order(self, names: list[str]) -> list[str]:
        """Return the names of the state's values in the order in which the layers run.

        A module may list its layers in any order; theirs follows from which part each weight reads and which
        it writes. If the layers do not form one chain, the module's own order is returned.
        """
        anatomy = self.slicing.anatomy
        parameters = [one for one in anatomy.parameters if one.axes]
        touched = {one.name: [anatomy.part_of(axis) for axis in one.axes] for one in parameters}
        pairs = [parts for parts in touched.values() if len(parts) == 2]
        following = {source: target for target, source in pairs}
        chain = [part for part in following if part not in following.values()][:1]
        while chain and chain[-1] in following and len(chain) <= len(pairs):
            chain.append(following[chain[-1]])
        position = {part: index for index, part in enumerate(chain[1:])}
        if len(position) != len(pairs) or any(p[0] not in position for p in touched.values()):
            return names

        def place(name: str) -> tuple[int, bool]:
            parts = touched.get(name)
            return (position[parts[0]], len(parts) != 2) if parts else (len(pairs), True)

        return sorted(names, key=place)

    def _tensors(self) -> list[Tensor]:
        """What the flat tensor holds, in its order."""
        tensors = named_tensors(self.module)
        chosen = [tensors[one.name] for one in self.slicing.anatomy.parameters]
        kinds = {(value.dtype, value.device) for value in chosen}
        if len(kinds) != 1:
            raise ModelError(
                f"a sliced network's parameters share one dtype and device; these have "
                f"{', '.join(sorted(f'{dtype} on {device}' for dtype, device in kinds)) or 'none'}"
            )
        return chosen

    def _refuse(self, whose: str, count: int, coordinate: int) -> NoReturn:
        raise ModelError(
            f"{whose}: {count} values are not finite, the first in parameter "
            f"{self.slicing.anatomy.parameter_at(coordinate)!r}; lower the learning rate or look at the "
            "peer's data"
        )

    def _find(self, owner: str) -> slice | Tensor:
        if owner not in self._where:
            self.slicing.where(owner)  # raises, naming the owners there are
        return self._where[owner]


def permute(network: SlicedNetwork, part: str, order: Sequence[int] | np.ndarray) -> None:
    """Permute the cells of a part in place: the k-th cell becomes what cell `order[k]` was.

    Parameters and batch statistics move together, so the network computes what it did before; inputs
    and outputs, if their part is permuted, are expected in the new order. What the cells are averaged
    with does not move: permuting across slices changes who owns which values.
    """
    anatomy = network.slicing.anatomy
    cells = anatomy.cells(anatomy.find(part))
    chosen = np.asarray(order, dtype=np.int64)
    if not np.array_equal(np.sort(chosen), np.arange(len(cells))):
        raise ModelError(
            f"part {part!r} has {len(cells)} cells: its order must hold 0 to {len(cells) - 1}, each once"
        )
    take = np.arange(anatomy.firsts[-1])
    take[cells] = cells[chosen]
    anatomy.permute(named_tensors(network.module), take)


_HOOKED: WeakSet[nn.Module] = WeakSet()


def _own_memory(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Copy a state's tensors out of memory that several networks share, as in an arena.

    torch.save writes all the memory behind a tensor: one peer's file would hold everybody's values.
    """
    mine = {name: v for name, v in state.items() if name.startswith(prefix) and _is_detached(v)}
    size = sum(value.nbytes for value in mine.values())
    for name, value in mine.items():
        if value.untyped_storage().nbytes() > size:
            state[name] = value.clone()


def _is_detached(value: Any) -> bool:
    """Return whether a value may be replaced by a copy: with `keep_vars` it is a parameter itself."""
    return isinstance(value, Tensor) and not value.requires_grad


def average(networks: Sequence[SlicedNetwork], weights: Sequence[float] | None = None) -> None:
    """Average, in place, every partial model among the networks that implement it.

    Networks built with `cross=True` average pairs of unrelated models too. `weights` (sample counts,
    say) gives one positive number per network; by default all count the same. Coordinates that one
    network alone owns, and private ones, are left bit for bit as they were.
    """
    shares = check_weights(networks, weights)
    for owner, members in implementers(networks).items():
        if len(members) < 2:
            continue
        first = networks[members[0]]
        for index in members[1:]:
            check_schema(owner, first, networks[index])
        values = []
        for index in members:
            values.append(networks[index].read(owner))
            networks[index].check_finite(owner, values[-1])
        # The mean of differences from the first peer: equal values average to themselves, exactly.
        base = values[0].double()
        total = sum(shares[index] for index in members)
        drift = torch.zeros_like(base)
        for index, value in zip(members[1:], values[1:], strict=True):
            drift += (shares[index] / total) * (value.double() - base)
        mean = base + drift
        for index in members:
            networks[index].write(owner, mean)


def implementers(networks: Sequence[SlicedNetwork]) -> dict[str, list[int]]:
    """For every owner, the indices of the networks that own it together."""
    found: dict[str, list[int]] = {}
    for index, network in enumerate(networks):
        for owner in network.owners:
            found.setdefault(owner, []).append(index)
    return dict(sorted(found.items()))


def check_weights(
    networks: Sequence[SlicedNetwork], weights: Sequence[float] | None
) -> Sequence[float]:
    """One positive weight per network; raises, naming the peer, for anything else."""
    if weights is None:
        return [1.0] * len(networks)
    if len(weights) != len(networks):
        raise ModelError(f"{len(weights)} weights were given for {len(networks)} networks")
    for network, weight in zip(networks, weights, strict=True):
        if not 0 < weight < float("inf"):
            raise ModelError(f"peer {network.peer!r}: weight {weight} is not a positive number")
    return weights


def check_schema(owner: str, one: SlicedNetwork, other: SlicedNetwork) -> None:
    """Raise, naming the first block that differs, unless two networks may average `owner`."""
    mine, theirs = one.slicing.schema(owner), other.slicing.schema(owner)
    if mine == theirs:
        return
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            raise ModelError(
                f"model {owner!r} is not the same on {one.peer!r} and {other.peer!r}: "
                f"{_block(a)} there, {_block(b)} here"
            )
    raise ModelError(
        f"model {owner!r} has {len(mine)} blocks on {one.peer!r} and {len(theirs)} on {other.peer!r}"
    )


def _block(block: tuple[str, tuple[tuple[str, int], ...]]) -> str:
    name, axes = block
    return f"{name} [{' × '.join(f'{count} {model}'.strip() for model, count in axes)}]"
