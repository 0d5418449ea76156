"""Reproductions of the papers' experiments."""

from .associative import ASSOCIATIVE, ASSOCIATIVE_STARTS
from .averaging_level import AVERAGING_LEVEL
from .runner import run_study
from .semi_local import SEMI_LOCAL, SEMI_LOCAL_AND_LOCAL
from .study import Cell, Point, Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        AVERAGING_LEVEL,
        SEMI_LOCAL,
        SEMI_LOCAL_AND_LOCAL,
        ASSOCIATIVE,
        ASSOCIATIVE_STARTS,
    )
}

__all__ = ["STUDIES", "Cell", "Point", "Study", "run_study"]
