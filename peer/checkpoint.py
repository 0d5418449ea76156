"""Checkpoints: any tree of plain data, arrays and tensors, written whole or not at all.

One safetensors file: the arrays as they are, the rest as JSON in its metadata. Nothing is pickled, so
reading a checkpoint runs no code.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gossamer.files import FileLock, replacing

from .errors import PeerError

FORMAT = "gossamer-checkpoint-4"
_REMEDY = "move it away to begin anew, or put back a copy"


def save_checkpoint(path: Path, tree: dict[str, Any], *, sync: bool = False) -> None:
    """Replace the checkpoint at `path`.

    The rename is atomic, which is all that a killed process needs. After a power cut the file may be an
    older one, or cut: `sync` also forces the bytes and the rename to the disk, at a disk write per
    exchange. A peer can do without where it can tell that the machine has started anew (see machine.py): it
    then keeps values and rounds alone, for which an older file will do.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_pack(tree, tensors))
    with replacing(path, sync=sync) as part:
        metadata = {"format": FORMAT, "tree": text, "checksum": _checksum(text, tensors)}
        save_file(tensors, part, metadata)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The tree that was saved, or None if there is no file. PeerError if it is not what was saved."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise PeerError(
                    f"{path}: is not a checkpoint of this version of the program; move it away to begin "
                    "anew, or run the version that wrote it"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = metadata["tree"]
        if metadata["checksum"] != _checksum(text, tensors):
            raise PeerError(f"{path}: is damaged: its checksum is wrong; {_REMEDY}")
        return _unpack(json.loads(text), tensors)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise PeerError(
            f"{path}: cannot be read as a checkpoint, it may be cut: {error}; {_REMEDY}"
        ) from None


def _checksum(text: str, tensors: dict[str, torch.Tensor]) -> str:
    """Of all that a file says: a flipped bit is a valid number too, and would spread to every peer."""
    found = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].cpu()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


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


class CheckpointLock:
    """The lock of a checkpoint, on a file beside it. Held from `acquire` to `release`."""

    def __init__(self, checkpoint: Path):
        self._checkpoint = checkpoint
        self._lock = FileLock(checkpoint.with_name(checkpoint.name + ".lock"))

    def acquire(self) -> None:
        """Take the lock, or raise a PeerError if another peer holds it."""
        try:
            taken = self._lock.acquire()
        except OSError as error:
            raise PeerError(
                f"{self._checkpoint}: cannot be locked: {error.strerror}; give the peer a "
                "checkpoint in a folder that it may write to"
            ) from None
        if not taken:
            raise PeerError(
                f"{self._checkpoint}: another running peer uses this checkpoint; stop it, or give "
                "each peer its own file"
            )

    def release(self) -> None:
        """Let go, and leave no file behind."""
        self._lock.release()
