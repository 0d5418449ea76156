"""Loads sensor data: human activities (HAPT) and vehicles seen by a sensor network (VSN).

HAPT: six activities of 30 people, recorded by a phone's accelerometer and gyroscope.

VSN: two vehicles, distinguished by 50 acoustic and 50 seismic features (Duarte and Hu 2004). "The paper" is
Bouchra Pilet, Frey and Taïani 2021, whose section V.4 learns from it. There are three sources, of which the
first that is found is used: MOCHA's vehicle.mat (two classes, 23 sensor nodes, as in the paper; for 16 peers,
`partition.by_group` takes the 16 nodes with the most samples), SensIT "combined" in LIBSVM format (three
classes, no nodes), and 300 samples of SensIT. SensIT's files do not name their classes: labels 1 and 2 are
assumed to be the vehicles, and label 3 noise. A class is the label − 1, so that noise is class 2.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from .dataset import Dataset, Samples, keep_classes, samples, standardise
from .sources import DataError, DataFiles

ACTIVITIES = ("walking", "upstairs", "downstairs", "sitting", "standing", "laying")
"""The classes of HAPT, in order."""
SENSIT_FEATURES = 100
_NOISE_NOTE = "class 2 (label 3) is assumed to be noise"
_SENSIT_NAMES = ("combined", "combined_scale")
"""Names of SensIT's training file, without a suffix of _OPEN_BY_SUFFIX."""
_OPEN_BY_SUFFIX: dict[str, Any] = {"": open, ".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}
"""The function that opens a file with a suffix of the compression."""


def vsn(files: DataFiles) -> Dataset:
    """Load VSN: two classes, grouped by sensor node, from vehicle.mat; else three classes without groups."""
    mat = files.find("vehicle.mat")
    if mat is not None:
        return Dataset("vsn", read_mocha(mat), None, 2, "grouped by sensor node")
    for stem in _SENSIT_NAMES:
        train = files.find(*(stem + suffix for suffix in _OPEN_BY_SUFFIX))
        if train is not None:
            test = files.find(*(stem + ".t" + suffix for suffix in _OPEN_BY_SUFFIX))
            note = f"SensIT has no node ids: divide the samples among peers with a partition; {_NOISE_NOTE}"
            held_out = None if test is None else read_libsvm(test)
            return Dataset("vsn", read_libsvm(train), held_out, 3, note)
    advice = (
        "put MOCHA's vehicle.mat or LIBSVM's SensIT 'combined' into one of these folders, "
        "or use the data set hapt-sitstand instead"
    )
    acoustic, seismic, y = files.arrays("sensit300.npz", "acoustic", "seismic", "y", advice=advice)
    x = np.concatenate([acoustic, seismic], axis=1)
    note = f"300 samples without node ids: too few for the paper's 16 peers (at most 19 each); {_NOISE_NOTE}"
    return Dataset("vsn", samples(x, y.astype(np.int64) - 1), None, 3, note)


def vsn_binary(files: DataFiles) -> Dataset:
    """Load VSN with only the two vehicles, as in the paper: `vsn` without class 2, which is noise."""
    all_classes = vsn(files)
    note = all_classes.note.replace(
        _NOISE_NOTE, "class 2 (label 3), assumed to be noise, is left out"
    )
    test = None if all_classes.test is None else keep_classes(all_classes.test, (0, 1))
    return Dataset("vsn-binary", keep_classes(all_classes.train, (0, 1)), test, 2, note)


def hapt(files: DataFiles) -> Dataset:
    """Load HAPT: 100 spectral features (50 accelerometer, 50 gyroscope), six classes, grouped by person.

    The scales of features differ: use `dataset.standardise` before training a sigmoid network.
    """
    x, y, subject = files.arrays("hapt_fft100.npz", "x", "y", "subject")
    note = "grouped by person; features not standardised"
    return Dataset("hapt", samples(x, y.astype(np.int64) - 1, subject), None, 6, note)


def hapt_sitstand(files: DataFiles) -> Dataset:
    """Load HAPT with only sitting (class 0) and standing (class 1).

    It can replace VSN: like VSN it has two classes, 100 features, and samples in groups (here people).
    Features are standardised over all people, so that a sigmoid network can learn from them.
    """
    all_classes = hapt(files)
    classes = (ACTIVITIES.index("sitting"), ACTIVITIES.index("standing"))
    note = "sitting against standing, in place of VSN; grouped by person; features standardised"
    train = standardise(keep_classes(all_classes.train, classes))
    return Dataset("hapt-sitstand", train, None, 2, note)


def hapt_raw(files: DataFiles) -> Dataset:
    """Load HAPT's time series, windows of shape `[n, 128 time steps, 6 axes]`; six classes.

    Recurrent networks take this shape; one-dimensional convolutions need `x.transpose(1, 2)`.
    """
    windows, scale, y, subject = files.arrays("hapt_raw128.npz", "w", "scale", "y", "subject")
    x = windows.astype(np.float32) / scale
    note = "grouped by person; windows of 128 time steps × 6 axes"
    return Dataset("hapt-raw", samples(x, y.astype(np.int64) - 1, subject), None, 6, note)


def read_mocha(path: Path) -> Samples:
    """Read MOCHA's .mat file: MATLAB cell arrays X and Y with an entry per sensor node.

    An entry of X is an array n × features, an entry of Y an array n × 1 of −1 or 1.
    """
    from scipy.io import loadmat  # slow to import, and needed only for this file

    try:
        content = loadmat(path)
        inputs = [np.asarray(x, dtype=np.float32) for x in content["X"].ravel()]
        labels = [np.asarray(y, dtype=np.float64).ravel() for y in content["Y"].ravel()]
    except Exception as error:  # loadmat may raise any exception for a damaged file
        raise DataError(
            f"{path} is not MOCHA's .mat with cell arrays X and Y ({type(error).__name__}: {error})"
        ) from error
    if not inputs or len(inputs) != len(labels):
        raise DataError(f"{path}: X has {len(inputs)} sensor nodes and Y has {len(labels)}")
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
    """Read SensIT in LIBSVM format, `label index:value …` with labels 1 to 3; plain, bz2, gz or xz."""
    from sklearn.datasets import load_svmlight_file  # slow to import, and needed only for this file

    try:
        with _OPEN_BY_SUFFIX.get(path.suffix, open)(path, "rb") as file:
            x, y, *_ = load_svmlight_file(file, n_features=SENSIT_FEATURES, zero_based=False)  # pyright: ignore[reportArgumentType]
    except (ValueError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(
            f"{path} is not LIBSVM text with {SENSIT_FEATURES} features ({error}): replace it"
        ) from error
    if not np.isin(y, (1, 2, 3)).all():
        raise DataError(f"{path}: labels must be 1, 2 or 3, not {np.unique(y)}")
    return samples(x.toarray().astype(np.float32), y.astype(np.int64) - 1)
