"""Vectors of matched peers: kept apart, of a common width, and what push-sum conserves of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.gossip import ONE, Gossiper
from gossamer.models import ModelError, ModelGraph, Sgd, SgdLearner, SlicedNetwork, mlp
from gossamer.peer import Matching
from gossamer.peer.store import Agreement, MatchedStore


def network(width: int, peer: str = "a", seed: int | None = 0) -> SlicedNetwork:
    module = mlp(f"4={width}=3", activation="tanh", output="none").double()
    return SlicedNetwork(module, {"all": f"4-{width}-3"}, peer=peer, seed=seed)


def learner(own: SlicedNetwork, momentum: float = 0.9) -> SgdLearner:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(30, 4, dtype=torch.float64, generator=random)
    y = torch.randint(0, 3, (30,), generator=random)
    return SgdLearner(
        own, (x, y), (x, y), local_samples=10, loss="cross-entropy",
        optimizer=lambda p: Sgd(p, 0.05, momentum=momentum),
    )  # fmt: skip


def fuse(width: str = "4-8-3", bound: str | None = None) -> dict[str, Matching]:
    return {"all": Matching("fuse", width, bound, seed=5)}


def gossiper(name: str, store: MatchedStore) -> Gossiper:
    return Gossiper(name, f"session-{name}", store, seed=1)


def deliver(giver: Gossiper, taker: Gossiper) -> None:
    for message in giver.poll():
        taker.handle(message, 0.0)
    for message in taker.poll():
        giver.handle(message, 0.0)


def test_peers_of_other_widths_start_nested_and_fit() -> None:
    small, large = network(3, "a"), network(8, "b")
    stores = [MatchedStore(small, fuse()), MatchedStore(large, fuse())]
    np.testing.assert_array_equal(stores[0].read("all"), stores[1].read("all"))
    assert stores[0].schema("all") == stores[1].schema("all")
    parameters = [dict(one.module.named_parameters()) for one in (small, large)]
    assert torch.equal(parameters[0]["0.weight"], parameters[1]["0.weight"][:3])


def test_cells_beyond_the_width_are_free() -> None:
    """Zero, so that a newcomer finds them; those inside the width are not."""
    store = MatchedStore(network(3), fuse("4-5-3", "4-8-3"))
    assert store.common_width is not None
    first = store.read("all")[: 8 * 4].reshape(8, 4)
    assert (first[5:] == 0).all()
    assert (first[:5] != 0).any(axis=1).all()


def test_training_moves_own_places_alone_and_averaging_all() -> None:
    own = network(3)
    store = MatchedStore(own, fuse())
    before = store.read("all").copy()
    learner(own).train(1)
    after = store.read("all")
    assert store.common_width is not None
    mine = np.zeros(len(before), dtype=bool)
    mine[store.common_width.positions("all")] = True
    assert (after[mine] != before[mine]).any()
    np.testing.assert_array_equal(after[~mine], before[~mine])
    given = np.arange(len(before), dtype=np.float64)
    store.write("all", given)
    np.testing.assert_array_equal(store.read("all"), given)
    np.testing.assert_array_equal(own.read("all"), given[mine])


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 8), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=12),
    st.integers(0, 50),
)
def test_pushes_between_widths_conserve_weight_and_sum(
    widths: list[int], steps: list[tuple[int, int, bool]], seed: int
) -> None:
    """Whatever the order of training and pushes: Σ weight·value moves by what training adds, no more."""
    random = np.random.default_rng(seed)
    names = [f"p{place}" for place in range(len(widths))]
    networks = [network(width, name) for width, name in zip(widths, names, strict=True)]
    stores = [MatchedStore(own, fuse()) for own in networks]
    peers = [gossiper(name, store) for name, store in zip(names, stores, strict=True)]
    for peer in peers:
        peer.inject("all", ONE)
        for other in peers:
            if other is not peer:
                peer.peer_online(other.peer, other.session, ["all"])

    def total() -> np.ndarray:
        weights = [peer.weight("all") / ONE for peer in peers]
        return sum(
            weight * store.read("all") for weight, store in zip(weights, stores, strict=True)
        )

    expected = total()
    for giver, taker, train in steps:
        giver, taker = giver % len(peers), taker % len(peers)
        if train:
            change = random.standard_normal(len(networks[giver].read("all")))
            networks[giver].write("all", networks[giver].read("all").numpy() + change)
            common = stores[giver].common_width
            assert common is not None
            expected = expected + peers[giver].weight("all") / ONE * common.embed("all", change)
        elif giver != taker and peers[giver].weight("all") > 2:
            share = peers[giver].weight("all") // 2
            peers[giver].push("all", {names[taker]: share}, 0.0)
            deliver(peers[giver], peers[taker])
    assert sum(peer.weight("all") for peer in peers) == ONE * len(peers)
    np.testing.assert_allclose(total(), expected, atol=1e-9)


def test_apart_the_network_does_not_see_what_is_heard() -> None:
    own = network(5)
    store = MatchedStore(own, {}, trained=True)
    before = own.read("all").clone()
    store.start_staging()
    store.write("all", np.ones(len(before)))
    assert store.is_staging
    assert torch.equal(own.read("all"), before)
    np.testing.assert_array_equal(store.read("all"), 1.0)
    assert store.match_cells(learner(own)) == 0
    np.testing.assert_array_equal(store.read("all"), before)


def test_an_aligned_newcomer_is_the_same_function_in_another_order() -> None:
    """A shuffled copy of the neighbours' network comes back into their order, and so does momentum."""
    theirs = network(6, "a", seed=3)
    own = network(6, "b", seed=3)
    shuffle = torch.tensor([3, 0, 5, 1, 4, 2])
    with torch.no_grad():
        hidden, last = own.module[0], own.module[2]
        for value in (hidden.weight, hidden.bias):
            value.copy_(value[shuffle].clone())
        last.weight.copy_(last.weight[:, shuffle].clone())
    trainer, reference = learner(own), learner(theirs)
    trainer.train(1)  # the same samples in the same order: the same function again
    reference.train(1)
    store = MatchedStore(own, {"all": Matching("align")}, trained=True)
    store.start_staging()
    store.write("all", theirs.read("all").numpy())
    assert store.match_cells(trainer) > 0
    np.testing.assert_allclose(store.read("all"), theirs.read("all"), atol=1e-12)
    trainer.train(2)
    reference.train(2)  # momentum that stayed behind would lead them apart
    np.testing.assert_allclose(own.read("all"), theirs.read("all"), atol=1e-12)


@pytest.mark.parametrize("matching", [fuse("4-5-3", "4-9-3"), fuse("4-9-3")])
def test_a_fused_newcomer_takes_its_cells_places_and_free_ones(
    matching: dict[str, Matching],
) -> None:
    """Free are cells that are zero, and those that no peer holds, which still have starting values."""
    theirs = network(5, "a", seed=3)
    there = MatchedStore(theirs, matching)
    theirs.flat.mul_(4)  # as if trained
    own = network(6, "b", seed=9)
    own.flat.mul_(4)
    with torch.no_grad():  # four of their cells, and two of its own
        own.module[0].weight[:4] = theirs.module[0].weight[[4, 2, 0, 1]]
        own.module[0].bias[:4] = theirs.module[0].bias[[4, 2, 0, 1]]
        own.module[2].weight[:, :4] = theirs.module[2].weight[:, [4, 2, 0, 1]]
        own.module[2].bias[:] = theirs.module[2].bias
        own.module[0].weight[4:] *= 30
    store = MatchedStore(own, matching, trained=True)
    before = own.flat.clone()
    store.start_staging()
    store.write("all", there.read("all"))
    assert store.match_cells(learner(own)) == 2
    assert store.common_width is not None
    indices = store.common_width.indices["all"][1]
    assert indices[:4].tolist() == [4, 2, 0, 1]
    assert set(indices[4:]) <= {5, 6, 7, 8}
    assert torch.equal(own.flat, before)
    again = MatchedStore(network(6, "b"), matching, trained=True)
    again.restore(store.snapshot())
    assert again.common_width is not None
    assert again.common_width.indices["all"][1].tolist() == indices.tolist()


@pytest.mark.parametrize(
    ("matching", "message"),
    [
        (Matching("fuse"), "'all' is fused, which needs its common width"),
        (Matching("fuse", None, "4-9-3"), "'all' has a bound but no width to start from"),
        (Matching("fuse", "4-3-3"), "the common width allows 3"),
        (Matching("fuse", "4-9-3", "4-8-3"), "raise it on all peers"),
    ],
)
def test_widths_that_cannot_be_are_refused(matching: Matching, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        MatchedStore(network(5), {"all": matching})


def test_unknown_models_and_kinds_are_refused() -> None:
    with pytest.raises(ModelError, match="there is no model 'al' here; models are all"):
        MatchedStore(network(5), {"al": Matching("align")})
    with pytest.raises(ModelError, match="'mix' is unknown; write align or fuse"):
        MatchedStore(network(5), {"all": Matching("mix")})  # type: ignore[arg-type]


def test_fuse_is_refused_where_widths_would_not_meet() -> None:
    module = mlp("4=6=3").double()
    graph = ModelGraph({"group": ["all"]})
    slices = {"all": "4-3-0", "group": "0-3-3"}
    own = SlicedNetwork(module, slices, graph=graph, peer="a", seed=0)
    with pytest.raises(ModelError, match=r"'group' depends on 'all'.*fuse 'group' as well"):
        MatchedStore(own, {"all": Matching("fuse", "4-9-0")})
    crossed = SlicedNetwork(mlp("4=6=3").double(), {"all": "4-6-3"}, peer="a", cross=True, seed=0)
    with pytest.raises(ModelError, match="does not work with cross-model averaging"):
        MatchedStore(crossed, {"all": Matching("fuse", "4-9-3")})


def test_what_a_peer_gives_does_not_change_with_its_network() -> None:
    """A store reads contiguous values as a view of the network; what is on its way is a copy."""
    own = network(5)
    store = MatchedStore(own, {})
    assert np.shares_memory(store.read("all"), own.flat.numpy())
    giver = gossiper("a", store)
    giver.inject("all", ONE)
    giver.peer_online("b", "session-b", ["all"])
    giver.push("all", {"b": ONE // 2}, 0.0)
    (give,) = giver.poll()
    before = own.read("all").numpy()
    own.flat.zero_()
    np.testing.assert_array_equal(give.value, before)
    np.testing.assert_array_equal(store.read("all"), 0.0)


def test_agreement_compares_with_the_value_before_a_credit() -> None:
    giver, taker = (MatchedStore(network(5, name), {}) for name in "ab")
    giver.write("all", np.full_like(giver.read("all"), 3.0))
    taker.write("all", np.full_like(taker.read("all"), 2.0))
    a, b = gossiper("a", giver), gossiper("b", taker)
    agreement = Agreement(["all"], taker)
    b.observe = lambda give, own, distance: agreement.add(give.model, own, distance)
    for each, other in ((a, b), (b, a)):
        each.inject("all", ONE)
        each.peer_online(other.peer, other.session, ["all"])
    a.push("all", {"b": ONE // 2}, 0.0)
    deliver(a, b)
    assert agreement.disagreement() == {"all": pytest.approx(0.5)}
    np.testing.assert_allclose(taker.read("all"), 2.0 + 1.0 / 3.0)
