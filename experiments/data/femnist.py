"""Loads FEMNIST, handwritten characters by writer, in three variants: A, M and D.

The variants are those of section V.2 of paper 003 (Bouchra Pilet, Frey and Taïani, 2021). LEAF's JSON files
are used if they are found; else two .npz files, which Gossamer does not download (their checksums are in
SHA256SUMS): images without writer ids, and the number of each image's style group, which stands in for its
writer. Labels are LEAF's: 0-9 digits, 10-35 capitals, 36-61 small letters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from .dataset import Dataset, Samples, keep_classes, samples
from .sources import DataError, DataFiles

# Small letters that have the same class as their capitals in NIST SD 19's "by merge" labels.
MERGED = "cijklmopsuvwxyz"
_LEAF = ("all_data_*.json", "all_data/all_data_*.json", "data/all_data/all_data_*.json")


def merged_labels() -> np.ndarray:
    """A table from variant A's 62 labels to variant M's 47; the last 11 are a b d e f g h n q r t."""
    table = np.arange(62)
    is_merged = np.array([chr(ord("a") + index) in MERGED for index in range(26)])
    table[36:] = np.where(is_merged, 10 + np.arange(26), 35 + np.cumsum(~is_merged))
    return table


def femnist_a(files: DataFiles) -> Dataset:
    """Load variant A: all 62 classes."""
    return _variant(files, 62, lambda all_: all_)


def femnist_m(files: DataFiles) -> Dataset:
    """Load variant M, 47 classes: letters whose capital and small forms look alike are one class."""
    table = torch.from_numpy(merged_labels())
    return _variant(files, 47, lambda all_: replace(all_, y=table[all_.y]))


def femnist_d(files: DataFiles) -> Dataset:
    """Load variant D: only digits.

    Without LEAF's files the data set `mnist-writers` (digits.py) is better: its groups are writers.
    """
    return _variant(files, 10, lambda all_: keep_classes(all_, range(10)))


def _variant(files: DataFiles, classes: int, change: Callable[[Samples], Samples]) -> Dataset:
    name = files.dataset
    if leaf_files := files.glob(*_LEAF):
        return Dataset(name, change(read_leaf(leaf_files)), None, classes, "grouped by writer")
    advice = (
        "put LEAF's all_data_*.json files into one of the folders just named, or set GOSSAMER_DATA to the "
        "folder that contains femnist/"
    )
    x, y = files.arrays("femnist_pool.npz", "x", "y", advice=advice)
    # pseudo-writers: groups of images of similar style
    (group,) = files.arrays("femnist_pseudo_writers.npz", "group", advice=advice)
    inverted = samples(255 - x[:, None], y, group)  # ink is dark in the file
    note = "groups are by handwriting style (stroke thickness, size, slant), not by writer"
    return Dataset(name, change(inverted), None, classes, note)


def read_leaf(files: list[Path]) -> Samples:
    """Read LEAF's files: `users` and `user_data[user] = {"x": [784 numbers, …], "y": […]}` in each.

    Writers are numbered in the order in which they appear. The full set has 36 files and needs several
    gigabytes of memory: a few of the files make a good, smaller set.
    """
    numbers: dict[str, int] = {}
    writers = [
        (x, y, np.full(len(y), numbers.setdefault(user, len(numbers))))
        for path in files
        for user, x, y in _users(path)
    ]
    if not writers:
        raise DataError(f"{files[0]}: no writer in LEAF's files has a sample: download them again")
    return samples(*map(np.concatenate, zip(*writers, strict=True)))


def _users(path: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Read the name, images and labels of every writer in one of LEAF's files."""
    try:
        content = json.loads(path.read_text())
        users, data = content["users"], content["user_data"]
        entries = [(str(user), data[user]["x"], data[user]["y"]) for user in users]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not LEAF's JSON with 'users' and 'user_data' holding 'x' and 'y' "
            f"({type(error).__name__}: {error})"
        ) from error
    writers = []
    for user, x, y in entries:
        try:
            # LEAF stores paper as 1 and ink as 0
            images = 1 - np.array(x, dtype=np.float32).reshape(len(y), 1, 28, 28)
            labels = np.array(y, dtype=np.int64).reshape(-1)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{path}, writer {user}: expected {len(y)} images of 784 numbers with a label each "
                f"({error})"
            ) from error
        if len(labels) and not 0 <= labels.min() <= labels.max() < 62:
            raise DataError(
                f"{path}, writer {user}: labels must lie in 0..61, "
                f"not {labels.min()}..{labels.max()}"
            )
        if len(labels):
            writers.append((user, images, labels))
    return writers
