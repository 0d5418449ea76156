"""Slices given as shares of parts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.models import ModelError, Slicing, discover, mlp

ANATOMY = discover(mlp("6=10=5=3"))  # parts: input, 0, 2, 4


def layouts(slices, rest="mine", anatomy=ANATOMY):
    slicing = Slicing(anatomy, slices, rest=rest)
    return {model: slicing.layout(model).as_slice() for model in slicing.models}


def test_a_share_is_of_hidden_parts_and_ends_go_to_the_first_model():
    assert layouts({"global": 0.8}) == {"global": "6-8-4-3", "mine": "0-2-1-0"}
    assert layouts({"global": 0}) == {"global": "6-0-0-3", "mine": "0-10-5-0"}
    assert layouts({"global": 0.6, "group": 0.2}) == {
        "global": "6-6-3-3", "group": "0-2-1-0", "mine": "0-2-1-0",
    }  # fmt: skip


def test_whoever_asks_gets_a_cell_if_there_are_enough():
    assert layouts({"a": 0.95, "b": 0.05}, rest=None) == {"a": "6-9-4-3", "b": "0-1-1-0"}
    tight = discover(mlp("6=10=1=3"))
    with pytest.raises(
        ModelError, match=r"part '2' has .* too few for the 2 models .* give model 'b' none"
    ):
        layouts({"a": 0.8, "b": 0.2}, anatomy=tight)
    slices = {"a": 0.8, "b": {"*": 0.2, "2": 0}}
    assert layouts(slices, rest=None, anatomy=tight) == {"a": "6-8-1-3", "b": "0-2-0-0"}


def test_the_last_pattern_that_matches_counts_and_ends_are_overridden_by_name():
    slices = {"global": {"*": 0.8, "2": 0.2, "4": 0}}
    assert layouts(slices) == {"global": "6-8-1-0", "mine": "0-2-4-3"}
    slices = {"global": {"*": 1.0, "[4]": 0}, "group": {"4": 1}}
    assert layouts(slices, rest=None) == {"global": "6-10-5-0", "group": "0-0-0-3"}


def test_whole_layer_schemes_are_ordinary_slices():
    """FedPer: everyone's backbone, a head of one's own. And the other way round."""
    assert layouts({"base": {"*": 1.0, "4": 0}}) == {"base": "6-10-5-0", "mine": "0-0-0-3"}
    assert layouts({"head": {"input": 0, "4": 1}}) == {"head": "0-0-0-3", "mine": "6-10-5-0"}


def test_shares_follow_indices_and_layouts():
    slices = {"a": {"0": [9, 0]}, "b": "6-2-0-3", "c": {"0": 0.5, "input": 0, "4": 0}}
    slicing = Slicing(ANATOMY, slices, rest="mine")
    assert slicing.cells["a"][1].tolist() == [9, 0]
    assert slicing.cells["b"][1].tolist() == [1, 2]
    assert slicing.cells["c"][1].tolist() == [3, 4, 5, 6, 7]


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=3),
    st.lists(st.integers(8, 40), min_size=3, max_size=4),
)
def test_shares_that_add_up_to_one_take_everything(weights, sizes):
    total = sum(weights)
    shares = {f"m{index}": weight / total for index, weight in enumerate(weights)}
    sizes = [size * 3 for size in sizes]
    slicing = Slicing(discover(mlp("=".join(map(str, sizes)))), shares)
    for part, size in enumerate(sizes):
        cells = np.concatenate([parts[part] for parts in slicing.cells.values()])
        assert sorted(cells) == list(range(size))
    for index in range(1, len(sizes) - 1):
        for model, share in shares.items():
            assert abs(len(slicing.cells[model][index]) - share * sizes[index]) <= 1


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ({"a": 1.2}, r"model 'a': a share is between 0 and 1, not 1.2"),
        ({"a": 0.8, "b": 0.3}, r"shares of part '0' add up to 1.1 with model 'b'"),
        ({"a": {"head*": 0.5}}, r"no part is called 'head\*'; parts are input, 0, 2, 4"),
        (
            {"a": {"2": [0, 1, 2]}, "b": {"2": 0.8}},
            r"model 'b': a share of 0.8 is 4 cells of part '2', which has 5, 2 of them free",
        ),
        ({"a": {"0": 0.5, "2": [1]}}, r"part '0' is given as a share \(0.5\) and others as lists"),
    ],
)
def test_bad_shares_name_model_and_part(slices, message):
    with pytest.raises(ModelError, match=message):
        layouts(slices)


def test_peers_that_are_cut_alike_share_their_coordinates():
    one, two = (Slicing(ANATOMY, {"g": 0.8}, rest=name) for name in ("local-a", "local-b"))
    other = Slicing(ANATOMY, {"g": 0.6}, rest="local-a")
    assert one.coordinates_or_slice("g") is two.coordinates_or_slice("g")
    assert one.coordinates_or_slice("local-a") is two.coordinates_or_slice("local-b")
    assert one.schema("g") == two.schema("g")
    assert len(other.coordinates_or_slice("g")) < len(one.coordinates_or_slice("g"))
