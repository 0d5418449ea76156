"""Peers whose networks have batch statistics: gossip, checkpoints and files know of them."""

from __future__ import annotations

import pytest
import torch
from peer_kit import Nest, begin, consensus, held, injected, quick

from gossamer.models import SgdLearner, SlicedNetwork, resnet
from gossamer.peer.engine import Engine

torch.set_num_threads(1)


def residual(name: str, buffers: str) -> SgdLearner:
    random = torch.Generator().manual_seed(sum(name.encode()))
    x = torch.rand(20, 1, 4, 4, generator=random)
    y = torch.randint(0, 3, (20,), generator=random)
    network = SlicedNetwork(
        resnet(1, 3, widths=(4,)), {"global": {"*": 0.75, "6": 0}}, example=x[:2], peer=name, seed=0,
        buffers=buffers,  # type: ignore[arg-type]
    )  # fmt: skip
    return SgdLearner(
        network, (x, y), (x, y), local_samples=10, batch=5, rate=0.05, reduction="mean", seed=1,
        loss="cross-entropy",
    )  # fmt: skip


@pytest.mark.parametrize("buffers", ["average", "local", "recompute"])
def test_peers_agree_on_what_they_share(run, buffers):
    async def scenario():
        nest = Nest(quick(rounds=3, expect=("a", "b")))
        learners = [residual(name, buffers) for name in ("a", "b")]
        for name, learner in zip(("a", "b"), learners, strict=True):
            nest.start(name, learner)
        return learners, await nest.all()

    learners, reports = run(scenario())
    assert held(reports) == injected(reports) == 2
    assert consensus(learners) < 1e-3
    means = [one.network.module.state_dict()["1.running_mean"] for one in learners]
    apart = (means[0] - means[1]).abs()
    assert bool((apart[:3] < 1e-3).all()) == (buffers == "average")
    assert apart[3] > 1e-4  # the fourth cell is each peer's own


@pytest.mark.parametrize("buffers", ["average", "local", "recompute"])
def test_a_restart_goes_on_with_the_same_statistics(tmp_path, buffers):
    first = residual("a", buffers)
    engine = Engine("a", first, quick(), checkpoint=tmp_path / "x")
    begin(engine)
    engine.train()
    engine.save()
    again = residual("a", buffers)
    Engine("a", again, quick(), checkpoint=tmp_path / "x")
    for name, value in first.network.module.state_dict().items():
        assert torch.equal(again.network.module.state_dict()[name], value), name
    assert first.train() == again.train()
    assert torch.equal(first.network.flat, again.network.flat)


@pytest.mark.parametrize("buffers", ["average", "local", "recompute"])
def test_a_file_holds_the_statistics_too(tmp_path, buffers):
    first, second = residual("a", buffers), residual("b", buffers)
    first.train()
    first.network.save(tmp_path / "x.safetensors")
    second.network.load(tmp_path / "x.safetensors")
    x = first.samples[0]
    assert torch.equal(first.network.module.eval()(x), second.network.module.eval()(x))
