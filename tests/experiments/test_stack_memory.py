"""What an arena needs is told before it starts, and refused by name when it does not fit."""

from __future__ import annotations

import pytest
import torch

from gossamer.experiments.arena import Arena, peak_memory
from gossamer.models import Learner, ModelError, SgdLearner, SlicedNetwork, mlp
from gossamer.models.stack import (
    MemoryItem,
    MemoryNeeds,
    combine_needs,
    estimate_memory,
    format_bytes,
    free_memory,
)

torch.set_num_threads(1)


def learners(peers: int = 4, adam: bool = False) -> list[Learner]:
    data = torch.rand(50, 6), torch.zeros(50, dtype=torch.int64)
    make = (lambda p: torch.optim.Adam(p, 0.01)) if adam else None
    return [
        SgdLearner(
            SlicedNetwork(mlp("6=8=4"), {"all": "6-4-2"}, peer=str(index), seed=1),
            (data[0].clone(), data[1].clone()), data, optimizer=make, seed=index,
        )
        for index in range(peers)
    ]  # fmt: skip


def test_every_term_is_counted() -> None:
    needs = Arena(learners(adam=True), threads=2).needs()
    size = 6 * 8 + 8 + 8 * 4 + 4
    items = {item.name: item for item in needs.items}
    assert items["parameters of 4 peers"].bytes == 4 * size * 4
    assert items["optimizer state"].bytes == 2 * 4 * size * 4
    assert items["training samples"].bytes == 4 * 50 * (6 * 4 + 8)
    assert items["test samples"].bytes == 50 * (6 * 4 + 8)  # all peers share one set
    assert items["coordinates of partial models"].bytes > 0
    assert items["work space"].bytes > 0
    assert needs.total == sum(item.bytes for item in needs.items)
    assert "optimizer state" in str(needs)


def test_a_batch_is_no_larger_than_what_is_trained_in_a_round() -> None:
    crowd, full = learners(), learners()
    for learner in full:
        learner.batch = 10**9  # type: ignore[attr-defined]
    (least,) = Arena(crowd[:1], memory=10**9).run(1)
    (all_at_once,) = Arena(full[:1], memory=10**9).run(1)
    assert least.training[0].samples == all_at_once.training[0].samples


def test_what_learners_hold_already_is_not_asked_for_again() -> None:
    needs = Arena(learners(adam=True)).needs()
    fresh = {item.name for item in needs.items if item.bytes > item.allocated}
    assert fresh == {"optimizer state", "work space"}


def test_what_does_not_fit_is_refused_by_its_largest_item() -> None:
    needs = estimate_memory(peers=1_000_000, parameters=266_610, sample_bytes=10**9)
    with pytest.raises(
        ModelError, match=r"1\.07 TB .* parameters of 1,000,000 peers with 1\.07 TB"
    ):
        needs.check_fits(16 * 10**9)
    needs.check_fits(2 * 10**12)
    needs.check_fits(None)


def test_an_arena_without_room_is_refused_before_it_touches_its_learners() -> None:
    crowd = learners()
    before = [learner.network.flat.data_ptr() for learner in crowd]
    with pytest.raises(ModelError, match="more memory and 1 kB are free"):
        Arena(crowd, memory=1000)
    assert [learner.network.flat.data_ptr() for learner in crowd] == before


def test_groups_share_the_work_space() -> None:
    both = combine_needs(
        [
            MemoryNeeds((MemoryItem("samples", 5, 5), MemoryItem("work space", 7))),
            MemoryNeeds((MemoryItem("samples", 6), MemoryItem("work space", 3))),
        ]
    )
    assert {item.name: (item.bytes, item.allocated) for item in both.items} == {
        "samples": (11, 5),
        "work space": (7, 0),
    }
    assert both.to_allocate == 6 + 7


def test_stacking_keeps_one_copy_of_each_sample() -> None:
    crowd = learners()
    Arena(crowd)
    places = {
        learner.samples[0].untyped_storage().data_ptr()  # type: ignore[attr-defined]
        for learner in crowd
    }
    assert len(places) == 1


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 bytes"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (3e12, "3 TB")]
)
def test_amounts_are_readable(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_this_machine_says_what_it_has() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or free > 0
    assert peak_memory() > 10**7
