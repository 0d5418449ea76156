"""Whole networks: the same function where it must be, parts that correspond, streams that add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.models import ModelError, mlp
from gossamer.models.matching import Chain, Layer, MatchOptions, fuse

PLAIN = MatchOptions(shrink=False)


def network(layout: str, seed: int, activation: str = "tanh") -> tuple[torch.nn.Module, Chain]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = mlp(layout, activation=activation, output="none").double()
        for value in module.parameters():
            torch.nn.init.normal_(value)
    return module, read(module)


def read(module: torch.nn.Module) -> Chain:
    return Chain.read({name: value.numpy() for name, value in module.state_dict().items()})


def answer(chain: Chain, x: torch.Tensor, activation: str = "tanh") -> torch.Tensor:
    """What torch computes with a chain's values."""
    layout = "=".join(map(str, chain.widths))
    module = mlp(layout, activation=activation, output="none").double()
    state = {name: torch.from_numpy(value) for name, value in chain.state(np.float64).items()}
    module.load_state_dict(state)
    return module(x).detach()


def permuted(chain: Chain, rng: np.random.Generator) -> Chain:
    orders = [np.arange(chain.widths[0])]
    orders += [rng.permutation(width) for width in chain.widths[1:-1]]
    orders += [np.arange(chain.widths[-1])]
    return Chain(
        tuple(
            Layer(
                layer.weight[np.ix_(orders[index + 1], orders[index])],
                {name: value[orders[index + 1]] for name, value in layer.per_cell.items()},
                layer.weight_name,
            )
            for index, layer in enumerate(chain.layers)
        )
    )


def inputs(width: int) -> torch.Tensor:
    return torch.randn(20, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@settings(max_examples=40)
@given(
    st.sampled_from(["5=6=3", "4=7=5=3", "4=5=6=5=2", "6=3"]),
    st.integers(0, 1000),
    st.integers(1, 5),
    st.sampled_from(["printed", "set", "efpf"]),
    st.sampled_from(["tanh", "prelu"]),
)
def test_permuted_copies_fuse_to_the_same_function(
    layout: str, seed: int, copies: int, kind: str, activation: str
) -> None:
    _, chain = network(layout, seed, activation)
    rng = np.random.default_rng(seed)
    chains = [chain, *(permuted(chain, rng) for _ in range(copies))]
    fused = fuse(chains, MatchOptions(kind=kind, shrink=False), seed=seed)  # type: ignore[arg-type]
    assert fused.chain.widths == chain.widths
    x = inputs(chain.widths[0])
    expected = answer(chain, x, activation)
    assert torch.allclose(answer(fused.chain, x, activation), expected, atol=1e-6)
    # With the paper's shrinkage the function is the same as the prior tends to say nothing.
    wide = MatchOptions(kind=kind, prior_variance=1e12, concentration=1e-6)  # type: ignore[arg-type]
    again = fuse(chains, wide, seed=seed)
    assert torch.allclose(answer(again.chain, x, activation), expected, atol=1e-6)


@settings(max_examples=25)
@given(st.lists(st.integers(2, 8), min_size=1, max_size=4), st.integers(0, 1000))
def test_networks_map_into_the_fused_one_and_back(widths: list[int], seed: int) -> None:
    chains = [
        network(f"5={width}={width + 1}=3", seed + index)[1] for index, width in enumerate(widths)
    ]
    fused = fuse(chains, seed=seed)
    x = inputs(5)
    for peer, chain in enumerate(chains):
        inside = fused.embed(peer)
        assert inside.widths == fused.chain.widths
        assert torch.allclose(answer(inside, x), answer(chain, x), atol=1e-9)
        back = fused.extract(peer, inside)
        for one, two in zip(back.layers, chain.layers, strict=True):
            assert np.array_equal(one.weight, two.weight)
            assert all(
                np.array_equal(one.per_cell[name], two.per_cell[name]) for name in two.per_cell
            )
        assert fused.extract(peer).widths == chain.widths


@settings(max_examples=25)
@given(st.integers(0, 1000))
def test_permuting_a_peer_leaves_the_fused_function(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chains = [network(layout, seed + 10 * i)[1] for i, layout in enumerate(["5=6=4=3", "5=4=5=3"])]
    counts = rng.integers(0, 50, size=(2, 3))
    one = fuse(chains, counts=counts, seed=seed)
    two = fuse([permuted(chain, rng) for chain in chains], counts=counts, seed=seed)
    assert one.chain.widths == two.chain.widths
    assert one.objective == pytest.approx(two.objective)
    x = inputs(5)
    assert torch.allclose(answer(one.chain, x), answer(two.chain, x), atol=1e-9)


def test_planted_deep_networks_are_recovered() -> None:
    """Peers with random subsets of one network's cells: masked connections do not split them."""
    rng = np.random.default_rng(4)
    planted = [rng.normal(size=(12, 20)) * 3, rng.normal(size=(10, 12)) * 3]
    top = rng.normal(size=(6, 10)) * 3
    chosen, chains = [], []
    for _ in range(5):
        one = np.sort(rng.permutation(12)[:9])
        two = np.sort(rng.permutation(10)[:8])
        chosen.append((one, two))
        noise = lambda shape: 0.02 * rng.normal(size=shape)  # noqa: E731
        layers = (
            Layer(planted[0][one] + noise((9, 20)), {"b0": noise(9)}, "0.weight"),
            Layer(planted[1][np.ix_(two, one)] + noise((8, 9)), {"b1": noise(8)}, "1.weight"),
            Layer(top[:, two] + noise((6, 8)), {"b2": noise(6)}, "2.weight"),
        )
        chains.append(permuted(Chain(layers), rng))
    fused = fuse(chains)
    assert fused.chain.widths == (20, 12, 10, 6)


def test_one_network_is_itself_up_to_shrinkage() -> None:
    _, chain = network("4=6=3", 0)
    fused = fuse([chain], MatchOptions(prior_variance=10, variance=1))
    order = fused.assignment(0)[0]
    assert np.allclose(fused.chain.layers[0].weight[order], chain.layers[0].weight * 10 / 11)
    assert np.allclose(fused.chain.layers[1].weight[:, order], chain.layers[1].weight * 10 / 11)
    own = fuse([chain], PLAIN)
    assert torch.allclose(answer(own.chain, inputs(4)), answer(chain, inputs(4)), atol=1e-9)


def test_a_class_belongs_to_the_peers_that_saw_it() -> None:
    """Output weights follow the shares of samples; a class that nobody saw is shared evenly."""
    _, chain = network("4=5=3", 1)
    other = Chain(
        (chain.layers[0], Layer(chain.layers[1].weight + 1, chain.layers[1].per_cell, "2.weight"))
    )
    counts = np.array([[30, 0, 0], [10, 20, 0]])
    fused = fuse([chain, other], PLAIN, counts=counts)
    mine = fused.extract(0).layers[1].weight - chain.layers[1].weight
    assert np.allclose(mine, [[0.25], [1.0], [0.5]], atol=1e-9)


def test_a_peer_with_a_smaller_variance_counts_more() -> None:
    _, chain = network("4=5=3", 1)
    moved = Chain(
        (
            Layer(
                chain.layers[0].weight + 0.1, chain.layers[0].per_cell, chain.layers[0].weight_name
            ),
            chain.layers[1],
        )
    )
    fused = fuse([chain, moved], PLAIN, variances=[1.0, 0.25])
    mine = fused.extract(0).layers[0].weight - chain.layers[0].weight
    assert np.allclose(mine, 0.1 * 4 / 5, atol=1e-9)


def test_groups_keep_models_apart() -> None:
    _, chain = network("4=6=3", 2)
    labels = [[np.array([0, 0, 0, 1, 1, 1])], [np.array([1, 1, 1, 1, 1, 1])]]
    fused = fuse([chain, chain], PLAIN, groups=labels)
    one, two = fused.assignment(0)[0], fused.assignment(1)[0]
    assert not set(one[:3]) & set(two)
    assert (one[3:] == two[3:]).all()


def test_a_stream_of_equal_networks_sharpens_and_does_not_grow() -> None:
    """Posterior becomes prior: the second step finds its atoms, and shrinks half as much."""
    rng = np.random.default_rng(6)
    chains = [network("6=5=4=3", 5)[1]] * 2
    chains[1] = permuted(chains[1], rng)
    first = fuse(chains)
    second = fuse([permuted(chain, rng) for chain in chains], prior=first.posterior)
    third = fuse(chains, prior=second.posterior)
    assert first.chain.widths == second.chain.widths == third.chain.widths == (6, 5, 4, 3)
    assert [f.posterior.fusions for f in (first, second, third)] == [1, 2, 3]
    factors = []
    for step, fused in enumerate((first, second, third), start=1):
        seen = 2 * step
        factors.append(seen / (seen + 0.1))
        expected = chains[0].layers[0].weight * factors[-1]
        order = third.assignment(0)[0] if step == 3 else first.assignment(0)[0]
        assert np.allclose(fused.chain.layers[0].weight[order], expected, atol=1e-9)
    assert factors == sorted(factors)


def test_a_stream_adds_what_is_new() -> None:
    """Later networks with cells of another kind add atoms; lower parts make room for them."""
    rng = np.random.default_rng(7)
    before = [network("6=5=4=3", 5)[1]] * 2
    other = network("6=5=4=3", 50)[1]
    first = fuse(before, MatchOptions(kind="set", variance=0.01))
    second = fuse(
        [permuted(before[0], rng), other],
        MatchOptions(kind="set", variance=0.01),
        prior=first.posterior,
    )
    assert second.chain.widths > first.chain.widths
    assert set(second.assignment(0)[0]) == set(range(5))  # the old one found its own
    x = inputs(6)
    assert torch.allclose(answer(second.embed(1), x), answer(other, x), atol=1e-9)


@pytest.mark.parametrize(("limit", "most"), [(30, 30), (8, 10)])
def test_a_stream_never_grows_beyond_its_limit_or_the_widest_network(limit: int, most: int) -> None:
    """A hundred steps of networks that have nothing in common."""
    options = MatchOptions(kind="set", variance=0.1, limit=limit, sweeps=1)
    posterior = None
    for step in range(100):
        chains = [network(layout, 2 * step + i)[1] for i, layout in enumerate(["4=10=3", "4=7=3"])]
        fused = fuse(chains, options, prior=posterior, seed=step)
        posterior = fused.posterior
        assert fused.chain.widths[1] <= most
        for peer in (0, 1):
            (mine,) = fused.assignment(peer)
            assert len(np.unique(mine)) == chains[peer].widths[1]
    assert fused.chain.widths[1] == most


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    chains = [network("5=6=4=3", seed)[1] for seed in range(4)]
    free, bound = (fuse(chains, MatchOptions(limit=limit)) for limit in (None, 24))
    for one, two in zip(free.chain.layers, bound.chain.layers, strict=True):
        assert np.array_equal(one.weight, two.weight)


def test_a_history_of_other_peers_is_refused() -> None:
    chains = [network("4=5=3", seed)[1] for seed in range(3)]
    with pytest.raises(ModelError, match="history has 3 peers, 2 were given"):
        fuse(chains[:2], prior=fuse(chains).posterior)


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        (("4=5=3", "4=5=5=3"), r"network 1 has 3 layers \(layout 4=5=5=3\), network 0 has 2"),
        (
            ("4=5=3", "5=5=3"),
            r"layer '0.weight' of network 1 has 5 inputs, that of network 0 has 4",
        ),
        (("4=5=3", "4=7=2"), "layer '2.weight' of network 1 has 2 outputs"),
    ],
)
def test_parts_that_do_not_correspond_are_named(layouts: tuple[str, str], message: str) -> None:
    chains = [network(layout, 0)[1] for layout in layouts]
    with pytest.raises(ModelError, match=message):
        fuse(chains)


def test_each_network_needs_a_name() -> None:
    with pytest.raises(ModelError, match="1 names were given for 2 networks"):
        fuse([network("4=5=3", seed)[1] for seed in (0, 1)], names=["anna"])


def test_other_kinds_of_cells_are_named() -> None:
    chains = [network("4=5=3", 0)[1], network("4=5=3", 0, "prelu")[1]]
    with pytest.raises(ModelError, match=r"network 1 holds 0.weight, 0.bias, 1.weight"):
        fuse(chains)


def test_values_that_are_not_finite_are_named() -> None:
    module, _ = network("4=5=3", 0)
    state = {name: value.numpy().copy() for name, value in module.state_dict().items()}
    state["2.weight"][0, 1] = np.inf
    with pytest.raises(
        ModelError, match=r"anna: layer '2.weight' has 1 values that are not finite"
    ):
        Chain.read(state, "anna")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"0.weight": np.ones((3, 2, 1))}, "neither a dense layer nor one value per cell"),
        ({"0.weight": np.ones((3, 2)), "1.weight": np.ones((2, 4))}, "takes 4 inputs"),
        ({}, "no dense layer"),
        (
            {"0.weight": np.ones((3, 2)), "1.weight": np.ones(3), "1.bias": np.ones(3)},
            "'1.weight' seems to belong to a normalization",
        ),
    ],
)
def test_other_networks_are_refused(state: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Chain.read(state, "ben")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"variances": [1.0]}, "1 variances were given for 2 networks"),
        ({"variances": [1.0, -2.0]}, r"variance \(σ²\) of network 1 is -2.0"),
        ({"counts": np.ones((2, 2))}, r"need \(2, 3\)"),
        ({"counts": -np.ones((2, 3))}, "negative"),
    ],
)
def test_wrong_trust_is_refused(wrong: dict[str, object], message: str) -> None:
    chains = [network("4=5=3", seed)[1] for seed in range(2)]
    with pytest.raises(ModelError, match=message):
        fuse(chains, **wrong)  # type: ignore[arg-type]


def test_layers_are_read_in_the_order_in_which_they_run() -> None:
    module, chain = network("=".join(["3"] * 8), 0)
    assert [layer.weight_name for layer in chain.layers] == [f"{i}.weight" for i in range(0, 14, 2)]
    assert chain.state().keys() == module.state_dict().keys()


def test_named_layers_are_read_as_given() -> None:
    state = {
        "zebra.weight": np.ones((3, 2)),
        "zebra.bias": np.ones(3),
        "ant.weight": np.ones((1, 3)),
        "ant.bias": np.ones(1),
    }
    assert Chain.read(state).widths == (2, 3, 1)


@pytest.mark.parametrize(
    "modules",
    [("0", "2", "head"), ("0", "3", "head"), ("stem", "1", "0"), ("b.in", "b.out", "a.in")],
)
def test_modules_beside_one_without_a_number_run_in_the_order_in_which_they_appear(
    modules: tuple[str, ...],
) -> None:
    state = {}
    for module in modules:
        state |= {f"{module}.weight": np.ones((3, 3)), f"{module}.bias": np.ones(3)}
    chain = Chain.read(state)
    assert [list(layer.per_cell) for layer in chain.layers] == [[f"{m}.bias"] for m in modules]
    assert [layer.weight_name for layer in chain.layers] == [f"{m}.weight" for m in modules]
