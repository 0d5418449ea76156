"""Results in a folder that a test names."""

from pathlib import Path

from gossamer.experiments.results import Results


def at(folder: Path, *, force: bool = False) -> Results:
    """Results of `gossamer simulate`, in this very folder."""
    return Results(folder, "simulate", exact=True, force=force)
