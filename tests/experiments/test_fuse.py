"""`gossamer fuse` as a person meets it: a file, a report, one line for every mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_kit import Result, runner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gossamer.models import SlicedNetwork, mlp

torch.set_num_threads(1)


@pytest.fixture
def fuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Runs `gossamer fuse` in this process, in a folder of its own."""
    return runner(tmp_path, monkeypatch, capsys, "fuse")


def save(path: str, layout: str, seed: int, activation: str = "relu") -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = mlp(layout, activation=activation, output="none")
    save_file({name: value.clone() for name, value in module.state_dict().items()}, path)
    return module


def test_networks_of_three_widths_become_one(fuse: Callable[..., Result]) -> None:
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


def test_a_permuted_copy_changes_nothing(fuse: Callable[..., Result]) -> None:
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


def test_sample_counts_decide_who_is_heard(fuse: Callable[..., Result], tmp_path: Path) -> None:
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


def test_cells_stay_inside_their_partial_models(fuse: Callable[..., Result]) -> None:
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
    assert "says nothing about its partial models" in refused.err


def test_an_output_is_replaced_only_by_force(fuse: Callable[..., Result], tmp_path: Path) -> None:
    save("a.safetensors", "4=6=3", 0)
    (tmp_path / "out.safetensors").write_text("precious")
    refused = fuse("a.safetensors", "-o", "out.safetensors")
    assert refused.code == 2
    assert refused.err.count("\n") == 1
    assert "exists: give another name, or --force" in refused.err
    assert (tmp_path / "out.safetensors").read_text() == "precious"
    assert fuse("a.safetensors", "-o", "out.safetensors", "--force").code == 0
    assert load_file("out.safetensors")["0.weight"].shape == (6, 4)


def test_nothing_is_written_when_an_input_is_bad(
    fuse: Callable[..., Result], tmp_path: Path
) -> None:
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
        (["a", "deep"], "deep.safetensors has 3 layers (4=6=5=3), a.safetensors has 2 (4=6=3)"),
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
        (["a", "--data", "digits", "--activation", "step"], "--activation step: there are relu"),
        (["a", "--data", "digits", "--activation", "relu"], "has 64 inputs and 10 classes"),
        (["a", "--counts", "nowhere.json"], "nowhere.json: cannot be read"),
        (["a", "--counts", "text.safetensors"], "is no list of lists of numbers"),
        (["a", "-o", "nowhere/out.safetensors"], "there is no folder nowhere"),
        (["a", "-o", "."], "is a folder"),
    ],
)
def test_mistakes_get_one_line(
    fuse: Callable[..., Result], tmp_path: Path, arguments: list[str], message: str
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
