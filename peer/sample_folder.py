"""New training samples for a running peer, from files in a folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import GossamerError

from ..models import Learner, SampleTaker
from .exits import PeerError
from .settings import Settings

_log = logging.getLogger(__name__)

ENDING = ".npz"
"""How the names of files with samples end."""


class SampleFolder:
    """Reads new .npz files with the arrays x and y; called between two rounds.

    Only the names, times and sizes of the files that are in the folder are remembered, so memory does not
    grow while old files are removed.

    peer: for log lines. add: receives inputs and labels of one file. window: the number of samples that are
        of use: at the first call only the newest files with that many are read; None for all files.
    """

    def __init__(
        self, peer: str, folder: Path, add: Callable[[Tensor, Tensor], None], window: int | None
    ) -> None:
        self._peer, self._folder, self._add, self._window = peer, folder, add, window
        self._seen: dict[str, tuple[int, int]] = {}
        """Of each file that was read or refused: time of its last change, and size."""
        self._is_unreadable = False

    def __call__(self) -> None:
        """Add the samples of all files that are new or have changed, in the order of their times."""
        files = self._list()
        new = [name for name in files if self._seen.get(name) != files[name]]
        self._seen = files
        read: list[tuple[str, Tensor, Tensor]] = []
        count = 0
        for name in sorted(new, key=lambda name: (files[name], name), reverse=True):
            if self._window is not None and count >= self._window:
                break  # the samples of older files would be forgotten at once
            with self._file_errors(name):
                inputs, labels = read_samples(self._folder / name)
                read.append((name, inputs, labels))
                count += len(labels)
        for name, inputs, labels in reversed(read):
            with self._file_errors(name):
                self._add(inputs, labels)

    @contextmanager
    def _file_errors(self, name: str) -> Iterator[None]:
        """Log, in one line, that a file is left out."""
        try:
            yield
        except (GossamerError, OSError) as error:
            _log.warning(
                "peer %s: %s is left out: %s",
                self._peer, self._folder / name, getattr(error, "strerror", None) or error,
            )  # fmt: skip

    def _list(self) -> dict[str, tuple[int, int]]:
        """Return time of change and size of every file with samples; those of the last call on an error."""
        files = {}
        try:
            for path in self._folder.iterdir():
                if path.suffix == ENDING and not path.name.startswith("."):
                    with suppress(FileNotFoundError):  # removed or renamed since it was listed
                        state = path.stat()
                        files[path.name] = (state.st_mtime_ns, state.st_size)
        except OSError as error:
            if not self._is_unreadable:
                _log.warning(
                    "peer %s: %s: cannot be read: %s; it is tried again after every round",
                    self._peer, self._folder, error.strerror,
                )  # fmt: skip
            self._is_unreadable = True
            return self._seen
        self._is_unreadable = False
        return files


def read_samples(path: Path) -> tuple[Tensor, Tensor]:
    """Return the arrays x and y of an .npz file; PeerError says what is wrong with it."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            inputs, labels = (torch.from_numpy(np.ascontiguousarray(arrays[key])) for key in "xy")
    except OSError:
        raise
    except Exception as error:  # of a damaged file, numpy and zipfile raise many kinds
        reason = (
            "it has no array"
            if isinstance(error, KeyError)
            else "it is not an .npz file of numbers"
        )
        raise PeerError(f"{reason}: {error}") from None
    if not labels.ndim or len(inputs) != len(labels):
        raise PeerError(f"{len(inputs)} inputs with labels of shape {tuple(labels.shape)}")
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        raise PeerError("some of its inputs are NaN or infinite")
    return inputs, labels


def watch_folder(learner: Learner, settings: Settings, peer: str) -> None:
    """Let a learner take new samples as the settings say; PeerError if it cannot."""
    if not isinstance(learner, SampleTaker):
        key = "window" if settings.samples_folder is None else "samples_folder"
        raise PeerError(
            f"peer {peer}: {key}: a {type(learner).__name__} takes no new samples; leave the key out, or "
            "give the learner the attributes of gossamer.models.SampleTaker"
        )
    if settings.window is not None:
        learner.window = settings.window
    if settings.samples_folder is not None:
        if learner.data is not None:
            raise PeerError(
                f"peer {peer}: samples_folder: its learner has a data function already; leave out one of them"
            )
        learner.data = SampleFolder(
            peer, Path(settings.samples_folder), learner.add_samples, learner.window
        )
