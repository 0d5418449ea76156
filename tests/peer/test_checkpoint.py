"""Checkpoints: what goes in comes out, and nothing half-written is ever read."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from disk_kit import largest_file
from peer_kit import begin, make_learner, quick
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from gossamer.errors import GossamerError
from gossamer.models import SgdLearner, SlicedNetwork, mlp
from gossamer.peer.engine import Engine
from gossamer.peer.exits import PeerError
from gossamer.peer.machine import load_checkpoint, save_checkpoint


def test_a_tree_comes_back_as_it_was(tmp_path):
    path = tmp_path / "c"
    tree = {
        "n": 1 << 62, "f": 0.1, "none": None, "list": [1, [True, "x"]], 7: {"empty": {}},
        "t": torch.arange(3), "a": np.arange(4, dtype=np.float64),
    }  # fmt: skip
    save_checkpoint(path, tree)
    back = load_checkpoint(path)
    assert back is not None
    assert torch.equal(back.pop("t"), tree.pop("t"))
    np.testing.assert_array_equal(back.pop("a"), tree.pop("a"))
    assert back == tree


DIES = """
import os, signal, sys
from pathlib import Path
from gossamer.peer import save_checkpoint
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
save_checkpoint(Path(sys.argv[1]), {"n": 2})
"""


def test_a_save_that_dies_midway_leaves_the_old_one(tmp_path):
    path = tmp_path / "c"
    save_checkpoint(path, {"n": 1})
    killed = subprocess.run([sys.executable, "-c", DIES, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2  # half a save is there
    assert load_checkpoint(path) == {"n": 1}
    save_checkpoint(path, {"n": 3})
    assert load_checkpoint(path) == {"n": 3}


def test_what_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(TypeError, match="cannot hold a object"):
        save_checkpoint(tmp_path / "c", {"x": object()})


def test_no_file_is_no_checkpoint_and_a_strange_file_is_an_error(tmp_path):
    assert load_checkpoint(tmp_path / "c") is None
    (tmp_path / "c").write_bytes(b"strange")
    with pytest.raises(PeerError, match="cannot be read as a checkpoint"):
        load_checkpoint(tmp_path / "c")


def test_an_engine_goes_on_where_its_checkpoint_was(tmp_path):
    path = tmp_path / "a.checkpoint"
    one = begin(Engine("a", make_learner("a"), quick(), checkpoint=path))
    one.train()
    one.save()
    two = Engine("a", make_learner("a"), quick(), checkpoint=path)
    assert two.restored
    assert (two.session, two.view.round) == (one.session, 1)
    assert torch.equal(two.network.flat, one.network.flat)
    one.train()
    two.train()
    assert torch.equal(two.network.flat, one.network.flat)  # data order and optimizer too


def adapted(shift: float = 0.0) -> SgdLearner:
    """A learner whose first layer is frozen, trained by an optimizer and a scheduler of torch."""
    module = mlp("4=600=3")
    for value in module[0].parameters():
        torch.nn.init.constant_(value, 0.25 + shift)
    module[0].requires_grad_(False)
    network = SlicedNetwork(module, {"all": 1.0}, peer="a", seed=0)
    samples = torch.linspace(-1, 1, 40).view(10, 4), torch.arange(10) % 3
    scheduler = {"name": "StepLR", "step_size": 1}
    return SgdLearner(network, samples, samples, optimizer="AdamW", scheduler=scheduler)


def test_frozen_parameters_are_not_in_a_checkpoint_and_must_be_those_of_before(tmp_path):
    path = tmp_path / "a.checkpoint"
    one = begin(Engine("a", adapted(), quick(), checkpoint=path))
    one.train()
    one.save()
    with safe_open(path, framework="pt") as file:
        shapes = [tuple(file.get_tensor(name).shape) for name in file.keys()]  # noqa: SIM118
    assert not any(600 * 4 in shape or shape == (600, 4) for shape in shapes)
    two = Engine("a", adapted(), quick(), checkpoint=path)
    for each in (one, two):
        each.train()
    assert torch.equal(two.network.flat, one.network.flat)
    with pytest.raises(GossamerError, match="frozen parameters are not those that it was trained"):
        Engine("a", adapted(shift=0.5), quick(), checkpoint=path)


def test_another_peers_checkpoint_is_refused(tmp_path):
    path = tmp_path / "c"
    Engine("a", make_learner("a"), quick(), checkpoint=path).save()
    with pytest.raises(PeerError, match="another network or peer"):
        Engine("b", make_learner("b"), quick(), checkpoint=path)


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def saved(tmp_path):
    path = tmp_path / "a.checkpoint"
    begin(Engine("a", make_learner("a"), quick(), checkpoint=path))
    return path


def again(path) -> Engine:
    return Engine("a", make_learner("a"), quick(), checkpoint=path)


def refused(path, *words: str) -> None:
    with pytest.raises(PeerError) as found:
        again(path)
    text = str(found.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    for word in ("move it away", *words):
        assert word in text


def test_a_flipped_bit_in_a_value_or_in_the_books_is_found(tmp_path):
    path = tmp_path / "c"
    tree = {"round": 12345, "values": torch.ones(64), "bytes": torch.ones(3, dtype=torch.uint8)}
    save_checkpoint(path, tree)
    flip(path, path.stat().st_size - 5)  # of a value: still a number
    with pytest.raises(PeerError, match=r"c: is damaged: its checksum is wrong; move it away"):
        load_checkpoint(path)
    save_checkpoint(path, tree)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"12345", b"12344"))
    with pytest.raises(PeerError, match="is damaged"):
        load_checkpoint(path)
    save_checkpoint(path, tree)
    assert load_checkpoint(path) is not None


def test_a_checkpoint_with_values_that_are_not_finite_is_refused(tmp_path):
    path = saved(tmp_path)
    tree = load_checkpoint(path)
    assert tree is not None
    tree["network"][3] = torch.nan
    save_checkpoint(path, tree)
    refused(path, "NaN or infinite")


@pytest.mark.parametrize("kept", [0, 7, 200, -1])
def test_a_cut_checkpoint_is_refused_in_one_line(tmp_path, kept):
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    refused(path, "it may be truncated")


def test_a_checkpoint_of_another_version_is_refused_in_one_line(tmp_path):
    path = saved(tmp_path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"].startswith("gossamer-checkpoint-")
    save_file(load_file(path), path, metadata | {"format": "gossamer-checkpoint-99"})
    refused(path, "not a checkpoint of this version", "run the version that wrote it")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("in_touch", None), ("learner", None), ("gossip", None), ("peer", None), ("network", None),
        ("agreed", None), ("samples", None), ("books", {"rounds": 3}), ("ending", {}),
        ("learner", {}), ("gossip", {"version": 99}), ("in_touch", 12.5), ("network", torch.zeros(3)),
    ],
)  # fmt: skip
def test_a_checkpoint_that_lacks_something_is_refused_in_one_line(tmp_path, key, value):
    path = saved(tmp_path)
    tree = load_checkpoint(path)
    assert tree is not None
    if value is None:
        del tree[key]
    else:
        tree[key] = value
    save_checkpoint(path, tree)
    refused(path, "does not fit this version of the program, or this learner")


def test_a_failed_save_leaves_the_old_one_and_takes_up_no_room(tmp_path):
    path = tmp_path / "c"
    save_checkpoint(path, {"n": 1})
    (tmp_path / "c.part").write_bytes(b"half")  # of a process that was killed
    with largest_file(10_000), pytest.raises(SafetensorError, match="File too large"):
        save_checkpoint(path, {"n": 2, "values": torch.ones(10_000)})
    assert load_checkpoint(path) == {"n": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["c"]
