"""Log-priors: the estimate of class shares, and learners that add them to their outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gossamer.models import (
    ModelError,
    SgdLearner,
    SlicedNetwork,
    class_correlation,
    log_priors,
    mlp,
)

# --- estimates ------------------------------------------------------------------------------------


def drawn(seed: int, sizes: list[int], pi: np.ndarray, alpha: float | None) -> np.ndarray:
    """Dirichlet-multinomial counts of peers with these numbers of samples; multinomial without alpha."""
    rng = np.random.default_rng(seed)
    shares = [pi if alpha is None else rng.dirichlet(alpha * pi) for _ in sizes]
    return np.array([rng.multinomial(m, p) for m, p in zip(sizes, shares, strict=True)])


EQUAL = np.full(10, 0.1)
UNEQUAL = np.array([0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.04, 0.03, 0.02, 0.01])


@pytest.mark.parametrize("alpha", [3.0, 10.0, 30.0])
@pytest.mark.parametrize("sizes", [[20] * 16, [400] * 16, [10, 20, 50, 300] * 4])
@pytest.mark.parametrize("pi", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_the_correlation_of_drawn_counts_is_found(
    alpha: float, sizes: list[int], pi: np.ndarray
) -> None:
    estimates = [class_correlation(drawn(seed, sizes, pi, alpha))[0] for seed in range(100)]
    rho = 1 / (1 + alpha)
    error = np.std(estimates) / np.sqrt(len(estimates))
    # A ratio of means is a little biased with few peers, besides the error of the simulation.
    assert np.mean(estimates) == pytest.approx(rho, abs=3 * error + 0.05 * rho)


@pytest.mark.parametrize("peers", [2, 40])
@pytest.mark.parametrize("samples", [20, 400])
@pytest.mark.parametrize("pi", [EQUAL, UNEQUAL, np.array([0.7, 0.3])], ids=["10", "u", "2"])
def test_the_standard_error_is_the_one_by_chance_and_alarms_are_rare(
    peers: int, samples: int, pi: np.ndarray
) -> None:
    results = [class_correlation(drawn(s, [samples] * peers, pi, None)) for s in range(600)]
    scores = np.array([rho / error for rho, error in results])
    assert abs(scores.mean()) < 0.2
    assert 0.8 < scores.std() < 1.2
    assert np.mean(scores > 2) < 0.075


@pytest.mark.parametrize(
    ("alpha", "samples", "power"), [(30.0, 20, 0.9), (10.0, 20, 0.99), (100.0, 400, 0.99)]
)
def test_real_differences_are_found(alpha: float, samples: int, power: float) -> None:
    priors = [log_priors(drawn(s, [samples] * 16, EQUAL, alpha), "auto") for s in range(200)]
    assert np.mean([prior is not None for prior in priors]) >= power


def test_the_correlation_is_one_for_single_classes_and_the_formula_holds() -> None:
    assert class_correlation(np.diag([7, 5, 6]))[0] == pytest.approx(1)
    # By hand: π = (½, ½), MSB = 2·4·2·(¼)²/1 = 1, MSW = 2·4·2·(¾·¼)/6 = ½, m̄ = 4, tr Σ = ½, tr Σ² = ¼.
    rho, error = class_correlation([[3, 1], [1, 3]])
    assert rho == pytest.approx((1 - 0.5) / (1 + 3 * 0.5))
    assert error == pytest.approx((2 * 0.25) ** 0.5 / (4 * 0.5))


@pytest.mark.parametrize(
    "counts",
    [[[3, 4]], [[3, 4], [0, 0]], [[9, 0], [5, 0]], [[1, 0], [0, 1], [1, 0]], [[0, 0], [0, 0]]],
)
def test_counts_that_cannot_tell_give_no_prior(counts: list[list[int]]) -> None:
    assert class_correlation(counts) == (0, 0)
    assert log_priors(counts, "auto") is None


def test_own_counts_every_class_once_more() -> None:
    found = log_priors([[3, 0, 1], [0, 0, 0]], "own")
    np.testing.assert_allclose(np.exp(np.asarray(found)), [[4 / 7, 1 / 7, 2 / 7], [1 / 3] * 3])
    assert log_priors([[3, 0, 1]], "none") is None


@pytest.mark.parametrize(("alpha", "at_least_one_each"), [(40.0, False), (3.0, True)])
def test_auto_draws_shares_towards_those_of_all_peers(
    alpha: float, at_least_one_each: bool
) -> None:
    counts = drawn(1, [50] * 15, EQUAL, alpha)
    counts = np.concatenate([counts, np.zeros((1, 10), int)])  # a peer without samples
    priors = log_priors(counts, "auto")
    assert priors is not None
    shares, common = np.exp(priors), (counts.sum(0) + 1) / (counts.sum() + 10)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    np.testing.assert_allclose(shares[-1], common)
    pseudo_samples = 1 / class_correlation(counts)[0] - 1
    assert (pseudo_samples < 10) == at_least_one_each
    pseudo_samples = max(pseudo_samples, 10)
    expected = (counts[0] + pseudo_samples * common) / (50 + pseudo_samples)
    np.testing.assert_allclose(shares[0], expected)


def test_auto_is_nearer_to_the_true_shares_than_own_with_few_samples() -> None:
    """Kullback–Leibler distance from the true shares, which is what a wrong prior costs."""
    rng, distance = np.random.default_rng(0), {"own": 0.0, "auto": 0.0}
    for _ in range(50):
        true = rng.dirichlet(10 * UNEQUAL, size=16) + 1e-9
        counts = np.array([rng.multinomial(20, p / p.sum()) for p in true])
        for how in ("own", "auto"):
            priors = log_priors(counts, how)
            assert priors is not None
            distance[how] += float((true * (np.log(true) - priors)).sum(axis=1).mean()) / 50
    assert distance["auto"] < 0.75 * distance["own"]


def test_priors_are_finite_for_peers_with_one_class_and_classes_of_nobody() -> None:
    counts = np.zeros((4, 6), int)
    counts[range(4), range(4)] = 50
    for how in ("own", "auto"):
        priors = log_priors(counts, how)
        assert priors is not None
        assert np.isfinite(priors).all()
        assert (priors.argmax(axis=1) == range(4)).all()


@pytest.mark.parametrize("counts", [[1, 2], [[1], [2]], [[1, -1]], [[1, np.nan]]])
def test_other_arrays_are_refused(counts: Any) -> None:
    with pytest.raises(ModelError, match=r"counts of labels must be .* 0 or more"):
        log_priors(counts, "own")


def test_an_unknown_kind_is_refused() -> None:
    how: Any = "mean"
    with pytest.raises(ModelError, match="unknown prior 'mean': there are auto, own, none"):
        log_priors([[1, 2]], how)


# --- learners -------------------------------------------------------------------------------------

PRIOR = torch.tensor([0.7, 0.2, 0.1]).log()


def data(count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def make(layout: str = "4=5=3", **options: Any) -> SgdLearner:
    network = SlicedNetwork(mlp(layout), {"g": layout.replace("=", "-")}, peer="a", seed=0)
    return SgdLearner(network, data(), data(), **{"local_samples": 40, "batch": 40} | options)


def test_training_descends_on_the_loss_with_the_prior() -> None:
    learner, (x, y) = make(rate=0.3, log_prior=PRIOR), data()
    parameters = list(learner.network.module.parameters())
    loss = F.cross_entropy(learner.network.module(x) + PRIOR, y)
    expected = [
        w - 0.3 * g for w, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True)
    ]
    metrics = learner.train(1)
    assert metrics.mean_loss == pytest.approx(float(loss.detach()), rel=1e-5)
    for got, want in zip(parameters, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_tests_and_accuracies_see_the_prior() -> None:
    learner, (x, y) = make(log_prior=PRIOR), data()
    outputs = learner.network.module(x).detach()
    test = learner.test()
    assert test.loss == pytest.approx(float(F.cross_entropy(outputs + PRIOR, y) * 40), rel=1e-5)
    right = int(((outputs + PRIOR).argmax(1) == y).sum())
    assert test.correct == right != int((outputs.argmax(1) == y).sum())
    own = make(log_prior=PRIOR, right=lambda out, y: (out + 0).argmax(1) == y)
    assert own.test().correct == right
    assert own.train(1).correct == right
    torch.testing.assert_close(
        learner.losses(outputs, y), F.cross_entropy(outputs + PRIOR, y, reduction="none")
    )


def test_a_prior_can_be_set_and_removed_later() -> None:
    learner, plain = make(), make()
    learner.log_prior = PRIOR.double()
    assert learner.test() == make(log_prior=PRIOR).test() != plain.test()
    learner.log_prior = None
    assert learner.test() == plain.test()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "squared"}, "is added to logits, so the loss must be 'cross-entropy'"),
        ({"loss": lambda out, y: out[:, 0]}, "is added to logits"),
        ({"log_prior": torch.zeros(4)}, "has 4 values, but the network has 3 outputs"),
        ({"log_prior": torch.zeros(1, 3)}, "one value for each class"),
        ({"log_prior": [0.0, 0.0, 0.0]}, "give a torch tensor"),
        ({"log_prior": torch.tensor([0.0, -torch.inf, 0.0])}, "all values must be finite"),
    ],
)
def test_a_prior_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"peer 'a', log_prior: .*{message}") as error:
        make("4=5=3", **{"log_prior": PRIOR} | options)
    assert "\n" not in str(error.value)


def test_a_single_output_is_refused() -> None:
    network = SlicedNetwork(mlp("4=5=1"), {"g": "4-5-1"}, peer="a", seed=0)
    x, y = data()
    with pytest.raises(ModelError, match="a single output for two classes"):
        SgdLearner(network, (x, y % 2), (x, y % 2), log_prior=torch.zeros(2))
