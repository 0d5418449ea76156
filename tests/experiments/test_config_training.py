"""Momentum and weight decay from a config: the steps written by hand, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.build import Swarm
from gossamer.experiments.config.tables import ConfigError, parse_config

torch.set_num_threads(1)


def table(**training: Any) -> dict[str, Any]:
    return {
        "peers": 3,
        "rounds": 4,
        "data": {"samples": 30, "test": 20},
        "network": {"layout": "64=8=10", "activation": "sigmoid"},
        "training": {"local_samples": 10, "batch": 5, "rate": 0.05, "reduction": "sum"} | training,
    }


def by_hand(config: Any, index: int, momentum: float, decay: float) -> torch.Tensor:
    """What one peer, alone, has learned after the config's rounds: w −= rate · v, v = m·v + g + d·w."""
    learner: Any = Swarm(config).member(index).learner
    parameters = list(learner.network.module.parameters())
    pace = [torch.zeros_like(one) for one in parameters]
    for _ in range(2 * config.rounds):
        chosen = learner.draw(5)
        outputs = learner.network.module(learner.samples[0][chosen])
        loss = learner.loss(outputs, learner.samples[1][chosen]).sum()
        with torch.no_grad():
            for v, w, g in zip(
                pace, parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                v.mul_(momentum).add_(g + decay * w)
                w -= 0.05 * v
    return learner.network.flat


@pytest.mark.parametrize(
    ("training", "momentum", "decay"),
    [
        ({"weight_decay": 0.3}, 0.0, 0.3),
        ({"optimizer": "momentum"}, 0.9, 0.0),
        ({"optimizer": "momentum", "momentum": 0.5, "weight_decay": 0.1}, 0.5, 0.1),
    ],
)
def test_steps_are_those_written_by_hand(
    training: dict[str, Any], momentum: float, decay: float
) -> None:
    config = parse_config(table(**training))
    simulation = Simulation.of(config)
    list(simulation.rounds())
    for index, member in enumerate(simulation.members):
        expected = by_hand(config, index, momentum, decay)
        torch.testing.assert_close(member.network.flat, expected, rtol=0, atol=1e-5)


def test_adam_gets_its_decay() -> None:
    learner: Any = Swarm(parse_config(table(optimizer="adam", weight_decay=0.2))).member(0).learner
    assert learner.optimizer.rule.decay == 0.2


@pytest.mark.parametrize(
    ("training", "text"),
    [
        ({"momentum": 0.5}, "key 'training': has a momentum, which the optimizer 'sgd' does not use"),
        ({"optimizer": "adam", "momentum": 0.5}, "the optimizer 'adam' does not use"),
        ({"optimizer": "momentum", "momentum": 1.0}, "key 'training.momentum'"),
        ({"weight_decay": -0.1}, "key 'training.weight_decay'"),
    ],
)  # fmt: skip
def test_mistakes_name_the_key(training: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(table(**training), "swarm.toml")
    assert text in str(error.value)


def test_the_associative_network_has_no_gradient_to_decay() -> None:
    sparse = {"data": {"set": "sparse"}, "network": {"layout": "50<>40"}}
    with pytest.raises(ConfigError, match=r"key 'training.weight_decay': the associative network"):
        Swarm(parse_config(sparse | {"training": {"weight_decay": 0.1}})).member(0)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "meta", "gpu"])
def test_a_device_that_is_not_there_names_those_that_are(device: str) -> None:
    if device != "gpu" and device != "meta" and torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(ConfigError) as error:
        Swarm(parse_config(table(device=device)), "swarm.toml").members()
    text = str(error.value)
    assert text.startswith(f"swarm.toml: key 'training.device': device '{device}': torch ")
    assert "there is cpu" in text
    assert "name one of these" in text
    assert "\n" not in text


def test_float64_is_what_is_trained_and_tested() -> None:
    config = parse_config(table(dtype="float64", device="cpu"))
    simulation = Simulation.of(config)
    first = next(iter(simulation.rounds()))
    member: Any = simulation.members[0]
    assert member.network.flat.dtype == torch.float64
    assert member.learner.samples[0].dtype == torch.float64
    assert first.training[0].samples
    single: Any = Swarm(parse_config(table())).member(0)
    start: Any = Swarm(config).member(0)
    torch.testing.assert_close(start.network.flat.float(), single.network.flat)
    with pytest.raises(ConfigError, match=r"key 'training.dtype'.*'float32' or 'float64'"):
        parse_config(table(dtype="float8"), "swarm.toml")


def test_the_associative_network_has_no_device() -> None:
    sparse = {"data": {"set": "sparse"}, "network": {"layout": "50<>40"}}
    with pytest.raises(ConfigError, match=r"key 'training.dtype': the associative network runs on"):
        Swarm(parse_config({**sparse, "training": {"dtype": "float64"}})).members()


@pytest.mark.parametrize(
    ("training", "text"),
    [
        ({"optimizer": "AdamWW"}, "key 'training.optimizer': unknown optimizer 'AdamWW'; did you mean"),
        ({"optimizer": {"betas": [0.9, 0.9]}}, "key 'training.optimizer': a table needs a name"),
        ({"optimizer": "Rprop", "weight_decay": 0.1}, "'Rprop' has no argument 'weight_decay'"),
        ({"optimizer": {"name": "AdamW", "betas": [2, 3]}}, "'training.optimizer': optimizer 'AdamW': Inv"),
        ({"scheduler": "StepLR"}, "key 'training.scheduler': scheduler 'StepLR' needs step_size"),
        ({"scheduler": {"name": "OneCycleLR", "max_lr": 1.0}}, "'training.scheduler': scheduler 'OneCycleL"),
        ({"loss": "HubberLoss"}, "key 'training.loss': unknown loss 'HubberLoss'; did you mean 'HuberLoss'?"),
        ({"loss": "squared", "prior": "own"}, "has a prior, which is added to logits"),
    ],
)  # fmt: skip
def test_names_of_torch_that_are_wrong_name_the_key(training: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Swarm(parse_config(table(**training), "swarm.toml"), "swarm.toml").members()
    assert str(error.value).startswith("swarm.toml: key 'training")
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_trains_with_torchs_optimizer_scheduler_and_loss() -> None:
    config = parse_config(
        table(
            optimizer={"name": "AdamW", "betas": [0.8, 0.9]},
            scheduler={"name": "CosineAnnealingLR", "T_max": 4},
            loss={"name": "CrossEntropyLoss", "label_smoothing": 0.1},
            weight_decay=0.3,
        )
    )
    simulation = Simulation.of(config)
    arena = simulation.arena()
    rounds = list(simulation.rounds(arena))
    assert not arena.one_by_one()
    learner: Any = simulation.members[0].learner
    group = learner.optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.9), 0.3)
    assert group["lr"] == pytest.approx(0.0, abs=1e-9)  # after T_max = 4 rounds
    assert rounds[-1].training[0].mean_loss < rounds[0].training[0].mean_loss


def test_a_device_of_the_command_line_overrides_the_config() -> None:
    config = parse_config(table(device="no such device"))
    assert config.on_device(None) is config
    member = Swarm(config.on_device("cpu")).member(0)
    assert member.learner.train(1).samples == 10
