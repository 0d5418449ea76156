"""An arena's learners while it runs and after: orders, states, memory, schedules, one seed one result."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from stack_kit import OPTIMIZERS, Make, assert_same, associators, perceptrons, pictures, plain_loop
from torch import Tensor

from gossamer.experiments.arena import Arena
from gossamer.models import SgdLearner

MIXED: dict[str, Make] = {
    "associative": lambda: associators(7),
    **{
        name: lambda name=name: [
            *perceptrons(5, optimizer=OPTIMIZERS[name], rate=0.05),
            *perceptrons(2, name="own", optimizer=lambda p: torch.optim.Rprop(p, 0.01)),
        ]
        for name in ("plain", "momentum", "adam")
    },
}


@pytest.mark.parametrize("make", MIXED.values(), ids=MIXED)
def test_some_peers_may_train_more_often_than_others(make: Make) -> None:
    mine, plain = make(), make()
    arena = Arena(mine, threads=2)
    for peers in ([4, 0, 2], [1], [0, 1, 3, 6], [5, 2, 0]):
        for peer, found in zip(peers, arena.train(peers), strict=True):
            wanted = plain[peer].train(1)
            assert (found.correct, found.samples) == (wanted.correct, wanted.samples)
    for peer, found in zip([6, 2], arena.test([6, 2]), strict=True):
        assert found.correct == plain[peer].test().correct
    arena.train()
    for a, b in zip(mine, plain, strict=True):
        b.train(1)
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: perceptrons(20), pictures, lambda: associators(9)])
def test_one_seed_one_result_on_any_number_of_threads(make: Make) -> None:
    def run(threads: int) -> Tensor:
        learners = make()
        list(Arena(learners, threads=threads).run(6))
        return torch.stack([learner.network.flat for learner in learners])

    one, again, two = run(1), run(1), run(2)
    assert torch.equal(one, again)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def test_a_network_is_its_row() -> None:
    learners = perceptrons(3)
    arena = Arena(learners)
    list(arena.run(2))
    network = learners[1].network
    weight = next(network.module.parameters())
    network.write("global", torch.zeros_like(network.read("global")))
    assert (weight[:2] == 0).all()
    before = network.flat.clone()
    list(arena.run(1))
    assert not torch.equal(network.flat, before)


def test_two_arenas_one_after_the_other_go_on_where_the_first_stopped() -> None:
    mine, plain = (perceptrons(optimizer=OPTIMIZERS["momentum"]) for _ in range(2))
    first, second = Arena(mine), Arena(mine)
    for arena in (first, second, first):
        list(arena.run(3))
    plain_loop(plain, 9)
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-5)


def test_states_saved_from_the_arena_restore_elsewhere() -> None:
    mine = perceptrons(3, optimizer=OPTIMIZERS["adam"])
    arena = Arena(mine)
    list(arena.run(5))
    states = [deepcopy(learner.state()) for learner in mine]
    flats = [learner.network.flat.clone() for learner in mine]
    list(arena.run(4))
    fresh = perceptrons(3, optimizer=OPTIMIZERS["adam"])
    for learner, state, flat in zip(fresh, states, flats, strict=True):
        learner.network.flat.copy_(flat)
        learner.restore(state)
    list(Arena(fresh).run(4))
    for a, b in zip(mine, fresh, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-6)
    for learner, state, flat in zip(mine, states, flats, strict=True):
        learner.network.flat.copy_(flat)
        learner.restore(state)
    list(arena.run(4))  # the same arena takes a restored state in as well
    for a, b in zip(mine, fresh, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-6)


def test_release_gives_networks_memory_of_their_own() -> None:
    learners = perceptrons(4)
    arena = Arena(learners)
    list(arena.run(1))
    network = learners[0].network
    size = network.flat.numel() * 4
    assert network.flat.untyped_storage().nbytes() == 4 * size
    arena.release()
    assert network.flat.untyped_storage().nbytes() == size
    assert next(network.module.parameters()).data_ptr() == network.flat.data_ptr()


def test_a_peers_state_is_saved_without_the_others(tmp_path: Path) -> None:
    learners = perceptrons(40)
    arena = Arena(learners)
    list(arena.run(1))
    module = learners[3].network.module
    torch.save(module.state_dict(), tmp_path / "peer.pt")
    size = learners[3].network.flat.nbytes
    assert size < (tmp_path / "peer.pt").stat().st_size < 4 * size + 8000
    for name, value in torch.load(tmp_path / "peer.pt").items():
        assert torch.equal(value, module.state_dict()[name])
        assert value.untyped_storage().nbytes() == value.nbytes
    # To be trained, the parameters themselves are asked for, and are given.
    kept = module.state_dict(keep_vars=True)
    assert all(kept[name] is value for name, value in module.named_parameters())


@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_the_rate_of_plain_descent_may_be_changed_between_rounds(rate: float) -> None:
    mine, plain = (perceptrons(3) for _ in range(2))
    rounds = Arena(mine).run(3)
    for _ in range(3):
        next(rounds)
        plain_loop(plain, 1)
        for learner in (*mine, *plain):
            learner.optimizer.rate = rate  # type: ignore[attr-defined]
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "momentum"])
def test_schedulers_of_torch_are_followed(optimizer: str) -> None:
    scheduler = {"name": "ExponentialLR", "gamma": 0.5}
    options = {"optimizer": optimizer, "scheduler": scheduler, "rate": 0.05}
    assert_same(lambda: perceptrons(3, **options), rounds=5)


def test_peers_of_a_stack_may_be_at_different_rates() -> None:
    options = {"scheduler": {"name": "ExponentialLR", "gamma": 0.5}}
    mine, plain = (perceptrons(3, **options) for _ in range(2))
    arena = Arena(mine)
    for learners in (mine, plain):
        learners[1].train(1)  # it is one round ahead
    assert "3 learners in 1 stack;" in repr(arena)
    list(arena.run(3))
    plain_loop(plain, 3)
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-5)


def test_a_loss_of_torch_is_stacked() -> None:
    loss = {"name": "CrossEntropyLoss", "label_smoothing": 0.1}
    assert_same(lambda: perceptrons(3, loss=loss, output="none"), rounds=4)


def test_what_is_not_stacked_is_told_with_its_cost() -> None:
    arena = Arena([*perceptrons(2), *perceptrons(3, optimizer="RMSprop", name="own")])
    list(arena.run(2))
    (sentence,) = arena.one_by_one()
    assert sentence.startswith(
        "3 of 5 peers train one by one (an optimizer that cannot be stacked)"
    )
    assert re.search(r"took \d+\.\d s of processor time$", sentence)


def test_a_learning_rate_schedule_is_followed() -> None:
    mine, plain = (perceptrons(3, optimizer=OPTIMIZERS["momentum"]) for _ in range(2))
    rounds = Arena(mine).run(6)
    for index in range(6):
        next(rounds)
        plain_loop(plain, 1)
        for learner in (*mine, *plain):
            assert isinstance(learner, SgdLearner)
            learner.optimizer.param_groups[0]["lr"] = 0.05 / (index + 2)  # type: ignore[union-attr]
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-5)
