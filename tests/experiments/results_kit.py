"""A Results object for a folder that a test chooses, and a callback that notes what it is told."""

from pathlib import Path

from gossamer.experiments.results import Results
from gossamer.models import Callback, Progress


def at(folder: Path, *, force: bool = False) -> Results:
    """Return a Results object of `gossamer simulate` that writes to `folder`, not to a sub-folder."""
    return Results(folder, "simulate", exact=True, force=force)


class Watch(Callback):
    """Notes what a callback is told, and may stop or interrupt a run.

    stop: the method that returns True, and the round in which it does. interrupt_at: the round after which
    Ctrl-C is pressed.
    """

    def __init__(self, stop: tuple[str, int] | None = None, interrupt_at: int = 0):
        self._stop, self._interrupt_at = stop, interrupt_at
        self.calls: list[tuple[str, Progress]] = []

    def told(self, method: str) -> list[Progress]:
        """Return what a method was told, call by call."""
        return [progress for name, progress in self.calls if name == method]

    def order(self) -> list[tuple[str, int]]:
        """Return the methods that were called, with their rounds."""
        return [(name, progress.round) for name, progress in self.calls]

    def _note(self, method: str, progress: Progress) -> bool:
        self.calls.append((method, progress))
        return (method, progress.round) == self._stop

    def start(self, progress: Progress) -> bool:
        return self._note("start", progress)

    def round(self, progress: Progress) -> bool:
        stop = self._note("round", progress)
        if progress.round == self._interrupt_at:
            raise KeyboardInterrupt
        return stop

    def test(self, progress: Progress) -> bool:
        return self._note("test", progress)

    def end(self, progress: Progress) -> bool:
        return self._note("end", progress)
