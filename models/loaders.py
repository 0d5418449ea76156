"""A learner whose samples need not fit into memory: they come from a torch Dataset or DataLoader."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from .errors import ModelError
from .learner import SCORED_SAMPLES, SgdLearner
from .network import SlicedNetwork

Source = Dataset[Any] | DataLoader[Any]
"""Where samples come from: a torch Dataset, map-style or iterable, or a DataLoader."""
Prepare = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of the inputs and labels of a batch that returns both as the network needs them."""

_TEST_BATCH = 256
"""Test samples that a LoaderLearner reads at once, unless its loader has batches of its own."""
_loading_lock = threading.Lock()
"""Held while a loader is read: its random numbers are torch's own, which all threads share."""


def epoch_length(source: Source) -> int | None:
    """Return how many samples an epoch of a data source has; None if it does not say."""
    dataset = source.dataset if isinstance(source, DataLoader) else source
    try:
        return len(cast("Any", dataset))
    except TypeError:
        return None


def first_samples(source: Source, count: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of a few samples of a data source, which show what shapes it has."""
    if isinstance(source, DataLoader | IterableDataset):
        loader = source if isinstance(source, DataLoader) else DataLoader(source, count)
        with _loading_lock, torch.random.fork_rng([]):
            batch = next(iter(loader), None)
        if batch is None:
            raise ModelError("the data source has no samples; give it some")
        return _as_pair(batch)
    size = epoch_length(source)
    if size is None or not hasattr(source, "__getitem__"):
        raise ModelError(
            f"a {type(source).__name__} is no data source: give a torch Dataset with __getitem__ and "
            "__len__, an IterableDataset, or a DataLoader"
        )
    if not size:
        raise ModelError("the data source has no samples; give it some")
    count = min(count, size)
    return _read_items(source, [k * size // count for k in range(count)])


def _read_items(source: Any, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the samples of a map-style Dataset at some indices as one batch."""
    items = [source[index] for index in indices]
    try:
        return _as_pair(default_collate(items))
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"samples of {type(source).__name__} cannot be put into one batch: "
            f"{' '.join(str(error).split())}; let it return tensors of one shape, or give a DataLoader "
            "with a collate_fn"
        ) from None


def _as_pair(batch: Any) -> tuple[Tensor, Tensor]:
    """Return a batch as inputs and labels; ModelError if it is something else."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, labels = batch
        if isinstance(inputs, Tensor) and isinstance(labels, Tensor) and labels.ndim:
            return inputs, labels
    raise ModelError(
        "a batch must be a pair of tensors, inputs and labels of several samples, and this is a "
        f"{type(batch).__name__} of something else; give a DataLoader with a batch_size, and with a "
        "collate_fn that makes such pairs"
    )


class _EpochReader:
    """Reads the batches of a loader in one epoch, with random numbers of its own.

    epoch_random, random: torch's random state for the loader, when the epoch began and now. taken: how many
    batches were read.
    """

    def __init__(self, loader: DataLoader[Any], random: Tensor):
        self.epoch_random = self.random = random
        self.taken = 0
        self._loader, self._batches = loader, None

    def read(self) -> tuple[Tensor, Tensor] | None:
        """Return the next batch; None at the end of the epoch."""
        with _loading_lock, torch.random.fork_rng([]):
            torch.set_rng_state(self.random)
            if self._batches is None:
                self._batches = iter(self._loader)
            batch = next(self._batches, None)
            self.random = torch.get_rng_state()
        if batch is None:
            return None
        self.taken += 1
        return _as_pair(batch)


class LoaderLearner(SgdLearner):
    """Trains on a torch Dataset or DataLoader, of which only the current batch is in memory.

    train
        A map-style Dataset of (input, label) pairs: its samples are drawn as SgdLearner draws those of
        tensors, so both learn the same. Or an IterableDataset or DataLoader, read in its own order and with
        its own batches; when it ends, a new epoch begins. Without shuffling by the loader, its order is the
        data's.
    test
        A Dataset or DataLoader, read anew at every test; or tensors, as for SgdLearner.
    batch
        Samples per gradient step; a DataLoader's own batch size takes precedence.
    prepare
        A function that is applied to inputs and labels of every batch, such as
        `lambda x, y: (x.flatten(1), y)`. Numbers are then converted to the network's dtype and device.
    seed
        Seeds the order of samples, and the random numbers of a loader.
    options
        The other arguments of SgdLearner.

    In an arena such learners train one by one. After a restart, training goes on at the same batch: the
    loader's earlier batches of that epoch are read again and dropped. `score` and `buffers="recompute"` use
    only the samples in memory: a loader's first batch, or SCORED_SAMPLES of a map-style Dataset.
    """

    def __init__(
        self,
        network: SlicedNetwork,
        train: Source,
        test: Source | tuple[Tensor, Tensor],
        *,
        batch: int = 10,
        prepare: Prepare | None = None,
        seed: int = 0,
        **options: Any,
    ):
        self.network, self._prepare = network, prepare
        self._source, self._reader = train, None
        self._used_samples = 0  # of the current batch
        self._test_source = None if isinstance(test, tuple) else test
        if isinstance(train, DataLoader | IterableDataset):
            self._loader = train if isinstance(train, DataLoader) else DataLoader(train, batch)
            batch = self._loader.batch_size or batch
            random = torch.Generator().manual_seed(seed).get_state()
            self._reader = _EpochReader(self._loader, random)
            self._current_batch = self._next_loader_batch(self._reader)
        else:
            self._current_batch = self._convert(first_samples(train, SCORED_SAMPLES))
        held_out = test if isinstance(test, tuple) else self._convert(first_samples(test, 2))
        super().__init__(network, self._current_batch, held_out, batch=batch, seed=seed, **options)

    @property
    def sample_count(self) -> int:
        """How many training samples an epoch has; 0 if the source does not say."""
        return epoch_length(self._source) or 0

    def add_samples(self, inputs: Tensor, labels: Tensor) -> None:
        """Raise ModelError: new samples come from the source."""
        raise ModelError(
            f"peer {self.network.peer!r}: a LoaderLearner reads its samples from its "
            f"{type(self._source).__name__}; let that deliver new ones, or use SgdLearner"
        )

    def state(self) -> dict[str, Any]:
        """Return what SgdLearner returns, and the position in the loader."""
        state = super().state()
        if self._reader is not None:
            epoch, taken = self._reader.epoch_random.clone(), self._reader.taken
            state["loader"] = {"epoch": epoch, "taken": taken, "used": self._used_samples}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; a loader is read up to the batch at which it was."""
        super().restore(state)
        if self._reader is not None and "loader" in state:
            position = state["loader"]
            self._reader = _EpochReader(self._loader, position["epoch"].clone())
            for _ in range(int(position["taken"])):
                self._current_batch = self._next_loader_batch(self._reader)
            self._used_samples = int(position["used"])

    def _next_batch(self, count: int) -> tuple[Tensor, Tensor]:
        if self._reader is None:
            return self._convert(_read_items(self._source, self.draw(count).tolist()))
        if self._used_samples >= len(self._current_batch[1]):
            self._current_batch, self._used_samples = self._next_loader_batch(self._reader), 0
        begin = self._used_samples
        end = self._used_samples = min(begin + count, len(self._current_batch[1]))
        return self._current_batch[0][begin:end], self._current_batch[1][begin:end]

    def _held_out_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._test_source is None:
            yield from super()._held_out_batches()
            return
        loader = self._test_source
        if not isinstance(loader, DataLoader):
            loader = DataLoader(loader, _TEST_BATCH)
        # The same random numbers for every test.
        reader = _EpochReader(loader, torch.Generator().manual_seed(0).get_state())
        while (batch := reader.read()) is not None:
            yield self._convert(batch)

    def _next_loader_batch(self, reader: _EpochReader) -> tuple[Tensor, Tensor]:
        """Return the next batch of the loader; at its end, begin a new epoch."""
        batch = reader.read()
        if batch is None:
            self._reader = _EpochReader(self._loader, reader.random)
            batch = self._reader.read()
        if batch is None:
            raise ModelError(
                f"peer {self.network.peer!r}: its loader has no samples in an epoch; a source that can be "
                "read only once must be made anew by its __iter__"
            )
        return self._convert(batch)

    def _convert(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return a batch as the network needs it: prepared, in its dtype, and on its device."""
        inputs, labels = self._prepare(*batch) if self._prepare else batch
        flat = self.network.flat
        inputs = inputs.to(flat) if inputs.is_floating_point() else inputs.to(flat.device)
        is_float = labels.is_floating_point()
        return inputs, labels.to(flat.device, flat.dtype if is_float else torch.int64)
