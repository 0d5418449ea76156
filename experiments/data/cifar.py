"""Loads CIFAR-10 from the published python batches, or from mosaics: image files that
are grids of 100 rows of 100 images.

The python batches are pickles. A pickle names functions that its reader calls, so a forged one can run any
program. `_BatchReader` never calls a function that the file names; for numpy's arrays and types it uses two
classes of this module.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .dataset import Dataset, samples
from .sources import DataError, DataFiles

_FOLDER = "cifar-10-batches-py"
"""The folder in the published archive."""
_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
"""The published files: five of training images, and the test images."""
_MOSAICS = ("cifar10_train_0.webp", "cifar10_train_1.webp", "cifar10_test.webp")
"""Lossless image files, each a grid of 100 rows of 100 images of the data set."""


def cifar10(files: DataFiles) -> Dataset:
    """Load CIFAR-10, 10 classes of 3×32×32 images.

    The python batches have 50000 training and 10000 test images, the mosaics 20000 and 10000.
    """
    # If any batch is there, the user means the batches: mosaics do not stand in for a missing one.
    if any(files.find(f"{_FOLDER}/{name}", name) for name in _BATCHES):
        advice = "other batches were found: unpack the archive again"
        *train, test = [
            read_batch(files.need(f"{_FOLDER}/{name}", name, advice=advice)) for name in _BATCHES
        ]
        x, y = (np.concatenate(batches) for batches in zip(*train, strict=True))
        return Dataset("cifar10", samples(x, y), samples(*test), 10)
    advice = (
        f"download its python version from {_HOME}, and unpack it in one of these folders, or set "
        "GOSSAMER_DATA to the folder that contains cifar/"
    )
    if (
        files.find(_MOSAICS[0]) is None
    ):  # neither form is there: the error names the published files
        files.need(f"{_FOLDER}/{_BATCHES[0]}", advice=advice)
    train_1, train_2, test = [read_mosaic(files.need(name, advice=advice)) for name in _MOSAICS]
    y, test_y = files.arrays("cifar10_labels.npz", "train", "test", advice=advice)
    train = samples(np.concatenate([train_1, train_2]), y)
    note = (
        "read from webp files, which have only the first 20000 of the 50000 training images; "
        f"for all of them, put the published {_FOLDER}/ beside these files"
    )
    return Dataset("cifar10", train, samples(test, test_y), 10, note)


def read_mosaic(path: Path) -> np.ndarray:
    """Read images `[n, 3, 32, 32]` from a lossless image file that shows them row by row."""
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except OSError as error:
        raise DataError(f"{path} cannot be read as an image ({error}): replace it") from error
    height, width, _ = pixels.shape
    if height % 32 or width % 32:
        raise DataError(f"{path} is {width}×{height}, not a grid of 32×32 images: replace it")
    images = pixels.reshape(height // 32, 32, width // 32, 32, 3)
    return images.transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images `[n, 3, 32, 32]` and labels of one python batch, without running code from the file."""
    try:
        with path.open("rb") as file:
            content = _BatchReader(file, encoding="bytes").load()
        x = content[b"data"].values.reshape(-1, 3, 32, 32)
        y = np.asarray(content[b"labels"], dtype=np.int64)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(
            f"{path} is not a CIFAR-10 python batch ({type(error).__name__}: {error}): replace it"
        ) from error
    if y.shape != (len(x),):
        raise DataError(f"{path} has {len(x)} images but labels of shape {y.shape}: replace it")
    return x, y


class _StoredArray:
    """Replaces numpy's array while unpickling: pickle makes one, and then passes it its content."""

    values: np.ndarray

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, state: tuple[Any, tuple[int, ...], Any, bool, bytes]) -> None:
        _, shape, _, is_fortran_order, content = state
        self.values = np.frombuffer(content, np.uint8).reshape(
            shape, order="F" if is_fortran_order else "C"
        )


class _StoredType:
    """Replaces numpy's dtype while unpickling; only bytes are allowed, and its state is ignored."""

    def __init__(self, name: str | bytes, *_: Any):
        if name not in ("u1", b"u1"):
            raise DataError(f"arrays of {name!r} are not allowed, only of bytes (u1)")

    def __setstate__(self, _: Any) -> None:
        pass


class _BatchReader(pickle.Unpickler):
    """Unpickles dicts, lists, bytes, str, numbers and arrays of bytes, and nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return the replacement for what makes an array in numpy's pickles; refuse all other names."""
        match (module_name, global_name):
            case ("numpy.core.multiarray" | "numpy._core.multiarray", _) | ("numpy", "ndarray"):
                return _StoredArray  # whatever the name: numpy's function is never called
            case ("numpy", "dtype"):
                return _StoredType
        raise DataError(
            f"asks for {module_name}.{global_name}, which a CIFAR-10 batch does not need: "
            "refused, because reading it could run a program; use the published files"
        )
