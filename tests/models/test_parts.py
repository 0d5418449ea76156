"""Parts of the ready networks: found, proved by permutation, averaged."""

import subprocess
import sys

import pytest
import torch
from parts_kit import check_all

from gossamer.models import (
    NETWORKS,
    READY_NETWORKS,
    ModelError,
    discover,
    mlp,
    resnet,
    small_cnn,
    unet,
    vit,
)

CASES = {
    "mlp": ({"layout": "6=5=4", "activation": "prelu"}, (2, 6), 1),
    "small-cnn": ({"size": 8, "widths": (4, 6), "hidden": 7}, (2, 3, 8, 8), 1),
    "resnet": ({"widths": (4, 6), "blocks": 2}, (2, 3, 8, 8), 1),
    "unet": ({"widths": (3, 4, 5)}, (2, 3, 8, 8), 1),
    "lstm": ({"hidden": 7, "layers": 2}, (2, 5, 6), 2),
    "cnn1d": ({"widths": (4, 5)}, (2, 6, 12), 1),
    "vit": ({"size": 8, "width": 12, "depth": 2, "heads": 3}, (2, 3, 8, 8), 1),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_ready_networks(name):
    torch.manual_seed(0)
    sizes, shape, channels = CASES[name]
    anatomy = check_all(NETWORKS[name](**sizes), torch.randn(shape), channels)
    assert anatomy.parts[0].name == "input"
    assert anatomy.parts[0].name in anatomy.ends
    assert anatomy.parts[-1].name in anatomy.ends


def test_a_residual_stream_is_one_part_and_its_statistics_follow():
    module = resnet(widths=(4, 6))
    anatomy = discover(module, torch.randn(1, 3, 8, 8))
    sizes = {part.name: part.cells for part in anatomy.parts}
    assert sizes == {
        "input": 3, "0": 4, "3.conv1": 4, "4.conv1": 6, "4.conv2": 6, "7": 10,
    }  # fmt: skip
    axes = {one.name: one.axes for one in (*anatomy.parameters, *anatomy.buffers)}
    stream = anatomy.cells(1).tolist()
    for name in ("0.weight", "1.weight", "1.running_var", "3.conv2.weight", "3.norm2.running_mean"):
        assert axes[name][0].tolist() == stream, name
    assert axes["4.skip.0.weight"][1].tolist() == stream
    assert axes["0.weight"][2] is None  # kernels carry no cells


def test_flattened_channels_repeat_and_heads_gather_their_dimensions():
    anatomy = discover(small_cnn(size=8, widths=(4, 6), hidden=7), torch.randn(1, 3, 8, 8))
    dense = next(one for one in anatomy.parameters if one.name == "7.weight")
    assert dense.axes[1].tolist() == [cell for cell in anatomy.cells(2) for _ in range(4)]
    anatomy = discover(vit(size=8, width=12, depth=1, heads=3), torch.randn(1, 3, 8, 8))
    heads = next(i for i, part in enumerate(anatomy.parts) if part.name.endswith("heads"))
    packed = next(one for one in anatomy.parameters if one.name.endswith("in_proj_weight"))
    a, b, c = anatomy.cells(heads)
    assert packed.axes[0].tolist() == 3 * [a, a, a, a, b, b, b, b, c, c, c, c]


def test_chains_are_read_without_a_trace_and_keep_their_names():
    module = mlp("6=5=4")
    with_example, without = discover(module, torch.randn(1, 6)), discover(module)
    assert with_example.parts == without.parts
    assert [part.name for part in without.parts] == ["input", "0", "2"]


def test_tracing_changes_neither_the_module_nor_the_random_state():
    module = resnet(widths=(4, 6)).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.random.get_rng_state()
    discover(module, torch.ones(1, 3, 8, 8))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert module.training
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(value.grad is None for value in module.parameters())


def test_peers_that_know_their_parts_do_not_pay_for_the_tracer():
    code = (
        "import sys; from gossamer.models import SlicedNetwork, mlp; "
        "SlicedNetwork(mlp('3=2'), {'g': 1.0}, seed=0); print('torch_pruning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small_cnn(size=2, widths=(4, 4)), r"2×2 cannot be halved 2 times"),
        (lambda: unet(widths=(4,)), r"two widths or more"),
        (lambda: vit(size=9), r"9×9 do not divide into patches of 4×4"),
        (lambda: vit(width=10, heads=4), r"10 does not divide into 4 heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ModelError, match=message):
        make()


@pytest.mark.parametrize("name", READY_NETWORKS)
def test_a_ready_network_reads_what_its_entry_in_the_table_says(name):
    entry = READY_NETWORKS[name]
    samples = torch.zeros(2, *entry.sample_shape)
    output = entry.build().eval()(samples.transpose(1, 2) if entry.time_last else samples)
    assert len(output) == 2
    assert (output.ndim == 2) == entry.classifies
