"""`gossamer slices`: the table adds up, the picture has every owner, and bad input is one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cli_kit import Run, runs

from gossamer.experiments.cli.slices import (
    MAX_DRAWN_CELLS,
    draw_slices,
    drawn_parts,
    models_of_drawn_cells,
    part_table,
)
from gossamer.models import ModelGraph, SlicedNetwork, lstm_classifier, mlp, resnet, small_cnn

torch.set_num_threads(1)


slices = runs("slices")


def residual(buffers: str = "average") -> SlicedNetwork:
    return SlicedNetwork(
        resnet(1, 4, widths=(8, 12)), {"global": {"*": 0.5, "7": 0}, "group": 0.25}, peer="a",
        example=torch.rand(2, 1, 8, 8), buffers=buffers,  # type: ignore[arg-type]
        graph=ModelGraph({"global": [], "group": ["global"]}),
    )  # fmt: skip


# The numbers


@pytest.mark.parametrize("buffers", ["average", "local", "recompute"])
def test_every_cell_and_every_value_is_counted_once(buffers: str) -> None:
    network = residual(buffers)
    table = part_table(network.slicing)
    assert (
        table["cells"] == table[[f"cells of {model}" for model in network.models]].sum(axis=1)
    ).all()
    for owner in network.averaged_models:
        assert table[f"values of {owner}"].sum() == len(network.slicing.coordinates(owner))
    assert table.filter(regex="^(values of |private)").to_numpy().sum() == len(network.flat)


def test_a_parameter_counts_where_it_leads() -> None:
    network = SlicedNetwork(mlp("6=4=2"), {"global": "6-3-2"}, peer="a")
    values = part_table(network.slicing).filter(regex="^(values of |private)")
    assert list(values.columns) == ["values of global", "values of local-a", "private"]
    assert values.loc["input"].tolist() == [0, 0, 0]
    assert values.loc["0"].tolist() == [6 * 3 + 3, 1, 6]  # weights and biases
    assert values.loc["2", "values of global"] == 3 * 2 + 2


def test_links_go_over_skips_and_back_to_the_same_part() -> None:
    names = [part.name for part in residual().slicing.anatomy.parts]
    found = {(names[one], names[other]) for one, other in residual().slicing.anatomy.connections()}
    assert ("0", "4.conv2") in found  # the skip
    assert ("0", "3.conv1") in found
    recurrent = SlicedNetwork(
        lstm_classifier(3, 2, hidden=4), {"g": 1.0}, example=torch.rand(2, 5, 3)
    )
    assert any(one == other for one, other in recurrent.slicing.anatomy.connections())


# The picture


def test_few_cells_of_wide_parts_are_drawn_but_every_model() -> None:
    module = small_cnn(1, 8, 10, widths=(8, 300), hidden=100)
    network = SlicedNetwork(module, {"global": 0.98}, peer="a", example=torch.rand(2, 1, 8, 8))
    for part in range(len(network.slicing.anatomy.parts)):
        shown = models_of_drawn_cells(network.slicing, part)
        assert len(shown) <= MAX_DRAWN_CELLS + 1
        given = {m for m in network.models if len(network.slicing.cells[m][part])}
        assert set(shown) == given


def test_deep_networks_are_drawn_from_both_ends() -> None:
    rows, left_out = drawn_parts(100)
    assert (rows[0], rows[-1], left_out) == (0, 99, 60)
    assert drawn_parts(12) == (list(range(12)), 0)


@pytest.mark.parametrize("cross", [False, True])
def test_the_picture_names_every_owner(tmp_path: Path, cross: bool) -> None:
    network = SlicedNetwork(mlp("6=8=4"), {"red": "6-3-4", "green": "0-3-0"}, peer="a", cross=cross)
    files = draw_slices(network.slicing, tmp_path / "x", "a network")
    assert [file.suffix for file in files] == [".png", ".svg"]
    text = files[1].read_text()
    for owner in ("red", "green", "local-a", "private"):
        assert (f"<!-- {owner} -->" in text) == (owner != "private" or not cross)
    assert ("<!-- green&amp;red -->" in text) == cross


# The command


def numbers(out: str, part: str) -> list[int]:
    line = next(line for line in out.splitlines() if line.split()[:1] == [part])
    return [int(word) for word in line.split()[1:]]


def test_a_ready_network_by_name(slices: Run, tmp_path: Path) -> None:
    done = slices(
        "small-cnn", "--input", "1x8x8", "--option", "widths=[4, 8]", "--option", "hidden=10"
    )
    assert done.code == 0
    assert numbers(done.out, "3")[:3] == [8, 6, 2]  # cells, global at 0.8, local
    assert (tmp_path / "results/slices/small-cnn/001/small-cnn.png").stat().st_size > 10_000


def test_shares_by_part_and_dependencies(slices: Run) -> None:
    plain = slices("12=8=4", "--give", "global=*:0.5,4:0", "--give", "group=0-2-4")
    assert plain.code == 2  # there is no part 4
    assert "no part is called '4'; parts are input, 0, 2" in plain.err
    give = ("12=8=4", "--give", "global=*:0.5,2:0", "--give", "group=0-2-4")
    apart = slices(*give)
    below = slices(*give, "--depends", "group=global")
    assert numbers(apart.out, "all")[-1] > numbers(below.out, "all")[-1]  # less stays private


def test_layers_without_a_part_of_their_own_are_named(slices: Run) -> None:
    done = slices("resnet")
    assert "the cells of part 0 are also those of 1, 3.conv2, 3.norm2" in done.out
    assert "part input" not in done.out
    wrong = slices("resnet", "--give", "global=*:1,3.conv2:0")
    assert (
        "no part is called '3.conv2'; the cells of layer '3.conv2' are those of part '0'"
        in wrong.err
    )


def test_a_users_own_module(slices: Run, tmp_path: Path) -> None:
    (tmp_path / "garden.py").write_text(
        "from torch import nn\n"
        "def make(channels, classes, hidden=6):\n"
        "    return nn.Sequential(nn.Conv2d(channels, hidden, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),\n"
        "        nn.Flatten(), nn.Linear(hidden, classes))\n"
        "class Fickle(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.body = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        return self.body(x) if x.sum() > 0 else x\n"
        "def fickle():\n"
        "    return Fickle()\n"
        "def nothing():\n"
        "    return 3\n"
    )
    done = slices("garden:make", "--input", "2x9x9", "--option", "hidden=5")
    assert numbers(done.out, "0")[0] == 5
    fickle = slices("garden:fickle", "--input", "8")
    assert fickle.code == 2
    assert "control flow that depends on data cannot be traced" in fickle.err
    assert "anatomy()" in fickle.err  # what to do
    assert "returned int instead of a torch module" in slices("garden:nothing").err
    assert "has no function or class 'other'" in slices("garden:other").err


def test_a_config_by_its_file(slices: Run, tmp_path: Path) -> None:
    (tmp_path / "swarm.toml").write_text(
        'name = "leaf"\npeers = 2\n[data]\nsamples = 20\ntest = 20\n'
        '[network]\nname = "small-cnn"\noptions = {widths = [4], hidden = 6}\n'
        '[[models]]\nname = "global"\nshare = 0.5\n'
    )
    done = slices("swarm.toml", "--peer", "1")
    assert re.search(r"cells of local-1", done.out)
    assert numbers(done.out, "0")[:3] == [4, 2, 2]
    assert "peers of swarm.toml are 0 to 1" in slices("swarm.toml", "--peer", "2").err
    assert (
        "--give: the config swarm.toml sets this already"
        in slices("swarm.toml", "--give", "a=1").err
    )
    assert "--buffers: the config" in slices("swarm.toml", "--buffers", "local").err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["alexnet"], "no ready network is called 'alexnet'; there are small-cnn, resnet"),
        (["nowhere:net"], "there is no module 'nowhere' in "),
        (["small-cnn", "--input", "3x"], "write the shape of one sample, as in 3x32x32"),
        (["small-cnn", "--input", "9"], "reads images (channels × height × width), but samples have"),
        (["lstm", "--input", "3x8x8"], "reads windows (time × channels)"),
        (["vit", "--option", "with=4"], "'vit' has no 'with'; it has channels, size"),
        (["vit", "--option", "patch=5"], "do not divide into patches of 5×5"),
        (["vit", "--option", "patch=[1"], "'[1' is not a value of TOML"),
        (["64=8=10", "--give", "global"], "--give 'global': write NAME=VALUE"),
        (["64=8=10", "--give", "global=most"], "'most' is not a share"),
        (["64=8=10", "--give", "a=0.5", "--give", "a=0.2"], "--give: names a model twice"),
        (["64=8=10", "--give", "a=0.6", "--give", "b=0.6"], "add up to 1.2 with model 'b'"),
        (["64=1=10", "--give", "a=0.5", "--give", "b=0.5"], "part '0' has 1 cells, too few for the 2 models"),
        (["64=8=10", "--give", "a=1.5"], "a share is between 0 and 1, not 1.5"),
        (["resnet", "--buffers", "throw"], "buffers 'throw' is unknown"),
        (["64=8=10", "--input", "64"], "cannot be used with a network layout"),
        (["64=8=10", "--peer", "1"], "--peer: is for a config, and 64=8=10 is none"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(slices: Run, arguments: list[str], text: str) -> None:
    done = slices(*arguments)
    assert done.code == 2
    assert text in " ".join(done.err.split())
    assert done.err.startswith("error:")
