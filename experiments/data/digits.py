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

from . import sources
from .dataset import Dataset, Samples, samples
from .sources import DataError, Places, download

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
    train, test = samples(x[:TRAIN], y[:TRAIN]), samples(x[TRAIN:], y[TRAIN:])
    return Dataset("digits", train, test, classes=10)


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
    train, test = (
        samples(
            _array(places, f"{part}-images-idx3-ubyte")[:, None],
            _array(places, f"{part}-labels-idx1-ubyte"),
        )
        for part in ("train", "t10k")
    )
    return Dataset("mnist", train, test, classes=10)


def mnist_writers(places: Places) -> Dataset:
    """MNIST with `group` = the NIST writer; the stand-in for FEMNIST-D.

    539 writers in the training part, others in the test part: for one writer per peer, divide each
    peer's own digits with `partition.split` instead of testing on strangers' digits.
    """
    writers = places.arrays("mnist_writers.npz", "train_writer", "test_writer")
    plain = mnist(places)
    assert plain.test is not None
    train, test = (
        _grouped(part, of) for part, of in zip((plain.train, plain.test), writers, strict=True)
    )
    note = "MNIST digits by NIST writer, in place of FEMNIST-D; test digits are by other writers"
    return Dataset("mnist-writers", train, test, 10, note)


def read_idx(path: Path) -> np.ndarray:
    """An array of bytes in idx format, gzipped or not: magic number, sizes, values."""
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
        path = download(urls, places.folders[-1] / name, sources.KNOWN[f"mnist/{name}"])
    else:
        places.verify(path, stem + (".gz" if path.suffix == ".gz" else ""))
    return read_idx(path)


def _grouped(part: Samples, writers: np.ndarray) -> Samples:
    if len(writers) != len(part):
        raise DataError(
            f"mnist_writers.npz names {len(writers)} writers for {len(part)} digits: replace it"
        )
    return replace(part, group=torch.from_numpy(writers.astype(np.int64)))


def pendigits(places: Places) -> Dataset:
    """About 250 digits for each of 44 writers, drawn from pen strokes as 28×28 images.

    `group` is the writer. There is no test part.
    """
    x, y, writer = places.arrays("pendigits_writers.npz", "x", "y", "writer")
    return Dataset("pendigits", samples(x[:, None], y, writer), None, 10, "grouped by writer")
