"""Checkpoints: what goes in comes out, and nothing half-written is ever read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peer_kit import make_learner, quick

from gossamer.peer import checkpoint
from gossamer.peer.checkpoint import load_checkpoint, save_checkpoint
from gossamer.peer.engine import Engine
from gossamer.peer.errors import PeerError


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


def test_a_save_that_dies_midway_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "c"
    save_checkpoint(path, {"n": 1})

    def dies(*args):
        args[1].write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", dies)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, {"n": 2})
    assert load_checkpoint(path) == {"n": 1}


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
    one = Engine("a", make_learner("a"), quick(), checkpoint=path)
    one.found(newcomer=False)
    one.train()
    one.save()
    two = Engine("a", make_learner("a"), quick(), checkpoint=path)
    assert two.restored
    assert (two.session, two.round) == (one.session, 1)
    assert torch.equal(two.network.flat, one.network.flat)
    one.train()
    two.train()
    assert torch.equal(two.network.flat, one.network.flat)  # data order and optimizer too


def test_another_peers_checkpoint_is_refused(tmp_path):
    path = tmp_path / "c"
    Engine("a", make_learner("a"), quick(), checkpoint=path).save()
    with pytest.raises(PeerError, match="another network or peer"):
        Engine("b", make_learner("b"), quick(), checkpoint=path)
