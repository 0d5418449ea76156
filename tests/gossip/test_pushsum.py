"""Splitting and absorbing conserve sums and weights, exactly so with fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.gossip import ONE, Mass, absorb, is_finite, split, total
from gossamer.gossip.pushsum import MAX_WEIGHT, portion

fractions = st.fractions(min_value=-1000, max_value=1000, max_denominator=1000)
vectors = st.lists(fractions, min_size=2, max_size=2).map(lambda v: np.array(v, dtype=object))
weights = st.integers(1, 1 << 50)


@given(vectors, st.integers(2, 1 << 50), st.data())
def test_split_conserves_exactly(value: np.ndarray, weight: int, data: st.DataObject) -> None:
    share = data.draw(st.integers(1, weight))
    kept, given_ = split(Mass(value, weight), share)
    assert kept.weight + given_.weight == weight
    assert list(total([kept, given_])[0]) == list(total([Mass(value, weight)])[0])


@given(vectors, vectors, st.integers(2, 1 << 50), st.data())
def test_the_compression_error_is_kept_by_the_sender(
    value: np.ndarray, sent: np.ndarray, weight: int, data: st.DataObject
) -> None:
    share = data.draw(st.integers(1, weight - 1))
    kept, given_ = split(Mass(value, weight), share, sent)
    assert list(given_.value) == list(sent)
    assert list(total([kept, given_])[0]) == list(total([Mass(value, weight)])[0])


@given(vectors, vectors, st.integers(0, 1 << 50), weights)
def test_absorb_conserves_exactly(a: np.ndarray, b: np.ndarray, wa: int, wb: int) -> None:
    together = absorb(Mass(a, wa), Mass(b, wb))
    assert together.weight == wa + wb
    assert list(total([together])[0]) == list(total([Mass(a, wa), Mass(b, wb)])[0])


@pytest.mark.parametrize("own", [np.float32, np.float64])
@pytest.mark.parametrize("other", [np.float16, np.float32, np.float64])
def test_absorb_keeps_the_dtype_of_the_receiver(own: type, other: type) -> None:
    for weight in (0, ONE):
        mine = Mass(np.array([1, 2], dtype=own), weight)
        result = absorb(mine, Mass(np.array([3, 4], dtype=other), 3 * ONE))
        assert result.value.dtype == own
        wanted = [3, 4] if weight == 0 else [2.5, 3.5]
        np.testing.assert_allclose(result.value, wanted)
    assert list(mine.value) == [1, 2]


def test_equal_values_stay_equal_to_the_last_bit() -> None:
    value = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    result = absorb(Mass(value, ONE), Mass(value.copy(), ONE // 3))
    assert np.array_equal(result.value, value)


def test_a_newcomer_takes_over_a_copy() -> None:
    theirs = np.array([1.0])
    mine = absorb(Mass(np.array([99.0]), 0), Mass(theirs, 5))
    theirs[0] = 7.0
    assert mine.value[0] == 1.0


def test_impossible_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="a mass needs a weight from 0 to"):
        Mass(np.zeros(1), MAX_WEIGHT + 1)
    with pytest.raises(ValueError, match="from 1 to the weight 4 of the mass, not 5"):
        split(Mass(np.zeros(1), 4), 5)
    with pytest.raises(ValueError, match="not 0"):
        split(Mass(np.zeros(1), 4), 0)


def test_portions_round_down_and_fractions_are_finite() -> None:
    assert portion(7, 0.5) == 3
    assert portion(9, Fraction(1, 3)) == 3
    assert portion((1 << 60) + 1, 1.0) == (1 << 60) + 1
    assert is_finite(np.array([Fraction(1)], dtype=object))
    assert not is_finite(np.array([1.0, np.inf]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_found_among_the_largest_floats(
    dtype: str, bad: float
) -> None:
    values = np.full(1000, np.finfo(dtype).max, dtype)
    assert is_finite(values)  # without a warning, though their squares are too large
    values[777] = bad
    assert not is_finite(values)
