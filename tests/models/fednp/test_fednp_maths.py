"""FedNP's pure parts: moments against adaptive quadrature, factors, sites, the NPN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from gossamer.models import ModelError
from gossamer.models.fednp import (
    NPN,
    FedNPOptions,
    GaussianLinear,
    Natural,
    gaussian_kl,
    relu_moments,
    server_cavities,
    sigmoid_power_mean,
    tilted_factor,
    tilted_moments,
    updated_site,
)

GRID = list(itertools.product(np.linspace(-8, 8, 9), (0.01, 0.5, 2.0, 8.0, 16.0)))


def adaptive(m: float, s: float) -> tuple[float, float]:
    """Tilted mean and variance by adaptive quadrature."""
    deviation = np.sqrt(s)

    def integral(power: int, around: float = 0.0) -> float:
        def inside(t: float) -> float:
            c = m + deviation * t
            return (c - around) ** power * np.exp(-np.logaddexp(0, -c) - t * t / 2)

        return quad(inside, -12, 12, limit=400, epsabs=1e-14)[0]

    mean = integral(1) / integral(0)
    return mean, integral(2, mean) / integral(0)


@pytest.fixture(scope="module")
def exact() -> np.ndarray:
    return np.array([adaptive(m, s) for m, s in GRID])


def on_grid(method: str, nodes: int = 20) -> tuple[np.ndarray, np.ndarray]:
    m, s = torch.tensor(GRID, dtype=torch.float64).T
    mean, variance = tilted_moments(m, s, torch.ones_like(m), method, nodes)  # type: ignore[arg-type]
    return mean.numpy(), variance.numpy()


def test_quadrature_is_accurate_on_the_whole_grid_and_more_nodes_help(exact):
    errors = []
    for nodes in (10, 20, 40):
        mean, variance = on_grid("quadrature", nodes)
        assert (variance > 0).all()
        errors.append(np.abs(mean - exact[:, 0]).max())
    assert errors[1] <= 0.03
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("method", ["closed", "probit"])
def test_closed_forms_are_valid_on_the_grid_and_close_where_the_sigmoid_is_not_in_its_tail(
    method, exact
):
    mean, variance = on_grid(method)
    assert (variance > 0).all()
    near = np.array([m >= -1 and s <= 2 for m, s in GRID])
    assert np.abs(mean - exact[:, 0])[near].max() < 0.1


def test_the_corrected_power_means_match_quadrature():
    for power, m, s in itertools.product((1, 2, 3), (-2.0, 0.0, 3.0), (0.3, 4.0)):
        found = float(sigmoid_power_mean(torch.tensor(m), torch.tensor(s), power))
        wanted = quad(
            lambda t, m=m, s=s, p=power: (
                (1 + np.exp(-m - np.sqrt(s) * t)) ** -p * np.exp(-t * t / 2) / np.sqrt(2 * np.pi)
            ),
            -10, 10,
        )[0]  # fmt: skip
        assert found == pytest.approx(wanted, abs=0.03)


@given(
    st.floats(-20, 20),
    st.floats(1e-3, 50),
    st.floats(-10, 10),
    st.sampled_from(["quadrature", "probit"]),
)
def test_variance_is_positive_and_never_above_the_cavitys(mean, variance, f, method):
    m, s, f = (torch.tensor([v], dtype=torch.float64) for v in (mean, variance, f))
    _, found = tilted_moments(m, s, f, method)
    assert 0 < float(found) <= variance * (1 + 1e-6)


def test_a_silent_f_leaves_the_cavity_as_it_is_and_has_a_gradient():
    m, s = torch.tensor([0.7], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    for method in ("quadrature", "closed", "probit"):
        f = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        mean, variance = tilted_moments(m, s, f, method)  # type: ignore[arg-type]
        assert mean.item() == pytest.approx(0.7, abs=1e-9)
        assert variance.item() == pytest.approx(2.0, abs=1e-9)
        mean.sum().backward()
        # d mean / d f at 0 is sz · (1 − r2) = sz / 2 by Stein's lemma; the closed E2 is not quite 1/4.
        assert f.grad is not None
        assert f.grad.item() == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("method", ["quadrature", "closed", "probit"])
def test_a_tilted_factor_is_the_quotient_of_tilted_distribution_and_cavity(method):
    m, s = torch.tensor(GRID, dtype=torch.float64).T
    f = torch.linspace(-1.5, 1.5, len(m), dtype=torch.float64)
    cavity = Natural.of(m, s)
    wanted = Natural.of(*tilted_moments(m, s, f, method, 60)) - cavity  # type: ignore[arg-type]
    found = torch.stack(tilted_factor(m, s, f, method, 60))  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted.stack(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("method", ["quadrature", "probit"])
@pytest.mark.parametrize("precision", [1e6, 1e13, 1e17])
def test_a_tilted_factor_beside_a_sharp_cavity_is_not_lost_to_rounding(method, precision):
    """A cavity this sharp is a point: the factor is the curvature of log σ(f·z) there."""
    mean, f = (torch.tensor([v], dtype=torch.float64) for v in (0.4, 1.3))
    variance = torch.full_like(mean, 1 / precision)
    _, found = tilted_factor(mean, variance, f, method)
    up = torch.sigmoid(f * mean)
    assert float(found) == pytest.approx(float(f * f * up * (1 - up)), rel=0.1)
    if method == "quadrature":
        assert float(found) == pytest.approx(float(f * f * up * (1 - up)), rel=1e-5)


naturals = st.lists(st.tuples(st.floats(-50, 50), st.floats(0, 100)), min_size=3, max_size=3).map(
    lambda rows: Natural.unstack(torch.tensor(rows, dtype=torch.float64).T)
)


@settings(max_examples=60)
@given(st.lists(naturals, min_size=1, max_size=8))
def test_every_cavity_times_its_site_is_the_whole_product(sites):
    prior = Natural.standard(3)
    whole = sum(sites, prior)
    for site, cavity in zip(sites, server_cavities(prior, sites), strict=True):
        again = cavity + site
        scale = 1 + float(whole.stack().abs().max())
        assert float((again.stack() - whole.stack()).abs().max()) <= 1e-10 * scale
        mean, variance = whole.moments()
        torch.testing.assert_close(
            Natural.of(mean, variance).stack(), whole.stack(), rtol=1e-10, atol=1e-10
        )


def test_a_site_that_cannot_be_is_skipped_and_damping_goes_half_way():
    cavity, site = Natural.standard(2), Natural.flat(2)
    mean = torch.tensor([0.5, 0.5], dtype=torch.float64)
    variance = torch.tensor([0.5, 2.0], dtype=torch.float64)  # the second is wider than its cavity
    fresh = Natural.of(mean, variance) - cavity
    whole = updated_site(site, fresh)
    half = updated_site(site, fresh, damping=0.5)
    torch.testing.assert_close((cavity + whole).moments()[0][:1], mean[:1])
    assert whole.stack()[:, 1].tolist() == [0.0, 0.0]
    torch.testing.assert_close(half.stack(), 0.5 * whole.stack())


def run_ep(
    signals: torch.Tensor, order: np.random.Generator, sweeps: int, damping: float
) -> torch.Tensor:
    """Sequential EP: one random site after the other."""
    prior = Natural.standard(signals.shape[1])
    sites = [Natural.flat(signals.shape[1]) for _ in signals]
    for _ in range(sweeps):
        for k in order.permutation(len(sites)):
            cavity = server_cavities(prior, sites)[k]
            factor = tilted_factor(*cavity.moments(), signals[k], nodes=40)
            sites[k] = updated_site(sites[k], Natural(*factor), damping)
    return sum(sites, prior).stack()


def test_one_fixed_point_is_reached_from_random_orders():
    signals = torch.tensor([[0.5, -2.0], [1.5, 0.1], [-0.7, 3.0], [2.0, 0.0]], dtype=torch.float64)
    ends = [run_ep(signals, np.random.default_rng(seed), 60, 0.5 + 0.1 * seed) for seed in range(5)]
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-7, atol=1e-7)
    # And it is near the exact posterior ∝ N(z; 0, 1) · Π σ(f_k z), dimension by dimension.
    for d in range(2):
        f = signals[:, d].numpy()
        density = lambda z, f=f: np.exp(-z * z / 2 - np.logaddexp(0, -f * z).sum())  # noqa: E731
        norm = quad(density, -10, 10)[0]
        mean = quad(lambda z, p=density: z * p(z), -10, 10)[0] / norm
        found = ends[0][0, d] / ends[0][1, d]
        assert float(found) == pytest.approx(mean, abs=0.02)


def test_relu_moments_are_exact():
    mean, variance = torch.tensor([-3.0, -0.5, 0.0, 2.0]), torch.tensor([0.5, 2.0, 1.0, 4.0])
    found = relu_moments(mean.double(), variance.double())
    for m, s, a, b in zip(
        mean.tolist(), variance.tolist(), *(f.tolist() for f in found), strict=True
    ):

        def moment(power: int, m: float = m, s: float = s) -> float:
            return quad(
                lambda x: x**power * np.exp(-((x - m) ** 2) / 2 / s) / np.sqrt(2 * np.pi * s),
                0,
                m + 40,
            )[0]

        assert a == pytest.approx(moment(1), abs=1e-7)
        assert b == pytest.approx(moment(2) - moment(1) ** 2, abs=1e-7)


def test_a_gaussian_layers_moments_are_those_of_samples():
    random = torch.Generator().manual_seed(0)
    layer = GaussianLinear(3, 2)
    with torch.no_grad():
        layer.mean.copy_(torch.tensor([[1.0, -1.0, 0.5], [0.0, 2.0, 1.0]]))
        layer.raw.fill_(-1.0)
        layer.raw_bias.fill_(0.0)
    mean, variance = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.0, 0.2, 0.5])
    out, doubt = (value.detach() for value in layer(mean, variance))
    count = 200_000
    draw = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    x = mean + variance.sqrt() * draw(count, 3)
    spread, spread_bias = (
        torch.nn.functional.softplus(p.detach()) for p in (layer.raw, layer.raw_bias)
    )
    weights = layer.mean.detach() + spread.sqrt() * draw(count, 2, 3)
    y = (weights @ x[:, :, None])[:, :, 0] + spread_bias.sqrt() * draw(count, 2)
    torch.testing.assert_close(y.mean(0), out, atol=0.03, rtol=0.01)
    torch.testing.assert_close(y.var(0), doubt, atol=0.03, rtol=0.02)


def test_an_npn_is_sure_of_nothing_and_its_kl_is_zero_only_at_itself():
    npn = NPN(2, 4, 3)
    mean, variance = (value.detach() for value in npn(torch.zeros(2), torch.ones(2)))
    assert (variance > 0).all()
    assert float(gaussian_kl((mean, variance), (mean, variance))) == pytest.approx(0.0, abs=1e-6)
    assert float(gaussian_kl((mean + 1, variance), (mean, variance))) > 0


@pytest.mark.parametrize(
    ("knob", "text"),
    [
        ({"strength": -1.0}, "strength"),
        ({"strength": float("nan")}, "strength"),
        ({"auxiliary_rate": 0.0}, "auxiliary_rate"),
        ({"spread": 0.0}, "spread"),
        ({"damping": 0.0}, "damping"),
        ({"damping": 1.5}, "damping"),
        ({"dimensions": 0}, "dimensions"),
        ({"nodes": 1}, "nodes"),
        ({"moments": "printed"}, "moments"),
        ({"signals": "two"}, "signals"),
    ],
)
def test_knobs_out_of_range_are_named(knob, text):
    with pytest.raises(ValueError, match=text):
        FedNPOptions(**knob)


def test_bad_moments_and_factors_are_refused():
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ModelError, match="quadrature, closed, probit"):
        tilted_moments(one, one, one, "printed")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="2 to 100"):
        tilted_moments(one, one, one, nodes=1)
    with pytest.raises(ModelError, match="no distribution"):
        Natural.flat(1).moments()
    with pytest.raises(ModelError, match="above 0"):
        Natural.of(one, -one)
