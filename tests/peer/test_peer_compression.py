"""Peers that compress, in every mode: weight is conserved, values agree, and what was saved is said."""

from __future__ import annotations

import numpy as np
import pytest
from peer_kit import Nest, Still, consensus, held, injected, make_learner, quick

from gossamer.gossip import RetryPolicy
from gossamer.peer.engine import Engine
from gossamer.peer.exits import PeerError
from gossamer.peer.settings import Limits

LAYOUT = "40=30=2"
SLICES = {"global": "40-30-2"}


def still(name, value):
    return Still(make_learner(name, SLICES, layout=LAYOUT), value)


@pytest.mark.parametrize("mode", ["async", "rounds", "server"])
def test_the_mean_survives_compression(run, mode):
    async def scenario():
        servers = {"global": "p0"} if mode == "server" else {}
        settings = quick(
            mode=mode, compress="int8", exchanges=2, servers=servers, founder=True,
            expect=("p0", "p1", "p2"), rounds=12, settle_tolerance=1e-4,
        )  # fmt: skip
        nest, learners, records = Nest(settings), [], []
        for index in range(3):
            learners.append(still(f"p{index}", float(index + 1)))
            nest.start(f"p{index}", learners[-1], on_record=records.append)
        reports = await nest.all()
        assert held(reports) == injected(reports) == 3
        assert consensus(learners) < 2e-3
        for learner in learners:
            assert np.abs(learner.network.read("global").numpy() - 2.0).max() < 0.02
        for report in reports:
            counted = report.compression["global"]
            assert counted["plain_bytes"] > 2.5 * counted["bytes"] > 0
            assert counted["worst"] < 0.05
            assert 0 <= counted["mean_distortion"] <= counted["worst"]
        assert any(record.get("saved_bytes", 0) > 0 for record in records)

    run(scenario())


def test_a_peer_that_does_not_compress_understands_one_that_does(run):
    async def scenario():
        plain = quick(founder=True, expect=("p0", "p1"))
        packed = quick(founder=True, expect=("p0", "p1"), compress="top-k:0.3+int8")
        nest = Nest(plain)
        learners = [still("p0", 1.0), still("p1", 3.0)]
        nest.start("p0", learners[0])
        nest.start("p1", learners[1], packed)
        reports = await nest.all()
        assert held(reports) == 2
        assert consensus(learners) < 1e-4
        assert reports[0].compression == {}
        assert reports[1].compression["global"]["messages"] > 0

    run(scenario())


def test_what_does_not_move_is_not_pushed(run):
    # Nor asked back after a stall: a push that finds its neighbour busy is neither sent nor skipped.
    limits = Limits(retry=RetryPolicy(recall_factor=float("inf")))

    async def scenario():
        settings = quick(founder=True, expect=("p0", "p1"), drift=0.5, rounds=10)
        nest = Nest(settings, limits=limits)
        learners = [still("p0", 1.0), still("p1", 1.0)]
        for index, learner in enumerate(learners):
            nest.start(f"p{index}", learner)
        reports = await nest.all()
        assert held(reports) == 2
        for report in reports:
            assert report.compression["global"]["skipped"] >= 9
            assert report.compression["global"]["skipped_bytes"] > 9 * 4 * 1000

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress": "int8", "dtype": "float16"}, "exclude each other"),
        ({"compress": "low-rank:50"}, "makes no block shorter"),
        ({"drift": 0.1, "mode": "rounds"}, 'use mode = "async"'),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(changes, words):
    with pytest.raises(PeerError, match=f"peer p: .*{words}"):
        Engine("p", make_learner("p", SLICES, layout=LAYOUT), quick(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress": "zip"}, "no compressor is called 'zip'"),
        ({"drift": -1.0}, "drift is -1"),
    ],
)
def test_settings_refuse_what_no_peer_can_do(changes, words):
    with pytest.raises(ValueError, match=words):
        quick(**changes)
