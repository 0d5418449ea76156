"""Peers whose cells are matched, on a broker in memory: newcomers that bring a network, other widths."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from peer_kit import Nest, Still, begin, held, injected, make_learner, quick
from waiting import until

from gossamer.gossip import ONE, Give, ReleasePlan, topics
from gossamer.gossip.security import GuardSettings
from gossamer.models import ModelError
from gossamer.peer import Matching
from gossamer.peer.bootstrap import load_trained
from gossamer.peer.engine import Engine
from gossamer.peer.exits import PeerError
from gossamer.peer.presence import Online
from gossamer.peer.store import MatchedStore
from gossamer.peer.summary import Summary, read_summary

ALIGN = {"global": Matching("align")}


def still(name: str, value: float) -> Still:
    return Still(make_learner(name), value)


@pytest.mark.parametrize("guards", ["off", GuardSettings()])
def test_what_a_trained_newcomer_brings_counts_with_its_weight(run, guards):
    """Three at 1, one at 1.2: all agree on 1.05. Guards that know what it will count let it hear."""

    async def swarm():
        nest = Nest(quick(rounds=10**9, guards=guards))
        settings = nest.settings.updated(expect=("a", "b", "c"), founder=True)
        lives = [nest.start(name, still(name, 1.0), settings) for name in "abc"]
        await until(lambda: all(life.trains() for life in lives))
        late = nest.settings.updated(trained=True, founder=False)
        records = []
        newcomer = nest.start("d", still("d", 1.2), late, on_record=records.append)
        await until(newcomer.counts)
        return nest, await nest.finish(more=5), records

    nest, reports, records = run(swarm())
    assert held(reports) == injected(reports) == 4
    assert "own_accuracy" in records[0]
    assert records[-1]["counts"]
    for life in nest.lives:
        np.testing.assert_allclose(life.peer.learner.network.read("global"), 1.05, rtol=1e-4)


def summary_of(nest: Nest, name: str) -> Summary | None:
    return read_summary(nest.broker.retained.get(topics.summary("nest", name), b""))


def shuffled(name: str, order: list[int]):
    """The usual network with its shared cells, the first four hidden ones, in another order."""
    learner = make_learner(name)
    take = torch.tensor([*order, 4, 5])
    module = learner.network.module
    with torch.no_grad():
        for value in (module[0].weight, module[0].bias):
            value.copy_(value[take].clone())
        module[2].weight.copy_(module[2].weight[:, take].clone())
    return learner


@pytest.mark.parametrize("matching", [ALIGN, {}])
def test_only_aligned_cells_are_mixed(run, matching):
    """A newcomer that has the founders' cells in another order changes nothing, if it is aligned."""

    async def swarm():
        nest = Nest(quick(rounds=10**9, matching=matching))
        start = [make_learner(name).network.read("global").clone() for name in "ab"]
        settings = nest.settings.updated(expect=("a", "b"), founder=True)

        def keep(inner):
            learner = Still(inner, 0.0)
            learner.network.flat.copy_(values[inner.network.peer])
            return learner

        made = {name: make_learner(name) for name in "ab"} | {"c": shuffled("c", [2, 0, 3, 1])}
        values = {name: one.network.flat.clone() for name, one in made.items()}
        lives = [nest.start(name, keep(made[name]), settings) for name in "ab"]
        await until(lambda: all(life.trains() for life in lives))
        late = nest.settings.updated(trained=True, founder=False)
        await until(nest.start("c", keep(made["c"]), late).counts)
        return start[0], nest, await nest.finish(more=5)

    start, nest, reports = run(swarm())
    assert held(reports) == injected(reports) == 3
    apart = [
        float((life.peer.learner.network.read("global") - start).abs().max()) for life in nest.lives
    ]
    assert (max(apart) < 1e-5) == bool(matching), apart
    told = summary_of(nest, "c")
    assert told is not None
    added = [(event.kind, event.text) for event in told.events if "counts in" in event.text]
    expected = "aligned with a, b: moved 4 cells; counts in global"
    plain = "adds its trained network as it is, and counts in global"
    assert added == [("aligned", expected) if matching else ("counted", plain)]


def test_of_two_trained_peers_that_come_together_one_gives_the_order(run):
    """Nobody said who founds the swarm; both would be founders, were they not trained."""

    async def swarm():
        nest = Nest(quick(rounds=40, matching=ALIGN, trained=True, expect=("a", "b")))
        for name, inner in (("a", make_learner("a")), ("b", shuffled("b", [2, 0, 3, 1]))):
            values = inner.network.flat.clone()
            learner = Still(inner, 0.0)
            learner.network.flat.copy_(values)
            nest.start(name, learner)
        return nest, await nest.all()

    nest, reports = run(swarm())
    assert held(reports) == injected(reports) == 2
    one, other = (life.peer.learner.network for life in nest.lives)
    np.testing.assert_allclose(one.read("global"), other.read("global"), atol=1e-5)
    first = make_learner("a").network.read("global")
    mine = sorted(first.abs().tolist())  # whoever's order it is, no cell was mixed with another
    np.testing.assert_allclose(sorted(one.read("global").abs().tolist()), mine, atol=1e-5)


def test_peers_of_three_widths_agree_on_the_common_vector(run):
    widths = {"a": 2, "b": 4, "c": 6}

    async def swarm():
        matching = {"global": Matching("fuse", "4-6-2", seed=3)}
        nest = Nest(quick(rounds=6, matching=matching, expect=tuple(widths), founder=True))
        for name, width in widths.items():
            learner = make_learner(name, {"global": f"4-{width}-2"}, layout=f"4={width}=2")
            nest.start(name, learner)
        return nest, await nest.all()

    nest, reports = run(swarm())
    assert held(reports) == injected(reports) == 3
    stores = [life.peer.link.engine.store for life in nest.lives]
    vectors = np.stack([store.read("global") for store in stores])
    assert vectors.shape[1] == 4 * 6 + 6 + 6 * 2 + 2
    assert np.abs(vectors - vectors[0]).max() < 1e-3
    for life, store in zip(nest.lives, stores, strict=True):
        own = life.peer.learner.network.read("global").numpy()
        np.testing.assert_array_equal(
            store.common_width.extract("global", store.read("global")), own
        )


def test_widths_that_differ_are_refused_by_name(run):
    async def swarm():
        nest = Nest(quick(expect=("a", "b"), founder=True))
        for name, bound in (("a", "4-8-2"), ("b", "4-9-2")):
            matching = {"global": Matching("fuse", "4-6-2", bound)}
            settings = nest.settings.updated(matching=matching)
            nest.start(name, make_learner(name), settings)
        return await asyncio.gather(*(life.task for life in nest.lives), return_exceptions=True)

    for error in run(swarm()):
        assert isinstance(error, PeerError)
        assert "model 'global' is not the same" in str(error)


# --- one peer's engine, step by step ------------------------------------------------------------

TWO = {"all": "4-2-0", "group": "0-2-2"}


def give(engine: Engine, vector: str, value: np.ndarray, sequence: int = 1) -> None:
    message = Give(vector, "x", "sx", sequence, engine.name, engine.session, ONE, value)
    engine.gossiper.handle(message, 0.0)


def newcomer(checkpoint=None) -> Engine:
    learner = make_learner("n", TWO, seed=7, depends={"group": ["all"]})
    settings = quick(trained=True, matching={m: Matching("align") for m in TWO})
    return Engine("n", learner, settings, checkpoint=checkpoint)


def test_a_newcomer_waits_for_every_model_and_survives_a_crash_meanwhile(tmp_path):
    """Heard of one of two models, killed, restarted, heard of the other: then it counts, once."""
    file = tmp_path / "n.checkpoint"
    first = newcomer(file)
    before = first.network.flat.clone()
    vectors = ["all", "group"]
    x = Online(
        "x",
        "sx",
        ("all", "group"),
        models_pushed_to_us=("all", "group"),
        counting_rounds={"all": 1, "group": 1},
    )
    begin(first, as_founder=False)
    theirs = {v: first.network.read(v).numpy() + 0.1 for v in vectors}
    first.turn([], [x], 0.5, 10**6)
    give(first, "all", theirs["all"])
    first.turn([], [], 1.0, 10**6)
    assert first.store.is_staging
    assert first.gossiper.account("all").injected == 0
    assert first.view.waiting >= {"all", "group"}
    first.save()

    second = newcomer(file)
    assert second.restored
    assert second.store.is_staging
    assert torch.equal(second.network.flat, before)
    np.testing.assert_array_equal(second.store.read("all"), theirs["all"])
    begin(second, as_founder=False)
    second.turn([], [x], 1.5, 10**6)
    give(second, "group", theirs["group"])
    second.turn([], [], 2.0, 10**6)
    assert not second.store.is_staging
    for vector in vectors:
        account = second.gossiper.account(vector)
        assert (account.held, account.injected) == (2 * ONE, ONE)
        own = theirs[vector] - 0.1  # in order already: the mean of what it heard and what it knew
        np.testing.assert_allclose(second.store.read(vector), (own + theirs[vector]) / 2, rtol=1e-5)
    third = newcomer(file)
    assert not third.store.is_staging
    assert third.gossiper.account("all").injected == ONE


def test_a_trained_peer_that_nobody_was_before_founds_the_swarm():
    engine = newcomer()
    before = engine.network.flat.clone()
    begin(engine)
    assert not engine.store.is_staging
    assert not engine.view.waiting
    assert torch.equal(engine.network.flat, before)


def test_a_founder_that_was_given_something_first_comes_as_a_newcomer():
    """Or two would count whose cells were never matched."""
    engine = newcomer()
    engine.gossiper.peer_online("x", "sx", ["all", "group"])
    give(engine, "all", engine.network.read("all").numpy())
    begin(engine)
    assert engine.store.is_staging
    assert engine.gossiper.account("all").injected == 0


def test_a_fused_newcomer_adds_its_own_cells_and_nothing_else():
    """Heard mass and own mass add up at its places; elsewhere what it heard stays as it was."""
    matching = {"global": Matching("fuse", "4-6-2", "4-9-2")}
    learner = make_learner("n", {"global": "4-5-2"}, layout="4=5=2", seed=8)
    engine = Engine("n", learner, quick(trained=True, matching=matching))
    own = learner.network.read("global").numpy().copy()
    other = make_learner("x", {"global": "4-6-2"}, layout="4=6=2")
    theirs = MatchedStore(other.network, matching).read("global")
    engine.gossiper.peer_online("x", "sx", ["global"])
    begin(engine, as_founder=False)
    give(engine, "global", theirs)
    engine.turn([], [], 1.0, 10**6)
    account = engine.gossiper.account("global")
    assert (account.held, account.injected) == (2 * ONE, ONE)
    found = engine.store.read("global")
    places = engine.store.common_width.positions("global")
    expected = theirs.copy()
    expected[places] = (theirs[places] + own) / 2
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(learner.network.read("global"), found[places])


def test_a_checkpoint_holds_the_common_vector(tmp_path):
    file = tmp_path / "a.checkpoint"
    settings = quick(matching={"global": Matching("fuse", "4-8-2", seed=2)})
    first = Engine("a", make_learner("a"), settings, checkpoint=file)
    begin(first)
    first.train()
    wide = np.linspace(0, 1, first.store.read("global").size, dtype=np.float32)
    first.store.write("global", wide)
    first.save()
    second = Engine("a", make_learner("a"), settings, checkpoint=file)
    assert second.restored
    np.testing.assert_array_equal(second.store.read("global"), wide)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp": ReleasePlan(clip=1.0, noise=1.0)}, "would be sent without noise"),
        ({"mode": "rounds", "matching": ALIGN}, "no peer joins midway in rounds mode"),
    ],
)
def test_settings_that_contradict_a_trained_network_are_refused(changes, message):
    with pytest.raises(PeerError, match=message):
        Engine("a", make_learner("a"), quick(trained=True, **changes))


def test_a_network_that_cannot_be_loaded_is_named(tmp_path):
    network = make_learner("a").network
    with pytest.raises(ModelError, match="there is no such file"):
        load_trained(network, tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"not a network")
    with pytest.raises(ModelError, match=r"bad.safetensors: cannot be read as a network"):
        load_trained(network, tmp_path / "bad.safetensors")
    make_learner("b", layout="4=7=2").network.save(tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="a different network"):
        load_trained(network, tmp_path / "other.safetensors")
