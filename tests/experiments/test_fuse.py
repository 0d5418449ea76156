"""`gossamer fuse` as a person meets it: a file, a report, one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_kit import Run, runs
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gossamer.models import SlicedNetwork, mlp

torch.set_num_threads(1)


fuse = runs("fuse")


def save(path: str, layout: str, seed: int, activation: str = "relu") -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = mlp(layout, activation=activation, output="none")
    save_file({name: value.clone() for name, value in module.state_dict().items()}, path)
    return module


def test_networks_of_three_widths_become_one(fuse: Run) -> None:
    for index, width in enumerate((5, 8, 6)):
        save(f"{index}.safetensors", f"64={width}=10", index)
    files = [f"{index}.safetensors" for index in range(3)]
    result = fuse(*files, "-o", "out.safetensors", "--data", "digits", "--activation", "relu")
    assert (result.code, result.err) == (0, "")
    state = load_file("out.safetensors")
    width = state["0.weight"].shape[0]
    assert 8 <= width <= 19
    assert state["2.weight"].shape == (10, width)
    for word in ("matched", "created", "objective", "accuracy", f"64={width}=10", "fused size"):
        assert word in result.out
    with safe_open("out.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["fusion"])
    assert about["files"] == files
    assert about["widths"] == [64, width, 10]
    assert 0 <= about["accuracy"] <= 1


def test_a_permuted_copy_changes_nothing(fuse: Run) -> None:
    module = save("a.safetensors", "4=6=3", 0)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    state = module.state_dict()
    save_file(
        {
            "0.weight": state["0.weight"][order].clone(),
            "0.bias": state["0.bias"][order].clone(),
            "2.weight": state["2.weight"][:, order].clone(),
            "2.bias": state["2.bias"].clone(),
        },
        "b.safetensors",
    )
    assert fuse("a.safetensors", "b.safetensors", "-o", "out.safetensors", "--no-shrink").code == 0
    fused = mlp("4=6=3", activation="relu", output="none")
    fused.load_state_dict(load_file("out.safetensors"))
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(fused(x), module(x), atol=1e-6)


def test_sample_counts_decide_who_is_heard(fuse: Run, tmp_path: Path) -> None:
    """Two linear networks; each class belongs to the one that saw it."""
    one, two = save("a.safetensors", "4=2", 0), save("b.safetensors", "4=2", 1)
    (tmp_path / "counts.json").write_text("[[10, 0], [0, 10]]")
    done = fuse(
        "a.safetensors", "b.safetensors", "-o", "o.safetensors", "--counts", "counts.json",
        "--no-shrink",
    )  # fmt: skip
    assert done.code == 0
    weight = load_file("o.safetensors")["0.weight"]
    assert torch.allclose(weight[0], one.state_dict()["0.weight"][0])
    assert torch.allclose(weight[1], two.state_dict()["0.weight"][1])


def test_cells_stay_inside_their_partial_models(fuse: Run) -> None:
    """The same network twice; the two peers gave its cells to different models."""
    module = save("plain.safetensors", "4=6=3", 0)
    for peer, slices in (("a", {"all": "4-2-3", "mine": "0-4-0"}), ("b", {"all": "4-6-3"})):
        copy = mlp("4=6=3", activation="relu", output="none")
        copy.load_state_dict(module.state_dict())
        SlicedNetwork(copy, slices, peer=peer).save(f"{peer}.safetensors")
    assert fuse("a.safetensors", "b.safetensors", "-o", "free.safetensors").code == 0
    bound = fuse("a.safetensors", "b.safetensors", "-o", "bound.safetensors", "--within-models")
    assert bound.code == 0
    assert load_file("free.safetensors")["0.weight"].shape[0] == 6
    assert load_file("bound.safetensors")["0.weight"].shape[0] == 10  # four of a's stay alone
    refused = fuse("plain.safetensors", "-o", "x.safetensors", "--within-models")
    assert refused.code == 2
    assert "does not contain its partial models" in refused.err


def named(
    names: list[str], layout: str, seed: int = 0
) -> tuple[dict[str, torch.Tensor], torch.nn.Module]:
    """A network whose layers have these names, in the order in which they run, and itself."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = mlp(layout, activation="relu", output="none")
    state = module.state_dict()
    layers = [name.removesuffix(".weight") for name in state if name.endswith(".weight")]
    renamed = dict(zip(layers, names, strict=True))
    return {
        f"{renamed[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": value.clone()
        for name, value in state.items()
    }, module


def answer(path: str, names: list[str], x: torch.Tensor) -> torch.Tensor:
    """What a file's network computes if its layers run in this order."""
    state = load_file(path)
    for name in names:
        x = x @ state[f"{name}.weight"].T + state[f"{name}.bias"]
        x = torch.relu(x) if name != names[-1] else x
    return x


@pytest.mark.parametrize(
    ("names", "layout", "order"),
    [
        (["zeta", "alpha"], "4=6=3", None),  # shapes say it
        (["zeta", "mid", "alpha"], "4=6=5=3", None),
        (["layer.8", "layer.9", "layer.10"], "4=4=4=4", None),  # numbers say it
        (["in", "layer.9", "layer.10", "a"], "4=6=6=6=3", None),
        (["zeta", "mid", "alpha"], "4=4=4=4", "zeta,mid,alpha"),
        (["zeta", "mid", "alpha"], "4=4=4=4", "zeta.weight, mid.weight, alpha.weight"),
    ],
)
def test_layers_run_in_their_own_order_whatever_their_names(
    fuse: Run, names: list[str], layout: str, order: str | None
) -> None:
    state, module = named(names, layout)
    save_file(state, "a.safetensors")
    said = [] if order is None else ["--order", order]
    done = fuse("a.safetensors", "a.safetensors", "-o", "out.safetensors", "--no-shrink", *said)
    assert (done.code, done.err) == (0, "")
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(answer("out.safetensors", names, x), module(x), atol=1e-6)


def test_our_own_files_say_in_which_order_their_layers_run(fuse: Run) -> None:
    """Also what `fuse` has written, and also where a module lists its layers in another order."""
    names = ["zeta", "mid", "alpha"]
    state, module = named(names, "4=4=4=4")
    copy = torch.nn.Sequential()
    for index, name in enumerate(names):
        copy.add_module(name, torch.nn.Linear(4, 4))
        if index < 2:
            copy.add_module(f"relu{index}", torch.nn.ReLU())
    copy.load_state_dict(state)
    SlicedNetwork(copy, {"all": 1.0}, peer="a").save("a.safetensors")
    assert fuse("a.safetensors", "-o", "one.safetensors", "--no-shrink").code == 0
    assert fuse("one.safetensors", "-o", "two.safetensors", "--no-shrink").code == 0
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(answer("two.safetensors", names, x), module(x), atol=1e-6)
    refused = fuse("a.safetensors", "-o", "x.safetensors", "--order", "alpha,mid,zeta")
    assert refused.code == 2
    assert "--order says alpha,mid,zeta, the file itself says zeta,mid,alpha" in refused.err


def test_an_activation_with_slopes_belongs_to_the_layer_before_it(
    fuse: Run,
) -> None:
    module = save("a.safetensors", "4=4=4=4", 0, "prelu")
    assert fuse("a.safetensors", "a.safetensors", "-o", "o.safetensors", "--no-shrink").code == 0
    fused = mlp("4=4=4=4", activation="prelu", output="none")
    fused.load_state_dict(load_file("o.safetensors"))
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(fused(x), module(x), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["square"], "fit together in more than one order"),
        (["square"], "give the right one with --order NAME,NAME,…"),
        (["loop"], "more than one order"),
        (["square", "--order", "zeta,mid"], "--order leaves out alpha; name every layer"),
        (["square", "--order", "zeta,mid,beta"], "'beta', which is not one of its layers: "),
        (["square", "--order", "zeta,mid,mid,alpha"], "--order names 'mid' twice"),
        (["chain", "--order", "mid,zeta,alpha"], "puts 'zeta', which has 4 inputs, after 'mid'"),
        (["apart"], "its layers form no chain ('alpha.weight' 5 to 3, 'zeta.weight' 4 to 6)"),
        (["slopes"], "'slope' may belong to any of the layers zeta,mid"),
        (["damaged"], "its metadata about the order of layers are invalid"),
    ],
)
def test_an_order_that_cannot_be_is_one_line(fuse: Run, arguments: list[str], message: str) -> None:
    names = ["zeta", "mid", "alpha"]
    square = named(names, "4=4=4=4")[0]
    files = {
        "square": square,
        "chain": named(names, "4=6=5=3")[0],
        "loop": named(names[:2], "4=6=4")[0],
        "apart": {"zeta.weight": torch.zeros(6, 4), "alpha.weight": torch.zeros(3, 5)},
        "slopes": {**named(names, "4=6=6=3")[0], "slope": torch.zeros(6)},
    }
    for name, state in files.items():
        save_file(state, f"{name}.safetensors")
    save_file(square, "damaged.safetensors", {"layer_order": '["zeta.weight"]'})
    known = {*files, "damaged"}
    given = [f"{a}.safetensors" if a in known else a for a in arguments]
    result = fuse(*given, "-o", "out.safetensors")
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err


def test_an_output_is_replaced_only_by_force(fuse: Run, tmp_path: Path) -> None:
    save("a.safetensors", "4=6=3", 0)
    (tmp_path / "out.safetensors").write_text("precious")
    refused = fuse("a.safetensors", "-o", "out.safetensors")
    assert refused.code == 2
    assert refused.err.count("\n") == 1
    assert "exists: give another name, or --force" in refused.err
    assert (tmp_path / "out.safetensors").read_text() == "precious"
    assert fuse("a.safetensors", "-o", "out.safetensors", "--force").code == 0
    assert load_file("out.safetensors")["0.weight"].shape == (6, 4)


def test_nothing_is_written_when_an_input_is_bad(fuse: Run, tmp_path: Path) -> None:
    save("a.safetensors", "4=6=3", 0)
    state = load_file("a.safetensors")
    state["2.weight"][1, 2] = float("nan")
    save_file(state, "b.safetensors")
    refused = fuse("a.safetensors", "b.safetensors", "-o", "out.safetensors")
    assert refused.code == 2
    assert "b.safetensors: layer '2.weight' has 1 values that are not finite" in refused.err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["a", "deep"],
            "deep.safetensors has 3 layers (layout 4=6=5=3), a.safetensors has 2 (4=6=3)",
        ),
        (["a", "wide"], "layer '0.weight' of wide.safetensors has 5 inputs"),
        (["a", "short"], "layer '2.weight' of short.safetensors has 2 outputs"),
        (["a", "prelu"], "layer '0.weight' of prelu.safetensors holds"),
        (["a", "missing"], "missing.safetensors: there is no such file"),
        (["a", "text"], "text.safetensors: cannot be read as safetensors"),
        (["a", "conv"], "'0.weight' of shape (2, 3, 3) is neither a dense layer"),
        (["a", "whole"], "holds values of type torch.int64"),
        (["a", "--kl", "1.5"], "kl (λ) is 1.5; it must lie between 0 and 1"),
        (["a", "--variance", "-1"], "variance (σ²) is -1.0"),
        (["a", "--variance", "1", "--variance", "2"], "2 variances were given for 1 networks"),
        (["a", "a", "--variance", "1", "--variance", "0"], "variance (σ²) of a.safetensors is 0.0"),
        (["a", "--prior-variance", "0"], "prior_variance (σ0²) is 0.0"),
        (["a", "--kind", "best"], "kind 'best' is unknown; there are printed, set, efpf"),
        (["a", "--data", "digits"], "--data needs --activation as well"),
        (["a", "--activation", "relu"], "--activation relu: is only used with --data"),
        (["a", "--data", "digits", "--activation", "step"], "--activation step: there are relu"),
        (["a", "--data", "digits", "--activation", "relu"], "has 64 inputs and 10 classes"),
        (["a", "--counts", "nowhere.json"], "nowhere.json: cannot be read"),
        (["a", "--counts", "text.safetensors"], "is not a list of lists of numbers"),
        (["a", "-o", "nowhere/out.safetensors"], "there is no folder nowhere"),
        (["a", "-o", "."], "is a folder"),
    ],
)
def test_mistakes_get_one_line(
    fuse: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    layouts = {"a": "4=6=3", "deep": "4=6=5=3", "wide": "5=6=3", "short": "4=6=2"}
    for name, layout in layouts.items():
        save(f"{name}.safetensors", layout, 0)
    save("prelu.safetensors", "4=6=3", 0, "prelu")
    (tmp_path / "text.safetensors").write_text("no network")
    save_file({"0.weight": torch.zeros(2, 3, 3)}, "conv.safetensors")
    save_file({"0.weight": torch.zeros(2, 3, dtype=torch.int64)}, "whole.safetensors")
    known = {*layouts, "prelu", "text", "missing", "conv", "whole"}
    given = [f"{a}.safetensors" if a in known else a for a in arguments]
    target = [] if "-o" in given else ["-o", "out.safetensors"]
    result = fuse(*given, *target)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
