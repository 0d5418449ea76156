"""Networks of every kind from a config: by name, by a user's function, with shares; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.build import Swarm, make_learner
from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.experiments.data import Dataset, Samples, load
from gossamer.experiments.study.sweep import outcomes, stackable_batches

torch.set_num_threads(1)

CNN = {"name": "small-cnn", "options": {"widths": [4], "hidden": 6}}
RESNET = {"name": "resnet", "options": {"widths": [4]}, "buffers": "recompute"}


def table(network: dict[str, Any] = CNN, **more: Any) -> dict[str, Any]:
    base = {
        "peers": 3,
        "rounds": 2,
        "data": {"samples": 20, "test": 30},
        "network": network,
        "models": [{"name": "global", "share": 0.5}],
        "training": {"local_samples": 20, "loss": "cross-entropy", "reduction": "mean"},
    }
    return base | more


def swarm(network: dict[str, Any] = CNN, source: str = "swarm.toml", **more: Any) -> Swarm:
    return Swarm(parse_config(table(network, **more), source), source)


def test_images_keep_their_shape_and_shares_count_cells() -> None:
    member = swarm().member(1)
    digits = load("digits")
    assert torch.equal(member.learner.samples[0], digits.train.x[20:40])  # type: ignore[attr-defined]
    assert [len(cells) for cells in member.network.slicing.cells["global"]] == [1, 2, 3, 10]
    assert [len(cells) for cells in member.network.slicing.cells["local-1"]] == [0, 2, 3, 0]


def test_peers_start_equal_where_they_share_and_parts_are_searched_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = swarm(models=[{"name": "global", "share": {"*": 0.5, "6": 0}}])
    monkeypatch.setattr("gossamer.experiments.networks.discover_or_one_cell", None)  # would fail
    first, second = found.member(0).network, found.member(2).network
    assert torch.equal(first.read("global"), second.read("global"))
    assert not torch.equal(first.flat, second.flat)
    assert first.slicing.coordinates_or_slice("global") is second.slicing.coordinates_or_slice(
        "global"
    )  # cut alike: one copy


def test_buffers_are_as_the_config_says() -> None:
    member = swarm(RESNET).member(0)
    assert member.network.buffers == "recompute"
    assert "1.running_mean" in member.network.own_buffers()
    with pytest.raises(ConfigError, match="small-cnn has no batch norm; leave it out"):
        swarm(CNN | {"buffers": "recompute"})


def test_windows_reach_networks_in_their_own_order() -> None:
    samples = Samples(torch.rand(60, 12, 5), torch.arange(60) % 3)

    def swarm(network: dict[str, Any]) -> Swarm:
        config = parse_config(table(network, data={"samples": 10}))
        return Swarm(config, load_data=lambda *_, **__: Dataset("w", samples, None, 3))

    lstm = swarm({"name": "lstm", "options": {"hidden": 4}}).member(0)
    assert lstm.learner.samples[0].shape[1:] == (12, 5)  # type: ignore[attr-defined]
    cnn = swarm({"name": "cnn1d", "options": {"widths": [4]}}).member(0)
    assert cnn.learner.samples[0].shape[1:] == (5, 12)  # type: ignore[attr-defined]
    assert cnn.network.slicing.anatomy.parts[0].cells == 5
    with pytest.raises(ConfigError, match=r"network.name': small-cnn reads images .* shape 12×5"):
        swarm(CNN)


def test_a_function_of_the_users_stands_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "orchard.py").write_text(
        "from torch import nn\n"
        "def make(classes, hidden):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.LayerNorm(hidden), nn.ReLU(),\n"
        "        nn.Linear(hidden, classes))\n"
        "def wrong():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))\n"
    )
    source = str(tmp_path / "swarm.toml")
    entry = {"entry": "orchard:make", "options": {"hidden": 6}}
    assert [p.cells for p in swarm(entry, source).member(0).network.slicing.anatomy.parts][-1] == 10
    # A live peer's process builds the same from what it is told.
    text = json.dumps(parse_config(table(entry)).model_dump(mode="json"))
    learner = make_learner(text, 1, source)
    assert torch.equal(learner.network.flat, swarm(entry, source).member(1).network.flat)
    with pytest.raises(ConfigError, match=r"network.entry': .* 7 outputs allow 0 to 6"):
        swarm({"entry": "orchard:wrong"}, source).member(0)


def test_a_network_that_cannot_be_traced_may_be_shared_whole(tmp_path: Path) -> None:
    (tmp_path / "tangle.py").write_text(
        "from torch import nn\n"
        "class Rows(nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.rows, self.out = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, classes)\n"
        "    def forward(self, x):\n"
        "        return self.out(self.rows(x[:, 0])[0][:, -1])\n"
    )
    entry, source = {"entry": "tangle:Rows"}, str(tmp_path / "swarm.toml")
    member = swarm(entry, source, models=[{"name": "all", "share": 1.0}]).member(0)
    assert member.network.averaged_models == ("all",)
    assert swarm(entry, source, models=[]).member(1).network.averaged_models == ("local-1",)
    with pytest.raises(ConfigError, match=r"network.entry': .* could be traced"):
        swarm(entry, source)


@pytest.mark.parametrize("network", [CNN, RESNET])
def test_a_sweep_gives_what_single_runs_do(network: dict[str, Any]) -> None:
    configs = [parse_config(table(network, seed=seed)) for seed in (0, 1)]
    found = outcomes(configs, ["a", "b"], 1)
    for config, outcome in zip(configs, found, strict=True):
        tests = list(Simulation.of(config).rounds())[-1].tests
        expected = float(np.mean([test.accuracy for test in tests]))
        assert outcome.accuracy == pytest.approx(expected, abs=0.02)


def test_runs_of_large_networks_do_not_share_an_arena() -> None:
    class Cell:
        config = parse_config(table())

    assert [len(batch) for batch in stackable_batches([Cell(), Cell()])] == [1, 1]


@pytest.mark.parametrize(
    ("network", "more", "text"),
    [
        ({"name": "alexnet"}, {}, "key 'network.name': input should be 'small-cnn', 'resnet'"),
        (CNN | {"entry": "a:b"}, {}, "key 'network': has a name and an entry: leave one of them out"),
        (CNN | {"layout": "64=8=10"}, {}, "key 'network': has a layout, which is for perceptrons"),
        ({"options": {"hidden": 3}}, {}, "key 'network': has options, which are for a name or an"),
        (CNN | {"options": {"depth": 3}}, {}, "key 'network.name': options: 'small-cnn' has no 'depth'"),
        (CNN | {"options": {"widths": [1, 1, 1, 1]}}, {}, "cannot be halved 4 times"),
        (
            {"name": "unet", "options": {"widths": [2, 4]}},
            {},
            "key 'network.name': unet returns the shape 2×10×8×8 for 2 samples, and classifying takes one",
        ),
        ({"entry": "nowhere:net"}, {}, "key 'network.entry': entry point 'nowhere:net': there is no module"),
        (CNN | {"buffers": "x"}, {}, "key 'network.buffers': input should be 'average', 'local'"),
        (CNN, {"models": [{"name": "g", "share": 2.0}]}, "key 'models.0.share': should be a fraction"),
        (CNN, {"models": [{"name": "g", "share": {"zz": 1}}]}, "no part is called 'zz'; parts are input, 0"),
        (CNN, {"models": [{"name": "g", "share": 1.0, "layout": "1-4-6-10"}]}, "not both"),
        (
            CNN,
            {"models": [{"name": "g", "share": 1.0, "matching": "fuse", "width": "1-4-6-10"}]},
            "key 'models.0.matching': only chains of dense layers can be fused",
        ),
    ],
)  # fmt: skip
def test_mistakes_name_the_key(network: dict[str, Any], more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        swarm(network, **more).members()
    assert str(error.value).startswith("swarm.toml: key 'n") or "models" in str(error.value)
    assert text in str(error.value)


def test_networks_that_start_apart_are_aligned() -> None:
    """Equal slices in another order: what peers bring is put into the first one's."""
    models = [{"name": "global", "share": 1.0, "matching": "align"}]
    apart = swarm(CNN | {"equal_starts": False}, models=models)
    simulation = Simulation.of(apart.config)
    plain = [member.network.flat.clone() for member in apart.members()]
    moved = [
        not torch.equal(member.network.flat, before)
        for member, before in zip(simulation.members, plain, strict=True)
    ]
    assert moved == [False, True, True]
