"""The optimizers take the steps of torch's, bit for bit, and go on from their saved state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from gossamer.models import Adam, ModelError, RuleOptimizer, Sgd

Make = Callable[[Iterable[nn.Parameter]], RuleOptimizer]
MakeOfTorch = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

PAIRS: dict[str, tuple[Make, MakeOfTorch]] = {
    "plain": (lambda p: Sgd(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "decay": (
        lambda p: Sgd(p, 0.1, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01),
    ),
    "momentum": (
        lambda p: Sgd(p, 0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    ),
    "nesterov": (
        lambda p: Sgd(p, 0.1, momentum=0.8, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, weight_decay=0.01, nesterov=True),
    ),
    "adam": (lambda p: Adam(p, 0.01), lambda p: torch.optim.Adam(p, 0.01)),
    "adam, decay": (
        lambda p: Adam(p, 0.01, betas=(0.8, 0.99), weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.99), weight_decay=0.1),
    ),
    "adamw": (
        lambda p: Adam(p, 0.01, weight_decay=0.1, decoupled=True),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    ),
}


class Net(nn.Module):
    """Its second layer is used, and so has gradients, only if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x).tanh()
        return self.second(x) if both else x


def nets() -> tuple[Net, Net]:
    mine, other = Net(), Net()
    with torch.no_grad():
        for index, (one, two) in enumerate(zip(mine.parameters(), other.parameters(), strict=True)):
            one.copy_(torch.randn(one.shape, generator=torch.Generator().manual_seed(index)))
            two.copy_(one)
    return mine, other


def train(net: Net, optimizer: RuleOptimizer | torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for number in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 + number))
        optimizer.zero_grad(set_to_none=True)
        net(x, both=number % 3 != 0).square().sum().backward()
        optimizer.step()


def assert_same(one: Net, two: Net) -> None:
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("make", "of_torch"), PAIRS.values(), ids=PAIRS)
def test_the_steps_are_those_of_torch(make: Make, of_torch: MakeOfTorch) -> None:
    mine, other = nets()
    start = [p.detach().clone() for p in mine.parameters()]
    # Steps 0, 3, 6 and 9 have no gradients for the second layer.
    train(mine, make(mine.parameters()), range(12))
    train(other, of_torch(other.parameters()), range(12))
    assert_same(mine, other)
    assert all(not torch.equal(a, b) for a, b in zip(start, mine.parameters(), strict=True))


@pytest.mark.parametrize(("make", "of_torch"), PAIRS.values(), ids=PAIRS)
def test_training_goes_on_from_a_saved_state_also_one_of_torch(
    make: Make, of_torch: MakeOfTorch
) -> None:
    mine, other = nets()
    optimizer, theirs = make(mine.parameters()), of_torch(other.parameters())
    train(mine, optimizer, range(5))
    train(other, theirs, range(5))
    for saved in (optimizer.state_dict(), theirs.state_dict()):
        resumed, _ = nets()
        resumed.load_state_dict(mine.state_dict())
        again = make(resumed.parameters())
        again.load_state_dict(saved)
        train(resumed, again, range(5, 10))
        expected, _ = nets()
        expected.load_state_dict(other.state_dict())
        theirs_again = of_torch(expected.parameters())
        theirs_again.load_state_dict(theirs.state_dict())
        train(expected, theirs_again, range(5, 10))
        assert_same(resumed, expected)


def test_a_loaded_state_is_a_copy() -> None:
    mine, other = nets()
    optimizer, loaded = Adam(mine.parameters(), 0.01), Adam(other.parameters(), 0.01)
    train(mine, optimizer, range(2))
    loaded.load_state_dict(optimizer.state_dict())
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    train(other, loaded, range(2))
    after = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_rate_may_change_between_two_steps() -> None:
    mine, other = nets()
    optimizer, theirs = Sgd(mine.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
    train(mine, optimizer, range(2))
    train(other, theirs, range(2))
    optimizer.rate = theirs.param_groups[0]["lr"] = 0.01
    train(mine, optimizer, range(2, 4))
    train(other, theirs, range(2, 4))
    assert optimizer.rate == 0.01
    assert_same(mine, other)


@pytest.mark.parametrize("sizes", [(5, 6), (5, 7, 3)])
def test_the_state_of_another_network_is_refused(sizes: tuple[int, ...]) -> None:
    mine, _ = nets()
    optimizer = Sgd(mine.first.parameters(), 0.1, momentum=0.9)
    other = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
    theirs = Sgd(other.parameters(), 0.1, momentum=0.9)
    other(torch.ones(1, 5)).sum().backward()
    theirs.step()
    with pytest.raises(ModelError, match="belongs to another network"):
        optimizer.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Sgd(p, 0.1, nesterov=True), "give a momentum above 0"),
        (lambda p: Sgd(p, -0.1), "rate is -0.1"),
        (lambda p: Sgd(p, 0.1, momentum=-1.0), "momentum is -1.0"),
        (lambda p: Adam(p, betas=(0.9, 1.0)), "each from 0 to below 1"),
        (lambda p: Adam(p, betas=(0.9,)), "give two numbers"),
        (lambda p: Adam(p, weight_decay=-0.1), "weight_decay is -0.1"),
    ],
)
def test_settings_that_no_optimizer_can_have_are_refused(make: Make, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make([nn.Parameter(torch.zeros(1))])
