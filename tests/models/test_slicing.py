"""Owners against a brute-force reading of the paper's R(π), and the paper's own pictures."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.models import (
    Anatomy,
    ModelError,
    ModelGraph,
    ParameterMap,
    Part,
    SlicedNetwork,
    Slicing,
    dense_axes,
    discover,
    mlp,
)

MODELS = ["a", "b", "c", "d"]


@st.composite
def orders(draw):
    """A random DAG: edges only from later to earlier models of a random arrangement."""
    arranged = draw(st.permutations(MODELS))
    return {
        model: draw(st.lists(st.sampled_from(arranged[:index]), unique=True)) if index else []
        for index, model in enumerate(arranged)
    }


@st.composite
def sliced(draw, order):
    """A random network in which every cell belongs to some model, as explicit shuffled indices."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    slices = {model: [[] for _ in sizes] for model in MODELS}
    for part, size in enumerate(sizes):
        for cell in draw(st.permutations(range(size))):
            slices[draw(st.sampled_from(MODELS))][part].append(cell)
    return sizes, {model: cells for model, cells in slices.items() if any(cells)}


def closure(order):
    """Transitive dependencies, by repeated substitution."""
    deps = {model: set(order[model]) for model in order}
    for _ in order:
        for model in deps:
            deps[model] |= set().union(*(deps[other] for other in deps[model]), set())
    return deps


def brute_force_owner(models, order, cross):
    """R(π) = { m ∈ M(π) : no m' ∈ M(π) depends on m }, read word by word."""
    deps = closure(order)
    left = {m for m in models if not any(m in deps[other] for other in models)}
    if len(left) == 1:
        return left.pop()
    return "&".join(sorted(left)) if cross else None


def complete(order, slices):
    """Drop dependencies on models that the peer has no cells for: a peer must implement them all."""
    return {
        model: [other for other in order[model] if other in slices]
        for model in order
        if model in slices
    }


@settings(max_examples=60)
@given(st.data())
def test_the_owner_of_every_coordinate_is_the_papers(data):
    order = data.draw(orders())
    sizes, slices = data.draw(sliced(order))
    order, cross = complete(order, slices), data.draw(st.booleans())
    module = mlp("=".join(map(str, sizes)), activation="prelu")
    anatomy = discover(module)
    slicing = Slicing(anatomy, slices, graph=ModelGraph(order), cross=cross)

    model_of = {
        (part, cell): model
        for model, parts in slices.items()
        for part, cells in enumerate(parts)
        for cell in cells
    }
    expected, coordinate = {}, 0
    for name, value in module.named_parameters():
        layer, kind = name.split(".")
        part = int(layer) // 2 + 1
        for index in np.ndindex(*value.shape):
            cells = [(part, index[0])]
            if kind == "weight" and value.ndim == 2:
                cells.append((part - 1, index[1]))
            owner = brute_force_owner({model_of[cell] for cell in cells}, order, cross)
            expected.setdefault(owner, set()).add(coordinate)
            coordinate += 1

    found = {owner: slicing.coordinates(owner).tolist() for owner in slicing.averaged_models}
    found[None] = slicing.private.tolist()
    for coordinates in found.values():
        assert len(coordinates) == len(set(coordinates))
    assert {k: set(v) for k, v in found.items() if v} == expected
    everything = sorted(c for coordinates in found.values() for c in coordinates)
    assert everything == list(range(anatomy.size))


@given(st.data())
def test_coordinates_correspond_whatever_the_peers_own_cell_order(data):
    """Tag every parameter with the *slice-relative* names of its cells; peers must read equal tags."""
    order = data.draw(orders())
    sizes, slices = data.draw(sliced(order))
    order = complete(order, slices)
    readings = []
    for _ in range(2):
        places = [data.draw(st.permutations(range(size))) for size in sizes]
        moved = {
            model: [[places[part][cell] for cell in cells] for part, cells in enumerate(parts)]
            for model, parts in slices.items()
        }
        anatomy = discover(mlp("=".join(map(str, sizes))))
        slicing = Slicing(anatomy, moved, graph=ModelGraph(order), cross=True)
        name_of = {
            (part, cell): (model, rank)
            for model, parts in moved.items()
            for part, cells in enumerate(parts)
            for rank, cell in enumerate(cells)
        }
        tags = []
        for parameter in anatomy.parameters:
            part = int(parameter.name.split(".")[0]) // 2 + 1
            for index in np.ndindex(*parameter.shape):
                cells = [(part - at, cell) for at, cell in enumerate(index)]
                tags.append((parameter.name, *(name_of[cell] for cell in cells)))
        readings.append(
            {
                owner: [tags[c] for c in slicing.coordinates(owner)]
                for owner in slicing.averaged_models
            }
        )
        readings[-1]["schema"] = [slicing.schema(owner) for owner in slicing.averaged_models]
    assert readings[0] == readings[1]


@given(st.data())
def test_slices_are_disjoint_and_cover_with_layouts_and_a_rest(data):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))
    first = [data.draw(st.integers(0, size)) for size in sizes]
    second = [
        data.draw(st.integers(0, size - taken)) for size, taken in zip(sizes, first, strict=True)
    ]
    slices = {
        name: "-".join(map(str, layout))
        for name, layout in (("one", first), ("two", second))
        if any(layout)
    }
    slicing = Slicing(discover(mlp("=".join(map(str, sizes)))), slices, rest="mine")
    for part, size in enumerate(sizes):
        cells = np.concatenate([parts[part] for parts in slicing.cells.values()])
        assert sorted(cells) == list(range(size))


def weights(slicing, name, shape):
    """Who owns each weight of a parameter, as an array of names ('' where private)."""
    owner = np.full(slicing.anatomy.size, "", dtype=object)
    for each in slicing.averaged_models:
        owner[slicing.coordinates(each)] = each
    first = slicing.anatomy.offsets[name]
    return owner[first : first + np.prod(shape)].reshape(shape).tolist()


def test_figure_4a_one_model():
    slicing = Slicing(discover(mlp("2=2")), {"m1": "2-2"})
    assert weights(slicing, "0.weight", (2, 2)) == [["m1", "m1"], ["m1", "m1"]]


def test_figure_4b_the_lower_model_averages_what_joins_the_two():
    slices = {"m1": "1-1", "m2": "1-1"}
    slicing = Slicing(discover(mlp("2=2")), slices, graph=ModelGraph({"m2": ["m1"]}))
    assert weights(slicing, "0.weight", (2, 2)) == [["m1", "m2"], ["m2", "m2"]]
    assert weights(slicing, "0.bias", (2,)) == ["m1", "m2"]


def test_figure_4c_without_dependency_what_joins_the_two_stays_private():
    slicing = Slicing(discover(mlp("2=2")), {"m1": "1-1", "m2": "1-1"})
    assert weights(slicing, "0.weight", (2, 2)) == [["m1", ""], ["", "m2"]]


FIGURE_6 = {"red": ["green", "yellow"], "green": ["blue"], "yellow": ["blue"]}


@pytest.mark.parametrize(("cross", "between"), [(False, ""), (True, "green&yellow")])
def test_figure_6_four_models(cross, between):
    """Red depends on green and yellow, which depend on blue; cells 0-3 are blue, green, yellow, red."""
    slices = dict.fromkeys(("blue", "green", "yellow", "red"), "1-1")
    slicing = Slicing(discover(mlp("4=4")), slices, graph=ModelGraph(FIGURE_6), cross=cross)
    assert weights(slicing, "0.weight", (4, 4)) == [
        ["blue", "green", "yellow", "red"],
        ["green", "green", between, "red"],
        ["yellow", between, "yellow", "red"],
        ["red", "red", "red", "red"],
    ]


def test_figure_5_three_peers_and_five_models():
    """Blue is global, red semi-local (peers 0 and 1), green, cyan and purple local and lowest."""
    graph = ModelGraph({"red": ["blue"], "green": ["red"], "cyan": ["red"], "purple": ["blue"]})
    peers = [
        SlicedNetwork(mlp("3=3"), {"blue": "1-1", "red": "1-1", "green": "1-1"}, graph=graph),
        SlicedNetwork(mlp("3=3"), {"blue": "1-1", "red": "1-1", "cyan": "1-1"}, graph=graph),
        SlicedNetwork(mlp("3=3"), {"blue": "1-1", "purple": "2-2"}, graph=graph),
    ]
    for peer, local in zip(peers[:2], ("green", "cyan"), strict=True):
        assert weights(peer.slicing, "0.weight", (3, 3)) == [
            ["blue", "red", local],
            ["red", "red", local],
            [local, local, local],
        ]
    assert weights(peers[2].slicing, "0.weight", (3, 3)) == [
        ["blue", "purple", "purple"],
        ["purple", "purple", "purple"],
        ["purple", "purple", "purple"],
    ]


def test_an_axis_may_repeat_cells_and_have_axes_without_cells():
    """A convolution flattened into a dense layer: 2 channels of 3 pixels feed 1 cell."""
    parts = (Part("channels", 2), Part("out", 1))
    channels, out = dense_axes(parts, 0, 1)
    anatomy = Anatomy(
        parts,
        (
            ParameterMap("conv", (2, 5), (channels, None)),
            ParameterMap("dense", (1, 6), (out, np.repeat(channels, 3))),
        ),
    )
    mine = Slicing(anatomy, {"g": [[0], [0]], "l": [[1], []]})
    other = Slicing(anatomy, {"g": [[1], [0]], "l": [[0], []]})
    assert mine.coordinates("g").tolist() == [0, 1, 2, 3, 4, 10, 11, 12]
    assert other.coordinates("g").tolist() == [5, 6, 7, 8, 9, 13, 14, 15]
    assert mine.schema("g") == other.schema("g")


@pytest.mark.parametrize(
    ("slices", "graph", "rest", "message"),
    [
        ({"a": "4-3"}, None, None, r"part '0' has 4 cells, but the slices a take only 3"),
        (
            {"a": "4-3-1"},
            None,
            None,
            r"model 'a': layout 4-3-1 has 3 parts, but the network has 2 \(input, 0\)",
        ),
        (
            {"a": "4-5"},
            None,
            None,
            r"model 'a' wants 5 cells of part '0', which has 4, 4 of them free",
        ),
        (
            {"a": "4-3", "b": "0-2"},
            None,
            None,
            r"model 'b' wants 2 cells of part '0', which has 4, 1 ",
        ),
        ({"a": "4-4", "b": "0-0"}, None, None, r"model 'b' is empty"),
        ({"a": "4=4"}, None, None, r"'4=4' is not a slice layout"),
        (
            {"b": "4-4"},
            {"b": ["a"]},
            None,
            r"model 'b' depends on 'a', which this peer does not have",
        ),
        ({"c": "4-4"}, {"b": ["a"]}, None, r"unknown model 'c': the graph names a, b"),
        (
            {"a": [[0, 1, 2, 3], [0, 0]]},
            None,
            "r",
            r"cell 0 of part '0' was given to 'a' and to 'a'",
        ),
        ({"a": [[0], [4]]}, None, "r", r"model 'a': part '0' has cells 0 to 3, not 4"),
        (
            {"a": [[0]]},
            None,
            "r",
            r"model 'a': indices were given for 1 parts, but the network has 2",
        ),
        (
            {"a": {"hidden": [0]}},
            None,
            "r",
            r"the network has no part 'hidden'; parts are input, 0",
        ),
        ({"a": [[0], [1.5]]}, None, "r", r"part '0' lists 1.5 as a cell; give whole numbers"),
        ({"a": [[0], [True]]}, None, "r", r"part '0' lists True as a cell"),
        ({"a": [[0], ["x"]]}, None, "r", r"part '0' lists 'x' as a cell"),
        ({"a": None}, None, "r", r"model 'a': None describes no slice"),
        ({"a": "1-1"}, None, "a", r"model 'a' has a slice already"),
        ({}, None, None, r"at least one slice"),
        ({"a/b": "4-4"}, None, None, r"'a/b' cannot name a partial model"),
    ],
)
def test_errors_name_the_part_and_the_model(slices, graph, rest, message):
    with pytest.raises(ModelError, match=message):
        Slicing(discover(mlp("4=4")), slices, graph=graph and ModelGraph(graph), rest=rest)


def test_a_circle_of_dependencies_is_spelled_out():
    with pytest.raises(ModelError, match=r"in a circle: .*a → .*"):
        ModelGraph({"a": ["b"], "b": ["c"], "c": ["a"]})


def test_a_dependency_must_be_a_list():
    with pytest.raises(ModelError, match=r"model 'a': write what it depends on as a list"):
        ModelGraph({"a": "b"})


def test_an_unknown_model_is_refused_with_the_names_of_those_that_average():
    slicing = Slicing(discover(mlp("2=2")), {"a": "2-2"})
    with pytest.raises(ModelError, match=r"model 'b' averages nothing here; models that do are a"):
        slicing.coordinates("b")
