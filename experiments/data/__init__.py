"""Data sets, partitions over peers, and tasks.

from gossamer.experiments.data import load, partition, tasks

data = load("digits")
for peer, indices in enumerate(partition.successive(len(data.train), peers=8)):
    own = data.train.take(indices)
"""

from typing import TYPE_CHECKING

from ...peer.lazy import at_first_use
from .files import DataError
from .registry import load, names

if TYPE_CHECKING:
    from . import partition, tasks
    from .dataset import Dataset, Samples, from_torch, restrict, samples, standardise
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
    "samples",
    "standardise",
    "tasks",
]

# To list the data sets, or to say that there is none of that name, takes no torch.
_AT_FIRST_USE = {
    "Dataset": ".dataset",
    "Samples": ".dataset",
    "Task": ".tasks",
    "from_torch": ".dataset",
    "partition": ".partition",
    "restrict": ".dataset",
    "samples": ".dataset",
    "standardise": ".dataset",
    "tasks": ".tasks",
}
__getattr__ = at_first_use(__name__, _AT_FIRST_USE)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
