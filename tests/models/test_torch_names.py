"""Optimizers, schedulers and losses by torch's names: the steps are torch's, and mistakes are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.experiments import ConfigError, Simulation, parse_config
from gossamer.models import (
    ModelError,
    RuleOptimizer,
    SgdLearner,
    SlicedNetwork,
    cross_entropy,
    find_loss,
    mlp,
    predicted_classes,
    predicted_scores,
)
from gossamer.models.stack import score
from gossamer.peer import load_checkpoint, save_checkpoint

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 3


def learner(layout: str = "4=6=3", y: torch.Tensor = Y, **options: Any) -> SgdLearner:
    network = SlicedNetwork(mlp(layout), {"all": 1.0}, peer="a", seed=0)
    return SgdLearner(
        network, (X, y), (X, y), **{"local_samples": 24, "batch": 8, "rate": 0.05} | options
    )


def by_hand(optimizer: Any, scheduler: Any, rounds: int) -> torch.Tensor:
    """Return what torch alone makes of the same samples in the same order."""
    plain = learner()
    parameters = list(plain.network.module.parameters())
    steps = optimizer(parameters)
    rates = scheduler(steps)
    for _ in range(rounds):
        for _ in range(3):
            drawn = plain.draw(8)
            steps.zero_grad()
            nn.CrossEntropyLoss()(plain.network.module(X[drawn]), Y[drawn]).backward()
            steps.step()
        rates.step()
    return plain.network.flat


SCHEDULES = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "in_torch"),
    [
        ("AdamW", {"name": "CosineAnnealingLR", "T_max": 4},
         (lambda p: torch.optim.AdamW(p, 0.05), lambda o: SCHEDULES.CosineAnnealingLR(o, 4))),
        ({"name": "RMSprop", "alpha": 0.9}, {"name": "StepLR", "step_size": 2},
         (lambda p: torch.optim.RMSprop(p, 0.05, alpha=0.9), lambda o: SCHEDULES.StepLR(o, 2))),
        ("momentum", "LinearLR",
         (lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), lambda o: SCHEDULES.LinearLR(o))),
    ],
    ids=["adamw", "rmsprop", "momentum"],
)  # fmt: skip
def test_steps_and_rates_are_torchs(optimizer: Any, scheduler: Any, in_torch: Any) -> None:
    named = learner(optimizer=optimizer, scheduler=scheduler)
    for _ in range(5):
        named.train(1)
    torch.testing.assert_close(named.network.flat, by_hand(*in_torch, rounds=5))


@pytest.mark.parametrize(
    "scheduler",
    [
        None,
        {"name": "CosineAnnealingLR", "T_max": 4},
        {"name": "ReduceLROnPlateau", "patience": 0, "threshold": 0.5},
        {"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 8},
    ],
    ids=lambda each: each["name"] if each else "none",
)
@pytest.mark.parametrize("optimizer", ["AdamW", {"name": "RMSprop", "momentum": 0.5}, "momentum"])
def test_a_restart_goes_on_bit_by_bit(tmp_path: Path, optimizer: Any, scheduler: Any) -> None:
    first = learner(optimizer=optimizer, scheduler=scheduler)
    for _ in range(3):
        first.train(1)
    saved = {"flat": first.network.flat.clone(), "learner": first.state()}
    save_checkpoint(tmp_path / "x", saved)
    again, state = (
        learner(optimizer=optimizer, scheduler=scheduler),
        load_checkpoint(tmp_path / "x"),
    )
    assert state is not None
    again.network.flat.copy_(state["flat"])
    again.restore(state["learner"])
    for each in (first, again):
        for _ in range(3):
            each.train(1)
    assert torch.equal(again.network.flat, first.network.flat)
    if scheduler is not None:
        rates = [each.optimizer.param_groups[0]["lr"] for each in (first, again)]  # type: ignore[union-attr]
        assert rates[0] == rates[1] != 0.05


def test_own_optimizers_have_short_names_and_need_no_torch_optimizer() -> None:
    for name in ("sgd", "momentum", {"name": "adam", "betas": [0.8, 0.9]}):
        assert isinstance(learner(optimizer=name).optimizer, RuleOptimizer)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("HuberLoss", nn.HuberLoss()),
        ({"name": "SmoothL1Loss", "beta": 0.3}, nn.SmoothL1Loss(beta=0.3)),
        ("L1Loss", nn.L1Loss()),
        ("MSELoss", nn.MSELoss()),
    ],
)
def test_losses_of_numbers_are_torchs(name: Any, reference: nn.Module) -> None:
    target = X[:, 0].square()
    one = learner("4=6=1", target, loss=name)
    losses = one.loss(one.network(X), target)
    assert losses.shape == (24,)
    torch.testing.assert_close(losses.mean(), reference(one.network(X)[:, 0], target))
    before = one.test().mean_loss
    for _ in range(20):
        one.train(1)
    assert one.test().mean_loss < before


def test_losses_of_classes_are_torchs() -> None:
    assert find_loss("CrossEntropyLoss") is cross_entropy
    smooth = find_loss({"name": "CrossEntropyLoss", "label_smoothing": 0.2, "weight": [1, 1, 1]})
    assert smooth == find_loss(
        {"name": "CrossEntropyLoss", "weight": [1, 1, 1], "label_smoothing": 0.2}
    )
    outputs = torch.randn(24, 3)
    torch.testing.assert_close(
        smooth(outputs, Y).mean(), nn.CrossEntropyLoss(label_smoothing=0.2)(outputs, Y)
    )
    margin = find_loss("MultiMarginLoss")
    torch.testing.assert_close(margin(outputs, Y).mean(), nn.MultiMarginLoss()(outputs, Y))
    binary = learner("4=6=1", Y % 2, loss="BCEWithLogitsLoss")
    torch.testing.assert_close(
        binary.loss(binary.network(X), Y % 2),
        cross_entropy(binary.network(X), Y % 2),
    )


def test_a_logit_is_judged_at_zero_whoever_counts() -> None:
    options = {"metrics": ["f1"], "rate": 0.5}
    ours = learner("4=6=1", Y % 2, **options)
    by_name = learner("4=6=1", Y % 2, loss="BCEWithLogitsLoss", **options)
    assert ours.train(20) == by_name.train(20)
    assert ours.test() == by_name.test()
    logits = by_name.network(X)
    assert (logits[:, 0] > 0).ne(logits[:, 0] > 0.5).any()  # else the test could not tell
    torch.testing.assert_close(
        predicted_classes(by_name, logits), (logits[:, 0] > 0).to(torch.int64)
    )
    torch.testing.assert_close(predicted_scores(by_name, logits), predicted_scores(ours, logits))
    labels = (Y % 2)[None]  # a stack of one peer
    counted = [score(logits.detach()[None], labels, each.loss) for each in (ours, by_name)]
    assert counted[0] == counted[1]


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("optimizer", {"name": "AdamW", "eps": -1.0}),
        ("scheduler", {"name": "StepLR", "step_size": "a"}),
    ],
)
def test_a_config_is_told_which_key_is_wrong(key: str, table: dict[str, Any]) -> None:
    config = parse_config({"peers": 2, "data": {"samples": 20}, "training": {key: table}})
    with pytest.raises(ConfigError, match=f"key 'training.{key}': {key} '{table['name']}': "):
        list(Simulation.of(config, "swarm.toml").rounds())


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR", "ReduceLROnPlateau", "ExponentialLR"])
def test_schedulers_that_need_much_are_tried_without_harm(name: str) -> None:
    tables = {
        "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1},
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
        "ExponentialLR": {"gamma": 0.9},
    }
    assert learner(scheduler={"name": name, **tables.get(name, {})}).train(1).samples == 24


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "AdamWW"}, r"unknown optimizer 'AdamWW'; did you mean 'AdamW'\?"),
        ({"optimizer": "LBFGS"}, "optimizer 'LBFGS' cannot be used"),
        ({"optimizer": {"name": "AdamW", "beta": 1}}, "no argument 'beta'; did you mean 'betas'"),
        ({"optimizer": {"name": "AdamW", "lr": 1}}, "its learning rate is `rate`"),
        ({"optimizer": {"betas": [0, 1]}}, "a table needs the name"),
        ({"optimizer": {"name": "AdamW", "eps": -1.0}}, "'AdamW': Invalid epsilon value"),
        ({"scheduler": "CosineAnealingLR"}, "did you mean 'CosineAnnealingLR'"),
        ({"scheduler": "CosineAnnealingLR"}, "needs T_max: write"),
        ({"scheduler": {"name": "StepLR", "step": 3}}, "no argument 'step'; did you mean 'step_size'"),
        ({"scheduler": "LinearLR", "optimizer": lambda p: RuleOptimizer(p, None)},
         "peer 'a': a scheduler needs an optimizer of torch"),
        ({"scheduler": {"name": "StepLR", "step_size": "a"}}, "scheduler 'StepLR': unsupported operand"),
        ({"scheduler": {"name": "StepLR", "step_size": 0}}, "scheduler 'StepLR': "),
        ({"loss": "HuberLos"}, "unknown loss 'HuberLos'; did you mean 'HuberLoss'"),
        ({"loss": {"name": "HuberLoss", "dleta": 2}}, "no argument 'dleta'; did you mean 'delta'"),
        ({"loss": "TripletMarginLoss"}, "does not compare outputs with targets"),
        ({"loss": "HuberLoss"}, "peer 'a', training samples: the loss failed .* the same shape"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        learner(**options)
    assert "\n" not in str(error.value)
