import json
import math

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from gossamer.models import LAYER_ORDER, ModelError, ModelGraph, SlicedNetwork, Start, discover, mlp


def test_parameters_are_views_of_the_flat_tensor():
    network = SlicedNetwork(mlp("3=2"), {"g": "3-2"}, seed=0)
    network.flat.zero_()
    assert all((p == 0).all() for p in network.module.parameters())
    with torch.no_grad():
        network.module[0].bias.add_(1)
    assert network.flat[-2:].tolist() == [1, 1]


def test_write_changes_exactly_what_read_reads():
    network = SlicedNetwork(mlp("4=3=2"), {"g": "4-2-1"}, seed=0)
    before = network.flat.clone()
    network.write("g", torch.full_like(network.read("g"), 7.0))
    changed = torch.nonzero(network.flat != before).flatten().tolist()
    assert sorted(changed) == sorted(network.slicing.coordinates("g").tolist())
    assert (network.read("g") == 7).all()


def test_shared_slices_start_equal_and_private_ones_do_not():
    graph = ModelGraph({"g": []})
    cells = {"ann": [[1, 0], [2, 0]], "bob": [[0, 1], [1, 2]]}
    ann, bob = (
        SlicedNetwork(mlp("2=3"), {"g": cells[name]}, graph=graph, peer=name, seed=5)
        for name in ("ann", "bob")
    )
    assert torch.equal(ann.read("g"), bob.read("g"))
    mine, theirs = (n.flat[torch.from_numpy(n.slicing.private)] for n in (ann, bob))
    assert len(mine) > 0
    assert not torch.equal(mine, theirs)
    again = SlicedNetwork(mlp("2=3"), {"g": cells["ann"]}, graph=graph, peer="ann", seed=5)
    assert torch.equal(ann.flat, again.flat)
    other = SlicedNetwork(mlp("2=3"), {"g": cells["ann"]}, graph=graph, peer="ann", seed=6)
    assert not torch.equal(ann.flat, other.flat)


def test_independent_starts_are_possible():
    ann, bob = (
        SlicedNetwork(mlp("5=4"), {"g": "5-4"}, peer=name, seed=5, start=Start(equal=False))
        for name in ("ann", "bob")
    )
    assert not torch.equal(ann.read("g"), bob.read("g"))


def test_starts_have_the_spread_they_promise():
    network = SlicedNetwork(mlp("400=300", output="prelu"), {"g": "400-300"}, seed=1)
    weight = network.module[0].weight.detach()
    assert float(weight.std()) == pytest.approx(1 / math.sqrt(400), rel=0.02)
    assert (network.module[0].bias == 0).all()
    assert (network.module[1].weight == 0.25).all()
    wide = Start("uniform", 1.0, by_fan_in=False)
    network = SlicedNetwork(mlp("400=300"), {"g": "400-300"}, seed=1, start=wide)
    weight = network.module[0].weight.detach()
    assert 0.99 < float(weight.max()) <= 1
    assert float(weight.std()) == pytest.approx(1 / math.sqrt(3), rel=0.02)


def test_without_a_seed_the_module_keeps_its_values():
    module = mlp("3=2")
    before = [p.detach().clone() for p in module.parameters()]
    SlicedNetwork(module, {"g": "3-2"})
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_save_and_load(tmp_path):
    path = tmp_path / "ann.safetensors"
    ann = SlicedNetwork(mlp("4=3"), {"g": "4-2"}, peer="ann", seed=1)
    ann.save(path)
    other = SlicedNetwork(mlp("4=3"), {"g": "4-2"}, peer="bob", seed=2)
    flat = other.flat
    other.load(path)
    assert torch.equal(other.flat, ann.flat)
    assert other.flat is flat
    with pytest.raises(ModelError, match=r"'0.weight' has shape \(3, 4\) in the file and \(2, 4\)"):
        SlicedNetwork(mlp("4=2"), {"g": "4-2"}).load(path)
    with pytest.raises(ModelError, match=r"a different network: it has no tensor '1.weight'"):
        SlicedNetwork(mlp("4=3", output="prelu"), {"g": "4-3"}).load(path)
    SlicedNetwork(mlp("4=3=2"), {"g": "4-3-2"}).save(path)
    with pytest.raises(ModelError, match=r"a different network: this one has no tensor '2.bias'"):
        ann.load(path)
    path.write_bytes(b"no network")
    with pytest.raises(ModelError, match=r"ann.safetensors: cannot be read as a network"):
        ann.load(path)


def test_a_users_own_per_cell_layer_is_understood():
    class Gain(nn.Module):
        per_cell = True

        def __init__(self, cells):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(cells))

        def forward(self, x):
            return x * self.gain

    anatomy = discover(nn.Sequential(nn.Linear(3, 2), Gain(2), nn.Sequential(nn.Linear(2, 1))))
    assert [part.cells for part in anatomy.parts] == [3, 2, 1]
    assert [p.name for p in anatomy.parameters] == [
        "0.weight", "0.bias", "1.gain", "2.0.weight", "2.0.bias",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 1)),
            r"takes 3 inputs, but the layer before it has 2",
        ),
        (
            nn.Sequential(nn.Linear(3, 2), nn.PReLU()),
            r"'1.weight' touches no cell.*num_parameters=cells",
        ),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), r"layer '0' \(Conv2d\): only Linear layers"),
        (nn.Sequential(nn.ReLU()), r"has no Linear layer"),
    ],
)
def test_modules_that_cannot_be_read_say_why(module, message):
    with pytest.raises(ModelError, match=message):
        discover(module)


def test_a_wrong_number_of_values_is_refused():
    network = SlicedNetwork(mlp("2=1"), {"g": "2-1"}, peer="ann")
    with pytest.raises(
        ModelError,
        match=r"'g' of peer 'ann' needs a vector of 3 values, not an array of shape \(2,\)",
    ):
        network.write("g", np.zeros(2))


def test_mixed_dtypes_are_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(
        ModelError, match=r"one dtype and be on one device; these are torch.float32 on cpu, torch.f"
    ):
        SlicedNetwork(module, {"g": "2-2-2"})


def test_complex_numbers_are_refused():
    with pytest.raises(ModelError, match=r"must be real numbers; .* torch.complex64"):
        SlicedNetwork(nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64)), {"g": 1.0}, seed=1)


def test_the_state_of_a_row_of_a_stack_holds_no_other_row():
    """Also if the network lists a tensor under three names."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[2].weight = module[0].weight
    network = SlicedNetwork(module, {"g": 1.0})
    stack = torch.zeros(2, len(network.flat))
    stack[0] = network.flat
    network.rebind(stack[0])
    for value in module.state_dict().values():
        assert value.untyped_storage().nbytes() < stack.nbytes


def test_print_shows_what_went_where():
    network = SlicedNetwork(mlp("4=3=2"), {"g": "4-2-0"}, peer="ann")
    assert repr(network) == (
        "SlicedNetwork(ann: cells g 4-2-0, local-ann 0-1-2; values g 10, local-ann 5, private 8)"
    )


def test_a_saved_network_says_in_which_order_its_layers_run(tmp_path):
    """Cells say it, not the module, which lists its layers as it pleases."""

    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha = nn.Linear(6, 3)
            self.zeta = nn.Linear(4, 6)

        def forward(self, x):
            return self.alpha(torch.relu(self.zeta(x)))

    network = SlicedNetwork(Backwards(), {"all": 1.0}, example=torch.randn(2, 4))
    network.save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        order = json.loads(file.metadata()[LAYER_ORDER])
    assert order == ["zeta.weight", "zeta.bias", "alpha.weight", "alpha.bias"]
