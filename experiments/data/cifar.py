"""CIFAR-10 from the published python batches, or from lossless 100×100 grids of its images.

The python batches are pickles, and a pickle may run any program when it is read. They are read here
by an unpickler that builds dicts, lists, bytes, str, numbers and arrays of bytes, and nothing else.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .dataset import Dataset, samples
from .files import DataError, Places, read_npz

_FOLDER = "cifar-10-batches-py"
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_GRIDS = ("cifar10_train_0.webp", "cifar10_train_1.webp", "cifar10_test.webp")


def cifar10(places: Places) -> Dataset:
    """10 classes of 3×32×32: 50000 + 10000 from python batches, 20000 + 10000 from grids."""
    if places.find(f"{_FOLDER}/{_BATCHES[0]}", _BATCHES[0]) is not None:
        parts = [read_batch(_batch(places, name)) for name in _BATCHES]
        x = np.concatenate([part[0] for part in parts])
        y = np.concatenate([part[1] for part in parts])
        test = read_batch(_batch(places, "test_batch"))
        return Dataset("cifar10", samples(x, y), samples(*test), 10)
    advice = f"put {_FOLDER}/ there, or set GOSSAMER_DATA to the folder above cifar/"
    grids = [read_grid(places.need("cifar10", f"cifar/{name}", advice)) for name in _GRIDS]
    labels = places.need("cifar10", "cifar/cifar10_labels.npz", advice)
    train, test = read_npz(labels, "train", "test")
    note = "the first 20000 training images"
    return Dataset(
        "cifar10", samples(np.concatenate(grids[:2]), train), samples(grids[2], test), 10, note
    )


def _batch(places: Places, name: str) -> Path:
    path = places.find(f"{_FOLDER}/{name}", name)
    if path is None:
        raise places.missing(
            "cifar10", [f"{_FOLDER}/{name}"], "other batches are there: unpack the archive again"
        )
    return path


def read_grid(path: Path) -> np.ndarray:
    """Images `[n, 3, 32, 32]` from a lossless picture that holds them row by row."""
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except OSError as error:
        raise DataError(f"{path} cannot be read as an image ({error}): replace it") from error
    height, width, _ = pixels.shape
    if height % 32 or width % 32:
        raise DataError(f"{path} is {width}×{height}, not a grid of 32×32 images: replace it")
    cells = pixels.reshape(height // 32, 32, width // 32, 32, 3)
    return cells.transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images `[n, 3, 32, 32]` and labels of one python batch, without running what it may carry."""
    try:
        with path.open("rb") as file:
            content = _PlainUnpickler(file, encoding="bytes").load()
        x = np.asarray(content[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
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


def _bytes_only(name: str | bytes, *_: Any) -> np.dtype:
    if name not in ("u1", b"u1"):
        raise DataError(f"arrays of {name!r} are not admitted, only of bytes (u1)")
    return np.dtype(np.uint8)


class _PlainUnpickler(pickle.Unpickler):
    """Knows only the three names with which numpy pickles an array; any other name is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        match (module_name, global_name):
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"):
                return np.empty(0).__reduce__()[0]
            case ("numpy", "ndarray"):
                return np.ndarray
            case ("numpy", "dtype"):
                return _bytes_only
        raise DataError(
            f"asks for {module_name}.{global_name}, which a CIFAR-10 batch does not need: "
            "refused, because reading it could run a program; use the published files"
        )
