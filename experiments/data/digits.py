"""Handwritten digits: scikit-learn's, which are built in, MNIST, plain or by writer, and pen digits."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from . import files
from .dataset import Dataset, Samples, samples
from .files import DataError, Places, download, read_npz, verify

TRAIN = 1437
"""Of the built-in digits, those to train on."""
MIRRORS: tuple[str, ...] = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)


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


def mnist(places: Places) -> Dataset:
    """60000 training and 10000 test digits, 28×28, in the published order.

    Files may be gzipped or not, and named `…-idx3-ubyte` or `….idx3-ubyte`. Those not found are
    downloaded into the cache folder.
    """
    train = samples(
        _array(places, "train-images-idx3-ubyte")[:, None],
        _array(places, "train-labels-idx1-ubyte"),
    )
    test = samples(
        _array(places, "t10k-images-idx3-ubyte")[:, None],
        _array(places, "t10k-labels-idx1-ubyte"),
    )
    return Dataset("mnist", train, test, classes=10)


def mnist_writers(places: Places) -> Dataset:
    """MNIST with `group` = the NIST writer; the stand-in for FEMNIST-D.

    539 writers in the training part, others in the test part: for one writer per peer, divide each
    peer's own digits with `partition.split` instead of testing on strangers' digits.
    """
    key = "mnist/mnist_writers.npz"
    path = places.need("mnist-writers", key, "set GOSSAMER_DATA to the folder above mnist/")
    writers, test_writers = read_npz(path, "train_writer", "test_writer")
    plain = mnist(places)
    assert plain.test is not None
    return Dataset(
        "mnist-writers",
        _grouped(plain.train, writers, path),
        _grouped(plain.test, test_writers, path),
        classes=10,
        note="MNIST digits by NIST writer, in place of FEMNIST-D; test digits are by other writers",
    )


def read_idx(path: Path) -> np.ndarray:
    """An array of bytes in idx format, gzipped or not: magic number, sizes, values."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                content = packed.read()
        else:
            content = path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}): replace it") from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is not an idx file of bytes: it begins with {content[:4].hex()}")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{path} ends after {len(content)} bytes, inside its header: replace it")
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    expected = math.prod(shape)
    if len(content) - start != expected:
        raise DataError(
            f"{path} says it holds an array of shape {shape}, {expected} bytes, "
            f"but {len(content) - start} follow: replace it"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _array(places: Places, stem: str) -> np.ndarray:
    dotted = stem.replace("-idx", ".idx")
    path = places.find(f"{stem}.gz", stem, f"{dotted}.gz", dotted)
    if path is None:
        name = f"{stem}.gz"
        urls = [mirror + name for mirror in MIRRORS]
        path = download(urls, places.cache / name, files.KNOWN[f"mnist/{name}"])
    else:
        verify(path, f"mnist/{stem}{'.gz' if path.suffix == '.gz' else ''}")
    return read_idx(path)


def _grouped(part: Samples, writers: np.ndarray, path: Path) -> Samples:
    if len(writers) != len(part):
        raise DataError(f"{path} names {len(writers)} writers for {len(part)} digits: replace it")
    return replace(part, group=torch.from_numpy(writers.astype(np.int64)))


def pendigits(places: Places) -> Dataset:
    """About 250 digits for each of 44 writers, drawn from pen strokes as 28×28 images.

    `group` is the writer. There is no test part.
    """
    key = "handwriting/pendigits_writers.npz"
    path = places.need("pendigits", key, "set GOSSAMER_DATA to the folder above handwriting/")
    x, y, writer = read_npz(path, "x", "y", "writer")
    return Dataset("pendigits", samples(x[:, None], y, writer), None, 10, "grouped by writer")
