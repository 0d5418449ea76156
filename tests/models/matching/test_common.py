"""A common width: peers of other widths, nested or matched, and what push-sum then averages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.models import ModelError, ModelGraph, SgdLearner, SlicedNetwork, mlp
from gossamer.models.matching import CommonWidth, MatchOptions, find_indices, resized

GRAPH = ModelGraph({"group": ["all"]})


def network(layout: str, slices: dict[str, str], peer: str, seed: int | None = 0) -> SlicedNetwork:
    module = mlp(layout, activation="tanh", output="none").double()
    return SlicedNetwork(module, slices, graph=GRAPH, peer=peer, seed=seed)


def wide(values: dict[str, np.ndarray], common: CommonWidth, layout: str) -> SlicedNetwork:
    """The common vectors as a network of the common width."""
    slices = {model: common.slicing.layout(model) for model in common.models}
    module = mlp(layout, activation="tanh", output="none").double()
    found = SlicedNetwork(module, slices, graph=GRAPH, peer="wide")
    found.flat.copy_(torch.from_numpy(common.flat(values)))
    return found


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 100))
def test_embedding_and_extracting_are_inverse_and_keep_the_function(
    a: int, b: int, seed: int
) -> None:
    """An embedded network is the same function at the common width: absent cells weigh nothing."""
    own = network(f"4={a}={b}=3", {"all": f"4-{a}-{b}-3"}, "a", seed)
    rng = np.random.default_rng(seed)
    indices = {"all": (np.arange(4), rng.permutation(7)[:a], rng.permutation(6)[:b], np.arange(3))}
    common = CommonWidth(own.slicing, {"all": "4-7-6-3"}, indices)
    values = own.read("all").numpy()
    embedded = common.embed("all", values)
    assert len(embedded) == common.size("all") == 4 * 7 + 7 + 7 * 6 + 6 + 6 * 3 + 3
    assert np.array_equal(common.extract("all", embedded), values)
    x = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(wide({"all": embedded}, common, "4=7=6=3")(x), own(x), atol=1e-12)
    filled = common.embed("all", values, np.full(common.size("all"), 5.0))
    assert np.array_equal(common.extract("all", filled), values)
    assert (filled == 5.0).sum() == len(embedded) - len(values)


def test_local_cells_and_dependent_models_take_their_places() -> None:
    """Of 4=8=3: 3 cells for all, 2 for the group, 3 local; the group's model depends on all's."""
    own = network("4=8=3", {"all": "4-3-0", "group": "0-2-3"}, "a")
    common = CommonWidth(own.slicing, {"group": "0-5-3", "all": "4-6-0"})
    assert common.averaged_models == ("all", "group")
    assert common.size("all") == 4 * 6 + 6
    assert common.size("group") == 4 * 5 + 5 + 3 * (6 + 5) + 3
    for owner in common.averaged_models:
        values = own.read(owner).numpy()
        assert np.array_equal(common.extract(owner, common.embed(owner, values)), values)
    alone = CommonWidth(own.slicing, {"group": "0-5-3"})
    assert alone.size("all") == len(own.slicing.coordinates("all"))


def test_all_widths_start_nested() -> None:
    starts = []
    for width in (3, 5):
        own = network(f"4={width}=2", {"all": f"4-{width}-2"}, f"p{width}")
        common = CommonWidth(own.slicing, {"all": "4-8-2"})
        start = common.start(seed=7)
        own.write("all", common.extract("all", start["all"]))
        starts.append((start["all"], own))
    assert np.array_equal(starts[0][0], starts[1][0])
    small, large = (dict(own.module.named_parameters()) for _, own in starts)
    assert torch.equal(small["0.weight"], large["0.weight"][:3])
    assert torch.equal(small["2.weight"], large["2.weight"][:, :3])


@settings(max_examples=20)
@given(st.integers(0, 200))
def test_a_newcomer_finds_its_cells(seed: int) -> None:
    """A narrower network made of the model's own cells, in another order, finds them all."""
    rng = np.random.default_rng(seed)
    large = network("6=7=5=3", {"all": "6-7-5-3"}, "large", seed)
    large.flat.mul_(4)
    reach = CommonWidth(large.slicing, {"all": "6-9-8-3"})
    values = {"all": reach.embed("all", large.read("all").numpy())}
    small = network("6=4=3=3", {"all": "6-4-3-3"}, "small", None)
    one, two = rng.permutation(7)[:4], rng.permutation(5)[:3]
    source = CommonWidth(
        small.slicing, {"all": "6-9-8-3"}, {"all": (np.arange(6), one, two, np.arange(3))}
    )
    small.write("all", source.extract("all", values["all"]))
    found = find_indices(small, CommonWidth(small.slicing, {"all": "6-9-8-3"}), values)
    assert found.indices["all"][1].tolist() == one.tolist()
    assert found.indices["all"][2].tolist() == two.tolist()


def test_a_stranger_takes_free_cells_up_to_the_bound() -> None:
    first = network("6=4=3", {"all": "6-4-3"}, "a", 1)
    first.flat.mul_(20)
    stranger = network("6=4=3", {"all": "6-4-3"}, "b", 2)
    stranger.flat.mul_(20)
    layout = {"all": "6-6-3"}
    values = {"all": CommonWidth(first.slicing, layout).embed("all", first.read("all").numpy())}
    greedy = MatchOptions(kind="set", concentration=100.0)
    found = find_indices(stranger, CommonWidth(stranger.slicing, layout), values, greedy)
    indices = found.indices["all"][1]
    assert {4, 5} <= set(indices.tolist())  # both free ones, and for the rest it has to match
    assert len(set(indices.tolist())) == 4
    timid = MatchOptions(variance=1e6, concentration=1e-6)
    kept = find_indices(stranger, CommonWidth(stranger.slicing, layout), values, timid)
    assert set(kept.indices["all"][1].tolist()) == {0, 1, 2, 3}


def test_peers_of_three_widths_learn_together() -> None:
    """They train their own cells and average whole common vectors, and beat training alone."""
    generator = torch.Generator().manual_seed(0)
    teacher = mlp("8=12=3", activation="tanh", output="none").double()
    for value in teacher.parameters():
        value.data.normal_(0, 1.0, generator=generator)
    x = torch.randn(500, 8, dtype=torch.float64, generator=generator)
    y = teacher(x).argmax(dim=1)
    held = x[200:], y[200:]

    def learners() -> tuple[list[SgdLearner], list[CommonWidth]]:
        made, commons = [], []
        for index, width in enumerate((6, 10, 16)):
            own = network(f"8={width}=3", {"all": f"8-{width}-3"}, f"p{index}")
            common = CommonWidth(own.slicing, {"all": "8-16-3"})
            own.write("all", common.extract("all", common.start(0)["all"]))
            share = slice(30 * index, 30 * index + 30)
            made.append(
                SgdLearner(
                    own,
                    (x[share], y[share]),
                    held,
                    local_samples=30,
                    rate=0.02,
                    loss="cross-entropy",
                    reduction="sum",
                )
            )
            commons.append(common)
        return made, commons

    alone, _ = learners()
    for learner in alone:
        learner.train(60)
    together, commons = learners()
    vector = commons[0].start(0)["all"]
    for _ in range(60):
        moved = np.zeros_like(vector)
        for learner, common in zip(together, commons, strict=True):
            learner.network.write("all", common.extract("all", vector))
            learner.train(1)
            change = learner.network.read("all").numpy() - common.extract("all", vector)
            moved += common.embed("all", change)
        vector = vector + moved / len(together)
    for lone, joint, common in zip(alone, together, commons, strict=True):
        joint.network.write("all", common.extract("all", vector))
        assert joint.test().accuracy > lone.test().accuracy


def test_a_resized_anatomy_keeps_names_and_order() -> None:
    own = network("4=5=3", {"all": "4-5-3"}, "a").slicing.anatomy
    larger = resized(own, [4, 9, 3])
    assert [p.shape for p in larger.parameters] == [(9, 4), (9,), (3, 9), (3,)]
    assert [p.name for p in larger.parameters] == [p.name for p in own.parameters]


@pytest.mark.parametrize(
    ("widths", "indices", "message"),
    [
        ({"all": "4-3-3"}, None, "has 5 cells of part '0', the common width allows 3"),
        ({"all": "4-9"}, None, "has 2 parts, the network has 3"),
        ({"some": "4-9-3"}, None, "this peer has no such model, but all"),
        (
            {"all": "4-9-3"},
            {"all": (range(4), [0, 0, 1, 2, 3], range(3))},
            "part '0': give 5 different numbers from 0 to 8",
        ),
        ({"all": "4-9-3"}, {"all": (range(4), range(5, 10), range(3))}, "from 0 to 8"),
        ({"all": "4-9-3"}, {"all": (range(4),)}, "given for 1 parts, but the network has 3"),
    ],
)
def test_bad_widths_are_refused(widths: dict[str, str], indices: object, message: str) -> None:
    slicing = network("4=5=3", {"all": "4-5-3"}, "a").slicing
    with pytest.raises(ModelError, match=message):
        CommonWidth(slicing, widths, indices)  # type: ignore[arg-type]


def test_vectors_of_another_size_are_refused() -> None:
    common = CommonWidth(network("4=5=3", {"all": "4-5-3"}, "a").slicing, {"all": "4-9-3"})
    with pytest.raises(ModelError, match="common values, not an array"):
        common.extract("all", np.zeros(3))
    with pytest.raises(ModelError, match="own values, not an array"):
        common.embed("all", np.zeros(3))
    with pytest.raises(ModelError, match="'x' has no common width here; models with one are all"):
        common.positions("x")
