"""Callbacks: objects that follow a run, and may stop it.

    class Watch(Callback):
        def test(self, progress):
            print(progress.round, progress.value("accuracy"))
            return progress.value("accuracy") > 0.99  # True stops the run

    for round in Arena(learners).run(100, callbacks=[Watch()]): ...

The same object works in an `Arena`, in `gossamer simulate`, in comparisons and in a live peer. Of every run,
`start` is called once, then `round` after each round and `test` after each test, and `end` once.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any

from gossamer.entry import call_entry, describe_error, import_from, load_entry
from gossamer.errors import GossamerError
from gossamer.files import atomic_path

from .errors import ModelError
from .learner import Learner
from .metrics import Metrics, less_is_better

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """How far a run is: what callbacks receive.

    round: the rounds so far, 0 at the start. In virtual time, a round takes as long as an average peer trains
        for one.
    rounds: how many there will be; None for a peer that learns for ever.
    learners: those of all peers in this process, one in a live peer; their networks have the current values.
    training: metrics of the samples that each peer trained on in its last round, by the peer's name; empty in
        a comparison.
    tests: metrics of each peer's latest test, by the peer's name; empty in `start`, and in `round`.
    time: virtual seconds; None if there is no virtual time.
    """

    round: int
    rounds: int | None
    learners: Sequence[Learner] = ()
    training: Mapping[str, Metrics] = field(default_factory=dict)
    tests: Mapping[str, Metrics] = field(default_factory=dict)
    time: float | None = None

    def value(self, name: str = "accuracy") -> float:
        """Return the mean over tested peers of the accuracy, the loss or a named metric; NaN without any."""
        values = [value_of(test, name) for test in self.tests.values() if test.samples]
        values = [value for value in values if isfinite(value)]
        return fmean(values) if values else nan


def value_of(test: Metrics, name: str) -> float:
    """Return the accuracy, the loss per sample or a named metric of a test; NaN if it has no such metric."""
    if name == "accuracy":
        return test.accuracy
    return test.mean_loss if name == "loss" else test.values.get(name, nan)


class Callback:
    """Follows a run: override the methods that you need. Any of them may return True, which stops the run.

    A run that is stopped ends as if this round were its last: it is tested, and results are written. A live
    peer that is stopped hands over its mass and leaves; the others go on.
    """

    def start(self, progress: Progress) -> bool | None:
        """Do something before the first round."""

    def round(self, progress: Progress) -> bool | None:
        """Do something after a round was trained and averaged."""

    def test(self, progress: Progress) -> bool | None:
        """Do something after a test; a tested round is followed by `round`, then by `test`."""

    def end(self, progress: Progress) -> bool | None:
        """Do something when the run is over, also after an error or Ctrl-C; what it returns has no effect."""


class CallbackList:
    """The callbacks of one run, called one after the other; each method returns whether to stop.

    stopped_by: the class name of the first callback that asked to stop; empty if none did.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()):
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ModelError(
                    f"callbacks: {callback!r:.80} is a {type(callback).__name__}, not an object of a "
                    "subclass of gossamer.models.Callback"
                )
        self._callbacks = tuple(callbacks)
        self.stopped_by = ""
        self._last_progress: Progress | None = None

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def start(self, progress: Progress) -> bool:
        """Call `start` of all callbacks."""
        return self._call("start", progress)

    def round(self, progress: Progress) -> bool:
        """Call `round` of all callbacks."""
        return self._call("round", progress)

    def test(self, progress: Progress) -> bool:
        """Call `test` of all callbacks."""
        return self._call("test", progress)

    def end(self, *, after_error: bool = False) -> None:
        """Call `end` of all callbacks with the progress that they saw last, unless none has been started.

        after_error: log the errors of callbacks instead of raising the first, which would hide the one that
            ended the run.
        """
        progress, self._last_progress = self._last_progress, None
        errors: list[GossamerError] = []
        for callback in () if progress is None else self._callbacks:
            try:
                _call(callback, "end", progress)
            except GossamerError as error:
                errors.append(error)
        if errors and not after_error:
            raise errors[0]
        for error in errors:
            _log.warning("%s", error)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Call `end` of all callbacks when the block ends, whatever ends it."""
        try:
            yield
        except BaseException:
            self.end(after_error=True)
            raise
        self.end()

    def _call(self, method: str, progress: Progress) -> bool:
        """Call a method of all callbacks; return whether one of them asked to stop."""
        self._last_progress = progress
        stopping = [callback for callback in self._callbacks if _call(callback, method, progress)]
        if stopping and not self.stopped_by:
            self.stopped_by = type(stopping[0]).__name__
        return bool(stopping)


def _call(callback: Callback, method: str, progress: Progress | None) -> bool:
    """Call a method of a callback, and return whether to stop; its errors become a ModelError."""
    try:
        return bool(getattr(callback, method)(progress))
    except GossamerError:
        raise
    except Exception as error:  # a user's callback may raise anything
        kind = type(callback)
        where = describe_error(f"{kind.__module__}:{kind.__qualname__}", error)
        raise ModelError(f"callback {where}, in {method!r}") from error


def find_callbacks(entries: Sequence[str], folder: Path) -> None:
    """Import the functions that a config names, `module:function`, from its folder; EntryError if one is not
    there."""
    for entry in entries:
        import_from(folder)
        load_entry(entry)


def make_callbacks(entries: Sequence[str], folder: Path, name: str) -> list[Callback]:
    """Call the functions that a config names, `module:function`, and return their callbacks.

    A function gets `folder`, that of the run's results, and `name`, that of the run, if it has parameters of
    these names. It returns a callback or a list of them.
    """
    callbacks: list[Callback] = []
    for entry in entries:
        available: dict[str, Any] = {"folder": folder, "name": name}
        parameters = inspect.signature(load_entry(entry)).parameters
        arguments = {key: available[key] for key in parameters if key in available}
        returned = call_entry(entry, arguments)
        for callback in returned if isinstance(returned, list | tuple) else [returned]:
            if not isinstance(callback, Callback):
                raise ModelError(
                    f"{entry} returned {type(callback).__name__} instead of a gossamer.models.Callback"
                )
            callbacks.append(callback)
    return callbacks


# --- ready callbacks --------------------------------------------------------------------------------


class _Best:
    """The best value of a metric so far, and its round.

    least: by how much a value must be better to count. smaller: whether less is better; None to decide by the
    metric's name.
    """

    def __init__(self, metric: str, least: float, smaller: bool | None):
        smaller = less_is_better(metric) if smaller is None else smaller
        self._sign, self._metric, self._least = (-1.0 if smaller else 1.0), metric, least
        self.value, self.round = nan, 0

    def improves(self, progress: Progress) -> bool:
        """Return whether a test is better than all before by more than `least`; the first one is."""
        value = progress.value(self._metric)
        is_better = isfinite(value) and (
            not isfinite(self.value) or self._sign * (value - self.value) > self._least
        )
        if is_better:
            self.value, self.round = value, progress.round
        return is_better


class EarlyStopping(Callback):
    """Stops a run when the mean of a metric over peers has not improved in `patience` tests.

    metric: accuracy, loss, or the name of a metric. least: a test must be better by more than this to count.
    smaller: whether less is better; by default for metrics with "loss" or "error" in their names.
    best, best_round: the best value so far, and its round.
    """

    def __init__(
        self,
        patience: int = 10,
        metric: str = "accuracy",
        least: float = 0.0,
        smaller: bool | None = None,
    ):
        if patience < 1:
            raise ModelError(f"patience={patience}: give a number of tests, 1 or more")
        self._patience, self._tests = patience, 0
        self._make_best = lambda: _Best(metric, least, smaller)
        self._best = self._make_best()

    @property
    def best(self) -> float:
        """The best value so far; NaN before the first test."""
        return self._best.value

    @property
    def best_round(self) -> int:
        """The round of the best value."""
        return self._best.round

    def start(self, progress: Progress) -> None:
        """Begin anew: one object may follow several runs, one after the other."""
        self._best, self._tests = self._make_best(), 0

    def test(self, progress: Progress) -> bool:
        """Count tests without improvement."""
        self._tests = 0 if self._best.improves(progress) else self._tests + 1
        return self._tests >= self._patience


class SaveNetworks(Callback):
    """Saves every peer's network as FOLDER/PEER.safetensors when the mean over peers is better than before.

    metric, smaller: as in EarlyStopping; a metric of None saves after every test.
    """

    def __init__(
        self, folder: str | Path, metric: str | None = "accuracy", smaller: bool | None = None
    ):
        self._folder = Path(folder)
        self._best = None if metric is None else _Best(metric, 0.0, smaller)

    def test(self, progress: Progress) -> None:
        """Save the networks if they are the best."""
        if self._best is not None and not self._best.improves(progress):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for learner in progress.learners:
            with atomic_path(self._folder / f"{learner.network.peer}.safetensors") as temporary:
                learner.network.save(temporary)


class PrintProgress(Callback):
    """Prints a line after every test: the round, and the means over peers of these metrics."""

    def __init__(self, *metrics: str):
        self._metrics = metrics or ("accuracy",)

    def test(self, progress: Progress) -> None:
        """Print a line."""
        values = "  ".join(f"{name} {progress.value(name):.4f}" for name in self._metrics)
        print(f"round {progress.round}  {values}", flush=True)


class TensorBoard(Callback):
    """Writes the means over peers of all metrics for TensorBoard, to FOLDER/tensorboard/NAME.

    Needs the package tensorboard: pip install "gossamer[tensorboard]".
    """

    def __init__(self, folder: str | Path = ".", name: str = "run"):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ModelError(
                "TensorBoard needs the package tensorboard, which is not installed: "
                'pip install "gossamer[tensorboard]"'
            ) from None
        self._writer = SummaryWriter(str(Path(folder) / "tensorboard" / name))

    def round(self, progress: Progress) -> None:
        """Write the mean training loss."""
        losses = [metrics.mean_loss for metrics in progress.training.values() if metrics.samples]
        if losses:
            self._writer.add_scalar("training/loss", fmean(losses), progress.round)

    def test(self, progress: Progress) -> None:
        """Write the means over peers of accuracy, loss and named metrics."""
        named = {name for test in progress.tests.values() for name in test.values}
        for name in ("accuracy", "loss", *sorted(named)):
            if isfinite(value := progress.value(name)):
                self._writer.add_scalar(f"test/{name}", value, progress.round)

    def end(self, progress: Progress) -> None:
        """Finish the file."""
        self._writer.close()
