"""Exact averaging, and the paper's section III as an equality."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.models import (
    ModelError,
    ModelGraph,
    SgdLearner,
    SlicedNetwork,
    average,
    mlp,
    networks_by_model,
)

GRAPH = ModelGraph({"pair": ["global"], "global": [], "other": []})


def swarm(*, cross=False, dtype=torch.float64):
    """Four peers: global everywhere, `pair` on two, `other` on three, cells in different places."""
    specs = [
        {"global": [[0, 1, 2], [0, 1], [0, 1]], "pair": [[], [2, 3], []], "other": [[], [4], []]},
        {"global": [[2, 1, 0], [4, 2], [1, 0]], "pair": [[], [0, 1], []], "other": [[], [3], []]},
        {"global": [[0, 1, 2], [1, 3], [0, 1]], "other": [[], [0], []]},
        {"global": [[0, 1, 2], [1, 3], [0, 1]]},
    ]
    return [
        SlicedNetwork(
            mlp("3=5=2", activation="tanh").to(dtype),
            spec, graph=GRAPH, peer=f"p{index}", seed=index, cross=cross,
        )
        for index, spec in enumerate(specs)
    ]  # fmt: skip


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_members_agree_on_the_mean_and_nothing_else_moves(cross, dtype):
    networks = swarm(cross=cross, dtype=dtype)
    members = networks_by_model(networks)
    shared = {owner: m for owner, m in members.items() if len(m) > 1}
    assert set(shared) == {"global", "pair", "other"} | ({"global&other"} if cross else set())
    before = [network.flat.clone() for network in networks]
    means = {
        owner: torch.stack([networks[i].read(owner) for i in m]).double().mean(0).to(dtype)
        for owner, m in shared.items()
    }
    average(networks)
    for owner, mean in means.items():
        for index in shared[owner]:
            torch.testing.assert_close(networks[index].read(owner), mean)
    for index, network in enumerate(networks):
        moved = set(torch.nonzero(network.flat != before[index]).flatten().tolist())
        owned = set()
        for owner, m in shared.items():
            if index in m:
                owned |= set(network.slicing.coordinates(owner).tolist())
        assert moved <= owned
        assert moved, "averaging different starts must change something"


@settings(max_examples=30)
@given(st.lists(st.floats(0.01, 1000), min_size=4, max_size=4), st.booleans())
def test_averaging_twice_is_averaging_once_bit_for_bit(weights, cross):
    networks = swarm(cross=cross)
    average(networks, weights)
    once = [network.flat.clone() for network in networks]
    average(networks, weights)
    assert all(torch.equal(n.flat, o) for n, o in zip(networks, once, strict=True))


def test_weights_are_sample_counts():
    networks = swarm()
    weights = [10, 30, 60, 100]
    values = torch.stack([n.read("global") for n in networks])
    pair = torch.stack([n.read("pair") for n in networks[:2]])
    average(networks, weights)
    expected = (values * torch.tensor(weights)[:, None]).sum(0) / 200
    torch.testing.assert_close(networks[3].read("global"), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(
        networks[0].read("pair"), 0.25 * pair[0] + 0.75 * pair[1], rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("cross", [False, True])
def test_section_iii_one_swarm_step_is_one_step_of_the_joined_model(cross):
    """SGD on every peer, then averaging = one step on all partial models joined, summed loss, each
    model's rate divided by its number of peers."""
    torch.manual_seed(0)
    rate, networks = 0.3, swarm(cross=cross)
    average(networks)  # shared slices agree, as after any earlier round
    data = [(torch.randn(7, 3, dtype=torch.float64), torch.randint(0, 2, (7,))) for _ in networks]

    # The joined parameter vector: every owner once, and every peer's private coordinates.
    members = networks_by_model(networks)
    joined = {owner: networks[m[0]].read(owner).requires_grad_() for owner, m in members.items()}
    alone = [n.flat[torch.from_numpy(n.slicing.private)].requires_grad_() for n in networks]
    total = torch.zeros((), dtype=torch.float64)
    for network, own, (x, y) in zip(networks, alone, data, strict=True):
        flat = torch.zeros_like(network.flat)
        for owner in network.averaged_models:
            flat = flat.index_put(
                (torch.from_numpy(network.slicing.coordinates(owner)),), joined[owner]
            )
        flat = flat.index_put((torch.from_numpy(network.slicing.private),), own)
        shapes = [(name, p.shape, p.numel()) for name, p in network.module.named_parameters()]
        pieces = torch.split(flat, [size for _, _, size in shapes])
        state = {
            name: piece.view(shape) for (name, shape, _), piece in zip(shapes, pieces, strict=True)
        }
        outputs = torch.func.functional_call(network.module, state, (x,))
        total = total + 0.5 * (outputs - torch.eye(2, dtype=torch.float64)[y]).square().sum()
    total.backward()

    for network, sample in zip(networks, data, strict=True):
        knobs = {"local_samples": 7, "batch": 7, "loss": "squared", "reduction": "sum"}
        SgdLearner(network, sample, sample, rate=rate, **knobs).train(1)
    average(networks)

    for owner, m in members.items():
        expected = joined[owner].detach() - rate / len(m) * joined[owner].grad
        for index in m:
            torch.testing.assert_close(networks[index].read(owner), expected, rtol=0, atol=1e-12)
    for network, own in zip(networks, alone, strict=True):
        got = network.flat[torch.from_numpy(network.slicing.private)]
        torch.testing.assert_close(got, own.detach() - rate * own.grad, rtol=0, atol=1e-12)


def test_a_value_that_is_not_finite_is_named():
    networks = swarm()
    with torch.no_grad():
        networks[2].module[2].bias[0] = float("nan")
    with pytest.raises(
        ModelError, match=r"peer 'p2', model 'global': 1 values are not finite.*'2.bias'"
    ):
        average(networks)


def test_peers_whose_slices_differ_in_size_are_told_where():
    one = SlicedNetwork(mlp("3=4=2"), {"global": "3-2-2"}, peer="ann")
    two = SlicedNetwork(mlp("3=4=2"), {"global": "3-3-2"}, peer="bob")
    with pytest.raises(
        ModelError,
        match=r"'global' is not the same on 'ann' and 'bob': 0.weight \[2 global × 3 global\] on 'ann', 0.w",
    ):
        average([one, two])


@pytest.mark.parametrize("weights", [[1, 2], [1, 1, 1, 0], [1, 1, 1, float("nan")]])
def test_bad_weights_are_refused(weights):
    with pytest.raises(ModelError, match=r"weights were given|is not a positive number"):
        average(swarm(), weights)
