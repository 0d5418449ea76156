"""What a peer that leaves has said is not forgotten, whatever becomes of those who heard it."""

from __future__ import annotations

from peer_kit import Still, begin, make_learner, quick

from gossamer.peer.engine import Engine
from gossamer.peer.machine import load_checkpoint
from gossamer.peer.presence import Gone, Online


def test_a_goodbye_is_saved_in_the_turn_in_which_it_is_heard(tmp_path):
    """A peer killed a moment later must not take back what the leaver said it had credited."""
    path = tmp_path / "a.checkpoint"
    learner = Still(make_learner("a"), 1.0)
    engine = begin(Engine("a", learner, quick(save_every=1e9), checkpoint=path))
    engine.turn(
        [], [Online("b", "theirs", ("global",), models_pushed_to_us=("global",))], 0.0, 1 << 20
    )
    engine.train()
    (give,) = [m for m in engine.turn([], [], 1.0, 1 << 20) if m.receiver == "b"]
    assert load_checkpoint(path)["gossip"]["ledger"]["open"] != []
    sequence = next(iter(engine.gossiper.ledger.open.values())).give.sequence
    statement = [["a", engine.session, give.model, sequence, "credited"]]
    engine.turn([], [Gone("b", "theirs", statement)], 2.0, 1 << 20)
    assert load_checkpoint(path)["gossip"]["ledger"]["open"] == []


def test_goodbyes_that_are_kept_for_others_are_saved_too(tmp_path):
    path = tmp_path / "a.checkpoint"
    engine = begin(Engine("a", Still(make_learner("a"), 1.0), quick(), checkpoint=path))
    engine.keep_goodbyes({"b": "a goodbye"})
    engine.turn([], [], 1.0, 1 << 20)
    again = Engine("a", Still(make_learner("a"), 1.0), quick(), checkpoint=path)
    assert again.history.goodbyes == {"b": "a goodbye"}
