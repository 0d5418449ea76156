"""scikit-learn's digits: 1797 images of 8×8 that come with a dependency. The built-in default."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from .dataset import Dataset, samples
from .files import DataError, Places

TRAIN = 1437


def digits(_: Places) -> Dataset:
    """The first 1437 images to train on, the last 360 to test on, in the file's own order.

    Nothing is shuffled, so the split is the same everywhere. Neighbours in the file resemble each
    other, which makes this split harder than a shuffled one.
    """
    with gzip.open(_table(), "rt") as file:
        rows = np.loadtxt(file, delimiter=",")
    x = (rows[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)  # pixels are counts 0..16
    y = rows[:, -1].astype(np.int64)
    return Dataset(
        "digits", samples(x[:TRAIN], y[:TRAIN]), samples(x[TRAIN:], y[TRAIN:]), classes=10
    )


def _table() -> Path:
    """The file inside scikit-learn. Importing scikit-learn to read it would cost every peer two seconds."""
    spec = find_spec("sklearn")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise DataError(
        "digits: scikit-learn, whose digits are the built-in data set, is not installed as expected; "
        "install it again with pip"
    )
