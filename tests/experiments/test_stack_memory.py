"""What an arena needs is told before it starts, and refused by name when it does not fit."""

from __future__ import annotations

import pytest
import torch

from gossamer.experiments.arena import Arena, peak_memory
from gossamer.models import Learner, ModelError, SgdLearner, SlicedNetwork, mlp
from gossamer.models.stack import (
    Needs,
    Term,
    amount,
    combine,
    estimate,
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
    terms = {term.name: term for term in needs.terms}
    assert terms["parameters of 4 peers"].bytes == 4 * size * 4
    assert terms["optimizer state"].bytes == 2 * 4 * size * 4
    assert terms["training samples"].bytes == 4 * 50 * (6 * 4 + 8)
    assert terms["test samples"].bytes == 50 * (6 * 4 + 8)  # all peers share one set
    assert terms["coordinates of partial models"].bytes > 0
    assert terms["work space"].bytes > 0
    assert needs.total == sum(term.bytes for term in needs.terms)
    assert "optimizer state" in str(needs)


def test_what_learners_hold_already_is_not_asked_for_again() -> None:
    needs = Arena(learners(adam=True)).needs()
    fresh = {term.name for term in needs.terms if term.bytes > term.held}
    assert fresh == {"optimizer state", "work space"}


def test_what_does_not_fit_is_refused_by_its_largest_term() -> None:
    needs = estimate(peers=1_000_000, parameters=266_610, sample_bytes=10**9)
    with pytest.raises(
        ModelError, match=r"1\.07 TB .* parameters of 1,000,000 peers with 1\.07 TB"
    ):
        needs.refuse_beyond(16 * 10**9)
    needs.refuse_beyond(2 * 10**12)
    needs.refuse_beyond(None)


def test_an_arena_without_room_is_refused_before_it_touches_its_learners() -> None:
    crowd = learners()
    before = [learner.network.flat.data_ptr() for learner in crowd]
    with pytest.raises(ModelError, match="more memory and 1 kB are free"):
        Arena(crowd, memory=1000)
    assert [learner.network.flat.data_ptr() for learner in crowd] == before


def test_groups_share_the_work_space() -> None:
    both = combine(
        [
            Needs((Term("samples", 5, 5), Term("work space", 7))),
            Needs((Term("samples", 6), Term("work space", 3))),
        ]
    )
    assert {term.name: (term.bytes, term.held) for term in both.terms} == {
        "samples": (11, 5),
        "work space": (7, 0),
    }
    assert both.more == 6 + 7


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
    assert amount(count) == text


def test_this_machine_says_what_it_has() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or free > 0
    assert peak_memory() > 10**7
