"""What a peer does by itself between two averagings: it takes new samples, trains, and measures its gain.

New samples come from files in a folder or from the learner's own function. A log-prior follows from the
peer's class counts and the totals of all peers; see models/prior.py. A lone twin trains beside the peer and
shows what it gains by taking part; see models/twin.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.logs import should_log_repeat

from ..gossip import Gossiper
from ..models import (
    Gain,
    Learner,
    LoneTwin,
    ModelError,
    Prior,
    SampleTaker,
    SgdLearner,
    auto_log_prior,
    class_summary,
    draws_twin,
    log_priors,
)
from .exits import PeerError
from .settings import Settings
from .store import MatchedStore, SwarmMean

_log = logging.getLogger(__name__)

CLASS_COUNTS = "class-counts"
"""The name under which totals of class counts are averaged; only with the prior `auto`."""


class LivePrior:
    """Sets a learner's log-prior, by its kind: `own` at once, `auto` after every averaging. On the worker."""

    def __init__(self, name: str, learner: Learner, store: MatchedStore, kind: Prior):
        if type(learner) is not SgdLearner:
            raise PeerError(
                f"peer {name}: a prior needs a learner with samples and a loss per sample (SgdLearner), not "
                f"{type(learner).__name__}"
            )
        inputs, labels = learner.samples
        with torch.no_grad():
            classes = learner.network.module.eval()(inputs[:2]).shape[-1]
        if classes < 2 or labels.is_floating_point():
            raise PeerError(
                f"peer {name}: a prior needs one output for each class, and two or more"
            )
        self._learner = learner
        self._counts = torch.bincount(labels.flatten().cpu(), minlength=classes).numpy()
        self._mean: SwarmMean | None = None
        if kind == "auto":
            self._mean = SwarmMean(store, CLASS_COUNTS, len(class_summary(self._counts)))
            return
        try:
            priors = log_priors([self._counts], kind)
            learner.log_prior = None if priors is None else torch.from_numpy(priors[0])
        except ModelError as error:
            raise PeerError(f"peer {name}: {error}") from None

    def after_training(self, gossiper: Gossiper) -> None:
        """Add this peer's class counts to the totals of all peers."""
        if self._mean is not None:
            self._mean.contribute(gossiper, class_summary(self._counts))

    def after_averaging(self, peers: int) -> None:
        """Set the log-prior by the totals as this peer knows them; peers: how many there are."""
        mean = self._mean
        if mean is None or mean.contribution is None or not mean.value[0] > 0:
            return
        totals = mean.value.astype(float) * (peers / float(mean.value[0]))
        prior = auto_log_prior(self._counts, totals)
        self._learner.log_prior = None if prior is None else torch.from_numpy(prior)

    def reset(self) -> None:
        """Forget the totals, for a new session."""
        if self._mean is not None:
            self._mean.reset()

    def snapshot(self) -> dict[str, Any] | None:
        """Return what a restarted process needs; None without totals."""
        return None if self._mean is None else self._mean.snapshot()

    def restore(self, data: dict[str, Any] | None) -> None:
        """Continue from a snapshot."""
        if self._mean is not None and data is not None:
            self._mean.restore(data)


SAMPLES_SUFFIX = ".npz"
"""How the names of files with samples end."""


class SampleFolder:
    """Reads new .npz files with the arrays x and y; called between two rounds.

    It remembers names, times and sizes only of the files that are in the folder, so its memory does not grow
    if old files are removed.

    peer: for log lines. add: called with the inputs and labels of each file. window: how many samples the
        learner keeps: of many new files only the newest with that many samples are read; None for all.
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
        files = self._list_files()
        new = [name for name in files if self._seen.get(name) != files[name]]
        self._seen = files
        read: list[tuple[str, Tensor, Tensor]] = []
        count = 0
        for name in sorted(new, key=lambda name: (files[name], name), reverse=True):
            if self._window is not None and count >= self._window:
                break  # the samples of older files would be dropped at once
            with self._file_errors(name):
                inputs, labels = read_samples(self._folder / name)
                read.append((name, inputs, labels))
                count += len(labels)
        for name, inputs, labels in reversed(read):
            with self._file_errors(name):
                self._add(inputs, labels)

    @contextmanager
    def _file_errors(self, name: str) -> Iterator[None]:
        """Log an error in one line, instead of raising it: the file is left out, and not those after it."""
        try:
            yield
        except Exception as error:  # the learner may be a user's own, and raise anything
            is_named = isinstance(error, GossamerError | OSError)
            _log.warning(
                "peer %s: %s is left out: %s%s", self._peer, self._folder / name,
                "" if is_named else f"{type(error).__name__}: ",
                getattr(error, "strerror", None) or error,
            )  # fmt: skip

    def _list_files(self) -> dict[str, tuple[int, int]]:
        """Return time of change and size of every file with samples; on an error, those of the last call."""
        files = {}
        try:
            for path in self._folder.iterdir():
                if path.suffix == SAMPLES_SUFFIX and not path.name.startswith("."):
                    with suppress(FileNotFoundError):  # removed or renamed since it was listed
                        stat = path.stat()
                        files[path.name] = (stat.st_mtime_ns, stat.st_size)
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
    """Return the arrays x and y of an .npz file; OSError or PeerError say what is wrong with it."""
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
        raise PeerError(
            f"x has {len(inputs)} inputs and y has the shape {tuple(labels.shape)}: write one label per input"
        )
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        raise PeerError("some of its inputs are NaN or infinite")
    return inputs, labels


def configure_samples(learner: Learner, settings: Settings, peer: str) -> None:
    """Set how many samples a learner keeps, and the folder of new ones; PeerError if it takes none."""
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


class LocalTraining:
    """The samples, the log-prior and the lone twin of a peer's learner. Used on the worker thread.

    Made before samples are held out for decisions about sharing: the class counts include those samples, and
    the twin trains on them.
    """

    def __init__(self, name: str, learner: Learner, store: MatchedStore, settings: Settings):
        self._name, self._learner, self._every = name, learner, settings.every
        self._sample_errors = 0
        self._prior: LivePrior | None = None
        if settings.prior != "none":
            self._prior = LivePrior(name, learner, store, settings.prior)
        self._twin: LoneTwin | None = None
        if draws_twin(settings.gain, settings.swarm, name):
            self._twin = LoneTwin(learner)
        if settings.samples_folder is not None or settings.window is not None:
            configure_samples(learner, settings, name)
        takes_samples = isinstance(learner, SampleTaker) and learner.data is not None
        if takes_samples and (self.has_twin or settings.sharing == "auto"):
            key = "gain" if self.has_twin else "sharing"
            raise PeerError(
                f"peer {name}: {key}: it compares networks on samples that stay the same, and this peer "
                f"takes new ones; leave out {key}, or samples_folder and the learner's data function"
            )

    @property
    def has_twin(self) -> bool:
        """Whether this peer measures what it gains by taking part."""
        return self._twin is not None

    def take_samples(self) -> None:
        """Let the learner take the samples that have arrived since the last round, if it can."""
        learner = self._learner
        if not isinstance(learner, SampleTaker) or learner.data is None:
            return
        try:
            if (samples := learner.data()) is not None:
                learner.add_samples(*samples)
        except Exception as error:  # the function may be a user's own, and raise anything
            self._sample_errors += 1
            if should_log_repeat(self._sample_errors):
                _log.warning(
                    "peer %s: new samples are left out: %s: %s (%d times so far)",
                    self._name, type(error).__name__, error, self._sample_errors,
                )  # fmt: skip

    def after_training(self, gossiper: Gossiper) -> None:
        """Prepare what is averaged besides the network: the class counts for the log-prior."""
        if self._prior is not None:
            self._prior.after_training(gossiper)

    def after_averaging(self, peers: int) -> None:
        """Set the log-prior for the next round; peers: how many there are."""
        if self._prior is not None:
            self._prior.after_averaging(peers)

    def train_twin(self, rounds: int) -> None:
        """Train the lone twin, if there is one, until it has trained this number of rounds in all.

        Called after the pushes of a round are sent, so that other peers need not wait for the twin. If the
        process crashes in between, the twin trains two rounds the next time.
        """
        if self._twin is not None:
            while self._twin.trainings < rounds:
                self._twin.train(self._every)

    def measure_gain(self, rounds: int) -> Gain | None:
        """Test the peer and its lone twin, after so many rounds; None if it has no twin."""
        if self._twin is None:
            return None
        self.train_twin(rounds)
        return self._twin.gain()

    def reset(self) -> None:
        """Forget what other peers have told in a former session: the totals of class counts."""
        if self._prior is not None:
            self._prior.reset()

    def snapshot(self) -> dict[str, Any]:
        """Return what a restarted process needs, as entries of its checkpoint."""
        prior = {} if self._prior is None else {"prior": self._prior.snapshot()}
        return prior if self._twin is None else {**prior, "twin": self._twin.state()}

    def restore(self, tree: Mapping[str, Any], rounds: int) -> None:
        """Continue from a checkpoint, after so many rounds."""
        if self._prior is not None:
            self._prior.restore(tree.get("prior"))
        if self._twin is not None and tree.get("twin") is not None:
            self._twin.restore(tree["twin"])
        elif self._twin is not None and rounds:
            self._twin = None
            _log.warning(
                "peer %s: gain was set after its first round; what it gains cannot be measured",
                self._name,
            )
