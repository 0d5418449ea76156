"""Loads handwriting: scikit-learn's digits (built in), MNIST, pen digits and FEMNIST, some by writer."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from . import sources
from .dataset import Dataset, Samples, keep_classes, samples
from .sources import DataError, DataFiles, download

TRAINING_DIGITS = 1437
"""The number of training samples of the built-in digits: the first in the file."""
MNIST_MIRRORS: tuple[str, ...] = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
"""Addresses from which MNIST's files are downloaded."""


def digits(_: DataFiles) -> Dataset:
    """Load scikit-learn's digits: the first 1437 for training, the last 360 for testing.

    Samples are not shuffled, so the split is the same everywhere. Neighbours in the file resemble each other,
    which makes this split harder than a shuffled one.
    """
    with gzip.open(_digits_file(), "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    x = rows[:, :-1].reshape(-1, 1, 8, 8) / np.float32(16)  # pixels are counts 0..16
    y = rows[:, -1].astype(np.int64)
    train, test = (
        samples(x[:TRAINING_DIGITS], y[:TRAINING_DIGITS]),
        samples(x[TRAINING_DIGITS:], y[TRAINING_DIGITS:]),
    )
    return Dataset("digits", train, test, classes=10)


def _digits_file() -> Path:
    """Return the file in scikit-learn's folder; importing scikit-learn to read it would take two seconds."""
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
            _read_mnist_file(files, f"{subset}-images-idx3-ubyte")[:, None],
            _read_mnist_file(files, f"{subset}-labels-idx1-ubyte"),
        )
        for subset in ("train", "t10k")
    )
    return Dataset("mnist", train, test, classes=10)


def mnist_writers(files: DataFiles) -> Dataset:
    """Load MNIST's training digits with the NIST writer of each as `group`; it can replace FEMNIST-D.

    The data set has no test set, since MNIST's test digits are by other writers: some of each peer's own
    digits are held out to test it.
    """
    (writers,) = files.arrays("mnist_writers.npz", "train_writer")
    note = "MNIST's training digits by NIST writer, in place of FEMNIST-D"
    return Dataset("mnist-writers", _with_writers(mnist(files).train, writers), None, 10, note)


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


def _read_mnist_file(files: DataFiles, stem: str) -> np.ndarray:
    """Return the array in one of MNIST's files, which is downloaded if it is missing.

    stem: the file's name without `.gz`; some copies are named with a dot, `….idx3-ubyte`.
    """
    dotted_stem = stem.replace("-idx", ".idx")
    path = files.find(f"{stem}.gz", stem, f"{dotted_stem}.gz", dotted_stem)
    if path is None:
        name = f"{stem}.gz"
        urls = [mirror + name for mirror in MNIST_MIRRORS]
        path = download(urls, files.folders[-1] / name, sources.CHECKSUMS[f"mnist/{name}"])
    else:
        files.verify(path, stem + (".gz" if path.suffix == ".gz" else ""))
    return read_idx(path)


def _with_writers(ungrouped: Samples, writers: np.ndarray) -> Samples:
    """Return samples with their writers as groups."""
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


# --- FEMNIST: characters by writer, in the variants A, M and D --------------------------------------
# The variants are those of section V.2 of paper 003 (Bouchra Pilet, Frey and Taïani, 2021). LEAF's JSON files
# are used if they are found; else two .npz files, which Gossamer does not download (their checksums are in
# SHA256SUMS): images without writer ids, and the number of each image's style group, which stands in for its
# writer. Labels are LEAF's: 0-9 digits, 10-35 capitals, 36-61 small letters.

MERGED_LETTERS = "cijklmopsuvwxyz"
"""Small letters that have the same class as their capitals in NIST SD 19's "by merge" labels."""
_LEAF_PATTERNS = ("all_data_*.json", "all_data/all_data_*.json", "data/all_data/all_data_*.json")
"""Where LEAF's files may be in the folder of the data set."""


def merged_labels() -> np.ndarray:
    """Return the label in variant M (0 to 46) of each of variant A's 62 labels.

    The last 11 labels of variant M are the letters a b d e f g h n q r t.
    """
    table = np.arange(62)
    is_merged = np.array([chr(ord("a") + index) in MERGED_LETTERS for index in range(26)])
    table[36:] = np.where(is_merged, 10 + np.arange(26), 35 + np.cumsum(~is_merged))
    return table


def femnist_a(files: DataFiles) -> Dataset:
    """Load variant A: all 62 classes."""
    return _load_variant(files, 62, lambda variant_a: variant_a)


def femnist_m(files: DataFiles) -> Dataset:
    """Load variant M, 47 classes: letters whose capital and small forms look alike are one class."""
    table = torch.from_numpy(merged_labels())
    return _load_variant(files, 47, lambda variant_a: replace(variant_a, y=table[variant_a.y]))


def femnist_d(files: DataFiles) -> Dataset:
    """Load variant D: only digits.

    Without LEAF's files the data set `mnist-writers` is better: its groups are writers.
    """
    return _load_variant(files, 10, lambda variant_a: keep_classes(variant_a, range(10)))


def _load_variant(
    files: DataFiles, classes: int, from_variant_a: Callable[[Samples], Samples]
) -> Dataset:
    """Load variant A and return another variant of it, with `classes` classes."""
    name = files.dataset
    if leaf_files := files.glob(*_LEAF_PATTERNS):
        leaf_samples = from_variant_a(read_leaf(leaf_files))
        return Dataset(name, leaf_samples, None, classes, "grouped by writer")
    advice = (
        "put LEAF's all_data_*.json files into one of the folders just named, or set GOSSAMER_DATA to the "
        "folder that contains femnist/"
    )
    x, y = files.arrays("femnist_pool.npz", "x", "y", advice=advice)
    # Pseudo-writers are groups of images of similar style.
    (group,) = files.arrays("femnist_pseudo_writers.npz", "group", advice=advice)
    inverted = samples(255 - x[:, None], y, group)  # ink is dark in the file, and 1 in Samples
    note = "groups are by handwriting style (stroke thickness, size, slant), not by writer"
    return Dataset(name, from_variant_a(inverted), None, classes, note)


def read_leaf(files: list[Path]) -> Samples:
    """Read LEAF's files: `users` and `user_data[user] = {"x": [784 numbers, …], "y": […]}` in each.

    Writers are numbered in the order in which they appear. The full set has 36 files and needs several
    gigabytes of memory: a few of the files make a good, smaller set.
    """
    numbers: dict[str, int] = {}
    writers = [
        (x, y, np.full(len(y), numbers.setdefault(user, len(numbers))))
        for path in files
        for user, x, y in _read_writers(path)
    ]
    if not writers:
        raise DataError(f"{files[0]}: no writer in LEAF's files has a sample: download them again")
    return samples(*map(np.concatenate, zip(*writers, strict=True)))


def _read_writers(path: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
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
            # LEAF stores paper as 1 and ink as 0.
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
