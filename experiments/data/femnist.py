"""FEMNIST: handwritten characters by writer, in the paper's variants A, M and D (V.2).

LEAF's json files are read when they are there; else a pool of FEMNIST images without writer ids,
whose groups are styles. Labels are LEAF's: 0-9 digits, 10-35 capitals, 36-61 small letters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from .dataset import Dataset, Samples, restrict, samples
from .sources import DataError, Places

# Small letters that NIST SD 19's "by merge" scheme joins with their capitals.
MERGED = "cijklmopsuvwxyz"
_LEAF = ("all_data_*.json", "all_data/all_data_*.json", "data/all_data/all_data_*.json")


def merged_labels() -> np.ndarray:
    """`m[label]`: variant A's 62 labels to variant M's 47; the last 11 are a b d e f g h n q r t."""
    table = np.arange(62)
    small = np.array([chr(ord("a") + place) in MERGED for place in range(26)])
    table[36:] = np.where(small, 10 + np.arange(26), 35 + np.cumsum(~small))
    return table


def femnist_a(places: Places) -> Dataset:
    """All 62 classes."""
    return _variant(places, 62, lambda all_: all_)


def femnist_m(places: Places) -> Dataset:
    """47 classes: letters whose capital and small forms look alike are one class."""
    table = torch.from_numpy(merged_labels())
    return _variant(places, 47, lambda all_: replace(all_, y=table[all_.y]))


def femnist_d(places: Places) -> Dataset:
    """Digits only. Without LEAF's files prefer `mnist-writers`, whose writers are real."""
    return _variant(places, 10, lambda all_: restrict(all_, range(10)))


def _variant(places: Places, classes: int, change: Callable[[Samples], Samples]) -> Dataset:
    name = places.dataset
    if files := places.glob(*_LEAF):
        return Dataset(name, change(read_leaf(files)), None, classes, "grouped by writer")
    advice = (
        "put LEAF's all_data_*.json files there, or set GOSSAMER_DATA to the folder above femnist/"
    )
    x, y = places.arrays("femnist_pool.npz", "x", "y", advice=advice)
    (group,) = places.arrays("femnist_pseudo_writers.npz", "group", advice=advice)
    whole = samples(255 - x[:, None], y, group)  # ink is dark in the file
    note = "style groups (stroke thickness, size, slant), not writers"
    return Dataset(name, change(whole), None, classes, note)


def read_leaf(files: list[Path]) -> Samples:
    """LEAF's FEMNIST: `users` and `user_data[user] = {"x": [784 numbers, …], "y": […]}` per file.

    Writers are numbered in the order in which they appear. The full set is 36 files and several
    gigabytes of memory: the first files alone make a good, smaller set.
    """
    number: dict[str, int] = {}
    parts = [
        (x, y, np.full(len(y), number.setdefault(user, len(number))))
        for path in files
        for user, x, y in _users(path)
    ]
    if not parts:
        raise DataError(f"{files[0]}: no writer in LEAF's files has a sample: download them again")
    return samples(*map(np.concatenate, zip(*parts, strict=True)))


def _users(path: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
    try:
        content = json.loads(path.read_text())
        users, data = content["users"], content["user_data"]
        pairs = [(str(user), data[user]["x"], data[user]["y"]) for user in users]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not LEAF json with 'users' and 'user_data' holding 'x' and 'y' "
            f"({type(error).__name__}: {error})"
        ) from error
    found = []
    for user, x, y in pairs:
        try:
            # LEAF stores paper as 1 and ink as 0
            images = 1 - np.array(x, dtype=np.float32).reshape(len(y), 1, 28, 28)
            classes = np.array(y, dtype=np.int64).reshape(-1)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{path}, writer {user}: expected {len(y)} images of 784 numbers with a label each "
                f"({error})"
            ) from error
        if len(classes) and not 0 <= classes.min() <= classes.max() < 62:
            raise DataError(
                f"{path}, writer {user}: labels must lie in 0..61, "
                f"not {classes.min()}..{classes.max()}"
            )
        if len(classes):
            found.append((user, images, classes))
    return found
