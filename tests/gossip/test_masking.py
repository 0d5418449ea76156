"""Masks that cancel: the average stays, the values are hidden, a vanished neighbour is made up for."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from gossamer.gossip import (
    ONE,
    DictStore,
    Gossiper,
    MaskPlan,
    Mass,
    MemoryNetwork,
    PrivateRound,
    RoundsMode,
    enter_round,
    introduce,
    leave_round,
    mask,
    run,
    total,
)

NAMES = [f"p{i}" for i in range(8)]
LENGTH = 400


def shared(names):
    pairs = [(a, b) for a in names for b in names if a < b]
    return {frozenset(pair): hashlib.sha256("".join(pair).encode()).digest() for pair in pairs}


def rounds_of(names, common, round=1, **options):
    return {
        a: PrivateRound(
            a, "v", round, {b: common[frozenset((a, b))] for b in names if b != a}, **options
        )
        for a in names
    }


def masses(names, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: Mass(rng.standard_normal(LENGTH).astype(dtype), ONE * int(rng.integers(1, 4)))
        for name in names
    }


def mean(values):
    found, weight = total(values)
    return found / weight


def test_both_ends_draw_the_same_mask_and_every_use_another():
    secret = bytes(range(32))
    base = mask(secret, "v", 1, 1000, 64.0)
    np.testing.assert_array_equal(base, mask(secret, "v", 1, 1000, 64.0))
    others = [
        mask(bytes(32), "v", 1, 1000, 64.0), mask(secret, "w", 1, 1000, 64.0),
        mask(secret, "v", 2, 1000, 64.0),
    ]  # fmt: skip
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.15


def test_masks_are_exact_bounded_and_uniform():
    drawn = mask(bytes(32), "v", 1, 100_000, 64.0)
    np.testing.assert_array_equal(drawn, drawn.astype(np.float32))
    assert np.abs(drawn).max() <= 64.0
    assert drawn.mean() == pytest.approx(0, abs=0.5)
    assert drawn.std() == pytest.approx(64 / np.sqrt(3), rel=0.02)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-5)])
def test_masks_hide_every_value_and_leave_the_average(dtype, tolerance):
    true = masses(NAMES, dtype)
    rounds = rounds_of(NAMES, shared(NAMES))
    masked = {name: rounds[name].enter(true[name]) for name in NAMES}
    for name in NAMES:
        assert masked[name].weight == true[name].weight
        assert masked[name].value.dtype == dtype
        assert np.linalg.norm(masked[name].value) > 20 * np.linalg.norm(true[name].value)
    np.testing.assert_allclose(mean(masked.values()), mean(true.values()), atol=tolerance)


def test_a_neighbour_that_knows_its_own_mask_knows_nothing():
    """What is left after p1 takes its own mask off p0's value has next to no correlation with it."""
    common = shared(NAMES)
    true = masses(NAMES)
    p0 = rounds_of(NAMES, common)["p0"]
    seen = p0.enter(Mass(true["p0"].value, ONE)).value
    own = mask(common[frozenset(("p0", "p1"))], "v", 1, LENGTH, 64.0)
    guess = seen - own
    assert abs(np.corrcoef(guess, true["p0"].value)[0, 1]) < 0.12  # 400 samples: noise of 0.05
    everybody = sum(mask(common[frozenset(("p0", b))], "v", 1, LENGTH, 64.0) for b in NAMES[1:])
    np.testing.assert_allclose(seen - everybody, true["p0"].value, atol=1e-9)


def test_rounds_never_reuse_a_mask():
    common, true = shared(NAMES), masses(NAMES)
    first = rounds_of(NAMES, common)["p0"]
    other = rounds_of(NAMES, common, round=2)["p0"]
    one, two = (each.enter(true["p0"]).value for each in (first, other))
    assert np.linalg.norm(one - two) > 20 * np.linalg.norm(true["p0"].value)


def test_who_vanishes_before_it_gives_is_cancelled():
    true = masses(NAMES)
    rounds = rounds_of(NAMES, shared(NAMES))
    masked = {name: rounds[name].enter(true[name]) for name in NAMES}
    left = NAMES[:-1]
    broken = mean([masked[name] for name in left])
    assert np.abs(broken - mean([true[name] for name in left])).max() > 1.0
    for _ in range(2):  # told twice, cancelled once
        masked = {name: rounds[name].cancel("p7", masked[name]) for name in left}
    np.testing.assert_allclose(
        mean(masked.values()), mean([true[name] for name in left]), atol=1e-12
    )


def test_what_cannot_be_private_is_refused():
    secret = bytes(32)
    mass = Mass(np.ones(3), ONE)
    lonely = PrivateRound("anna", "v", 1, {"ben": secret})
    with pytest.raises(ValueError, match="a single one could subtract its mask"):
        lonely.enter(mass)
    two = PrivateRound("anna", "v", 1, {"ben": secret, "carl": secret})
    two.enter(mass)
    with pytest.raises(ValueError, match="has begun already"):
        two.enter(mass)
    with pytest.raises(ValueError, match="no weight"):
        PrivateRound("anna", "v", 1, {"ben": secret, "carl": secret}).enter(Mass(np.ones(3), 0))
    with pytest.raises(ValueError, match="not a power of two"):
        MaskPlan(scale=100.0)
    with pytest.raises(ValueError, match="not 32"):
        mask(b"short", "v", 1, 3, 1.0)
    half = PrivateRound("anna", "v", 1, {"b": b"1" * 32, "c": b"2" * 32}, MaskPlan(65536.0))
    diverged = PrivateRound("a", "v", 0, {"b": bytes(32), "c": bytes(32)})
    with pytest.raises(ValueError, match=r"'v': its values are NaN or infinite.*has diverged"):
        diverged.enter(Mass(np.array([1.0, np.nan]), ONE))
    with pytest.raises(ValueError, match="masks overflow float16"):
        half.enter(Mass(np.ones(1000, np.float16), ONE >> 4))


# --- through a gossiper ------------------------------------------------------------------------------


def test_if_one_model_cannot_be_masked_no_mask_stays_in_another():
    gossiper = Gossiper("a", "s-a", DictStore({"v": np.ones(3), "w": np.ones(3)}))
    for model in gossiper.models:
        gossiper.inject(model, ONE)
    gossiper.peer_online("b", "s-b", ["v", "w"])
    gossiper.peer_online("c", "s-c", ["v"])
    with pytest.raises(ValueError, match=r"private averaging of 'w'.*a single one"):
        enter_round(gossiper, 0, lambda _: bytes(32), {"v": MaskPlan(), "w": MaskPlan()})
    assert list(gossiper.value("v")) == [1.0] * 3


def swarm(exchanges, private, vanish=None):
    """Eight peers, one round of averaging; returns (gossipers, true mean)."""
    common, true = shared(NAMES), masses(NAMES)
    gossipers = {}
    for name in NAMES:
        store = DictStore({"v": true[name].value})
        gossipers[name] = Gossiper(name, f"s-{name}", store, mode=RoundsMode(exchanges), seed=1)
        gossipers[name].inject("v", true[name].weight)
    introduce(gossipers.values())
    entered = {}
    for name, gossiper in gossipers.items():
        if private:
            entered[name] = enter_round(
                gossiper,
                0,
                lambda other, me=name: common[frozenset((me, other))],
                {"v": MaskPlan()},
            )
    if vanish is not None:
        dead = gossipers.pop(vanish)
        true.pop(vanish)
        for name, gossiper in gossipers.items():
            leave_round(gossiper, entered[name], vanish)
            gossiper.peer_gone(vanish, dead.session)
    for gossiper in gossipers.values():
        gossiper.mode.begin_round(gossiper, 0)
    done = lambda: all(g.mode.finished(0) for g in gossipers.values())  # noqa: E731
    run(gossipers, MemoryNetwork(0), seconds=60, until=done)
    assert done()
    return gossipers, mean(true.values())


@pytest.mark.parametrize(
    "options", [{"private": True}, {"private": True, "vanish": "p3"}, {"private": False}]
)
def test_gossip_with_and_without_masks_ends_at_the_same_average(options):
    gossipers, wanted = swarm(12, **options)
    for gossiper in gossipers.values():
        np.testing.assert_allclose(gossiper.value("v"), wanted, atol=1e-6)
