"""Makes a Results object for a folder that a test chooses."""

from pathlib import Path

from gossamer.experiments.results import Results


def at(folder: Path, *, force: bool = False) -> Results:
    """Return a Results object of `gossamer simulate` that writes to `folder`, not to a sub-folder."""
    return Results(folder, "simulate", exact=True, force=force)
