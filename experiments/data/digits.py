"""Loads handwritten digits: scikit-learn's (built in), MNIST with or without writers, and pen digits."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from . import sources
from .dataset import Dataset, Samples, samples
from .sources import DataError, DataFiles, download

TRAIN = 1437
"""The number of training samples of the built-in digits."""
MIRRORS: tuple[str, ...] = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)


def digits(_: DataFiles) -> Dataset:
    """Load scikit-learn's digits: the first 1437 for training, the last 360 for testing.

    Samples are not shuffled, so the split is the same everywhere. Neighbours in the file resemble each other,
    which makes this split harder than a shuffled one.
    """
    with gzip.open(_digits_file(), "rt") as file:
        rows = np.loadtxt(file, delimiter=",")
    x = (rows[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)  # pixels are counts 0..16
    y = rows[:, -1].astype(np.int64)
    train, test = samples(x[:TRAIN], y[:TRAIN]), samples(x[TRAIN:], y[TRAIN:])
    return Dataset("digits", train, test, classes=10)


def _digits_file() -> Path:
    """The file in scikit-learn's folder; importing scikit-learn to read it would take two seconds."""
    spec = find_spec("sklearn")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise DataError(
        "digits: the file digits.csv.gz, which is part of scikit-learn, was not found; install scikit-learn "
        "again with pip"
    )


def mnist(files: DataFiles) -> Dataset:
    """Load MNIST: 60000 training and 10000 test digits, 28×28, in the published order.

    Files may be gzipped or not, and named `…-idx3-ubyte` or `….idx3-ubyte`. Missing files are downloaded into
    the cache folder.
    """
    train, test = (
        samples(
            _array(files, f"{subset}-images-idx3-ubyte")[:, None],
            _array(files, f"{subset}-labels-idx1-ubyte"),
        )
        for subset in ("train", "t10k")
    )
    return Dataset("mnist", train, test, classes=10)


def mnist_writers(files: DataFiles) -> Dataset:
    """Load MNIST with the NIST writer of each digit as `group`, in place of FEMNIST-D.

    The 539 writers of the training set have no digits in the test set: with one writer per peer, hold out
    some of each peer's digits with `partition.split` instead of testing on other writers' digits.
    """
    writers = files.arrays("mnist_writers.npz", "train_writer", "test_writer")
    ungrouped = mnist(files)
    assert ungrouped.test is not None
    train = _with_writers(ungrouped.train, writers[0])
    test = _with_writers(ungrouped.test, writers[1])
    note = "MNIST digits by NIST writer, in place of FEMNIST-D; test digits are by other writers"
    return Dataset("mnist-writers", train, test, 10, note)


def read_idx(path: Path) -> np.ndarray:
    """Read an array of bytes in idx format, gzipped or not: magic number, sizes, values."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
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
            f"{path} should hold an array of shape {shape}, {expected} bytes, "
            f"but has {len(content) - start}: replace it"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _array(files: DataFiles, stem: str) -> np.ndarray:
    """Read one of MNIST's files; download it if it is missing."""
    dotted = stem.replace("-idx", ".idx")
    path = files.find(f"{stem}.gz", stem, f"{dotted}.gz", dotted)
    if path is None:
        name = f"{stem}.gz"
        urls = [mirror + name for mirror in MIRRORS]
        path = download(urls, files.folders[-1] / name, sources.CHECKSUMS[f"mnist/{name}"])
    else:
        files.verify(path, stem + (".gz" if path.suffix == ".gz" else ""))
    return read_idx(path)


def _with_writers(ungrouped: Samples, writers: np.ndarray) -> Samples:
    if len(writers) != len(ungrouped):
        raise DataError(
            f"mnist_writers.npz names {len(writers)} writers for {len(ungrouped)} digits: replace it"
        )
    return replace(ungrouped, group=torch.from_numpy(writers.astype(np.int64)))


def pendigits(files: DataFiles) -> Dataset:
    """Load pen digits: about 250 digits of each of 44 writers, pen strokes drawn as 28×28 images.

    `group` is the writer. There is no test set.
    """
    x, y, writer = files.arrays("pendigits_writers.npz", "x", "y", "writer")
    return Dataset("pendigits", samples(x[:, None], y, writer), None, 10, "grouped by writer")
