"""Samples and data sets, which all loaders return, and tasks, which permute the labels of some peers.

"The paper" is number 003: Bouchra Pilet, Frey and Taïani, Simple, Efficient and Convenient Decentralized
Multi-Task Learning for Neural Networks (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from .sources import DataError

Labels = TypeVar("Labels", Tensor, np.ndarray)


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs, labels and, if the source has them, natural groups (writers, subjects, sensor nodes).

    x: float32 of shape `[n, ...]`. Images keep their shape, `(channels, height, width)`, with ink or light
        at 1 and background at 0; use `flat()` for a multi-layer perceptron.
    y: int64 in `0 .. classes - 1`; or targets of a regression, float32 of shape `[n, ...]`, for a learner
        with a loss function of the user. A `Dataset` accepts only classes.
    group: int64, the number of each sample's group, for `partition.by_group`.
    """

    x: Tensor
    y: Tensor
    group: Tensor | None = None

    def __post_init__(self) -> None:
        if self.x.dtype != torch.float32 or self.x.ndim < 2:
            raise DataError(
                f"Samples.x must be float32 with at least two dimensions, not {self.x.dtype} "
                f"of shape {tuple(self.x.shape)}: scale or reshape it first"
            )
        for name, column in (("y", self.y), ("group", self.group)):
            if column is None or (name == "y" and column.dtype == torch.float32):
                continue
            if column.dtype != torch.int64 or column.shape != (len(self.x),):
                raise DataError(
                    f"Samples.{name} must be int64 of shape ({len(self.x)},), one for each row "
                    f"of x, not {column.dtype} of shape {tuple(column.shape)}"
                )
        if len(self.y) != len(self.x):
            raise DataError(f"Samples.y has {len(self.y)} targets for {len(self.x)} rows of x")

    def __len__(self) -> int:
        return len(self.x)

    def take(self, indices: np.ndarray | Tensor | Sequence[int]) -> Samples:
        """Return the samples at `indices`, in that order, or those that a boolean mask selects."""
        index = torch.as_tensor(np.asarray(indices))
        if index.dtype == torch.bool:
            if index.shape != (len(self),):
                raise DataError(f"a mask of {len(index)} cannot select from {len(self)} samples")
            index = index.nonzero().flatten()
        if index.is_floating_point() and len(index):
            raise DataError("indices must be whole numbers or a boolean mask, not fractions")
        index = index.to(torch.int64)
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise DataError(
                f"indices {int(index.min())} to {int(index.max())} were asked of {len(self)} "
                f"samples: they must lie between 0 and {len(self) - 1}"
            )
        group = None if self.group is None else self.group[index]
        return Samples(self.x[index], self.y[index], group)

    def flat(self) -> Tensor:
        """Return the inputs as `[n, features]`, for fully connected networks, without copying."""
        return self.x.flatten(1)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named data set.

    test: None if each peer must hold out some of its own samples (`partition.split`).
    note: what readers of results must know, such as "groups are by handwriting style, not by writer"; it is
        printed with results.
    """

    name: str
    train: Samples
    test: Samples | None
    classes: int
    note: str = ""

    def __post_init__(self) -> None:
        for subset, samples in (("train", self.train), ("test", self.test)):
            if samples is None or not len(samples):
                continue
            if samples.y.is_floating_point():
                raise DataError(
                    f"{self.name}: {subset} labels are not whole numbers, so they are no classes; for a "
                    "regression use SgdLearner with a loss of your own"
                )
            low, high = int(samples.y.min()), int(samples.y.max())
            if low < 0 or high >= self.classes:
                raise DataError(
                    f"{self.name}: {subset} labels run from {low} to {high}, "
                    f"but {self.classes} classes allow 0 to {self.classes - 1}"
                )

    def checksum(self) -> str:
        """Return a text that differs if training samples do, to find machines with other data."""
        return f"{len(self.train)} samples, sum {float(self.train.x.sum(dtype=torch.float64)):.9g}"


@dataclass(frozen=True, eq=False)
class PeerDatasets:
    """A data set that is read while peers train: for each peer a torch Dataset or DataLoader of its own.

    A user's function in a config returns it for data that do not fit into memory. Only batches are read.

    train, test: functions of a peer's number, from 0, that return its source of (input, label) pairs: inputs
        are float tensors of one shape, labels 0 … classes − 1.
    """

    name: str
    train: Callable[[int], Any]
    test: Callable[[int], Any]
    classes: int
    note: str = ""

    def example(self) -> Dataset:
        """Return a data set of a few samples of the first peer, which have the shape of all."""
        from ...models import ModelError, first_samples

        try:
            x, y = first_samples(self.train(0), 2)
        except ModelError as error:
            raise DataError(f"{self.name}: {error}") from None
        return Dataset(self.name, Samples(x[:2].float(), y[:2].long()), None, self.classes)


def samples(x: ArrayLike, y: ArrayLike, group: ArrayLike | None = None) -> Samples:
    """Return arrays of any number type as Samples; uint8 inputs are scaled from 0 … 255 to [0, 1].

    y: labels of classes if they are integers, or floats in one dimension that are all whole numbers; any
        other floats are targets of a regression, and are not changed.
    """
    x, y = np.asarray(x), np.asarray(y)
    # np.array copies, because torch warns about read-only arrays.
    inputs = torch.from_numpy(np.array(x, dtype=np.float32, order="C"))
    if x.dtype == np.uint8:
        inputs /= 255
    elif not bool(torch.isfinite(inputs).all()):
        row = int((~torch.isfinite(inputs)).flatten(1).any(1).nonzero()[0])
        raise DataError(f"sample {row} has a value that is not finite: remove or repair it")
    groups = None if group is None else torch.from_numpy(np.asarray(group).astype(np.int64))
    return Samples(inputs, _label_tensor(y), groups)


def _label_tensor(y: np.ndarray) -> Tensor:
    """Return `y` as int64; as float32 if it has fractions, or floats in more than one dimension."""
    if y.dtype.kind == "f" and y.size:
        if not np.isfinite(y).all():
            row = int(np.argwhere(~np.isfinite(y))[0, 0])
            raise DataError(f"the label of sample {row} is not finite: remove or repair it")
        if y.ndim > 1 or (y != np.rint(y)).any():
            return torch.from_numpy(y.astype(np.float32))
    return torch.from_numpy(y.astype(np.int64))


def keep_classes(source: Samples, labels: Sequence[int]) -> Samples:
    """Return only the samples with these labels, renumbered 0, 1, … in the order of `labels`."""
    number = {label: index for index, label in enumerate(labels)}
    selected = source.take(torch.isin(source.y, torch.tensor(list(labels))))
    renumbered = torch.tensor([number[int(label)] for label in selected.y], dtype=torch.int64)
    return replace(selected, y=renumbered)


def standardise(source: Samples, by: Samples | None = None) -> Samples:
    """Return samples with every feature scaled to mean 0 and standard deviation 1; constant ones become 0.

    by: the samples on which mean and deviation are measured; `source` if left out. Pass a peer's own training
        samples, so that nothing leaks from test samples or from other peers.
    """
    reference = (source if by is None else by).x
    mean, deviation = reference.mean(0), reference.std(0, correction=0)
    scale = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    return replace(source, x=(source.x - mean) / scale)


def from_torch(dataset: Any, indices: Iterable[int] | None = None) -> Samples:
    """Read a map-style torch Dataset of (x, y) pairs, or only its items at `indices`, into Samples.

    uint8 inputs (tensors, arrays, PIL images) are scaled to [0, 1]; floats are not changed. PIL images become
    `(channels, height, width)`, and a single number becomes one feature. Labels are read as by `samples`.
    """
    selected = range(len(dataset)) if indices is None else [int(i) for i in indices]
    if not len(selected):
        raise DataError("from_torch was given no samples: the dataset or the indices are empty")
    inputs: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for i in selected:
        try:
            x, y = dataset[i]
        except IndexError:
            size = f", which has {len(dataset)}" if hasattr(dataset, "__len__") else ""
            raise DataError(f"from_torch: there is no sample {i} in the dataset{size}") from None
        inputs.append(_as_array(x))
        label = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
        labels.append(label.reshape(()) if label.size == 1 else label)
        for subject, arrays in ((f"sample {i}", inputs), (f"the label of sample {i}", labels)):
            if arrays[-1].shape != arrays[0].shape:
                raise DataError(
                    f"from_torch: {subject} has shape {arrays[-1].shape}, the first one {arrays[0].shape}: "
                    "resize or pad in the dataset's transform"
                )
    return samples(np.stack(inputs), np.stack(labels))


def _as_array(x: Any) -> np.ndarray:
    """Return one sample's input (a tensor, an array, a PIL image or a number) as an array."""
    if isinstance(x, Tensor):
        array = x.detach().cpu().numpy()
    else:
        array = np.asarray(x)
        if hasattr(x, "getbands"):  # a PIL image: height × width, or height × width × channels
            array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return array[None] if array.ndim == 0 else array


@dataclass(frozen=True)
class Task:
    """A permutation of the labels (section V.3 of the paper): it changes the label `c` to `labels[c]`."""

    name: str
    labels: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.labels:
            raise DataError("a task needs at least one class, not 0")
        if sorted(self.labels) != list(range(len(self.labels))):
            raise DataError(
                f"task {self.name!r}: {self.labels} is not a permutation of "
                f"0..{len(self.labels) - 1}: every label must occur once"
            )

    @classmethod
    def identity(cls, classes: int) -> Task:
        """Return the task that changes no label."""
        return cls("identity", tuple(range(classes)))

    @classmethod
    def swap(cls, classes: int, a: int, b: int) -> Task:
        """Return the task that exchanges the labels `a` and `b`."""
        if a == b or not (0 <= a < classes and 0 <= b < classes):
            raise DataError(f"swap: {a} and {b} must be two different labels of 0..{classes - 1}")
        labels = list(range(classes))
        labels[a], labels[b] = b, a
        return cls(f"swap {a} {b}", tuple(labels))

    @classmethod
    def cycle(cls, classes: int, r: int) -> Task:
        """Return the task that permutes the last `r` labels cyclically (section V.3.f of the paper).

        Each of these labels becomes the next one, and the last label becomes the first of them.

        r: the number of labels that change, which the paper calls the difference rate: 0, or 2 to `classes`.
        """
        if r == 1 or not 0 <= r <= classes:
            raise DataError(
                f"cycle: r must be 0 or 2..{classes}, not {r}: no permutation moves exactly one label"
            )
        first_moved = classes - r
        shifted = [first_moved + (index + 1) % r for index in range(r)]
        return cls(f"cycle {r}", (*range(first_moved), *shifted))

    @classmethod
    def all_permutations(cls, classes: int, moved: int = 3) -> list[Task]:
        """Return one task for every permutation of the last `moved` labels, the identity first.

        Section V.3.d of the paper has the six permutations of three labels.
        """
        if not 1 <= moved <= classes:
            raise DataError(f"all_permutations: moved must be 1..{classes}, not {moved}")
        first_moved = classes - moved
        return [
            cls(f"S{moved} {' '.join(map(str, order))}", (*range(first_moved), *order))
            for order in permutations(range(first_moved, classes))
        ]

    @property
    def permutation(self) -> np.ndarray:
        """`p` with `new_label = p[label]`."""
        return np.array(self.labels, dtype=np.int64)

    def apply(self, y: Labels) -> Labels:
        """Return the labels that this task gives; `y` itself is not changed."""
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(self.labels):
            raise DataError(
                f"task {self.name!r} is for labels 0..{len(self.labels) - 1}, "
                f"not {int(y.min())}..{int(y.max())}: build it for the data set's classes"
            )
        if isinstance(y, Tensor):
            return torch.from_numpy(self.permutation)[y]
        return self.permutation[y]

    def then(self, other: Task) -> Task:
        """Return this task followed by `other`: `swap(10, 8, 9).then(swap(10, 6, 7))` swaps both pairs."""
        return Task(f"{self.name}, {other.name}", tuple(other.apply(self.permutation).tolist()))
