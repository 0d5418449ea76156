"""Data sets, partitions over peers, and tasks.

from gossamer.experiments.data import load, partition, tasks

data = load("digits")
for peer, indices in enumerate(partition.successive(len(data.train), peers=8)):
    own = data.train.take(indices)
"""

from . import partition, tasks
from .dataset import Dataset, Samples, from_torch, restrict, standardise
from .files import DataError
from .registry import load, names
from .tasks import Task

__all__ = [
    "DataError",
    "Dataset",
    "Samples",
    "Task",
    "from_torch",
    "load",
    "names",
    "partition",
    "restrict",
    "standardise",
    "tasks",
]
