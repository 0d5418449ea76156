"""The event loop only moves bytes: training, encoding, testing and saving run on the peer's thread."""

from __future__ import annotations

import asyncio
import threading

import pytest
from blockbuster import blockbuster_ctx
from peer_kit import Nest, make_learner, quick
from waiting import wait_until

from gossamer.gossip.security import layer as intake_module
from gossamer.peer import engine as engine_module
from gossamer.peer import machine as machine_module
from gossamer.peer import traffic
from gossamer.peer.engine import Engine
from gossamer.peer.store import Agreement

HEAVY = ("train", "turn", "save", "open_session", "begin", "report", "end", "finish")


@pytest.mark.parametrize("mode", ["async", "rounds"])
def test_nothing_heavy_runs_on_the_loop(run, tmp_path, monkeypatch, mode):
    where: dict[str, set[int]] = {}

    def watch(owner, name):
        function = getattr(owner, name)

        def watched(*args, **kwargs):
            where.setdefault(name, set()).add(threading.get_ident())
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for name in HEAVY:
        watch(Engine, name)
    for name in ("disagreement", "reached"):
        watch(Agreement, name)
    for name in ("save_checkpoint", "load_checkpoint"):
        watch(machine_module, name)
    watch(engine_module, "schema_hash")
    watch(traffic, "encode")
    watch(intake_module, "decode")
    learners = [make_learner("a"), make_learner("b")]
    for learner in learners:
        watch(type(learner), "test")

    async def swarm():
        nest = Nest(quick(rounds=3, mode=mode, expect=("a", "b"), founder=True))
        with blockbuster_ctx() as buster:  # a blocking call on the loop raises
            buster.functions["os.stat"].deactivate()
            for name, learner in zip("ab", learners, strict=True):
                nest.start(name, learner, checkpoint=tmp_path / f"{name}.checkpoint")
            await nest.all()
        return threading.get_ident()

    loop_thread = run(swarm())
    seen = {*HEAVY, "disagreement", "encode", "decode", "save_checkpoint", "test"}
    assert where.keys() >= seen | ({"reached"} if mode == "async" else set())
    for name, threads in where.items():
        assert loop_thread not in threads, name


def test_long_training_leaves_the_loop_free(run):
    """While a peer trains, the loop's own callbacks go on: they are counted, not timed."""
    turns = [0]
    during: list[int] = []

    class Slow:
        def __init__(self, inner):
            self._inner, self.network = inner, inner.network

        def train(self, steps):
            before = turns[0]
            wait_until(lambda: turns[0] - before >= 100, "a hundred turns of the loop")
            during.append(turns[0] - before)
            return self._inner.train(steps)

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def test(self):
            return self._inner.test()

        def state(self):
            return self._inner.state()

        def restore(self, state):
            self._inner.restore(state)

    async def heartbeat():
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def swarm():
        beat = asyncio.create_task(heartbeat())
        await Nest(quick(rounds=2)).start("a", Slow(make_learner("a"))).task
        beat.cancel()

    run(swarm())
    assert min(during) >= 100
