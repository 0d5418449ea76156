"""Learners that read a torch Dataset or DataLoader: steps as on tensors, restarts, and flat memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from gossamer.experiments import Arena
from gossamer.models import LoaderLearner, ModelError, SgdLearner, SlicedNetwork, mlp
from gossamer.peer import load_checkpoint, save_checkpoint

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0)
TEST = X[:20], Y[:20]


def network(peer: str = "a", dtype: torch.dtype = torch.float32) -> SlicedNetwork:
    return SlicedNetwork(mlp("4=6=3").to(dtype), {"all": 1.0}, peer=peer, seed=0)


def learner(train: Any, test: Any = TEST, peer: str = "a", **options: Any) -> LoaderLearner:
    return LoaderLearner(
        network(peer), train, test, **{"local_samples": 30, "rate": 0.1, "seed": 5} | options
    )


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), shuffle=True, **{"batch_size": 8} | options)


class Stream(IterableDataset[tuple[Tensor, int]]):
    """A million samples that are made one by one; counts how many of them are alive."""

    def __init__(self, count: int = 1_000_000) -> None:
        self.count, self.made, self.alive, self.most = count, 0, 0, 0

    def _ended(self) -> None:
        self.alive -= 1

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.count):
            x = torch.randn(4, generator=generator)
            self.made, self.alive = self.made + 1, self.alive + 1
            self.most = max(self.most, self.alive)
            weakref.finalize(x, self._ended)
            yield x, int(x[0] > 0)


def test_a_dataset_is_learned_as_its_tensors_are() -> None:
    in_memory = SgdLearner(network(), (X, Y), TEST, local_samples=30, seed=5, metrics=["f1"])
    read = learner(TensorDataset(X, Y), TensorDataset(*TEST), metrics=["f1"])
    for _ in range(4):
        assert read.train(1) == in_memory.train(1)
        assert read.test() == in_memory.test()
    assert torch.equal(read.network.flat, in_memory.network.flat)
    torch.testing.assert_close(read.test_samples(), in_memory.test_samples())


def test_memory_stays_flat_over_a_stream_that_would_not_fit() -> None:
    stream = Stream()
    reads = learner(stream, batch=10, local_samples=100)
    for _ in range(20):
        assert reads.train(1).samples == 100
    gc.collect()
    assert 2000 <= stream.made <= 2020
    assert stream.most <= 3 * 10  # a batch and what is made of it, never an epoch
    assert len(reads.samples[1]) == 10


def test_an_epoch_ends_and_batches_do_not_span_learner_steps() -> None:
    loader = shuffled(batch_size=16)
    reads = learner(loader, local_samples=20)
    assert reads.train(3).samples == 60  # 16 + 4, 12 + 8, 8 + 2 and then the next epoch
    assert reads.batch == 16
    once = DataLoader(Once(), batch_size=5)
    ended = learner(once, local_samples=10)
    with pytest.raises(ModelError, match=r"peer 'a': its loader has no samples in an epoch"):
        ended.train(2)


class Once(IterableDataset[tuple[Tensor, int]]):
    """Can be read only once."""

    def __init__(self) -> None:
        self._samples = iter([(x, int(y)) for x, y in zip(X[:10], Y[:10], strict=True)])

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return self._samples


@pytest.mark.parametrize(
    "source",
    [shuffled, lambda: TensorDataset(X, Y), lambda: Stream(37)],
    ids=["loader", "dataset", "stream"],
)
def test_a_restart_goes_on_at_the_same_sample(tmp_path: Path, source: Any) -> None:
    options = {"local_samples": 21, "optimizer": "adam", "rate": 0.01}
    first = learner(source(), **options)
    for _ in range(3):
        first.train(1)
    save_checkpoint(tmp_path / "x", {"flat": first.network.flat, "learner": first.state()})
    state, again = load_checkpoint(tmp_path / "x"), learner(source(), **options)
    assert state is not None
    again.network.flat.copy_(state["flat"])
    again.restore(state["learner"])
    for _ in range(4):
        assert first.train(1) == again.train(1)
    assert torch.equal(first.network.flat, again.network.flat)


def test_a_loaders_order_follows_the_seed_and_leaves_torchs_random_numbers() -> None:
    runs = [learner(shuffled(), shuffled(), seed=seed) for seed in (1, 1, 2)]
    before = torch.get_rng_state()
    for each in runs:
        each.train(3)
        each.test()
    assert torch.equal(torch.get_rng_state(), before)
    one, same, other = (each.network.flat for each in runs)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_an_arena_trains_them_one_by_one_and_says_so() -> None:
    peers = [learner(shuffled(), shuffled(), peer=str(number), seed=number) for number in range(3)]
    arena = Arena(peers, threads=2)
    rounds = list(arena.run(8))
    assert "0 stacks, 3 one by one" in repr(arena)
    (sentence,) = arena.one_by_one()
    assert sentence.startswith("3 of 3 peers train one by one (learners of class LoaderLearner)")
    assert torch.equal(peers[0].network.flat, peers[2].network.flat)
    assert rounds[-1].loss < rounds[0].loss


def test_batches_are_prepared_and_take_the_networks_dtype() -> None:
    doubled = LoaderLearner(
        network(dtype=torch.float64), DataLoader(TensorDataset(X, Y.int()), 10), TensorDataset(*TEST),
        prepare=lambda x, y: (2 * x, 2 - y), local_samples=10,
    )  # fmt: skip
    assert torch.equal(doubled.samples[0], 2 * X[:10].double())
    assert torch.equal(doubled.samples[1], 2 - Y[:10])
    assert doubled.test().samples == 20


class Odd(Dataset[Any]):
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (Odd(), "has no samples"),
        (Odd(X[0], X[1]), "a batch must be a pair of tensors"),
        (DataLoader(TensorDataset(X, Y), batch_size=None), "a DataLoader with a batch_size"),
        (Odd((X[0], 0), (X[0, :2], 1)), "cannot be put into one batch: .*; let it return tensors"),
        (Odd((X[0], 7), (X[1], 7)), "labels run from 7 to 7"),
        ([(X[0], 0)] * 3, None),
        (iter([]), "is no data source: give a torch Dataset"),
    ],
)
def test_mistakes_are_one_line(train: Any, words: str | None) -> None:
    if words is None:  # whatever has a length and items will do
        assert learner(train).train(1).samples
        return
    with pytest.raises(ModelError, match=words) as error:
        learner(train)
    assert "\n" not in str(error.value)


def test_other_learners_name_the_one_to_use() -> None:
    with pytest.raises(ModelError, match="LoaderLearner takes a Dataset or DataLoader of torch"):
        SgdLearner(network(), TensorDataset(X, Y), TEST)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="let that deliver new ones"):
        learner(shuffled()).add_samples(X, Y)
