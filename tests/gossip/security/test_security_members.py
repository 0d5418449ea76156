"""Cards, statuses and notices: whatever a stranger or a member puts into one, it is checked and counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from security_kit import (
    ONLINE,
    OWNER,
    SWARM,
    Clock,
    WrongClock,
    exchange,
    group,
    hears_card,
    introduce,
    invited,
    person,
    restarted,
    understand,
    wake,
)

from gossamer.gossip import topics
from gossamer.gossip.security import (
    Death,
    Identity,
    NullSecurity,
    Register,
    Revocations,
    StatusHead,
    TrustError,
    endorse,
    invite,
    open_ticket,
    read_claims,
    revocation_topic,
    sign_death,
    sign_status,
    signed,
)
from gossamer.gossip.security.invitation import CLOCK_SKEW
from gossamer.gossip.security.members import (
    MAX_CARD_AGE,
    MAX_EARLY,
    MAX_MISDATED,
    MAX_OTHERS,
    MAX_STATUS,
    REPLY_TIMEOUT,
    VERSION,
    EarlyStatuses,
    MisdatedCards,
    NameClaim,
    ReplyMonitor,
)

# --- signed and still unsound ------------------------------------------------------------------------


def nested(depth: int) -> list:
    found: list = []
    for _ in range(depth):
        found = [found]
    return found


DEEP = nested(400)


def card(identity: Identity, **bad: object) -> bytes:
    head = {
        "version": VERSION, "key": identity.public, "incarnation": bytes(16), "number": 1,
        "exchange": bytes(32), "masks": bytes(32), "session": "x",
        "since": 0.0, "issued": 0.0, "models": ["global"],
        "invitation": invite(OWNER, SWARM, identity.label, identity.public), "endorsement": b"",
    }  # fmt: skip
    return signed.sign(identity, topics.card(SWARM, identity.name), head | bad)


@pytest.mark.parametrize(
    "bad",
    [{"invitation": 2**64 - 1}, {"invitation": 2**45}, {"invitation": 3}, {"endorsement": 2**62},
     {"masks": 32}, {"version": VERSION - 1}, {"incarnation": bytes(32)}, {"number": -1},
     {"exchange": 2**62}, {"exchange": 32}, {"exchange": bytes(31)}, {"models": 7},
     {"models": "global"}, {"models": [DEEP]}, {"session": DEEP}, {"session": 3},
     {"session": "a b"}, {"session": "x" * 65}, {"since": float("inf")}, {"since": "0"},
     {"issued": float("nan")}, {"issued": True}],
    ids=lambda bad: ", ".join(f"{key} {value!s:.20}" for key, value in bad.items()),
)  # fmt: skip
def test_a_card_with_a_field_of_another_kind_is_malformed(bad):
    ben = person("ben", Clock())
    eve = Identity.generate("eve")
    assert ben.security.receive(topics.card(SWARM, eve.name), card(eve, **bad)) == []
    assert ben.security.counters == {"untrusted-malformed": 1}
    assert not ben.security.register.members


def test_the_same_card_without_it_is_a_card():
    """Or the test before would only show that nothing gets through."""
    clock = Clock()
    ben, eve = person("ben", clock), Identity.generate("eve")
    issued = {"issued": clock.wall(), "invitation": invited("x")[1].invitation}
    assert ben.security.receive(topics.card(SWARM, eve.name), card(eve, **issued)) == []
    assert ben.security.counters == {
        "untrusted-uninvited": 1
    }  # read to its end, and refused for that


@pytest.mark.parametrize("error", [MemoryError("no"), RecursionError("deep"), OverflowError("far")])
@pytest.mark.parametrize("kind", ["card", "status", "inbox"])
def test_whatever_else_goes_wrong_in_reading_is_counted(error, kind):
    (anna, ben), _ = group("anna", "ben")

    def fail(*_args, **_options):
        raise error

    if kind == "inbox":
        (packet,) = anna.packets(ben)
        ben.security.keyring = SimpleNamespace(open=fail)
        assert ben.security.open("global", packet) is None
    else:
        ben.security.register = SimpleNamespace(card=fail, status=fail)
        topic = getattr(topics, kind)(SWARM, anna.name)
        assert ben.security.receive(topic, getattr(anna.security, kind)(b"{}")) == []
    assert ben.security.counters == {"untrusted-malformed": 1}


@pytest.mark.parametrize("field", ["number", "revocations"])
@pytest.mark.parametrize("value", [True, -1, 2**63, 1.5, "1", None])
def test_a_status_without_its_numbers_is_malformed(field, value):
    (anna, ben), _ = group("anna", "ben")
    head = {
        "version": VERSION, "key": anna.identity.public, "number": 7, "revocations": 0,
        "incarnation": anna.security.keyring.incarnation,
    }  # fmt: skip
    topic = topics.status(SWARM, anna.name)
    bad = signed.sign(anna.identity, topic, head | {field: value}, b"{}")
    assert ben.security.receive(topic, bad) == []
    assert ben.security.counters == {"untrusted-malformed": 1}
    assert ben.security.receive(topic, signed.sign(anna.identity, topic, head, b"{}"))


@pytest.mark.parametrize("bad", [{"uses": float("inf")}, {"expires": float("nan")}, {"key": 32},
                                 {"models": [DEEP]}, {"number": DEEP}])  # fmt: skip
def test_an_invitation_of_another_form_admits_nobody(bad):
    claims, _ = signed.read(invited("x")[1].invitation, "invitation", lambda _: OWNER.public)
    forged = signed.sign(OWNER, "invitation", claims | bad)
    with pytest.raises(TrustError, match="with missing fields"):
        read_claims(forged, OWNER.public)


@pytest.mark.parametrize("bad", [{"peers": [DEEP]}, {"papers": 3}, {"number": -1}])
def test_a_revocation_list_of_another_form_is_malformed(bad):
    head = {"number": 1, "peers": [], "papers": []} | bad
    with pytest.raises(TrustError, match="with missing fields"):
        Revocations.read(signed.sign(OWNER, revocation_topic(SWARM), head), OWNER.public, SWARM)


def test_a_status_nested_too_deep_is_not_online():
    assert signed.state_of(b"[" * 200_000) is None


def test_deep_nesting_in_a_head_is_malformed():
    ben, eve = person("ben", Clock()), Identity.generate("eve")
    topic = topics.card(SWARM, eve.name)
    lists = b"\x91" * 200_000  # each holds the next
    assert ben.security.receive(topic, signed.sign(eve, topic, {})[:72] + lists) == []
    assert ben.security.counters == {"untrusted-malformed": 1}


# --- what was said before a peer left -------------------------------------------------------------


def hears(listener, kind, speaker, payload):
    topic = getattr(topics, kind)(SWARM, speaker.name)
    return [each.kind for each in listener.security.receive(topic, payload)]


def lives(clock, count=2):
    """One peer, life after life, each with the card and the status that the broker saw."""
    identity, admission = invited("ben")
    found = []
    for number in range(count):
        clock.now += 10
        life = wake(identity, admission, clock, session=f"s{number}")
        found.append((life, life.security.card(b"{}"), life.security.status(b"online")))
    return found


def test_an_old_card_is_not_believed_again_after_its_peer_left():
    clock = Clock()
    anna = person("anna", clock)
    (_, old_card, old_status), (ben, new_card, new_status) = lives(clock)
    assert hears(anna, "card", ben, new_card) == ["card"]
    assert hears(anna, "status", ben, new_status) == ["status"]
    anna.security.remove(ben.name, "s1")
    for card_ in (old_card, new_card):
        assert hears(anna, "card", ben, card_) == []
    assert hears(anna, "status", ben, old_status) == []
    assert anna.security.counters == {"untrusted-stale": 2}
    assert not anna.security.register.members


def test_a_life_that_comes_back_cannot_be_given_its_old_status():
    clock = Clock()
    anna = person("anna", clock)
    ((ben, first, status),) = lives(clock, 1)
    newer = ben.security.status(b"done")
    assert hears(anna, "card", ben, first) == ["card"]
    assert hears(anna, "status", ben, newer) == ["status"]
    anna.security.remove(ben.name, "s0")
    clock.now += 10
    assert hears(anna, "card", ben, ben.security.card(b"{}")) == ["card"]
    assert hears(anna, "status", ben, status) == []
    assert hears(anna, "status", ben, newer) == []
    assert hears(anna, "status", ben, ben.security.status(b"online")) == ["status"]


def test_a_new_life_is_believed_after_the_old_one_left():
    clock = Clock()
    anna = person("anna", clock)
    (ben, first, _), (_, second, status) = lives(clock)
    assert hears(anna, "card", ben, first) == ["card"]
    anna.security.remove(ben.name, "s0")
    assert hears(anna, "card", ben, second) == ["card"]
    assert hears(anna, "status", ben, status) == ["status"]


def test_of_many_who_left_the_oldest_are_forgotten():
    clock = Clock()
    register = Register(SWARM, OWNER.public, max_departed=2)
    gone = [person(label, clock) for label in ("ben", "carl", "dora")]
    cards = [one.security.card(b"{}") for one in gone]
    for one, card_ in zip(gone, cards, strict=True):
        register.add(register.read_card(one.name, card_, clock.wall())[0])
        register.remove(one.name)
    again = []
    for one, card_ in zip(gone, cards, strict=True):
        try:
            again.append(bool(register.read_card(one.name, card_, clock.wall())))
        except TrustError as error:
            again.append(error.cause)
    assert again == [True, "stale", "stale"]


# --- goodbyes ----------------------------------------------------------------------------------------


LEFT = b'{"state": "left", "session": "s"}'


def hear(listener, speaker, status):
    heard = listener.security.receive(topics.status(SWARM, speaker.name), status)
    return [(each.kind, each.peer, each.body) for each in heard]


def test_a_returning_peer_learns_who_left_without_a_card():
    (anna, ben), clock = group("anna", "ben")
    again = restarted(ben, clock)
    # Anna has cleared her card: the broker keeps only her last status.
    assert hear(again, anna, anna.security.status(LEFT)) == [("status", anna.name, LEFT)]
    assert not again.security.counters


def test_a_peer_that_came_back_and_left_meanwhile_is_known_to_have_left():
    (anna, ben), clock = group("anna", "ben")
    clock.now += 1
    next_life = wake(anna.identity, anna.admission, clock, session="next")
    next_life.security.card(b"{}")  # Ben never saw it
    goodbye = next_life.security.status(LEFT)
    assert hear(ben, anna, goodbye) == [("status", anna.name, LEFT)]
    assert hear(ben, anna, goodbye) == []
    assert ben.security.counters == {"untrusted-stale": 1}


def test_only_a_goodbye_is_believed_without_a_card():
    (anna, ben), clock = group("anna", "ben")
    again = restarted(ben, clock)
    for status in (anna.security.status(ONLINE), anna.security.will(LEFT)):
        assert hear(again, anna, status) == []
    assert hear(again, anna, LEFT) == []
    assert again.security.counters == {"untrusted-malformed": 1}  # the others wait for a card


@pytest.mark.parametrize("crashed", [False, True])
def test_an_old_goodbye_does_not_make_a_present_peer_leave(crashed):
    """The broker shows Ben the goodbye of an incarnation of Anna's before the one that he knows."""
    clock = Clock()
    identity, admission = invited("anna")
    old = wake(identity, admission, clock, session="old")
    old.security.card(b"{}")
    goodbye = old.security.status(LEFT)
    clock.now += 10
    anna, ben = wake(identity, admission, clock), person("ben", clock)
    introduce([anna, ben])
    if crashed:
        ben = restarted(ben, clock)
    assert hear(ben, anna, goodbye) == []
    assert ben.security.counters == {"untrusted-stale": 1}


def test_cards_from_before_a_goodbye_do_not_count():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    card = anna.security.card(b"{}")
    assert hear(ben, anna, anna.security.status(LEFT))
    assert ben.security.receive(topics.card(SWARM, anna.name), card) == []
    assert ben.security.counters == {"untrusted-stale": 1}
    clock.now += 1
    again = wake(anna.identity, anna.admission, clock)
    assert ben.security.receive(topics.card(SWARM, anna.name), again.security.card(b"{}"))


def test_a_goodbye_of_a_stranger_is_refused():
    clock = Clock()
    ben, admitted = person("ben", clock), invited("eve")[1]
    eve, forged = invited("eve", owner=Identity.generate("somebody"))
    topic = topics.status(SWARM, eve.name)
    for admission in (forged, admitted):  # not the owner's; somebody else's
        shown = admission.invitation, admission.endorsement
        head = StatusHead(bytes(16), 1, 0, False, (), clock.wall(), *shown)
        assert ben.security.receive(topic, sign_status(eve, SWARM, head, LEFT)) == []
    assert ben.security.counters == {"untrusted-uninvited": 2}
    assert (
        ben.security.receive(topic, sign_status(eve, SWARM, StatusHead(bytes(16), 1, 0), LEFT))
        == []
    )
    assert ben.security.counters["untrusted-malformed"] == 1


def test_goodbyes_of_a_ticket_count_for_those_that_were_admitted():
    """Whoever has a ticket can make up keys without end: their goodbyes must not fill anything."""
    clock = Clock()
    ticket = open_ticket(OWNER, SWARM, uses=5, days=30_000)
    ben, known, unknown = (
        person("ben", clock),
        *(wake(one, endorse(*ticket, one), clock) for one in map(Identity.generate, "xy")),
    )
    introduce([ben, known])
    before = [one.security.card(b"{}") for one in (known, unknown)]
    again = restarted(ben, clock)
    assert hear(again, known, known.security.status(LEFT))
    assert hear(again, unknown, unknown.security.status(LEFT)) == []  # it waits, in little room
    assert not hears_card(again, known, before[0])
    assert hears_card(again, unknown, before[1])  # nothing is remembered of it


def test_what_is_remembered_of_cards_is_bounded_by_their_age():
    (anna, ben), clock = group("anna", "ben")
    assert ben.security.snapshot()["editions"].keys() == {anna.name}
    again = restarted(ben, clock)
    assert again.security.snapshot()["editions"].keys() == {anna.name}
    clock.now += 2 * MAX_CARD_AGE
    assert again.security.snapshot()["editions"] == {}


def test_a_peer_that_restarts_refuses_cards_older_than_those_it_knew():
    clock = Clock()
    ben, (identity, admission) = person("ben", clock), invited("anna")
    old = wake(identity, admission, clock, session="old").security.card(b"{}")
    clock.now += 10
    anna = wake(identity, admission, clock)
    card = anna.security.card(b"{}")
    ben.security.receive(topics.card(SWARM, anna.name), card)
    again = restarted(ben, clock)
    assert again.security.receive(topics.card(SWARM, anna.name), old) == []
    assert again.security.counters == {"untrusted-stale": 1}
    assert again.security.receive(topics.card(SWARM, anna.name), card)


# --- who is refused, and notices it -------------------------------------------------------------------


def lines(caplog, text):
    return [r.getMessage() for r in caplog.records if text in r.getMessage()]


@pytest.mark.parametrize(("ahead", "known"), [(CLOCK_SKEW, True), (CLOCK_SKEW + 1, False)])
def test_a_card_from_the_future_is_refused_by_name(caplog, ahead, known):
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", WrongClock(clock, ahead))
    assert hears_card(anna, ben) is (ben.name in anna.security.register.members) is known
    assert anna.security.counters["untrusted-clock"] == (not known)
    told = (
        f"the card of {ben.name} is dated {ahead:.0f} s ahead of our clock: its clock is ahead, or"
    )
    assert (told in caplog.text) is not known


def test_a_clock_that_was_ahead_once_does_not_lock_its_peer_out():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", WrongClock(clock, 86_400))
    introduce([anna, ben])
    clock.now += 10
    again = wake(ben.identity, ben.admission, clock)
    introduce([anna, again])
    assert understand(anna, again)
    assert "untrusted-stale" not in anna.security.counters


@pytest.mark.parametrize("wrong", [-3600.0, 3 * 86_400.0], ids=["behind", "ahead"])
def test_a_device_that_starts_with_its_clock_wrong_takes_the_others_in_later(wrong):
    """Retained cards come once, when it connects: with its clock set, it must know them all the same."""
    clock = Clock()
    hers = WrongClock(clock, wrong)
    anna, ben = person("anna", hers), person("ben", clock)
    introduce([anna, ben])
    assert anna.security.register.members == {}
    anna.security.tick()
    assert anna.security.register.members == {}
    hers.by = 0.0
    found = [each for each in anna.security.tick()[1] if each.kind != "reissue-card"]
    assert [(each.kind, each.peer) for each in found] == [
        ("card", ben.name),
        ("status", ben.name),
    ]
    assert anna.packets(ben)


def test_misdated_cards_are_bounded_and_wait_for_our_clock():
    waiting = MisdatedCards()
    for number in range(MAX_MISDATED + 5):
        waiting.keep(f"p{number}", b"old", 1e9)
    waiting.keep("p0", b"new", 1e9)
    assert waiting.take_due(0.0) == waiting.take_due(1e9 + 2 * MAX_CARD_AGE) == []
    cards = waiting.take_due(1e9)
    assert len(cards) == MAX_MISDATED
    assert cards[0] == ("p0", b"new")
    assert waiting.take_due(1e9) == []


def test_who_is_not_answered_says_so_once_and_shows_its_card_again(caplog):
    clock = Clock()
    his = WrongClock(clock, 3600)
    anna, ben = person("anna", clock), person("ben", his)
    introduce([anna, ben])  # Ben hears Anna, and Anna refuses Ben
    for _ in range(12):
        exchange([anna, ben], clock, rounds=1, seconds=REPLY_TIMEOUT / 4)
    assert [each.kind for each in ben.heard] == ["reissue-card"] * 2
    (line,) = lines(caplog, "no peer has replied")
    assert line.startswith(f"peer {ben.name}: no peer has replied for {REPLY_TIMEOUT:g} s")
    assert anna.name in line
    his.by = 0.0
    introduce([ben, anna])
    assert understand(anna, ben)
    clock.now += 10 * REPLY_TIMEOUT
    assert ben.security.tick()[1] == []


def test_who_is_taken_for_a_member_is_answered_though_nobody_gossips(caplog):
    """Rounds of training may take minutes: a question, and its answer, tell silence from refusal."""
    people, clock = group("anna", "ben", "carl", "dora", "eric")
    assert exchange(people, clock, rounds=4, seconds=REPLY_TIMEOUT / 9) == 0
    asked = exchange(people, clock, rounds=8, seconds=REPLY_TIMEOUT / 9)
    assert 0 < asked <= 2 * 3 * len(people)
    assert not any(one.heard for one in people)
    assert exchange(people, clock, rounds=20, seconds=REPLY_TIMEOUT) == 0
    assert lines(caplog, "no peer has replied") == []


def test_who_is_answered_or_alone_does_not_complain(caplog):
    (anna, ben), clock = group("anna", "ben")
    assert understand(anna, ben)
    alone = person("carl", clock)
    # The card of somebody who is not there, and somebody there with whom nothing is shared.
    assert hears_card(alone, ben)
    other = person("dora", clock, ("blue",))
    introduce([alone, other])
    for _ in range(3):
        clock.now += REPLY_TIMEOUT
        for one in (anna, ben, alone, other):
            assert one.security.tick()[1] == []
    assert lines(caplog, "no peer has replied") == []


def test_the_warning_names_a_few_of_many(caplog):
    watch = ReplyMonitor("me")
    others = [f"p{number}" for number in range(10)]
    assert [watch.next_step(others, now) for now in (0.0, REPLY_TIMEOUT / 2, REPLY_TIMEOUT / 2 + 1)] == [
        "wait", "ask", "wait",
    ]  # fmt: skip
    assert watch.next_step(others, REPLY_TIMEOUT) == "reissue"
    assert "(p0, p1, p2 and 7 more)" in caplog.text


# --- strangers ----------------------------------------------------------------------------------------


def stranger_status(number, size):
    stranger = Identity.generate(f"x{number}")
    status = sign_status(stranger, SWARM, StatusHead(bytes(16), 1, 0), b"." * size)
    return topics.status(SWARM, stranger.name), status


def test_long_statuses_of_strangers_are_dropped_and_counted(caplog):
    anna = person("anna", Clock())
    for number in range(5):
        assert anna.security.receive(*stranger_status(number, MAX_STATUS)) == []
    assert anna.security.counters == {"untrusted-malformed": 5}
    assert len(lines(caplog, "whose card is not known")) == 3  # the 1st, the 2nd, the 4th


def test_statuses_of_many_strangers_give_way_and_are_counted():
    anna = person("anna", Clock())
    for number in range(MAX_EARLY + 20):
        anna.security.receive(*stranger_status(number, 3000))
    assert anna.security.counters == {"untrusted-unknown-sender": 20}


def test_statuses_that_wait_take_up_bounded_room():
    early = EarlyStatuses()
    with pytest.raises(TrustError, match="the limit is"):
        early.keep("x", b"." * (MAX_STATUS + 1))
    for number in range(MAX_EARLY):
        early.keep(f"p{number}", b"first")
    early.keep("p0", b"second")
    with pytest.raises(TrustError, match="the oldest, of p1, is dropped"):
        early.keep("another", b"first")
    assert len(early) == MAX_EARLY
    assert (early.pop("p0"), early.pop("p1"), early.pop("another")) == (b"second", None, b"first")


def test_a_long_goodbye_of_a_member_is_heard():
    """It says what became of every transfer: the bound is one for strangers."""
    (anna, ben), _ = group("anna", "ben")
    goodbye = ben.security.status(ONLINE + b" " * 10 * MAX_STATUS)
    assert anna.security.receive(topics.status(SWARM, ben.name), goodbye)


# --- our own name ------------------------------------------------------------------------------------


def incarnations(number):
    """As many incarnations of one peer, and its status topic."""
    clock = Clock()
    identity, admission = invited("anna")
    people = [wake(identity, admission, clock, session=f"s{each}") for each in range(number)]
    return [one.security for one in people], topics.status(SWARM, identity.name)


def said(security, place, payload):
    return [heard.body for heard in security.receive(place, payload) if heard.kind == "status"]


def test_an_old_status_is_refused_in_silence_while_the_name_is_asked_for(caplog):
    caplog.set_level("INFO")
    (old, new), place = incarnations(2)
    words = [old.status(b"online"), old.status(b"left"), old.will(b"offline")]
    assert [said(new, place, each) for each in words] == [[]] * 3
    assert new.counters == {"untrusted-unanswered": 3}
    assert caplog.messages == []
    assert said(new, place, new.status(b"free?")) == [b"free?"]  # our own question comes back


def test_an_incarnation_that_answers_is_believed_and_so_is_its_end():
    (first, second), place = incarnations(2)
    first.card(b"{}")
    before = first.status(b"online")
    assert said(second, place, before) == []
    assert said(first, place, second.status(b"free?")) == [b"free?"]  # so that it answers
    assert said(second, place, first.status(b"online")) == [b"online"]
    assert said(second, place, first.will(b"offline")) == [b"offline"]


def test_an_answer_to_one_incarnation_is_none_to_another():
    (first, second, third), place = incarnations(3)
    first.card(b"{}")
    first.receive(place, second.status(b"free?"))
    answer = first.status(b"online")
    assert said(second, place, answer) == [b"online"]
    assert said(third, place, answer) == []


def test_once_the_name_is_ours_late_wills_are_heard():
    """They are contradicted: the broker would else keep them as our last word."""
    (old, new), place = incarnations(2)
    new.card(b"{}")
    assert said(new, place, old.will(b"offline")) == [b"offline"]


def test_incarnations_met_are_bounded():
    own = NameClaim(bytes(16))
    own.is_claimed = True
    for number in range(1, 21):
        own.receive(StatusHead(bytes([number] * 16), 1, 0), b"")
    assert own.others == [bytes([number] * 16) for number in range(21 - MAX_OTHERS, 21)]


@pytest.mark.parametrize(
    "wrong", [{"incarnation": b"short"}, {"answers": 3}, {"answers": [3]}, {"will": 1}]
)
def test_nonsense_under_our_own_name_is_malformed(wrong):
    (anna,), place = incarnations(1)
    other = anna.identity
    head = {
        "version": VERSION,
        "key": other.public,
        "incarnation": bytes(16),
        "number": 1,
        "revocations": 0,
    }
    assert anna.receive(place, signed.sign(other, place, head | wrong)) == []
    assert anna.counters == {"untrusted-malformed": 1}


def test_the_echo_waits_for_an_incarnation_that_may_still_answer():
    """Whoever asks would else take silence for a free name, when the other is only slow."""
    (first, second), place = incarnations(2)
    online, will = first.status(b'{"state": "online"}'), first.will(b'{"state": "offline"}')
    question = second.status(b"free?")
    assert said(second, place, question) == [b"free?"]
    assert said(second, place, online) == []
    assert said(second, place, question) == []
    assert said(second, place, will) == []  # it is over: nothing to wait for
    assert said(second, place, question) == [b"free?"]
    second.receive(place, online)
    second.card(b"{}")
    assert said(second, place, question) == [b"free?"]


def test_a_card_under_our_name_is_heard_if_our_key_has_signed_it():
    """It tells the generation of the device that has or had the name; the last will does not."""
    (old, new), _ = incarnations(2)
    place = topics.card(SWARM, old.name)
    (heard,) = new.receive(place, old.card(b"generation 2"))
    assert (heard.kind, heard.peer, heard.body) == ("card", old.name, b"generation 2")
    stranger, admission = invited("anna")
    forged = wake(stranger, admission, Clock()).security.card(b"generation 9")
    assert new.receive(place, forged) == []
    assert new.counters["untrusted-signature"] == 1


def test_a_card_is_never_dated_before_the_one_it_follows():
    """Others take the newest card: one whose clock was set back would be shut out until it has caught up."""
    clock = Clock()
    identity, admission = invited("anna")
    before = wake(identity, admission, clock, session="s1").security.card(b"{}")
    ben = wake(*invited("ben"), clock).security
    place = topics.card(SWARM, identity.name)
    assert ben.receive(place, before)
    for back, accepted in ((24.0, True), (7200.0, False)):  # nobody is to be dated hours ahead
        clock.epoch -= back
        again = wake(identity, admission, clock, session=f"s{back}").security
        again.receive(place, before)
        card = again.card(b"{}")
        clock.epoch += back
        assert bool(ben.receive(place, card)) == accepted


# --- death notices -----------------------------------------------------------------------------------


DEATH = Death("s-anna", "its disk burnt", "owner", 1.8e9)


def test_the_owners_notice_is_heard_by_the_others_and_by_the_peer_itself():
    (anna, ben), _ = group("anna", "ben")
    notice = sign_death(OWNER, SWARM, anna.name, DEATH)
    for listener in (anna, ben):
        (heard,) = listener.security.receive(topics.death(SWARM, anna.name), notice)
        assert (heard.kind, heard.peer, Death.decode(heard.body)) == ("death", anna.name, DEATH)


def test_nobody_elses_notice_counts():
    (anna, ben, carl), _ = group("anna", "ben", "carl")
    topic = topics.death(SWARM, anna.name)
    for forged in (
        sign_death(Identity.generate("owner"), SWARM, anna.name, DEATH),
        sign_death(carl.identity, SWARM, anna.name, DEATH),
        sign_death(OWNER, SWARM, carl.name, DEATH),
        sign_death(OWNER, "meadow", anna.name, DEATH),
    ):
        assert ben.security.receive(topic, forged) == []
    assert ben.security.counters == {"untrusted-signature": 4}
    assert ben.security.receive(topic, DEATH.encode()) == []
    assert ben.security.receive(topic, b"") == []
    assert ben.security.counters["untrusted-malformed"] == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b"[" * 100_000, b'{"session": 1, "reason": "", "by": "", "time": 0}',
     b'{"session": "a b", "reason": "", "by": "", "time": 0}',
     b'{"session": "s", "reason": "", "by": "", "time": NaN}'],
)  # fmt: skip
def test_a_notice_of_another_form_is_malformed(body):
    with pytest.raises(TrustError, match="a death notice with missing fields"):
        Death.decode(body)


def test_what_is_logged_of_a_notice_is_short_and_printable():
    death = Death.decode(Death("s", "a\nb" + "c" * 500, "\x1b[31mme", 0.0).encode())
    assert "\n" not in death.reason
    assert len(death.reason) <= 200
    assert death.by == "[31mme"


def test_without_security_a_notice_is_believed_as_it_is():
    security, topic = NullSecurity("ben"), topics.death(SWARM, "anna")
    (heard,) = security.receive(topic, DEATH.encode())
    assert (heard.kind, heard.peer, heard.body) == ("death", "anna", DEATH.encode())
    assert security.receive(topic, b"") == []


def test_a_death_is_state_that_no_transport_drops():
    topic = topics.death(SWARM, "anna")
    assert topics.is_retained_topic(topic)
    assert topics.parse(topic).kind == "death"
    assert topics.matches(topics.of_all(SWARM, "death"), topic)
