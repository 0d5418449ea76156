"""HAPT: six activities of 30 people from a phone's accelerometer and gyroscope; people as peers."""

from __future__ import annotations

import numpy as np

from .dataset import Dataset, restrict, samples
from .files import Places, read_npz

ACTIVITIES = ("walking", "upstairs", "downstairs", "sitting", "standing", "laying")
_ADVICE = "set GOSSAMER_DATA to the folder above sensors/"


def hapt(places: Places) -> Dataset:
    """100 spectral features (50 accelerometer, 50 gyroscope), six classes, `group` = the person.

    Features have their own scales: `standardise` them before training a sigmoid network.
    """
    path = places.need("hapt", "sensors/hapt_fft100.npz", _ADVICE)
    x, y, subject = read_npz(path, "x", "y", "subject")
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
    path = places.need("hapt-raw", "sensors/hapt_raw128.npz", _ADVICE)
    windows, scale, y, subject = read_npz(path, "w", "scale", "y", "subject")
    x = windows.astype(np.float32) / scale
    note = "people as groups; windows of 128 moments × 6 axes"
    return Dataset("hapt-raw", samples(x, y.astype(np.int64) - 1, subject), None, 6, note)
