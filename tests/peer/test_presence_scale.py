"""On a graph, a peer hears of its neighbours alone, and still ends only when all peers have finished."""

from __future__ import annotations

import asyncio

from learner_kit import make_learner
from peer_kit import Gate, Still
from waiting import until

from gossamer.experiments.bench.gossip import CountingTransport, presence_load
from gossamer.gossip import ONE, MemoryBroker
from gossamer.peer import Peer, Settings


def test_presence_costs_by_the_degree_and_not_by_the_peers():
    small, large = (presence_load(peers) for peers in (6, 16))
    assert small.subscriptions == large.subscriptions == 3 * (4 + 1) + 1
    assert large.bytes < 2 * small.bytes  # nearly three times as many if all hear of all
    everyone = presence_load(10, None)
    assert everyone.bytes > 1.5 * presence_load(5, None).bytes


def test_the_ends_of_a_path_wait_for_each_other(run):
    # Peers 0 - 1 - 2 - 3 - 4: peer 0 never hears of peer 4, which trains long after the others have finished.
    names = [str(index) for index in range(5)]
    gate = Gate(limit=0)

    async def scenario():
        broker, transports = MemoryBroker(), {}

        def connect(name):
            def make(client_id, will, on_connect):
                options = {"will": will, "on_connect": on_connect}
                transports[name] = CountingTransport(broker, client_id, **options)
                return transports[name]

            return make

        def peer(index):
            near = tuple(names[other] for other in (index - 1, index + 1) if 0 <= other < 5)
            settings = Settings(
                swarm="path", rounds=2, neighbours=near, hops=4, expect=tuple(names), founder=True,
                tick=0.02, settle_timeout=200.0,
            )  # fmt: skip
            learner = make_learner(names[index])
            during = gate if index == 4 else None
            still = Still(learner, float(index), during)
            return Peer(names[index], still, settings, connect(names[index]), seed=index)

        peers = [peer(index) for index in range(5)]
        tasks = [asyncio.create_task(each.run()) for each in peers]
        await until(lambda: peers[0].link and peers[0].link.phase == "settling")
        await until(lambda: gate.reached)
        assert not transports["0"].wants("gossamer/v1/path/peer/4/status")
        gate.open()
        return await asyncio.gather(*tasks)

    reports = run(scenario())
    assert [report.ended for report in reports] == ["finished"] * 5
    assert sum(sum(report.weight["global"][:2]) for report in reports) == 5 * ONE
