"""Networks on disk: read to be fused, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...models import LAYER_ORDER, ModelError
from ...models.matching import Chain
from ..results import find_run, replacing
from .order import layer_order


@dataclass(frozen=True, eq=False)
class NetworkFile:
    """A network and what its file says about it."""

    path: Path
    chain: Chain
    dtype: torch.dtype
    slices: dict[str, list[list[int]]] | None

    @property
    def name(self) -> str:
        """For reports."""
        return str(self.path)


def read_network(path: Path, order: Sequence[str] | None = None) -> NetworkFile:
    """Read a safetensors file of dense layers, as `SlicedNetwork.save` or torch users write them.

    order: names of layers as they run, for files that do not say it; see `layer_order`.
    """
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as safetensors ({error})") from None
    kinds = {value.dtype for value in state.values()}
    if odd := [kind for kind in kinds if not kind.is_floating_point]:
        raise ModelError(f"{path}: holds values of type {odd[0]}; only dense layers can be fused")
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    chain = Chain.read(
        {name: value.double().numpy() for name, value in state.items()},
        str(path),
        layer_order(shapes, metadata, order, str(path)),
    )
    dtype = torch.float64 if torch.float64 in kinds else torch.float32
    try:
        slices = json.loads(metadata["slices"]) if "slices" in metadata else None
    except json.JSONDecodeError:
        raise ModelError(f"{path}: its metadata about slices is damaged") from None
    return NetworkFile(path, chain, dtype, slices)


def network_files(paths: Sequence[Path], out: Path) -> list[Path]:
    """Files as they are, and of every folder the networks in it, by number or name; never `out` itself.

    A folder is what a swarm left behind: one safetensors file per peer that finished. Of a folder with
    several runs, it is the latest.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        path = find_run(path)
        inside = [each for each in path.glob("*.safetensors") if each.resolve() != out.resolve()]
        if not inside:
            why = "; its peers have not finished" if any(path.glob("*.checkpoint")) else ""
            raise ModelError(
                f"{path}: there is no network (*.safetensors) in this folder{why}; give the folder that "
                "gossamer swarm or gossamer simulate --networks wrote"
            )
        found += sorted(inside, key=lambda each: (len(each.stem), each.stem))
    return found


def check_target(path: Path, *, force: bool) -> None:
    """Refuse an output that exists, or a folder that does not, before any work is done."""
    if path.is_dir():
        raise ModelError(f"{path} is a folder: give the name of a file")
    if path.exists() and not force:
        raise ModelError(f"{path} exists: give another name, or --force to replace it")
    if not path.parent.is_dir():
        raise ModelError(f"{path}: there is no folder {path.parent}; make it first")


def write_network(path: Path, chain: Chain, dtype: torch.dtype, metadata: dict[str, str]) -> None:
    """Write a network as safetensors; a file of that name is replaced at once or not at all.

    The order of its layers joins the metadata.
    """
    state = {
        name: torch.from_numpy(np.ascontiguousarray(value)).to(dtype)
        for name, value in chain.state(np.float64).items()
    }
    with replacing(path) as part:
        save_file(state, part, {**metadata, LAYER_ORDER: json.dumps(list(state))})


def model_groups(networks: Sequence[NetworkFile]) -> list[list[np.ndarray]]:
    """Labels `[network][hidden part][cell]`: equal for cells of one partial model in all files."""
    number: dict[str, int] = {}
    found = []
    for network in networks:
        if network.slices is None:
            raise ModelError(
                f"{network.path}: says nothing about its partial models, so cells cannot be kept "
                "inside them; save it with SlicedNetwork.save, or leave out --within-models"
            )
        labels = [np.full(width, -1) for width in network.chain.widths]
        for model, parts in network.slices.items():
            for label, cells in zip(labels, parts, strict=True):
                label[cells] = number.setdefault(model, len(number))
        found.append(labels[1:-1])
    return found


def read_counts(path: Path) -> np.ndarray:
    """Sample counts: a JSON list with one list of numbers per network."""
    try:
        return np.array(json.loads(path.read_text("utf-8")), dtype=np.float64)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"{path}: is no list of lists of numbers, one list per network ({error})"
        ) from None
