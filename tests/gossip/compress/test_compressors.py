"""What compressors keep, that they are unbiased where they say so, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.gossip import Packed, PackError
from gossamer.gossip.compress import (
    CompressError,
    distortion,
    parse,
    roundtrip,
    unpack,
)

SHAPES = [(24, 30), (24,), (3, 2)]
SIZE = 24 * 30 + 24 + 6
NAMES = [
    "float16", "int8", "int5", "int2", "mask:0.1", "subsample:0.25", "top-k:0.05", "low-rank:2",
    "top-k:0.05+int8", "low-rank:2+int4", "mask:0.5+top-k:0.1+float16", "low-rank:1+mask:0.5+int8",
]  # fmt: skip


def values(seed: int = 0, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def over_the_wire(packed: Packed) -> Packed:
    return Packed.parse(memoryview(b"".join(packed.buffers())), packed.length)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_is_what_is_read(name):
    packed = parse(name).pack(values(), rng(), SHAPES, base=-7)
    arrived = over_the_wire(packed)
    assert arrived.base == -7
    assert np.array_equal(unpack(arrived, SIZE), unpack(packed, SIZE))
    read, size = roundtrip(name, values(), rng(), SHAPES)
    assert np.array_equal(read, unpack(packed, SIZE))
    assert size == packed.nbytes < 4 * SIZE
    assert 0 < distortion(values(), read) < 2.5


@pytest.mark.parametrize("name", ["int8", "int3", "int2", "subsample:0.3", "subsample:0.5+int4"])
def test_unbiased_over_ten_thousand_draws(name):
    pipeline = parse(name)
    assert pipeline.unbiased
    given_values = np.array([0.0, 1.0, -0.3, 0.011, 0.5, -2.0, 1.9, 0.02], dtype=np.float32)
    copies, random = np.tile(given_values, 200), rng(5)
    reads = [unpack(pipeline.pack(copies, random), copies.size) for _ in range(50)]
    draws = np.concatenate(reads).astype(np.float64).reshape(10_000, 8)
    mean, error = draws.mean(0), draws.std(0) / 100
    assert (np.abs(mean - given_values) <= 4.5 * error + 1e-6).all()


def test_the_test_above_sees_bias():
    read = np.mean([unpack(parse("mask:0.3").pack(values(), rng(i)), SIZE) for i in range(200)], 0)
    assert not parse("mask:0.3").unbiased
    assert distortion(values(), read) > 0.5


def test_int8_is_near_and_a_quarter():
    read, size = roundtrip("int8", values(size=100_000), rng())
    assert distortion(values(size=100_000), read) < 0.012
    assert size < 4 * 100_000 / 3.9


def test_top_k_keeps_the_largest():
    given_values = np.array([0.1, -5, 0.2, 3, -0.3, 0.01, 0, 0.5, 1, -1], dtype=np.float32)
    read, _ = roundtrip("top-k:0.2", given_values, rng())
    assert read.tolist() == [0, -5, 0, 3, 0, 0, 0, 0, 0, 0]


def test_mask_sends_no_places_and_keeps_its_rate():
    read, size = roundtrip("mask:0.1", values(size=50_000), rng())
    kept = np.count_nonzero(read)
    assert 4700 < kept < 5300
    assert size < 4 * kept + 64
    assert set(read[read != 0]) <= set(values(size=50_000))


def test_low_rank_is_exact_on_matrices_of_that_rank():
    a, b = rng(2).standard_normal((24, 2)), rng(3).standard_normal((2, 30))
    given_values = values()
    given_values[: 24 * 30] = (a @ b).reshape(-1)
    read, size = roundtrip("low-rank:2", given_values, rng(), SHAPES)
    assert distortion(given_values, read) < 1e-5
    assert size < 4 * (2 * 54 + 30) + 64
    assert np.array_equal(read[24 * 30 :], given_values[24 * 30 :])  # biases go as they are


def test_low_rank_is_near_the_best_of_its_rank():
    matrix = values()[: 24 * 30].reshape(24, 30)
    left, sizes, right = np.linalg.svd(matrix)
    best = (left[:, :4] * sizes[:4]) @ right[:4]
    read, _ = roundtrip("low-rank:4", matrix.reshape(-1), rng(), [(24, 30)])
    assert distortion(matrix.reshape(-1), read) < 1.06 * distortion(matrix, best)


@settings(max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    data=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40),
)
def test_any_finite_values_come_back_finite_or_are_refused(name, data):
    given_values = np.array(data, dtype=np.float32)
    packed = parse(name).pack(given_values, rng(), [(1, len(data))])
    try:
        read, cause_found = unpack(packed, len(data)), "none"
    except PackError as error:
        read, cause_found = given_values, error.cause
    assert cause_found in ("none", "non-finite")  # scaled beyond float32
    assert read.shape == given_values.shape
    assert np.isfinite(read).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zip", "no compressor is called 'zip'"),
        ("", "no compressor is called ''"),
        ("int8+", "nothing can follow 'int8'"),
        ("int8+top-k:0.1", "nothing can follow 'int8'"),
        ("int9", "2 to 8 bits"),
        ("int1", "2 to 8 bits"),
        ("top-k", "needs a number, as in top-k:0.1"),
        ("top-k:0", "must be above 0 and at most 1"),
        ("mask:1.5", "must be above 0 and at most 1"),
        ("subsample:nan", "needs a number"),
        ("low-rank:2.5", "needs a number, as in low-rank:4"),
        ("low-rank:0", "at least 1"),
        ("mask:0.5+low-rank:2", "put it first"),
        ("mask:0.5+mask:0.5+mask:0.5+mask:0.5", "more than 3"),
        ("float16:2", "no compressor is called 'float16:2'"),
    ],
)
def test_bad_names_say_what_is_wrong(name, words):
    with pytest.raises(CompressError, match=words):
        parse(name)


def test_low_rank_says_which_shapes_it_cannot_use():
    with pytest.raises(CompressError, match=r"low-rank:4 makes no block shorter.*3×2, 24"):
        parse("low-rank:4").check_shapes([(3, 2), (24,)])
    with pytest.raises(CompressError, match="do not make up a vector of 9 values"):
        roundtrip("low-rank:1", values(size=9), rng(), [(4, 5)])


# --- hostile bytes -------------------------------------------------------------------------------


def cause(packed: Packed, length: int = SIZE) -> str:
    with pytest.raises(PackError) as error:
        unpack(packed, length)
    return error.value.cause


@pytest.mark.parametrize(
    "stages",
    [
        [["zip"]],
        [["float32", 1]],
        [["int8"], ["float32"]],
        [["float32"], ["float32"]],
        [["top-k", 10]],
        [["top-k", 2**40], ["float32"]],
        [["top-k", -1], ["float32"]],
        [["top-k", True], ["float32"]],
        [["top-k", "3"], ["float32"]],
        [["mask", 1, 2**33], ["float32"]],
        [["mask", -1, 1], ["float32"]],
        [["mask", 2**80, 1], ["float32"]],
        [["int", 9, 256]],
        [["int", 8, 0]],
        [["int", 8, 2**40]],
        [["low-rank", 1, [[2**40, 2**40]]], ["float32"]],
        [["low-rank", 1, "12"], ["float32"]],
        [["low-rank", 1, [[5, 5, 5]]], ["float32"]],
        [["low-rank", 0, [[SIZE, 1]]], ["float32"]],
    ],
)
def test_senseless_facts_are_garbage(stages):
    assert cause(Packed(SIZE, tuple(stages), (bytes(64),))) == "garbage"


def test_lengths_are_checked_before_anything_is_made_of_them():
    huge = Packed(2**62, (["mask", 1, 1], ["float32"]), (b"",))
    assert cause(huge) == "garbage"
    assert cause(Packed(SIZE, (["float32"],), (bytes(4 * SIZE - 1),))) == "truncated"
    assert cause(Packed(SIZE, (["float32"],), (bytes(4 * SIZE + 1),))) == "trailing"
    assert cause(Packed(SIZE, (["int", 8, 1],), (bytes(8),))) == "truncated"


def test_places_must_rise_and_lie_inside():
    for places in ([5, 5], [9, 2], [1, SIZE]):
        data = np.array(places, "<u2").tobytes() + bytes(8)
        assert cause(Packed(SIZE, (["top-k", 2], ["float32"]), (data,))) == "garbage"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(bad):
    plain = np.full(SIZE, bad, "<f4").tobytes()
    assert cause(Packed(SIZE, (["float32"],), (plain,))) == "non-finite"
    scale = np.array([bad], "<f4").tobytes() + bytes(SIZE)
    assert cause(Packed(SIZE, (["int", 8, 1024],), (scale,))) == "non-finite"
    large = np.full(2 * (SIZE + 1), 1e38, "<f4")
    large[:2] = 1e30
    lows = Packed(SIZE, (["low-rank", 1, [[2, SIZE // 2]]], ["float32"]), (large.tobytes(),))
    assert cause(lows) in ("non-finite", "trailing")


@settings(max_examples=60)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_changed_bytes_raise_nothing_else(name, data):
    good = b"".join(parse(name).pack(values(), rng(), SHAPES).buffers())
    start = data.draw(st.integers(0, min(len(good) - 1, 120)))
    junk = data.draw(st.binary(max_size=12))
    cut = data.draw(st.integers(0, 12))
    bad = good[:start] + junk + good[start + cut :]
    try:
        read = unpack(Packed.parse(memoryview(bad), SIZE), SIZE)
    except PackError:
        return
    assert read.shape == (SIZE,)
    assert np.isfinite(read).all()
