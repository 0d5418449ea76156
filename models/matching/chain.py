"""A network as arrays: layers one after the other, the form in which networks are fused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ModelError


@dataclass(frozen=True, eq=False)
class Layer:
    """One dense layer: `weight` [cells, inputs], and values per cell by name (`bias`, slopes, …).

    `weight_name` and the keys of `own` are the names in the network's state dict.
    """

    weight: np.ndarray
    own: Mapping[str, np.ndarray]
    weight_name: str = "weight"

    @property
    def cells(self) -> int:
        """How many cells the layer has."""
        return self.weight.shape[0]


@dataclass(frozen=True, eq=False)
class Chain:
    """Dense layers in the order in which they run, in double precision."""

    layers: tuple[Layer, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Cells per part, inputs first."""
        return (self.layers[0].weight.shape[1], *(layer.cells for layer in self.layers))

    @property
    def hidden(self) -> int:
        """The number of hidden parts."""
        return len(self.layers) - 1

    @property
    def size(self) -> int:
        """How many parameters the network has."""
        return sum(
            layer.weight.size + sum(v.size for v in layer.own.values()) for layer in self.layers
        )

    def state(self, dtype: np.dtype | type = np.float32) -> dict[str, np.ndarray]:
        """A state dict of arrays, names as they were."""
        found: dict[str, np.ndarray] = {}
        for layer in self.layers:
            found[layer.weight_name] = layer.weight.astype(dtype)
            found.update({name: value.astype(dtype) for name, value in layer.own.items()})
        return found

    @classmethod
    def read(
        cls,
        state: Mapping[str, np.ndarray],
        name: str = "the network",
        order: Sequence[str] | None = None,
    ) -> Chain:
        """Read a state dict: two-dimensional values are layers, others belong to the layer before.

        name
            Stands in errors: a file, a peer.
        order
            The names of the values as they run. By default it is that of the state dict, numbered layers by
            their numbers: right for a module's `state_dict()`, but a file sorts names as text.
        """
        layers: list[tuple[str, np.ndarray, dict[str, np.ndarray]]] = []
        for key in order or _in_order(state):
            value = np.asarray(state[key], dtype=np.float64)
            if not np.isfinite(value).all():
                raise ModelError(
                    f"{name}: layer {key!r} has {int((~np.isfinite(value)).sum())} values that are not "
                    "finite; leave this network out, or train it again at a lower rate"
                )
            if value.ndim == 2:
                if layers and layers[-1][1].shape[0] != value.shape[1]:
                    raise ModelError(
                        f"{name}: layer {key!r} takes {value.shape[1]} inputs, but the one before it "
                        f"({layers[-1][0]!r}) has {layers[-1][1].shape[0]} cells; only chains of dense "
                        "layers can be fused"
                    )
                layers.append((key, value, {}))
            elif value.ndim == 1 and layers and value.shape == (layers[-1][1].shape[0],):
                layers[-1][2][key] = value
            else:
                raise ModelError(
                    f"{name}: {key!r} of shape {value.shape} is neither a dense layer nor one value per "
                    "cell of the layer before it; only chains of dense layers can be fused"
                )
        if not layers:
            raise ModelError(f"{name}: there is no dense layer in it")
        # By name, for networks that list their values in other orders are fused too.
        return cls(
            tuple(Layer(value, dict(sorted(own.items())), key) for key, value, own in layers)
        )


def check_alike(chains: Sequence[Chain], names: Sequence[str] | None = None) -> None:
    """Refuse networks whose parts do not correspond, naming the layer and the sizes."""
    names = names or [f"network {index}" for index in range(len(chains))]
    if not chains:
        raise ModelError("fuse: no networks were given")
    first = chains[0]
    for name, chain in zip(names[1:], chains[1:], strict=True):
        if len(chain.layers) != len(first.layers):
            raise ModelError(
                f"{name} has {len(chain.layers)} layers ({_shape(chain)}), {names[0]} has "
                f"{len(first.layers)} ({_shape(first)}); networks of one depth can be fused"
            )
        for mine, theirs in zip(first.layers, chain.layers, strict=True):
            if list(mine.own) != list(theirs.own) or mine.weight_name != theirs.weight_name:
                raise ModelError(
                    f"layer {theirs.weight_name!r} of {name} holds {_names(theirs)}, the one of "
                    f"{names[0]} holds {_names(mine)}: their parts do not correspond"
                )
        for what, index in (("inputs", 0), ("outputs", -1)):
            if chain.widths[index] != first.widths[index]:
                layer = chain.layers[index].weight_name
                raise ModelError(
                    f"layer {layer!r} of {name} has {chain.widths[index]} {what}, that of {names[0]} has "
                    f"{first.widths[index]}; only hidden widths may differ"
                )


def part_names(chain: Chain) -> tuple[str, ...]:
    """The names of the hidden parts: their layers' names without `.weight`."""
    return tuple(layer.weight_name.removesuffix(".weight") for layer in chain.layers[:-1])


def _shape(chain: Chain) -> str:
    return "=".join(map(str, chain.widths))


def _names(layer: Layer) -> str:
    return ", ".join([layer.weight_name, *layer.own])


def _in_order(state: Mapping[str, np.ndarray]) -> list[str]:
    """`2.weight` before `10.bias`, other names as given; in a module the weight first.

    Files sort names as text; numbers say in which order the layers of a Sequential run.
    """
    seen: dict[str, int] = {}
    for name in state:
        for step in name.split(".")[:-1]:
            seen.setdefault(step, len(seen))

    def place(name: str) -> tuple[list[int], bool]:
        *path, last = name.split(".")
        return [int(step) if step.isdecimal() else seen[step] for step in path], last != "weight"

    return sorted(state, key=place)
