"""A torch module whose parameters are views of one flat tensor, cut into partial models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .allotment import SliceSpec
from .anatomy import Anatomy
from .discovery import discover
from .errors import ModelError
from .graph import ModelGraph
from .initial import Start, starting_values
from .slicing import Slicing


class SlicedNetwork:
    """Wraps a module; reading or writing a partial model is one gather or scatter.

    The module stays an ordinary torch module: train it with any optimizer, call it, save it. Only do
    not replace its parameters or move it to another device or dtype: build it there instead.

        network = SlicedNetwork(mlp("64=32=10"), {"global": "64-24-10"}, peer="anna", seed=1)
        network.read("global")            # the coordinates that "global" averages
        network(x)                        # the module's own forward

    module
        Chains of Linear layers are understood as they are; other modules carry an `anatomy()`.
    slices, graph, cross
        See Slicing.
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
        seed: int | None = None,
        start: Start | None = None,
    ):
        self.module = module
        self.peer = peer
        anatomy = anatomy or discover(module)
        name = rest.replace("{peer}", peer) if rest is not None else None
        self.slicing = Slicing(anatomy, slices, graph=graph, rest=name, cross=cross)
        self.flat = _flatten(module)
        self._where = {owner: self._place(owner) for owner in self.slicing.owners}
        if seed is not None:
            current = self.flat.double().cpu().numpy()
            values = starting_values(self.slicing, current, seed=seed, peer=peer, start=start)
            self.flat.copy_(torch.from_numpy(values))

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def __repr__(self) -> str:
        """Which model has which cells, and how many values each owner averages."""
        models = ", ".join(f"{m} {self.slicing.layout(m).as_slice()}" for m in self.models)
        owned = ", ".join(
            f"{owner} {len(self.slicing.coordinates(owner))}" for owner in self.owners
        )
        private = len(self.slicing.private)
        return f"SlicedNetwork({self.peer}: cells {models}; values {owned}, private {private})"

    @property
    def models(self) -> tuple[str, ...]:
        """The partial models that this peer implements."""
        return self.slicing.models

    @property
    def owners(self) -> tuple[str, ...]:
        """Models, and pairs with cross-model averaging, that own coordinates of this network."""
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

    def check_finite(self, owner: str, values: Tensor) -> None:
        """Raise, naming peer, model and parameter, if a value of `owner` is NaN or infinite."""
        bad = torch.nonzero(~torch.isfinite(values))
        if len(bad):
            coordinate = int(self.slicing.coordinates(owner)[int(bad[0, 0])])
            raise ModelError(
                f"peer {self.peer!r}, model {owner!r}: {len(bad)} values are not finite, the first in "
                f"parameter {self.slicing.anatomy.parameter_at(coordinate)!r}; lower the learning rate or "
                "look at the peer's data"
            )

    def save(self, path: str | Path) -> None:
        """Write the module's state as safetensors, with the slices as readable metadata."""
        state = {name: value.contiguous() for name, value in self.module.state_dict().items()}
        slices = {
            model: [cells.tolist() for cells in self.slicing.cells[model]] for model in self.models
        }
        metadata = {"peer": self.peer, "slices": json.dumps(slices)}
        save_file({name: value.clone() for name, value in state.items()}, path, metadata)

    def load(self, path: str | Path) -> None:
        """Read a state written by `save`; the flat tensor and its views stay in place."""
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        own = {name: tuple(value.shape) for name, value in self.module.state_dict().items()}
        for name, shape in own.items():
            if name not in state:
                raise ModelError(f"{path}: holds another network, it has no parameter {name!r}")
            if tuple(state[name].shape) != shape:
                raise ModelError(
                    f"{path}: holds another network, {name!r} is {tuple(state[name].shape)} there and "
                    f"{shape} here"
                )
        self.module.load_state_dict(state)

    def _find(self, owner: str) -> slice | Tensor:
        if owner not in self._where:
            self.slicing.where(owner)  # raises, naming the owners there are
        return self._where[owner]

    def _place(self, owner: str) -> slice | Tensor:
        where = self.slicing.where(owner)
        return where if isinstance(where, slice) else torch.from_numpy(where).to(self.flat.device)


def _flatten(module: nn.Module) -> Tensor:
    """Move a module's parameters into one tensor, of which they become views."""
    parameters = list(module.parameters())
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    if len(kinds) != 1:
        raise ModelError(
            f"a sliced network's parameters share one dtype and device; these have "
            f"{', '.join(sorted(f'{dtype} on {device}' for dtype, device in kinds)) or 'none'}"
        )
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    offset = 0
    for parameter in parameters:
        parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    return flat
