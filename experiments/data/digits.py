"""scikit-learn's digits: 1797 images of 8×8 that come with a dependency. The built-in default."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from .dataset import Dataset, samples
from .files import Places

TRAIN = 1437


def digits(_: Places) -> Dataset:
    """The first 1437 images to train on, the last 360 to test on, in the file's own order.

    Nothing is shuffled, so the split is the same everywhere. Neighbours in the file resemble each
    other, which makes this split harder than a shuffled one.
    """
    flat, y = load_digits(return_X_y=True)
    x = (np.asarray(flat).reshape(-1, 1, 8, 8) / 16).astype(np.float32)  # pixels are counts 0..16
    return Dataset(
        "digits", samples(x[:TRAIN], y[:TRAIN]), samples(x[TRAIN:], y[TRAIN:]), classes=10
    )
