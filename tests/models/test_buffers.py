"""Batch statistics: averaged with their cells, kept local, or recomputed."""

import pytest
import torch
from torch import nn

from gossamer.experiments import Arena
from gossamer.models import ModelError, SgdLearner, SlicedNetwork, average, cnn1d, discover, resnet

SHAPE = (40, 6, 8)


def networks(buffers, slices=None, names=("ann", "bob")):
    torch.manual_seed(0)
    found = discover(cnn1d(widths=(4, 5), kernel=3), torch.randn(1, *SHAPE[1:]))
    return [
        SlicedNetwork(
            cnn1d(widths=(4, 5), kernel=3), slices or {"g": 1.0}, anatomy=found, peer=name,
            buffers=buffers, seed=1,
        )
        for name in names
    ]  # fmt: skip


def learner(network, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SHAPE, generator=generator) * (1 + seed) + seed
    y = torch.randint(0, 6, (SHAPE[0],), generator=generator)
    options = {"local_samples": 40, "batch": 20, "reduction": "mean", "loss": "cross-entropy"}
    return SgdLearner(network, (x, y), (x, y), rate=0.05, seed=seed, **options)


def test_starts_are_seeded_gains_one_and_statistics_neutral():
    one, two = networks("average")
    assert torch.equal(one.flat, two.flat)
    norm = one.module[1]
    assert (norm.weight == 1).all()
    assert (norm.bias == 0).all()
    assert (norm.running_mean == 0).all()
    assert (norm.running_var == 1).all()


def test_averaged_statistics_are_views_and_follow_their_cells():
    pair = networks("average", {"g": 0.5})
    for seed, network in enumerate(pair):
        learner(network, seed).train()
    before = [network.module[1].running_var.clone() for network in pair]
    assert not torch.equal(*before)
    average(pair, weights=[3, 1])
    mean = (3 * before[0] + before[1]) / 4
    for network, old in zip(pair, before, strict=True):
        norm = network.module[1]
        torch.testing.assert_close(norm.running_var[:2], mean[:2])  # 2 of 4 cells are shared
        assert torch.equal(norm.running_var[2:], old[2:])
        assert norm.num_batches_tracked == 2
        network.flat.fill_(0.5)
        assert (norm.running_mean == 0.5).all()


def test_local_keeps_statistics_and_norms_and_averages_the_rest():
    pair = networks("local")
    for seed, network in enumerate(pair):
        learner(network, seed).train()
    kept = [{k: v.clone() for k, v in network.module[1].state_dict().items()} for network in pair]
    average(pair)
    assert torch.equal(pair[0].module[0].weight, pair[1].module[0].weight)
    for network, old in zip(pair, kept, strict=True):
        for name, value in network.module[1].state_dict().items():
            assert torch.equal(value, old[name]), name
    assert not torch.equal(pair[0].module[1].weight, pair[1].module[1].weight)


def test_recompute_takes_statistics_from_the_peers_own_samples():
    network = networks("recompute")[0]
    assert "1.running_mean" in network.own_buffers()
    one = learner(network, 1)
    one.train()
    one.test()
    norm, convolution = network.module[1], network.module[0]
    with torch.no_grad():
        seen = convolution(one.samples[0])
    torch.testing.assert_close(norm.running_mean, seen.mean((0, 2)))
    torch.testing.assert_close(norm.running_var, seen.var((0, 2)))
    assert norm.momentum == 0.1
    with pytest.raises(ModelError, match=r"peer 'ann' has no samples"):
        network.recompute(one.samples[0][:0])
    one.samples = (one.samples[0][:0], one.samples[1][:0])
    assert one.test().samples  # who has nothing to train with is tested with what it heard


@pytest.mark.parametrize("buffers", ["average", "local", "recompute"])
def test_a_restart_goes_on_with_the_same_statistics(buffers):
    one, two = networks(buffers)
    mine, other = learner(one, 1), learner(two, 1)
    mine.train()
    state, flat = mine.state(), one.flat.clone()
    other.restore(state)
    two.flat.copy_(flat)
    for name, value in one.module.state_dict().items():
        assert torch.equal(two.module.state_dict()[name], value), name
    mine.train()
    other.train()
    for name, value in one.module.state_dict().items():
        assert torch.equal(two.module.state_dict()[name], value), name


def test_rebinding_moves_parameters_and_statistics():
    network = networks("average")[0]
    rows = torch.stack([network.flat, network.flat])
    network.rebind(rows[1])
    rows[1].fill_(2.0)
    assert all((value == 2).all() for value in network.module.parameters())
    assert (network.module[1].running_var == 2).all()


def test_save_and_load_keep_statistics(tmp_path):
    one, two = networks("average")
    learner(one, 1).train()
    one.save(tmp_path / "net.safetensors")
    two.load(tmp_path / "net.safetensors")
    assert torch.equal(one.flat, two.flat)
    assert two.module[1].running_var.data_ptr() != one.module[1].running_var.data_ptr()


def test_the_arena_averages_statistics_as_exact_averaging_does():
    """Modules with buffers train one by one there, but their statistics travel with the rest."""
    mine, theirs = networks("average", {"g": 0.5}), networks("average", {"g": 0.5})
    list(Arena([learner(network, seed) for seed, network in enumerate(mine)]).run(2))
    alone = [learner(network, seed) for seed, network in enumerate(theirs)]
    for _ in range(2):
        for one in alone:
            one.train()
        average(theirs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.flat, b.flat, rtol=0, atol=1e-6)
        assert not torch.equal(a.module[1].running_mean, torch.zeros(4))


def test_an_unknown_way_is_refused():
    with pytest.raises(ModelError, match=r"'mean' is unknown; there are average, local, recompute"):
        networks("mean")


def test_every_kind_of_tensor_starts_alike_on_all_peers():
    """Convolutions, tokens, heads, recurrent gates, one-cell layers: nothing keeps torch's own draw."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 6)
            self.rnn = nn.GRU(6, 4, batch_first=True)
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.rnn(self.embed(x))[0][:, -1])

    example = torch.randint(0, 7, (2, 3))
    flats = []
    for draw in (1, 2):
        torch.manual_seed(draw)
        flats.append(SlicedNetwork(Mixed(), {"g": 1.0}, example=example, seed=3).flat)
    assert torch.equal(*flats)
    network = SlicedNetwork(Mixed(), {"g": 1.0}, example=example, seed=3)
    assert (network.module.head.bias == 0).all()
    assert (network.module.rnn.bias_hh_l0 == 0).all()
    assert float(network.module.embed.weight.detach().norm(dim=1).mean()) == pytest.approx(
        1, abs=0.4
    )
    wide = resnet(widths=(32,))
    network = SlicedNetwork(wide, {"g": 1.0}, example=torch.randn(1, 3, 8, 8), seed=3)
    spread = float(wide[3].conv1.weight.detach().std())
    assert spread == pytest.approx((32 * 9) ** -0.5, rel=0.05)


def test_a_network_that_was_used_before_starts_alike_and_alive():
    """As after the first call that lazy layers need, or with vectors that torch drew."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
            self.scale, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 6)

        def forward(self, x):
            return self.head(self.norm(self.conv(x)).mean((2, 3)) * self.scale)

    flats = []
    for draw in (1, 2):
        torch.manual_seed(draw)
        module, example = Scaled(), torch.randn(8, 2, 5, 5)
        module(example)
        nn.init.uniform_(module.norm.weight)
        flats.append(SlicedNetwork(module, {"g": 1.0}, example=example, seed=3).flat)
        assert (module.norm.running_var == 1).all()
        assert (module.norm.running_mean == 0).all()
        assert (module.norm.weight == 1).all()
        assert float(module.scale.detach().norm()) == pytest.approx(1, abs=0.5)
    assert torch.equal(*flats)
