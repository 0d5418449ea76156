"""Reproductions of the papers' experiments."""

from ..study.runner import run_study
from ..study.study import Cell, Point, Study
from .associative import ASSOCIATIVE, ASSOCIATIVE_STARTS
from .averaging_level import AVERAGING_LEVEL
from .semi_local import SEMI_LOCAL, SEMI_LOCAL_AND_LOCAL

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
