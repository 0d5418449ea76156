import math

import pytest
import torch
from torch import nn

from gossamer.models import (
    AssociativeLearner,
    AssociativeNetwork,
    Learner,
    Metrics,
    ModelError,
    Scorer,
    SgdLearner,
    SlicedNetwork,
    mlp,
    sparse_vectors,
)
from gossamer.models.associative import UNIFORM


def data(n=40):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def learner(**options):
    network = SlicedNetwork(
        mlp("4=5=3", activation="sigmoid", output="sigmoid"), {"g": "4-5-3"}, seed=0
    )
    options = {
        "local_samples": 20,
        "batch": 5,
        "rate": 0.1,
        "loss": "squared",
        "reduction": "sum",
    } | options
    return SgdLearner(network, data(), data(), **options)


def test_a_summed_batch_step_is_the_hand_written_one():
    mine = learner(local_samples=40, batch=40)
    x, y = data()
    w1, b1, w2, b2 = [p.detach().double().clone() for p in mine.network.module.parameters()]
    h = torch.sigmoid(x.double() @ w1.T + b1)
    o = torch.sigmoid(h @ w2.T + b2)
    d2 = (o - torch.eye(3).double()[y]) * o * (1 - o)
    d1 = (d2 @ w2) * h * (1 - h)
    expected = [
        w1 - 0.1 * d1.T @ x.double(),
        b1 - 0.1 * d1.sum(0),
        w2 - 0.1 * d2.T @ h,
        b2 - 0.1 * d2.sum(0),
    ]
    mine.train(1)
    for got, want in zip(mine.network.module.parameters(), expected, strict=True):
        torch.testing.assert_close(got.detach().double(), want, rtol=0, atol=1e-5)


def test_local_samples_are_counted_and_epochs_visit_every_sample():
    mine = learner(local_samples=7, batch=3)
    seen = []
    mine.loss = lambda o, y, inner=mine.loss: (seen.append(len(y)), inner(o, y))[1]
    assert mine.train(2).samples == 14
    assert seen == [3, 3, 1, 3, 3, 1], "no batch reaches beyond the local samples"
    order = torch.cat([mine.samples[1][mine.draw(1)] for _ in range(26)])
    assert len(order) == 26
    assert len(mine.order) == 0, "14 + 26 samples are one epoch of 40"


def test_training_learns_and_testing_changes_nothing():
    mine = learner(rate=0.5, batch=1, local_samples=40)
    before = mine.test()
    flat = mine.network.flat.clone()
    mine.test()
    assert torch.equal(flat, mine.network.flat)
    mine.train(40)
    assert mine.test().mean_loss < 0.7 * before.mean_loss


def test_any_optimizer_and_cross_entropy():
    mine = learner(
        loss="cross-entropy", reduction="mean", optimizer=lambda p: torch.optim.Adam(p, lr=0.05)
    )
    before = mine.test().mean_loss
    mine.train(20)
    assert mine.test().mean_loss < before


@pytest.mark.parametrize(("loss", "output"), [("squared", "sigmoid"), ("cross-entropy", "none")])
def test_one_output_is_a_binary_classifier(loss, output):
    x = torch.linspace(-1, 1, 40)[:, None]
    y = (x[:, 0] > 0.3).long()
    network = SlicedNetwork(
        mlp("1=4=1", activation="sigmoid", output=output), {"g": "1-4-1"}, seed=0
    )
    mine = SgdLearner(
        network, (x, y), (x, y), local_samples=40, batch=4, rate=1.0, loss=loss, reduction="sum"
    )
    mine.train(60)
    assert mine.test().accuracy > 0.9


def test_state_and_restore_continue_exactly():
    def optimizer(p):
        return torch.optim.SGD(p, lr=0.1, momentum=0.9)

    mine, twin = learner(optimizer=optimizer), learner(optimizer=optimizer)
    mine.train(3)
    twin.network.flat.copy_(mine.network.flat)
    twin.restore(mine.state())
    mine.train(3)
    twin.train(3)
    assert torch.equal(mine.network.flat, twin.network.flat)


def test_the_same_seed_gives_the_same_network():
    one, two, three = learner(seed=1), learner(seed=1), learner(seed=2)
    for each in (one, two, three):
        each.train(2)
    assert torch.equal(one.network.flat, two.network.flat)
    assert not torch.equal(one.network.flat, three.network.flat)


def test_metrics_add():
    total = Metrics(2.0, 3, 4) + Metrics(1.0, 1, 4)
    assert (total.mean_loss, total.accuracy) == (3 / 8, 0.5)
    assert math.isnan(Metrics().accuracy)  # nothing was right or wrong
    assert math.isnan(Metrics().mean_loss)


def test_bad_input_is_refused():
    network = SlicedNetwork(mlp("4=3"), {"g": "4-3"}, peer="ann")
    with pytest.raises(
        ModelError, match="unknown loss 'hinge'; known are squared, cross-entropy, L1Loss"
    ):
        SgdLearner(network, data(), data(), loss="hinge")
    with pytest.raises(ModelError, match="peer 'ann': 0 training inputs with 1 labels"):
        SgdLearner(network, (torch.zeros(0, 4), torch.zeros(1)), data())
    for options in ({"batch": 0}, {"local_samples": 2.5}, {"window": 0}):
        with pytest.raises(ModelError, match=f"{next(iter(options))} is .*, at least 1"):
            SgdLearner(network, data(), data(), **options)
    with pytest.raises(ModelError, match=r"score_every is 1; .* leaves no sample"):
        SgdLearner(network, data(), data(), score_every=1)
    with pytest.raises(ModelError, match="reduction 'average' is unknown; there are mean, sum"):
        SgdLearner(network, data(), data(), reduction="average")
    with pytest.raises(ModelError, match="unknown activation 'swish'"):
        mlp("2=2", output="swish")


def associative(**options):
    network = SlicedNetwork(AssociativeNetwork("50<>40"), {"g": "50-40"}, seed=1, start=UNIFORM)
    whole, _, _ = sparse_vectors(0, 9)
    _, partial, expected = sparse_vectors(1000, 30)
    return AssociativeLearner(network, whole, (partial, expected), **options)


def test_algorithms_3_and_4_cell_by_cell():
    """One vector against the paper's loops, written out."""
    mine = associative()
    net = mine.module
    hidden_w = net.hidden.double().numpy().copy()
    visible_w = net.visible.double().numpy().copy()
    v = mine.samples[0].numpy()
    h = [1 if sum(v * hidden_w[i]) >= 0.5 else 0 for i in range(40)]
    rate = 0.1
    for i in range(40):
        for j in range(50):
            if v[j] == 1:
                w = hidden_w[i][j]
                hidden_w[i][j] = w + (1 - w) / 2 * rate if h[i] else w - (1 + w) / 2 * rate
    for i in range(50):
        for j in range(40):
            if h[j] == 1:
                w = visible_w[i][j]
                visible_w[i][j] = w + (1 - w) / 2 * rate if v[i] else w - (1 + w) / 2 * rate
    net.learn(mine.samples[0], rate)
    assert 0 < sum(h) < 40
    torch.testing.assert_close(net.hidden.double(), torch.from_numpy(hidden_w), rtol=0, atol=1e-6)
    torch.testing.assert_close(net.visible.double(), torch.from_numpy(visible_w), rtol=0, atol=1e-6)


def test_the_associative_network_completes_vectors_after_training():
    mine = associative()
    before = mine.test().accuracy
    mine.train(20)
    assert before < 0.5
    assert mine.test().accuracy > 0.9
    assert isinstance(mine, Learner)
    assert mine.state() == {"next": 6}


def test_the_generator_follows_v5():
    whole, partial, clean = sparse_vectors(4, 1, bits=100, ones=8, noise=2, period=3)
    # k = 4: block 1 starts at 24; noise flips bits 1 and 51.
    assert clean[0].nonzero().flatten().tolist() == list(range(24, 40))
    assert (whole[0] - clean[0]).abs().nonzero().flatten().tolist() == [1, 51]
    assert partial[0].nonzero().flatten().tolist() == [1, *range(24, 32), 51]
    _, _, changed = sparse_vectors(4, 1, bits=100, ones=8, noise=2, period=3, modified=1)
    assert changed[0].nonzero().flatten().tolist() == [*range(24, 32), *range(40, 48)]
    _, _, wrapped = sparse_vectors(2, 1)
    assert wrapped[0].nonzero().flatten().tolist() == [*range(14), 48, 49]


@pytest.mark.parametrize("layout", ["50=400", "50<>", "0<>3", "x"])
def test_a_bad_associative_layout_is_refused(layout):
    with pytest.raises(ModelError, match="is not an associative layout"):
        AssociativeNetwork(layout)


def test_an_associative_learner_needs_its_network():
    network = SlicedNetwork(mlp("4=3"), {"g": "4-3"})
    with pytest.raises(ModelError, match="needs an AssociativeNetwork, not Sequential"):
        AssociativeLearner(network, torch.zeros(1, 4), (torch.zeros(1, 4), torch.zeros(1, 4)))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            torch.zeros(3, 5),
            torch.zeros(3, dtype=torch.int64),
            r"shape \(5,\) do not fit the network",
        ),
        (torch.zeros(3, 4).double(), torch.zeros(3, dtype=torch.int64), "inputs are torch.float64"),
        (torch.zeros(3, 4), torch.zeros(3), "labels must be int64"),
        (torch.zeros(3, 4), torch.zeros(3, 1, dtype=torch.int64), r"of shape \(3, 1\)"),
        (
            torch.zeros(3, 4),
            torch.tensor([0, 1, 3]),
            "from 0 to 3, but the network's 3 outputs allow 0 to 2",
        ),
        (torch.zeros(3, 4), torch.tensor([0, -1, 2]), "labels run from -1"),
    ],
)
def test_samples_that_do_not_fit_are_refused_before_training(x, y, message):
    network = SlicedNetwork(mlp("4=3"), {"g": "4-3"}, peer="ann")
    with pytest.raises(ModelError, match=f"peer 'ann', training samples.*{message}"):
        SgdLearner(network, (x, y), data())
    with pytest.raises(ModelError, match=f"peer 'ann', test samples.*{message}"):
        SgdLearner(network, data(), (x, y))


def test_inputs_on_which_a_network_raises_any_error_are_one_line():
    embedding = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    norm = nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    labels = torch.zeros(3, dtype=torch.int64)
    for module, inputs in ((embedding, torch.full((3, 2), 9)), (norm, torch.zeros(3, 4))):
        network = SlicedNetwork(module, {"g": 1.0}, peer="ann")
        with pytest.raises(ModelError, match=r"inputs of shape .* do not fit the network: "):
            SgdLearner(network, (inputs, labels), (inputs[:0], labels[:0]))
    with pytest.raises(ModelError, match="does not fit the network: index out of range"):
        SlicedNetwork(embedding, {"g": 1.0}, example=torch.full((3, 2), 9))


def test_a_network_that_returns_no_tensor_is_refused():
    class Both(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    network = SlicedNetwork(Both(4, 3), {"g": 1.0}, peer="ann")
    with pytest.raises(ModelError, match="the network returns a tuple"):
        SgdLearner(network, data(), data())


def test_new_samples_that_are_no_tensors_are_refused():
    with pytest.raises(ModelError, match="new samples: give inputs and labels as torch tensors"):
        learner().add_samples([[0.0] * 4], [1])


def test_a_batch_of_one_sample_under_batch_norm_is_one_line():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    network = SlicedNetwork(module, {"g": 1.0}, peer="ann", buffers="recompute")
    message = r"peer 'ann': a batch has only one sample, .*choose batch and local_samples"
    with pytest.raises(ModelError, match=message):
        SgdLearner(network, data(), data(), local_samples=5, batch=2).train()
    with pytest.raises(ModelError, match=message):
        SgdLearner(network, data(1), data()).test()
    images = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(6, 1, 3, 3), torch.arange(6) % 3
    network = SlicedNetwork(images, {"g": 1.0}, peer="ann")
    assert SgdLearner(network, (x, y), (x, y), local_samples=3, batch=1).train().samples == 3


def test_a_schedule_that_ends_before_the_rounds_do_is_one_line():
    ann = learner(scheduler={"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 2})
    ann.train()
    ann.train()
    with pytest.raises(ModelError, match="give it as many steps as there are rounds"):
        ann.train()


def test_a_state_can_be_restored_twice():
    ann = learner(optimizer="AdamW")
    ann.train()
    state, values = ann.state(), ann.network.flat.clone()
    results = []
    for _ in range(2):
        ann.restore(state)
        ann.network.flat.copy_(values)
        ann.train()
        results.append(ann.network.flat.clone())
    assert torch.equal(*results)


def test_an_unknown_optimizer_is_told_with_the_nearest():
    network = SlicedNetwork(mlp("4=3"), {"g": "4-3"}, peer="ann")
    with pytest.raises(ModelError, match="unknown optimizer 'Adamm'; did you mean 'Adam'"):
        SgdLearner(network, data(), data(), optimizer="Adamm")


def test_a_score_is_the_loss_with_other_values_in_place_and_changes_nothing():
    mine = learner()
    assert isinstance(mine, Scorer)
    flat = mine.network.flat.clone()
    x, y = mine.samples
    losses = mine.losses(mine.network.module(x), y).detach()
    # All classes count equally, however many samples they have.
    expected = torch.stack([losses[y == label].mean() for label in y.unique()]).mean().item()
    assert mine.score({}) == pytest.approx(expected)
    # A network of zeros outputs one half everywhere: half of 3 · ¼.
    assert mine.score({"g": torch.zeros(43)}) == pytest.approx(0.375)
    assert torch.equal(flat, mine.network.flat)
    mine.samples = x[:0], y[:0]
    assert math.isnan(mine.score({}))


def test_a_score_uses_64_samples_and_own_private_parts():
    network = SlicedNetwork(mlp("4=5=3"), {"g": "4-2-3"}, rest="mine", seed=0)
    mine = SgdLearner(network, data(200), data(), local_samples=20)
    counted = []
    mine.loss = lambda o, y, inner=mine.loss: (counted.append(len(y)), inner(o, y))[1]
    mine.score({})
    assert counted == [64]
    shared = torch.zeros(len(network.read("g")))
    before = mine.score({"g": shared})
    network.write("mine", network.read("mine") + 1.0)
    assert mine.score({"g": shared}) != before


def test_samples_that_score_are_not_trained_on_and_follow_new_ones():
    mine = learner(score_every=4)
    x, y = data()
    assert torch.equal(mine.scored[0], x[3::4])
    assert torch.equal(mine.scored[1], y[3::4])
    assert torch.equal(mine.samples[0], x[torch.arange(40) % 4 != 3])
    x, y = mine.scored
    losses = mine.losses(mine.network.module(x), y).detach()
    expected = torch.stack([losses[y == label].mean() for label in y.unique()]).mean()
    assert mine.score({}) == pytest.approx(expected.item())
    for number in range(4):
        mine.add_samples(torch.full((1, 4), float(number)), torch.tensor([0]))
    assert mine.scored[0][-1].tolist() == [3.0] * 4, "every fourth of those that come one by one"
    assert len(mine.samples[1]) == 30 + 3


@pytest.mark.parametrize(("count", "scored"), [(99, 0), (100, 10), (500, 50), (1000, 62)])
def test_samples_are_set_aside_if_they_are_enough_and_no_more_than_are_used(count, scored):
    network = SlicedNetwork(mlp("4=3"), {"g": "4-3"}, seed=0)
    mine = SgdLearner(network, data(count), data(), score_every=10)
    assert len(mine.scored[1]) == scored
    assert len(mine.samples[1]) == count - scored
    assert mine.score({}) > 0


def test_a_module_that_is_not_wrapped_is_one_line():
    with pytest.raises(ModelError, match="not a Sequential; wrap the module first: SlicedNetwork"):
        SgdLearner(mlp("4=5=3"), data(), data())  # type: ignore[arg-type]
