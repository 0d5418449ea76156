"""Two or three gossipers that compress: references, what they do when lost, and what stays where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gossamer.gossip import ONE, DictStore, Give, Gossiper, Message, Packed, decode, encode
from gossamer.gossip.compress import Links, parse

SIZE = 600
SHAPES = {"v": [(20, 30)]}


def make(name: str, compressor: str | None, *, room: int = 1 << 30) -> Gossiper:
    value = np.random.default_rng(sum(name.encode())).standard_normal(SIZE)
    links = Links(compressor and parse(compressor), SHAPES, max_bytes=room)
    gossiper = Gossiper(name, f"s-{name}", DictStore({"v": value}), links=links)
    gossiper.inject("v", ONE)
    return gossiper


def acquaint(*peers: Gossiper) -> None:
    for a in peers:
        for b in peers:
            if a is not b:
                a.peer_online(b.peer, b.session, ["v"])


def wired(message: Message) -> Message:
    return decode(b"".join(encode(message, "schema", "float64"))).message


def deliver(*peers: Gossiper) -> list[Give]:
    """Everything that is on its way, over the wire; returns the transfers."""
    gives = []
    while messages := [wired(m) for a in peers for m in a.poll()]:
        for message in messages:
            gives += [message] if isinstance(message, Give) else []
            next(p for p in peers if p.peer == message.receiver).handle(message, 0.0)
    return gives


def total(*peers: Gossiper) -> np.ndarray:
    held = [p.value("v") * (p.weight("v") / ONE) for p in peers]
    left = [p.snapshot()["vault"]["residue"].get("v", np.zeros(SIZE)) / ONE for p in peers]
    return np.sum([*held, *left], axis=0)


def apart(*peers: Gossiper) -> float:
    return float(np.ptp([p.value("v") for p in peers], axis=0).max())


def exchange(a: Gossiper, b: Gossiper) -> list[Give]:
    a.push("v", {b.peer: a.weight("v") // 2}, 0.0)
    return deliver(a, b)


@pytest.mark.parametrize(
    "name",
    [
        "float16",
        "int8",
        "int2",
        "mask:0.4",
        "subsample:0.5",
        "top-k:0.1",
        "low-rank:3",
        "top-k:0.2+int8",
    ],
)
def test_peers_agree_on_the_mean_and_nothing_is_lost(name):
    peers = [make(each, name) for each in "abc"]
    acquaint(*peers)
    before = total(*peers)
    turn = np.random.default_rng(0)
    for _ in range(600):
        a, b = turn.permutation(3)[:2]
        peers[a].push("v", {peers[b].peer: peers[a].weight("v") // 2}, 0.0)
        deliver(*peers)
    np.testing.assert_allclose(total(*peers), before, atol=1e-10)
    assert sum(p.weight("v") for p in peers) == 3 * ONE
    assert apart(*peers) < 0.05
    np.testing.assert_allclose(peers[0].value("v"), before / 3, atol=0.05)


def test_a_push_of_everything_leaves_a_residue_that_comes_home():
    a, b = make("a", "int2"), make("b", None)
    acquaint(a, b)
    before = total(a, b)
    a.push("v", {"b": ONE}, 0.0, exact_shares=True)
    deliver(a, b)
    assert a.weight("v") == 0
    assert np.abs(a.snapshot()["vault"]["residue"]["v"]).max() > 0
    np.testing.assert_allclose(total(a, b), before, atol=1e-12)
    exchange(b, a)
    assert not a.snapshot()["vault"]["residue"]
    np.testing.assert_allclose(total(a, b), before, atol=1e-12)


def test_a_leaver_takes_no_residue_along():
    a, b = make("a", "int2"), make("b", None)
    acquaint(a, b)
    before = total(a, b)
    exchange(a, b)
    a.hand_over(0.0)
    deliver(a, b)
    assert a.is_drained()
    assert not a.snapshot()["vault"]["residue"]
    np.testing.assert_allclose(total(b), before, atol=1e-12)


def test_the_first_message_is_whole_and_later_ones_refer_to_the_latest_in_either_direction():
    a, b = make("a", "top-k:0.05"), make("b", "top-k:0.05")
    acquaint(a, b)
    bases = [exchange(*pair)[0].packed.base for pair in ((a, b), (a, b), (b, a), (a, b), (b, a))]
    assert bases == [0, 1, -2, -1, -3]


def test_a_receiver_that_was_restarted_refuses_and_is_sent_the_whole():
    a, b = make("a", "top-k:0.05"), make("b", None)
    acquaint(a, b)
    before = total(a, b)
    exchange(a, b)
    b = Gossiper.restore(b.snapshot(), DictStore({"v": np.zeros(SIZE)}))
    acquaint(a, b)
    (give,) = exchange(a, b)
    assert give.packed.base == 1
    assert b.counters["refused-no-reference"] == 1
    assert a.counters["acknowledged-void"] == 1
    np.testing.assert_allclose(total(a, b), before, atol=1e-12)
    (give,) = exchange(a, b)
    assert give.packed.base == 0
    assert b.counters["credited"] == 2
    np.testing.assert_allclose(total(a, b), before, atol=1e-12)


def test_a_sender_that_was_restarted_sends_what_it_had_promised():
    a, b = make("a", "int3"), make("b", None)
    acquaint(a, b)
    before = total(a, b)
    exchange(a, b)
    a.push("v", {"b": ONE // 8}, 0.0)
    snapshot = a.snapshot()
    (lost,) = a.poll()  # saved, but crashed before sending
    store = DictStore({"v": np.zeros(SIZE)})
    again = Gossiper.restore(snapshot, store, links=Links(parse("int3"), SHAPES))
    acquaint(again, b)
    again.tick(0.0)
    (give,) = deliver(again, b)
    assert give.packed is None
    assert isinstance(lost, Give)
    assert np.array_equal(give.value, lost.value)
    np.testing.assert_allclose(total(again, b), before, atol=1e-12)


def test_references_are_forgotten_when_there_is_no_room():
    a, b = make("a", "top-k:0.05", room=10), make("b", None)
    acquaint(a, b)
    assert [exchange(a, b)[0].packed.base for _ in range(3)] == [0, 0, 0]
    assert b.counters["credited"] == 3


def test_the_room_that_references_take_is_known_at_all_times():
    hub, *others = [make(name, "int8", room=6 * 4 * SIZE) for name in "habcd"]
    acquaint(hub, *others)

    for _ in range(5):
        for other in others:
            exchange(hub, other)
            exchange(other, hub)
            assert hub.links.held_bytes <= 6 * 4 * SIZE
    assert hub.links.held_bytes > 3 * 4 * SIZE
    for other in "abcd":
        hub.links.forget_peer(other)
    assert hub.links.held_bytes == 0
    exchange(hub, others[0])
    assert hub.links.held_bytes == 4 * SIZE
    hub.links.forget()
    assert hub.links.held_bytes == 0


def test_an_answer_may_refer_to_what_is_not_acknowledged_yet():
    a, b = make("a", "int8"), make("b", "int8")
    acquaint(a, b)
    before = total(a, b)
    a.push("v", {"b": ONE // 2}, 0.0)
    (give,) = a.poll()
    b.handle(wired(give), 0.0)
    (ack,) = b.poll()
    b.push("v", {"a": ONE // 2}, 0.0)
    (answer,) = b.poll()
    assert isinstance(answer, Give)
    assert answer.packed is not None
    assert answer.packed.base == -1
    a.handle(wired(answer), 0.0)  # overtakes the acknowledgement
    a.handle(wired(ack), 0.0)
    deliver(a, b)
    assert a.counters["credited"] == 1
    np.testing.assert_allclose(total(a, b), before, atol=1e-10)


def test_a_message_that_makes_no_sense_is_refused_and_its_mass_comes_back():
    a, b = make("a", "int8"), make("b", None)
    acquaint(a, b)
    before = total(a, b)
    a.push("v", {"b": ONE // 2}, 0.0)
    (give,) = a.poll()
    assert isinstance(give, Give)
    bad = Packed(2**40, (["mask", 1, 1], ["float32"]), (b"",))
    b.handle(wired(replace(give, packed=bad)), 0.0)
    deliver(a, b)
    assert b.counters["refused-garbage"] == 1
    np.testing.assert_allclose(total(a, b), before, atol=1e-12)


def test_distortion_is_counted_and_shrinks_as_peers_agree():
    a, b = make("a", "int8"), make("b", "int8")
    acquaint(a, b)
    exchange(a, b)
    first = a.links.traffic["v"].worst
    assert 0.001 < first < 0.02
    for _ in range(30):
        exchange(a, b)
        exchange(b, a)
    counted = a.links.traffic["v"]
    assert counted.packed == 31
    assert counted.worst == first
    assert counted.mean_distortion < first / 4


def test_shares_shrink_with_what_comes_through():
    a, b = make("a", "mask:0.1"), make("b", None)
    acquaint(a, b)
    exchange(a, b)
    a.set_value("v", a.value("v") + np.random.default_rng(9).standard_normal(SIZE))
    held = a.weight("v")
    (give,) = exchange(a, b)
    assert 0.2 < give.weight / (held // 2) < 0.45  # a tenth of the values: cos is about √0.1
    assert a.weight("v") == held - give.weight


def test_exact_models_are_not_compressed_and_references_of_ended_ones_are_dropped():
    a, b = make("a", "int8"), make("b", "int8")
    acquaint(a, b)
    assert all(give.packed is not None for give in exchange(a, b))
    assert a.links.held_bytes
    a.links.set_models({}, exact=["v"])
    assert not a.links.held_bytes
    before = total(a, b)
    gives = exchange(a, b)
    assert {give.packed is None for give in gives if give.sender == "a"} == {True}
    np.testing.assert_allclose(total(a, b), before, rtol=1e-6)
