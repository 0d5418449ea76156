"""What a peer that leaves has said is not forgotten, whatever becomes of those who heard it."""

from __future__ import annotations

import asyncio
from base64 import b64decode

import pytest
from peer_kit import Still, begin, delivered, make_learner, quick
from waiting import turns

from gossamer.gossip import ONE, topics
from gossamer.peer.engine import Engine
from gossamer.peer.machine import load_checkpoint
from gossamer.peer.presence import Card, Online, SessionEnded, Status, read_card


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
    engine.turn([], [SessionEnded("b", "theirs", statement)], 2.0, 1 << 20)
    assert load_checkpoint(path)["gossip"]["ledger"]["open"] == []


def test_an_acknowledgement_that_has_arrived_is_read_before_its_sender_is_given_up():
    """Else what the receiver passed on would exist twice: there, and taken back here."""
    ann, ben = (
        begin(Engine(name, Still(make_learner(name), 1.0), quick())) for name in ("ann", "ben")
    )
    models = ("global",)
    to_ben = Online("ben", ben.session, models, models_pushed_to_us=models)
    to_ann = Online("ann", ann.session, models, models_pushed_to_us=models)
    ann.turn([], [to_ben], 0.0, 1 << 20)
    ben.turn([], [to_ann], 0.0, 1 << 20)
    ann.train()

    def packets(sender: Engine, received: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        sent = sender.turn(received, [], 0.01, 1 << 20)
        return [(each.model, bytes(packet)) for each in sent for packet in each.packets]

    acknowledgements = packets(ben, packets(ann, []))
    ann.turn(acknowledgements, [SessionEnded("ben", ben.session, None)], 0.02, 1 << 20)
    accounts = [engine.gossiper.account("global") for engine in (ann, ben)]
    assert ann.gossiper.reclaimed == []
    assert sum(account.held + account.open for account in accounts) == 2 * ONE


def test_goodbyes_that_are_kept_for_others_are_saved_too(tmp_path):
    path = tmp_path / "a.checkpoint"
    engine = begin(Engine("a", Still(make_learner("a"), 1.0), quick(), checkpoint=path))
    engine.keep_goodbyes({"b": "a goodbye"})
    engine.turn([], [], 1.0, 1 << 20)
    again = Engine("a", Still(make_learner("a"), 1.0), quick(), checkpoint=path)
    assert again.history.goodbyes == {"b": "a goodbye"}


@pytest.mark.parametrize(
    "later",
    [b"", b"nonsense", Status("offline", "b1", reason="connection lost").encode()],
    ids=["cleared", "nonsense", "late last will"],
)
def test_a_goodbye_that_is_kept_for_others_is_not_replaced_by_what_is_none(later):
    engine = begin(Engine("a", make_learner("a"), quick()))
    goodbye = Status("left", "b1", statement=[["c", "c1", "global", 3, "credited"]]).encode()
    arrivals = [
        (topics.card("nest", "b"), Card("b1", 0.0, 1, engine.schema_entries).encode()),
        (topics.status("nest", "b"), Status("online", "b1").encode()),
        (topics.card("nest", "c"), Card("c1", 0.0, 1, engine.schema_entries).encode()),
        (topics.status("nest", "c"), Status("online", "c1").encode()),
        (topics.status("nest", "c"), Status("offline", "c1").encode()),
        (topics.status("nest", "b"), goodbye),
        (topics.status("nest", "b"), later),
    ]

    async def scenario() -> list[bytes]:
        link, published = await delivered(arrivals, joined=True, engine=engine)
        keep_status = asyncio.create_task(link.keep_status())
        await turns(10)
        keep_status.cancel()
        return [payload for topic, payload in published if topic == topics.card("nest", "a")]

    (payload,) = asyncio.run(scenario())
    card = read_card(payload)
    assert card is not None
    assert {peer: b64decode(text) for peer, text in card.goodbyes.items()} == {"b": goodbye}
