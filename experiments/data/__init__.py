"""Data sets, partitions over peers, and tasks.

from gossamer.experiments.data import load, partition, tasks

data = load("digits")
for peer, indices in enumerate(partition.successive(len(data.train), peers=8)):
    own = data.train.take(indices)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "restrict": ".dataset",
    "samples": ".dataset",
    "standardise": ".dataset",
}


def __getattr__(name: str) -> Any:
    if name in ("partition", "tasks"):
        return import_module(f".{name}", __name__)
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_AT_FIRST_USE[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
