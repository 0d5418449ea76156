"""Data of a user's own: a function that returns a Dataset, named as `module:function`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from gossamer.entry import EntryError, describe_error, load_entry

from .dataset import Dataset
from .files import DataError


def own(named: str, seed: int = 0, folder: Path | None = None) -> Dataset:
    """What the function returns; it is given `seed` if it has an argument of that name.

    Its module stands in `folder` (beside the config), in the folder that one starts from, or is
    installed. Whatever goes wrong in it is one line that names the function.
    """
    beside = str((folder or Path()).resolve())
    if beside not in sys.path:
        sys.path.insert(0, beside)
    try:
        function = load_entry(named)
    except EntryError as error:
        raise DataError(str(error)) from None
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C: it says nothing of its arguments
        known = {}
    try:
        found = function(seed=seed) if "seed" in known else function()
    except DataError as error:
        raise DataError(f"{named}: {error}") from None
    except Exception as error:
        raise DataError(describe_error(named, error)) from error
    if not isinstance(found, Dataset):
        raise DataError(
            f"{named} returned {type(found).__name__} instead of a gossamer.experiments.data.Dataset, "
            "as in Dataset('mine', samples(x, y), None, classes=3)"
        )
    if not len(found.train):
        raise DataError(f"{named} returned a Dataset without training samples")
    if found.test is not None and not len(found.test):
        raise DataError(
            f"{named} returned a Dataset with an empty test set: with None, samples are held out"
        )
    return found
