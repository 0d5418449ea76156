"""Named metrics: their values, and how they add up over samples and peers."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import nn

from gossamer.models import METRICS, Metrics, ModelError, SgdLearner, SlicedNetwork, measure
from gossamer.models.stack import form_group, group_learners

RANDOM = torch.Generator().manual_seed(3)
LABELS = torch.randint(0, 4, (200,), generator=RANDOM)
OUTPUTS = torch.randn(200, 4, generator=RANDOM) + 0.7 * nn.functional.one_hot(LABELS, 4)


def value(name: str, outputs: torch.Tensor, labels: torch.Tensor) -> float:
    ((_, (number, _)),) = measure([METRICS[name]], outputs, labels).items()
    return number


def test_f1_and_auc_are_those_of_scikit_learn() -> None:
    said = OUTPUTS.argmax(1)
    assert value("f1", OUTPUTS, LABELS) == pytest.approx(
        reference.f1_score(LABELS, said, average="macro")
    )
    expected = reference.roc_auc_score(LABELS, OUTPUTS.softmax(1), multi_class="ovr")
    assert value("auc", OUTPUTS, LABELS) == pytest.approx(expected)


@pytest.mark.parametrize("columns", [1, 2])
def test_auc_of_two_classes_with_equal_scores(columns: int) -> None:
    labels, score = LABELS % 2, (OUTPUTS[:, 0] * 2).round()
    outputs = score[:, None] if columns == 1 else torch.stack([-score, score], dim=1)
    assert value("auc", outputs, labels) == pytest.approx(reference.roc_auc_score(labels, score))
    assert value("f1", outputs, labels) == pytest.approx(
        reference.f1_score(labels, score > 0, average="macro")
    )


def test_errors_of_a_regression() -> None:
    outputs, targets = OUTPUTS[:, :1], OUTPUTS[:, 1]
    theirs = {
        "mae": reference.mean_absolute_error, "mse": reference.mean_squared_error,
        "r2": reference.r2_score,
    }  # fmt: skip
    for name, function in theirs.items():
        assert value(name, outputs, targets) == pytest.approx(function(targets, outputs[:, 0]))
    assert value("rmse", outputs, targets) ** 2 == pytest.approx(value("mse", outputs, targets))


def test_the_accuracies_of_classes_add_up_by_their_samples() -> None:
    halves = [
        Metrics(named=measure([METRICS["class-accuracy"]], OUTPUTS[half], LABELS[half]))
        for half in (slice(0, 50), slice(50, None))
    ]
    whole = measure([METRICS["class-accuracy"]], OUTPUTS, LABELS)
    assert (halves[0] + halves[1]).named == {k: pytest.approx(v) for k, v in whole.items()}
    hits = sum(number * weight for number, weight in whole.values())
    assert hits == pytest.approx(float((OUTPUTS.argmax(1) == LABELS).sum()))


def test_a_metric_that_only_one_has_keeps_its_weight() -> None:
    total = Metrics(samples=2, named={"a": (1.0, 2)}) + Metrics(samples=6, named={"b": (3.0, 6)})
    assert total.named == {"a": (1.0, 2), "b": (3.0, 6)}
    assert (total + Metrics(named={"a": (4.0, 1)})).values == {"a": 2.0, "b": 3.0}


def test_what_cannot_be_measured_is_left_out() -> None:
    ones = torch.ones(5, dtype=torch.int64)
    assert measure([METRICS["auc"]], OUTPUTS[:5, :2], ones) == {}
    assert set(measure([METRICS["class-accuracy"]], OUTPUTS[:5, :2], ones)) == {"accuracy_1"}
    assert measure([METRICS["f1"]], OUTPUTS[:0], LABELS[:0]) == {}
    assert measure([METRICS["r2"]], OUTPUTS[:5, :1], ones.float()) == {}


def top_two(outputs, labels):
    near = outputs.topk(2, dim=1).indices == labels[:, None]
    return {"top_two": float(near.any(1).double().mean()), "margin": (0.5, 7)}


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda out, y: "much", "return a number, or"),
        (lambda out, y: {"accuracy": 1.0}, "two metrics are called 'accuracy'"),
        (lambda out, y: {"a/b": 1.0}, "a name has up to 64"),
        (lambda out, y: (1.0, -2), "a weight is 0 or more"),
    ],
)
def test_a_metric_that_returns_something_else_is_named(metric, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        measure([metric], OUTPUTS, LABELS)


def learner(seed: int, **options) -> SgdLearner:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 5, generator=random)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    network = SlicedNetwork(net, {"all": 1.0}, example=x[:2], peer=str(seed), seed=0)
    metrics = ["f1", "auc", "class-accuracy", top_two]
    options = {"local_samples": 30, "seed": seed, "metrics": metrics} | options
    return SgdLearner(network, (x[:40], y[:40]), (x[40:], y[40:]), **options)


def test_a_learner_measures_what_it_is_asked_for() -> None:
    one = learner(0)
    one.train(5)
    test = one.test()
    assert {"f1", "auc", "accuracy_0", "top_two", "margin"} <= test.values.keys()
    assert test.named["margin"] == (0.5, 7)
    assert test.named["top_two"][1] == 20
    assert replace(test, named={}) == learner_without_metrics().test()
    with pytest.raises(ModelError, match="did you mean 'auc'"):
        learner(0, metrics=["aux"])


def learner_without_metrics() -> SgdLearner:
    one = learner(0, metrics=())
    one.train(5)
    return one


@pytest.mark.parametrize("log_prior", [None, torch.tensor([0.0, 0.5, -0.5])])
def test_peers_in_a_stack_measure_what_they_measure_alone(log_prior) -> None:
    learners = [learner(seed, log_prior=log_prior) for seed in range(3)]
    alone = [one.test() for one in learners]
    (spec,) = group_learners(learners)
    assert spec.stackable
    group = form_group(spec, learners, None)
    stacked = dict(pair for task in group.test([0, 1, 2]) for pair in task())
    for index, test in enumerate(alone):
        assert stacked[index].values == {k: pytest.approx(v) for k, v in test.values.items()}
        assert not any(isnan(v) for v in test.values.values())


def test_a_single_output_predicts_the_second_class_above_the_threshold_of_its_loss() -> None:
    x = torch.tensor([[0.2], [0.4], [0.6], [0.8]])
    y = torch.tensor([0, 0, 1, 1])
    net = nn.Linear(1, 1)
    network = SlicedNetwork(net, {"all": 1.0}, example=x[:2], seed=0)
    with torch.no_grad():
        net.weight.fill_(1.0)
        net.bias.zero_()
    for loss, expected in (("squared", 1.0), ("cross-entropy", np.mean([0.0, 2 / 3]))):
        one = SgdLearner(network, (x, y), (x, y), loss=loss, metrics=["f1"])
        assert one.test().values["f1"] == pytest.approx(expected)


def test_a_metric_for_another_kind_of_targets_is_refused() -> None:
    x, classes, numbers = torch.randn(6, 4), torch.arange(6) % 3, torch.randn(6, 3)
    network = SlicedNetwork(nn.Linear(4, 3), {"g": 1.0}, peer="ann")
    with pytest.raises(ModelError, match="peer 'ann': metric 'f1' is for classes"):
        SgdLearner(network, (x, numbers), (x, numbers), loss="MSELoss", metrics=["mae", "f1"])
    with pytest.raises(ModelError, match="metric 'mae' is for targets that are numbers"):
        SgdLearner(network, (x, classes), (x, classes), metrics=["f1", "mae"])
