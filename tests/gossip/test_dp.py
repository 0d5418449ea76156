"""Releases with noise: bounded, unbiased, and their epsilon is the accountant's."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from gossamer.gossip import PrivacyError, ReleasePlan, Releases

BEFORE = np.linspace(-1, 1, 2000).astype(np.float32)


def releases(clip=1.0, noise=1.0, **plan):
    return Releases(ReleasePlan(clip, noise, **plan), seed=3)


def test_what_is_released_is_the_clipped_update_with_noise():
    made = releases(clip=2.0, noise=0.5)
    after = BEFORE + np.float32(1.0)  # an update of length √2000
    out = made.release(BEFORE, after)
    assert out.dtype == np.float32
    noise = out.astype(np.float64) - BEFORE - 2.0 / math.sqrt(2000)
    assert noise.mean() == pytest.approx(0, abs=0.1)
    assert noise.std() == pytest.approx(1.0, rel=0.05)  # noise · clip
    assert made.counters == {"released": 1, "clipped": 1}
    assert made.norms == [pytest.approx(math.sqrt(2000), rel=1e-6)]


def test_a_short_update_is_not_stretched():
    made = releases(clip=100.0, noise=1e-6)
    out = made.release(BEFORE, BEFORE + np.float32(0.5))
    np.testing.assert_allclose(out, BEFORE + 0.5, atol=1e-3)
    assert made.counters["clipped"] == 0


def test_noise_is_never_the_same_unless_seeded():
    plan = ReleasePlan(1.0, 1.0)
    first, second = (Releases(plan).release(BEFORE, BEFORE) for _ in range(2))
    assert np.abs(first - second).max() > 1.0
    again = Releases(plan)
    assert np.abs(again.release(BEFORE, BEFORE) - again.release(BEFORE, BEFORE)).max() > 1.0


def test_epsilon_is_that_of_composed_gaussians():
    """Against the exact curve of one Gaussian of the composed width (Balle and Wang's formula)."""
    made = releases(noise=4.0)
    assert made.epsilon() == 0.0
    for _ in range(10):
        made.release(BEFORE, BEFORE)
    found = made.epsilon()
    exact = exact_epsilon(4.0 / math.sqrt(10), 1e-5)
    assert exact <= found <= 1.2 * exact  # an upper bound, and not a lazy one
    assert made.report() == {"epsilon": found, "delta": 1e-5, "releases": 10, "clipped": 0}
    assert releases(noise=8.0).epsilon(10) < found < releases(noise=4.0).epsilon(20)


def exact_epsilon(sigma: float, delta: float) -> float:
    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    low, high = 0.0, 100.0
    for _ in range(100):
        e = (low + high) / 2
        found = phi(0.5 / sigma - e * sigma) - math.exp(e) * phi(-0.5 / sigma - e * sigma)
        low, high = (e, high) if found > delta else (low, e)
    return high


def test_a_restart_forgets_no_cost():
    again = Releases(ReleasePlan(1.0, 4.0), releases=10, seed=1)
    assert again.epsilon() == releases(noise=4.0).epsilon(10)


def test_releases_stop_at_the_limit():
    made = releases(noise=4.0, limit=2.0)
    while made.epsilon(made.count + 1) <= 2.0:
        made.release(BEFORE, BEFORE)
    assert 1 < made.count < 100
    with pytest.raises(PrivacyError, match="one more release would exceed epsilon 2"):
        made.release(BEFORE, BEFORE)
    assert made.epsilon() <= 2.0 < made.epsilon(made.count + 1)


@pytest.mark.parametrize(
    "wrong",
    [{"clip": 0.0}, {"clip": math.inf}, {"noise": 0.0}, {"delta": 1.0}, {"limit": -1.0}],
)
def test_plans_without_sense_are_refused(wrong):
    with pytest.raises(PrivacyError, match="differential privacy: "):
        ReleasePlan(**({"clip": 1.0, "noise": 1.0} | wrong))


def test_broken_updates_are_not_released():
    made = releases()
    with pytest.raises(PrivacyError, match="not finite"):
        made.release(BEFORE, np.full_like(BEFORE, np.nan))
    with pytest.raises(PrivacyError, match="2000 values before training, 3 after"):
        made.release(BEFORE, BEFORE[:3])
    assert made.count == 0


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(PrivacyError, match=r"pip install 'gossamer\[dp\]'"):
        releases()
