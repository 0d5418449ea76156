"""Sensors: HAPT, six activities of 30 people from a phone's accelerometer and gyroscope, and VSN.

VSN: vehicles told apart by 50 acoustic and 50 seismic features (Duarte & Hu; the paper's V.4).

Three sources, the best one found wins: MOCHA's vehicle.mat (two classes, 23 sensor nodes: the
paper's setting), SensIT "combined" in LIBSVM format (three classes, no nodes), a sample of 300.
SensIT's files do not name their classes: label 3 is taken for noise, 1 and 2 for the two vehicles.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path
from typing import Any

import numpy as np

from .dataset import Dataset, Samples, restrict, samples
from .sources import DataError, Places

ACTIVITIES = ("walking", "upstairs", "downstairs", "sitting", "standing", "laying")
FEATURES = 100
_STEMS = ("combined", "combined_scale")
_OPENERS: dict[str, Any] = {"": open, ".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}


def vsn(places: Places) -> Dataset:
    """Two classes with nodes as groups from vehicle.mat; else three classes without groups."""
    mat = places.find("vehicle.mat")
    if mat is not None:
        return Dataset("vsn", read_mocha(mat), None, 2, "grouped by sensor node")
    for stem in _STEMS:
        train = places.find(*(stem + suffix for suffix in _OPENERS))
        if train is not None:
            test = places.find(*(stem + ".t" + suffix for suffix in _OPENERS))
            note = "SensIT without node ids: make peers by a partition; class 2 taken for noise"
            held_out = None if test is None else read_libsvm(test)
            return Dataset("vsn", read_libsvm(train), held_out, 3, note)
    advice = (
        "put MOCHA's vehicle.mat or LIBSVM's SensIT 'combined' there, "
        "or use hapt-sitstand in its place"
    )
    acoustic, seismic, y = places.arrays("sensit300.npz", "acoustic", "seismic", "y", advice=advice)
    x = np.concatenate([acoustic, seismic], axis=1)
    note = "300 samples without node ids: too few for 16 peers; class 2 taken for noise"
    return Dataset("vsn", samples(x, y.astype(np.int64) - 1), None, 3, note)


def vsn_binary(places: Places) -> Dataset:
    """The paper's two classes only: whatever `vsn` finds, without the noise class."""
    whole = vsn(places)
    note = whole.note.replace("class 2 taken for noise", "label 3 left out as noise")
    test = None if whole.test is None else restrict(whole.test, (0, 1))
    return Dataset("vsn-binary", restrict(whole.train, (0, 1)), test, 2, note)


def hapt(places: Places) -> Dataset:
    """100 spectral features (50 accelerometer, 50 gyroscope), six classes, `group` = the person.

    Features have their own scales: `standardise` them before training a sigmoid network.
    """
    x, y, subject = places.arrays("hapt_fft100.npz", "x", "y", "subject")
    note = "people as groups; features not standardised"
    return Dataset("hapt", samples(x, y.astype(np.int64) - 1, subject), None, 6, note)


def hapt_sitstand(places: Places) -> Dataset:
    """Sitting (0) against standing (1): like VSN, two classes, 100 features, differing places."""
    whole = hapt(places)
    chosen = (ACTIVITIES.index("sitting"), ACTIVITIES.index("standing"))
    note = "sitting against standing, in place of VSN; " + whole.note
    return Dataset("hapt-sitstand", restrict(whole.train, chosen), None, 2, note)


def hapt_raw(places: Places) -> Dataset:
    """The windows themselves, `[n, 128 moments, 6 axes]`, for recurrent networks; six classes.

    One-dimensional convolutions want axes first: `x.transpose(1, 2)`.
    """
    windows, scale, y, subject = places.arrays("hapt_raw128.npz", "w", "scale", "y", "subject")
    x = windows.astype(np.float32) / scale
    note = "people as groups; windows of 128 moments × 6 axes"
    return Dataset("hapt-raw", samples(x, y.astype(np.int64) - 1, subject), None, 6, note)


def read_mocha(path: Path) -> Samples:
    """MOCHA's .mat: cells `X{t}` (n × features) and `Y{t}` (n × 1, −1 or 1), one per node t."""
    from scipy.io import loadmat  # only here: it takes long to import, and few have this file

    try:
        content = loadmat(path)
        inputs = [np.asarray(x, dtype=np.float32) for x in content["X"].ravel()]
        labels = [np.asarray(y, dtype=np.float64).ravel() for y in content["Y"].ravel()]
    except Exception as error:  # loadmat raises whatever its parser stumbles on
        raise DataError(
            f"{path} is not MOCHA's .mat with cells X and Y ({type(error).__name__}: {error})"
        ) from error
    if not inputs or len(inputs) != len(labels):
        raise DataError(f"{path}: X has {len(inputs)} nodes and Y has {len(labels)}")
    for node, (x, y) in enumerate(zip(inputs, labels, strict=True)):
        if x.ndim != 2 or len(x) != len(y) or x.shape[1] != inputs[0].shape[1]:
            raise DataError(
                f"{path}, node {node}: X is {x.shape} for {len(y)} labels; "
                f"the first node has {inputs[0].shape[1:]} features"
            )
        if not np.isin(y, (-1, 1)).all():
            raise DataError(f"{path}, node {node}: labels must be -1 or 1, not {np.unique(y)}")
    group = np.repeat(np.arange(len(labels)), [len(y) for y in labels])
    return samples(np.concatenate(inputs), (np.concatenate(labels) > 0).astype(np.int64), group)


def read_libsvm(path: Path) -> Samples:
    """SensIT in LIBSVM format, `label index:value …` with labels 1 to 3; plain, bz2, gz or xz."""
    from sklearn.datasets import load_svmlight_file  # as above

    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            x, y, *_ = load_svmlight_file(file, n_features=FEATURES, zero_based=False)  # pyright: ignore[reportArgumentType]
    except (ValueError, OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(
            f"{path} is not LIBSVM text with {FEATURES} features ({error}): replace it"
        ) from error
    if not np.isin(y, (1, 2, 3)).all():
        raise DataError(f"{path}: labels must be 1, 2 or 3, not {np.unique(y)}")
    return samples(x.toarray().astype(np.float32), y.astype(np.int64) - 1)
