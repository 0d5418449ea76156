"""In which order the layers of a network file run.

A safetensors file lists its values by name, which says nothing about the order in which they run. What says
it, from the surest on: the file's own metadata (`SlicedNetwork.save` writes it), the user, the shapes of the
layers where they fit together in one way only, and numbers in names, as those of a Sequential.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise

from gossamer.errors import GossamerError

from ...models import LAYER_ORDER, ModelError

Shapes = Mapping[str, tuple[int, ...]]

_STEPS = 10_000
"""Partial chains that are tried before the user is asked; a network of 50 layers needs a few hundred."""


def layer_order(
    shapes: Shapes, metadata: Mapping[str, str], given: Sequence[str] | None, file: str
) -> list[str]:
    """The names of a file's values in the order in which they run, each layer's weight first.

    given
        What the user says: names of layers, or of values, in order.

    Raises ModelError, with the remedy, for an order that does not fit, and where none can be told.
    """
    own = _recorded(shapes, metadata, file)
    if own is not None:
        if given and (asked := _weights(shapes, _listed(shapes, given, file))) != _weights(
            shapes, own
        ):
            raise ModelError(
                f"{file}: --order says {_join(asked)}, the file itself says {_join(_weights(shapes, own))}; "
                "leave out --order"
            )
        return own
    if given:
        return _with_rest(shapes, _listed(shapes, given, file), file)
    weights = [name for name, shape in shapes.items() if len(shape) == 2]
    return _with_rest(shapes, _by_shapes(shapes, weights, file), file)


def _recorded(shapes: Shapes, metadata: Mapping[str, str], file: str) -> list[str] | None:
    """The order that the file's metadata gives, if any."""
    if LAYER_ORDER not in metadata:
        return None
    try:
        names = json.loads(metadata[LAYER_ORDER])
        if sorted(names) == sorted(shapes):
            return names
    except (json.JSONDecodeError, TypeError):
        pass
    raise ModelError(f"{file}: its metadata about the order of layers is damaged; save it again")


def _listed(shapes: Shapes, given: Sequence[str], file: str) -> list[str]:
    """The values that the user named, a layer standing for its weight and what is beside it."""
    names: list[str] = []
    for one in given:
        meant = [one] if one in shapes else sorted(n for n in shapes if _module(n) == one)
        if not meant:
            layers = dict.fromkeys(_module(name) or name for name in sorted(shapes, key=_natural))
            raise ModelError(
                f"{file}: --order names {one!r}, which is no layer of it; its layers are {_join(layers)}"
            )
        names += sorted(meant, key=lambda name: len(shapes[name]) != 2)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ModelError(f"{file}: --order names {_layer(twice)!r} twice")
    weights = [name for name, shape in shapes.items() if len(shape) == 2]
    if missing := [name for name in weights if name not in names]:
        raise ModelError(
            f"{file}: --order leaves out {_join(_layer(name) for name in missing)}; name every layer"
        )
    chain = _weights(shapes, names)
    for one, other in pairwise(chain):
        if shapes[one][0] != shapes[other][1]:
            raise ModelError(
                f"{file}: --order puts {_layer(other)!r}, which takes {shapes[other][1]} inputs, behind "
                f"{_layer(one)!r}, which has {shapes[one][0]} cells"
            )
    return names


def _by_shapes(shapes: Shapes, weights: Sequence[str], file: str) -> list[str]:
    """The one chain that the layers form; where shapes allow several, numbers in their names decide."""
    try:
        chains = _first_two(_chains(shapes, weights, numbered=False))
        if len(chains) > 1:
            numbered = _first_two(_chains(shapes, weights, numbered=True))
            chains = numbered if len(numbered) == 1 else chains
    except _TooManySteps:
        raise ModelError(
            f"{file}: the order of its {len(weights)} layers cannot be told from their shapes; give it with "
            "--order NAME,NAME,…"
        ) from None
    if len(chains) == 1 or not weights:
        return chains[0] if chains else []
    if chains:
        raise ModelError(
            f"{file}: its layers fit together in more than one order, as {_join(chains[0])} and as "
            f"{_join(chains[1])}; give the right one with --order NAME,NAME,…"
        )
    sizes = ", ".join(f"{name!r} {shapes[name][1]} to {shapes[name][0]}" for name in weights)
    raise ModelError(
        f"{file}: its layers form no chain ({sizes}); only chains of dense layers can be fused"
    )


class _TooManySteps(GossamerError):
    """So many chains begin but do not end that the search was given up."""


def _chains(shapes: Shapes, weights: Sequence[str], *, numbered: bool) -> Iterator[list[str]]:
    """All orders of the layers in which each takes what the one before it gives.

    numbered: only those in which layers whose names differ by a number stand by their numbers.
    """
    steps = 0
    stack: list[list[str]] = [[]]
    while stack:
        steps += 1
        if steps > _STEPS:
            raise _TooManySteps
        chain = stack.pop()
        if len(chain) == len(weights):
            yield chain
            continue
        rest = [name for name in weights if name not in chain]
        for name in rest:
            fits = not chain or shapes[chain[-1]][0] == shapes[name][1]
            if fits and not (numbered and any(_precedes(other, name) for other in rest)):
                stack.append([*chain, name])


def _first_two(chains: Iterator[list[str]]) -> list[list[str]]:
    return list(islice(chains, 2))


def _with_rest(shapes: Shapes, listed: Sequence[str], file: str) -> list[str]:
    """The listed values, and behind each layer those of its own that were not listed."""
    layers = _weights(shapes, listed)
    behind: dict[str, list[str]] = {}
    loose = [name for name in sorted(shapes, key=_natural) if name not in listed]
    for name in loose:
        if layers:
            behind.setdefault(_owner(shapes, layers, name, file), []).append(name)
    found = [each for name in listed for each in (name, *behind.get(name, ()))]
    return found if layers else loose


def _owner(shapes: Shapes, layers: Sequence[str], name: str, file: str) -> str:
    """The layer that a value belongs to: its module's, the last with a lower number, or the only one."""
    fitting = [layer for layer in layers if shapes[name] == shapes[layer][:1]]
    for one in layers:
        if _module(one) == _module(name):
            return one
    if before := [layer for layer in fitting if _precedes(layer, name)]:
        return max(before, key=_natural)
    if len(fitting) > 1:
        raise ModelError(
            f"{file}: {name!r} may belong to any of the layers {_join(fitting)}; list it behind its own with "
            "--order NAME,NAME,…"
        )
    return fitting[0] if fitting else layers[-1]  # where nothing fits, reading the chain says so


def _weights(shapes: Shapes, names: Sequence[str]) -> list[str]:
    return [name for name in names if len(shapes[name]) == 2]


def _precedes(one: str, other: str) -> bool:
    """Whether two names differ first by a number, which is lower in the first."""
    for mine, theirs in zip(one.split("."), other.split("."), strict=False):
        if mine != theirs:
            return mine.isdecimal() and theirs.isdecimal() and int(mine) < int(theirs)
    return False


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """A sorting key by which `layer.9` stands before `layer.10`."""
    return [
        (not step.isdecimal(), int(step) if step.isdecimal() else 0, step)
        for step in name.split(".")
    ]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


def _join(names: Sequence[str] | Iterator[str] | Mapping[str, object]) -> str:
    return ",".join(_layer(name) for name in names)
