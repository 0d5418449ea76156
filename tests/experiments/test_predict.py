"""`gossamer predict` as a person meets it: classes and scores of a written network, one line for mistakes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_kit import Run, runs

from gossamer.models import SgdLearner, SlicedNetwork, mlp
from gossamer.peer import NetworkFile, about_path

predict = runs("predict")

ENTRY = f"{__name__}:make"
ABOUT = {"peer": "ann", "swarm": "garden", "session": "s", "round": 7, "accuracy": 0.5}
INPUTS = np.arange(12, dtype=np.float64).reshape(3, 4) / 5 - 1


def make(seed: int, images: bool = False) -> SgdLearner:
    """Return a learner of three classes; images: of inputs of 2 × 2 pixels."""
    module = mlp("4=5=3", activation="relu", output="none")
    if images:
        module = torch.nn.Sequential(torch.nn.Flatten(), module)
    network = SlicedNetwork(module, {}, peer="ann", rest="own", seed=seed)
    shape = (2, 2, 2) if images else (2, 4)
    return SgdLearner(network, *[(torch.zeros(shape), torch.zeros(2, dtype=torch.int64))] * 2)


@pytest.fixture
def learner(predict: Run) -> SgdLearner:
    """A learner whose network is in ann.safetensors; the file says how to make it, with another seed."""
    return written()


def written(at: float = 1e9, **arguments) -> SgdLearner:
    learner = make(3, **arguments)
    file = NetworkFile(Path("ann.safetensors"), 1.0, ENTRY, {"seed": 4, **arguments})
    file.write(learner.network, at, **ABOUT)
    np.save("in.npy", INPUTS)
    return learner


def test_classes_and_scores_are_those_of_the_written_network(predict: Run, learner) -> None:
    result = predict("ann.safetensors", "in.npy", "--json")
    rows = [json.loads(line) for line in result.out.splitlines()]
    expected = torch.softmax(learner.network(torch.tensor(INPUTS, dtype=torch.float32)), 1)
    assert [row["class"] for row in rows] == expected.argmax(1).tolist()
    assert [row["score"] for row in rows] == pytest.approx(expected.amax(1).tolist())
    about = {(row["file"], row["round"], row["written"]) for row in rows}
    assert about == {("in.npy", 7, "2001-09-09T01:46:40+00:00")}
    plain = predict("ann.safetensors", "in.npy").out.splitlines()
    assert plain[2] == f"in.npy:2: class {rows[2]['class']}, score {rows[2]['score']:.3f}"


@pytest.mark.parametrize(
    ("seconds", "age"), [(5975, "100 min"), (5 * 3600, "5 hours"), (3 * 86400, "3 days")]
)
def test_it_says_of_which_round_the_network_is_and_how_old(
    predict: Run, learner, seconds: float, age: str
) -> None:
    written(time.time() - seconds)
    (line,) = predict("ann.safetensors", "in.npy").err.splitlines()
    assert line == f"ann.safetensors: network of round 7, written {age} ago"


def test_all_kinds_of_files_give_the_same(predict: Run, learner) -> None:
    np.savez("in.npz", x=INPUTS)
    np.save("big-endian.npy", INPUTS.astype(">f8"))
    Path("in.csv").write_text("\n".join(",".join(map(str, row)) for row in INPUTS))
    Path("titles.csv").write_text("a,b,c,d\n" + Path("in.csv").read_text())
    files = ["in.npy", "in.npz", "in.csv", "titles.csv", "big-endian.npy"]
    lines = predict("ann.safetensors", *files).out.splitlines()
    assert len(lines) == 15
    assert {line.split(": ")[1] for line in lines[::3]} == {lines[0].split(": ")[1]}


def test_rows_of_a_table_are_given_to_a_network_of_images(predict: Run) -> None:
    written(images=True)
    Path("in.csv").write_text("1,2,3,4\n")
    assert predict("ann.safetensors", "in.csv").code == 0


def test_the_file_beside_says_what_the_network_is(predict: Run, learner) -> None:
    about = json.loads(about_path(Path("ann.safetensors")).read_text())
    assert about == ABOUT | {
        "time": "2001-09-09T01:46:40+00:00",
        "schema": {"own": about["schema"]["own"]},
        "entry": ENTRY,
        "arguments": {"seed": 4},
        "version": about["version"],
        "format": "gossamer-network-1",
    }


def make_tokens() -> SgdLearner:
    """Return a learner that reads rows of three tokens, 0 to 4."""
    module = torch.nn.Sequential(
        torch.nn.Embedding(5, 4), torch.nn.Flatten(), torch.nn.Linear(12, 3)
    )
    x, y = torch.zeros((2, 3), dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    network = SlicedNetwork(module, {}, example=x, peer="ann", rest="own", seed=1)
    return SgdLearner(network, (x, y), (x, y))


def test_a_network_of_tokens_reads_them_from_any_file(predict: Run) -> None:
    file = NetworkFile(Path("ann.safetensors"), 1.0, f"{__name__}:make_tokens", {})
    file.write(make_tokens().network, 1e9, **ABOUT)
    Path("in.csv").write_text("0,1,4\n")
    np.save("in.npy", np.array([[0, 1, 4]], ">i2"))
    lines = predict("ann.safetensors", "in.csv", "in.npy").out.splitlines()
    assert lines[0].partition(":")[2] == lines[1].partition(":")[2] != ""
    for row, reason in ("0,1,5\n", "index out of range"), ("0,1,0.5\n", "trained with integers"):
        Path("in.csv").write_text(row)
        result = predict("ann.safetensors", "in.csv")
        assert (result.code, result.out) == (2, "")
        assert "error: in.csv: " in result.err
        assert reason in result.err


def mistakes() -> dict[str, tuple[list[str], str]]:
    return {
        "no network": (
            ["no.safetensors", "in.npy"],
            "no.safetensors: cannot be read: there is no such file",
        ),
        "not a network": (["in.npy", "in.npy"], "in.npy: is not a safetensors file"),
        "no inputs": (["ann.safetensors", "no.npy"], "no.npy: cannot be read: No such file"),
        "another ending": (["ann.safetensors", "in.txt"], "in.txt: inputs are read from .npy"),
        "text": (["ann.safetensors", "text.csv"], "text.csv: cannot be read"),
        "no array x": (["ann.safetensors", "y.npz"], "y.npz: has no array named x"),
        "one dimension": (["ann.safetensors", "flat.npy"], "flat.npy: needs one row of numbers"),
        "another width": (
            ["ann.safetensors", "wide.npy"],
            "wide.npy: inputs of 9 numbers do not fit the network: it was trained with 4",
        ),
        "no such function": (
            ["ann.safetensors", "in.npy", "--entry", "json:x"],
            "no function or class 'x'",
        ),
    }


@pytest.mark.parametrize("mistake", mistakes())
def test_a_mistake_is_one_line(mistake: str, predict: Run, learner) -> None:
    np.savez("y.npz", y=INPUTS)
    np.save("flat.npy", INPUTS[0])
    np.save("wide.npy", np.zeros((2, 9)))
    Path("text.csv").write_text("a,b\nc,d\n")
    arguments, reason = mistakes()[mistake]
    result = predict(*arguments)
    assert result.code == 2
    assert reason in result.err
    assert len(result.err.splitlines()) == 1
