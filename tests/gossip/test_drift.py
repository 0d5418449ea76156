"""Pushes of what has hardly moved are skipped, counted, and made anyway when peers must agree."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from gossamer.gossip import ONE, DictStore, Drift, Gossiper, PacedMode, as_sent
from gossamer.gossip.compress import Traffic


def peer(bound):
    traffic = defaultdict(Traffic)
    mode = PacedMode(2, drift=Drift(bound, traffic))
    store = DictStore({"v": np.ones(100), "w": np.ones(10)})
    gossiper = Gossiper("a", "s", store, mode=mode)
    for model in ("v", "w"):
        gossiper.inject(model, ONE)
    for other in "bcde":
        gossiper.peer_online(other, f"s-{other}", ["v", "w"])
    return gossiper, mode, store, traffic


def pushed(gossiper, mode, **how) -> list[str]:
    mode.request(**how)
    gossiper.tick(0.0)
    return sorted(message.model for message in gossiper.poll())


def test_a_vector_is_pushed_first_and_again_when_it_has_moved():
    gossiper, mode, store, traffic = peer(0.05)
    assert pushed(gossiper, mode) == ["v", "v", "w", "w"]
    assert pushed(gossiper, mode) == []
    store.write("v", np.full(100, 1.04))
    assert pushed(gossiper, mode) == []
    store.write("v", np.full(100, 1.06))
    assert pushed(gossiper, mode) == ["v", "v"]
    assert traffic["v"].skipped == 4
    assert traffic["v"].skipped_bytes == 4 * 4 * 100
    assert traffic["v"].saved == 1600
    assert traffic["w"].skipped == 6


def test_bounds_by_model():
    gossiper, mode, _, traffic = peer({"w": 0.05})
    pushed(gossiper, mode)
    assert pushed(gossiper, mode) == ["v", "v"]
    assert set(traffic) == {"w"}


def test_a_model_that_begins_again_is_pushed_first():
    gossiper, mode, _, _ = peer(0.05)
    pushed(gossiper, mode)
    mode.update_models(["w"])
    mode.update_models(["v", "w"])
    assert pushed(gossiper, mode) == ["v", "v"]


def test_peers_that_must_agree_push_anyway():
    gossiper, mode, _, _ = peer(0.05)
    pushed(gossiper, mode)
    assert pushed(gossiper, mode, ignore_drift=True) == ["v", "v", "w", "w"]


@pytest.mark.parametrize("bound", [-0.1, float("nan"), float("inf"), {"v": -1.0}])
def test_bounds_must_be_distances(bound):
    with pytest.raises(ValueError, match=r"drift( of 'v')? is .*as in 0.05"):
        Drift(bound, {})


def test_exempt_models_are_always_pushed():
    drift = Drift(0.05, defaultdict(Traffic), lambda model: model == "w")
    value = np.ones(10)
    assert not drift.skips("v", value, 1)
    assert drift.skips("v", value, 1)
    for _ in range(3):
        assert not drift.skips("w", value, 1)


def test_a_push_that_failed_is_made_when_it_can_be():
    gossiper, mode, store, traffic = peer(0.05)
    gossiper.lossy = lambda _model, value: as_sent(value, "float16")
    store.write("v", np.full(100, 1e30))  # more than float16 can hold
    assert pushed(gossiper, mode) == ["w", "w"]
    assert pushed(gossiper, mode) == []
    assert traffic["v"].skipped == 0
    gossiper.lossy = None
    assert pushed(gossiper, mode) == ["v", "v"]


def test_a_model_that_returns_at_another_size_is_pushed():
    gossiper, mode, store, _ = peer(0.05)
    pushed(gossiper, mode)
    mode.update_models(["w"])
    mode.update_models(["v", "w"])
    store.write("v", np.ones(7))
    assert pushed(gossiper, mode) == ["v", "v"]
