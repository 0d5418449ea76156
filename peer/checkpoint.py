"""Checkpoints: any tree of plain data, arrays and tensors, written whole or not at all.

One safetensors file: the arrays as they are, the rest as JSON in its metadata. Nothing is pickled, so
reading a checkpoint runs no code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .errors import PeerError

FORMAT = "gossamer-checkpoint-1"


def save_checkpoint(path: Path, tree: dict[str, Any], *, sync: bool = False) -> None:
    """Replace the checkpoint at `path`.

    The rename is atomic, which is all that a killed process needs. `sync` also forces the bytes to the
    disk, for devices that lose power: it costs a disk write per exchange.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_pack(tree, tensors))
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, {"format": FORMAT, "tree": text})
    if sync:
        with part.open("rb") as file:
            os.fsync(file.fileno())
    part.replace(path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The tree that was saved, or None if there is no file."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise PeerError(f"{path}: is not a checkpoint of this program; move it away")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return _unpack(json.loads(metadata["tree"]), tensors)
    except (SafetensorError, OSError, ValueError) as error:
        raise PeerError(f"{path}: cannot be read as a checkpoint: {error}") from None


def _pack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Move tensors and arrays out, leaving their names; wrap what JSON would change."""
    if isinstance(value, torch.Tensor | np.ndarray):
        is_array = isinstance(value, np.ndarray)
        name = str(len(tensors))
        tensors[name] = torch.tensor(value) if is_array else value.detach().clone().contiguous()
        return {"$array" if is_array else "$tensor": name}
    if isinstance(value, dict):
        return {"$dict": [[_pack(k, tensors), _pack(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return [_pack(item, tensors) for item in value]
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


def _unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$bytes" in value:
        return bytes.fromhex(value["$bytes"])
    if "$array" in value:
        return tensors[value["$array"]].numpy()
    return {_unpack(k, tensors): _unpack(v, tensors) for k, v in value["$dict"]}
