"""Layers that need rules of their own, parts named by hand, and modules that cannot be traced."""

import pytest
import torch
from parts_kit import check_all, check_permutations
from torch import nn

from gossamer.models import (
    Anatomy,
    ModelError,
    ParameterMap,
    Part,
    SlicedNetwork,
    discover,
    permute,
)
from gossamer.models.discovery import check_by_permutation


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(5, 4, batch_first=True, **options)
        self.head = nn.Linear(4 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class FromState(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(5, 4, **options)
        self.head = nn.Linear(4 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x):
        state = self.rnn(x.transpose(0, 1))[1]
        state = state[0] if isinstance(state, tuple) else state
        if self.rnn.bidirectional:
            return self.head(torch.cat([state[-2], state[-1]], dim=1))
        return self.head(state[-1])


@pytest.mark.parametrize(
    "module",
    [
        Recurrent(nn.LSTM),
        Recurrent(nn.GRU, num_layers=2),
        Recurrent(nn.RNN, bias=False),
        Recurrent(nn.LSTM, bidirectional=True, num_layers=2),
        FromState(nn.GRU),
        FromState(nn.GRU, num_layers=2),
        FromState(nn.RNN, bidirectional=True),
        FromState(nn.LSTM, bidirectional=True, num_layers=2),
    ],
)
def test_recurrent_layers_move_gates_and_both_matrices(module):
    torch.manual_seed(0)
    anatomy = check_all(module, torch.randn(2, 6, 5), channels=2)
    assert {part.cells for part in anatomy.parts if "rnn" in part.name} == {4}


class Cross(nn.Module):
    """Attention whose keys and values have other widths than its queries."""

    def __init__(self):
        super().__init__()
        self.embed, self.other = nn.Linear(5, 8), nn.Linear(5, 6)
        self.attention = nn.MultiheadAttention(
            8, 4, kdim=6, vdim=6, batch_first=True, add_bias_kv=True
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        y = self.other(x)
        return self.head(self.attention(self.embed(x), y, y)[0].mean(1))


def test_attention_moves_by_head():
    torch.manual_seed(0)
    anatomy = check_all(Cross(), torch.randn(2, 6, 5), channels=2)
    sizes = {part.name: part.cells for part in anatomy.parts}
    assert sizes["attention.heads"] == 4
    assert sizes["other"] == 6


class Tied(nn.Module):
    """Tokens in, scores of tokens out, through the same matrix; and a temperature."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight
        self.heat = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        y = self.embed(x)
        return self.out(torch.relu(self.mix(y)) + y).transpose(1, 2) * self.heat


def test_embeddings_tied_weights_and_a_parameter_without_cells():
    torch.manual_seed(0)
    module = Tied()
    anatomy = check_all(module, torch.randint(0, 11, (2, 5)))
    assert {part.name: part.cells for part in anatomy.parts} == {"embed": 6, "heat": 1}
    axes = {one.name: one.axes for one in anatomy.parameters}
    assert axes["embed.weight"][0] is None  # which row a token reads is data
    network = SlicedNetwork(module, {"g": {"embed": 1.0}}, anatomy=anatomy, peer="ann")
    assert len(network.read("local-ann")) == 1


@pytest.mark.parametrize(
    ("layers", "cells"),
    [
        ([nn.Conv2d(8, 12, 3, groups=2)], 2),
        ([nn.GroupNorm(4, 8), nn.Conv2d(8, 12, 3)], 4),
        ([nn.Conv2d(8, 8, 3, groups=8), nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 12, 1)], 8),
        ([nn.Conv2d(8, 16, 3, groups=8), nn.Conv2d(16, 12, 1)], 8),
        ([nn.GroupNorm(1, 8), nn.ConvTranspose2d(8, 12, 2)], 8),
    ],
)
def test_groups_of_channels_are_one_cell_each(layers, cells):
    torch.manual_seed(0)
    entry = nn.Conv2d(3, 8, 3)
    module = nn.Sequential(entry, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4))
    anatomy = check_all(module, torch.randn(2, 3, 9, 9))
    assert anatomy.parts[1].cells == cells


class TokenMix(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.mix, self.leave = nn.Linear(4, 6), nn.Linear(5, 5), nn.Linear(6, 3)

    def forward(self, x):
        x = self.enter(x)
        return self.leave((x + self.mix(x.transpose(1, 2)).transpose(1, 2)).mean(1))


def test_what_cannot_be_followed_is_named_and_can_be_said_by_hand():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 4)
    with pytest.raises(ModelError, match=r"'enter' \(6 of them\) reach 'mix.in', which has only 5"):
        discover(TokenMix(), x)
    by_hand = {"": ["mix.weight:0", "mix.weight:1", "mix.bias:0"]}
    anatomy = check_all(TokenMix(), x, channels=2, parts=by_hand)
    assert {part.name: part.cells for part in anatomy.parts} == {
        "input": 4, "enter": 6, "mix.weight": 1, "mix.bias": 1, "leave": 3,
    }  # fmt: skip


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        y = self.a(x)
        return self.b(torch.cat([torch.relu(y[:, :4]), torch.tanh(y[:, 4:])], dim=1))


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(x) if x.sum() > 0 else self.a(x)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)) + torch.randn(4, dtype=x.dtype))


@pytest.mark.parametrize(
    ("module", "example", "options", "message"),
    [
        (Halves(), torch.randn(2, 4), {}, r"only 4 of the 8 channels of 'b.in' could be traced"),
        (Decides(), torch.randn(2, 4), {}, r"Decides reads a tensor.*depends on data.*by hand"),
        (Noisy(), torch.randn(2, 4), {}, r"Noisy does not compute the same on every call"),
        (Noisy(), torch.randn(2, 5), {}, r"RuntimeError in 'a' \(Linear\)"),
        (Noisy(), [1.0], {}, r"example input as a tensor"),
        (Noisy(), torch.randn(0, 4), {}, r"an empty batch"),
        (Noisy(), torch.randn(2, 4), {"channels": 3}, r"has dimensions 1 to 1"),
        (Noisy(), torch.randn(2, 4), {"parts": {"p": ["c.weight:0"]}}, r"'c.weight:0' names no axis"),
        (Noisy(), torch.randn(2, 4), {"parts": {"p": ["a.bias:1"]}}, r"'a.bias' has 1 axes"),
        (Halves(), torch.randn(2, 4), {"parts": {"p": ["a.bias:0", "b.bias:0"]}}, r"a.bias:0 has 8, b"),
        (
            Halves(),
            torch.randn(2, 4),
            {"parts": {"p": ["a.bias:0"], "q": ["a.*:0"]}},
            r"a.bias:0 was given to part 'q' and to another",
        ),
        (
            Recurrent(nn.LSTM, proj_size=2),
            torch.randn(2, 6, 5),
            {},
            r"'rnn': an LSTM with proj_size",
        ),
    ],
)  # fmt: skip
def test_modules_and_examples_that_do_not_work_say_why(module, example, options, message):
    with pytest.raises(ModelError, match=message):
        discover(module, example, **options)


def test_a_wrong_anatomy_is_found_out_by_name():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))
    right = discover(module, torch.randn(2, 3))
    check_permutations(module, right, torch.randn(2, 3))
    # A user who says that the norm's gain carries no cells: it stays behind when cells move.
    maps = tuple(
        ParameterMap(one.name, one.shape, (None,), int(right.first_cells[-1]))
        if one.name == "2.weight"
        else one
        for one in right.parameters
    )
    wrong = Anatomy((*right.parts, Part("gain", 1)), maps, ends=right.ends)
    with pytest.raises(ModelError, match=r"part '0' \(4 cells\) was traced wrongly.*0.weight:0"):
        check_by_permutation(module, wrong, (torch.randn(2, 3),), (1,))


def test_other_dtypes_several_outputs_and_frozen_parameters_are_followed():
    class Two(Recurrent):
        def forward(self, x):
            y = self.rnn(x)[0]
            return {"scores": self.head(y[:, -1]), "all": (self.head(y),)}

    module = Two(nn.LSTM).double().requires_grad_(False)
    anatomy = discover(module, torch.randn(2, 6, 5).double())
    assert [part.name for part in anatomy.parts] == ["input", "rnn", "head"]
    assert not any(value.requires_grad for value in module.parameters())


class Skip(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Turn(nn.Module):
    def forward(self, x):
        return x.roll(1, -1)


class MeanOfSteps(nn.Module):
    def forward(self, x):
        return x.mean(1)


class Mask(nn.Module):
    """Multiplies each cell by a number; all numbers are equal at first."""

    def __init__(self, cells):
        super().__init__()
        self.register_buffer("factors", torch.ones(cells))

    def forward(self, x):
        return x * self.factors


def _between(*layers):
    return nn.Sequential(nn.Linear(5, 8), *layers, nn.ReLU(), nn.Linear(8, 3))


def _used_twice():
    layer, tied = nn.Linear(8, 8), nn.Linear(8, 8)
    tied.weight = layer.weight
    return _between(layer, nn.ReLU(), layer), _between(layer, nn.ReLU(), tied)


@pytest.mark.parametrize(
    "module",
    [
        _between(Skip(nn.Linear(8, 8), nn.ReLU())),
        _between(nn.BatchNorm1d(8, affine=False)),
        _between(nn.GroupNorm(2, 8, affine=False)),
        *_used_twice(),
    ],
)
def test_a_chain_whose_cells_are_tied_is_traced(module):
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="pass an example input"):
        discover(module)
    check_all(module, torch.randn(4, 5))


@pytest.mark.parametrize("layer", [Turn(), nn.AvgPool1d(3, 1, 1), Mask(8)])
def test_a_layer_that_treats_cells_differently_is_no_activation(layer):
    module = _between(layer)
    with pytest.raises(ModelError, match=r"layer '1' .* pass an example input"):
        discover(module)
    with pytest.raises(ModelError, match=r"part '0' .* was traced wrongly"):
        discover(module, torch.randn(4, 5))


def test_an_activation_may_be_the_users_own_and_used_twice():
    activation = nn.ReLU()
    module = nn.Sequential(
        nn.AvgPool2d(2), nn.Flatten(), Mask(4), nn.Linear(4, 8), activation, MeanOfSteps(),
        nn.Linear(8, 6), activation, nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 2),
    )  # fmt: skip
    assert discover(module).names == ["input", "3", "6", "9"]


class OwnState(nn.Module):
    """Makes its first state in single precision, whatever its inputs are."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.rnn(x, torch.zeros(1, len(x), 4))[0][:, -1])


def test_a_copy_that_cannot_run_in_double_precision_is_one_line():
    x = torch.randn(2, 6, 5)
    with pytest.raises(ModelError, match=r"cannot be checked .* x.new_zeros.*check=False"):
        discover(OwnState(), x)
    assert "rnn" in discover(OwnState(), x, check=False).names


class Uncopyable(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.computed = self.layer.weight * 2

    def forward(self, x):
        return self.layer(x)


def test_a_module_that_cannot_be_copied_is_one_line():
    with pytest.raises(ModelError, match="Uncopyable cannot be copied"):
        discover(Uncopyable(), torch.randn(2, 5))


def test_computed_weights_are_refused():
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), nn.LayerNorm(2))
    with pytest.raises(ModelError, match=r"shape \(2, 3\) is computed from other parameters"):
        discover(module, torch.randn(2, 3))


def test_check_can_be_left_out():
    discover(Noisy(), torch.randn(2, 4), check=False)


def test_permuting_refuses_what_is_no_permutation():
    network = SlicedNetwork(nn.Sequential(nn.Linear(3, 2)), {"g": 1.0})
    with pytest.raises(ModelError, match=r"part '0' has 2 cells: its order must hold 0 to 1"):
        permute(network, "0", [0, 0])
    with pytest.raises(ModelError, match=r"no part 'x'; parts are input, 0"):
        permute(network, "x", [0])
