"""The rule of the revocation list's number: peers give each other nothing until they have the same list."""

from __future__ import annotations

import numpy as np
import pytest
from security_kit import (
    ONLINE,
    OWNER,
    SWARM,
    Clock,
    exchange,
    group,
    hears_card,
    introduce,
    person,
    received,
    restarted,
    understand,
)

from gossamer.gossip import topics
from gossamer.gossip.security import Revocations, StatusHead, revocation_topic, sign_status
from gossamer.gossip.security.channels import FIRST_REPEAT, LONGEST_REPEAT


def list_against(*people, number=1):
    """The owner's list of this number, with these peers on it."""
    revoked = Revocations()
    for _ in range(number):
        revoked = revoked.add([one.name for one in people] or ["somebody@else"])
    return revoked.sign(OWNER, SWARM)


def show(person, data):
    """The broker shows a peer a list; returns what presence is told."""
    return [(h.kind, h.peer) for h in person.security.receive(revocation_topic(SWARM), data)]


def causes(person):
    return {cause.removeprefix("untrusted-"): n for cause, n in person.security.counters.items()}


def publish_status(speaker, listeners):
    status = speaker.security.status(ONLINE)
    for listener in listeners:
        listener.security.receive(topics.status(SWARM, speaker.name), status)


def claim_list(speaker, listener, number):
    """A peer signs a status that says that it has the list of this number."""
    head = StatusHead(speaker.security.keyring.incarnation, 10**6 + number % 10**6, number)
    status = sign_status(speaker.identity, SWARM, head, ONLINE)
    assert listener.security.receive(topics.status(SWARM, speaker.name), status)


# --- agreement ----------------------------------------------------------------------------------------


def test_whoever_hears_a_list_says_so_and_all_go_on_without_handing_it_over():
    """The broker shows it to everybody, as it should: statuses are enough."""
    people, clock = group("anna", "ben", "carl")
    data = list_against()
    for one in people:
        assert show(one, data) == [("reissue-status", one.name)]
        assert show(one, data) == []
    anna, ben, _ = people
    assert not anna.packets(ben)  # for all that she knows he has not heard it
    for one in people:
        publish_status(one, [each for each in people if each is not one])
    assert exchange(people, clock, rounds=60) == 0
    assert understand(anna, ben)


def test_two_peers_give_each_other_nothing_until_they_have_the_same_list():
    (anna, ben), clock = group("anna", "ben")
    under_way = anna.packets(ben), ben.packets(anna)
    show(anna, list_against())
    assert not anna.packets(ben)
    assert received(anna, under_way[1]) == []
    assert received(anna, ben.packets(anna)) == []
    assert causes(anna) == {"behind": 3}
    assert received(ben, under_way[0])  # sealed before she had it: both had the same
    exchange([anna, ben], clock)
    assert ben.list_number == 1
    assert ("reissue-status", ben.name) in [(h.kind, h.peer) for h in ben.heard]
    assert understand(anna, ben)
    assert not causes(ben)


def test_what_comes_from_a_peer_with_a_newer_list_waits_until_we_have_it():
    """Anna believes that Ben has it: his status said so, and was not true."""
    (anna, ben), clock = group("anna", "ben")
    show(anna, list_against())
    claim_list(ben, anna, 1)
    (packet,) = anna.packets(ben)
    assert received(ben, [packet]) == []
    assert causes(ben) == {"ahead": 1}
    assert ben.list_number == 0
    # His first packet shows the truth, and he is handed the list all the same.
    assert received(anna, ben.packets(anna)) == []
    assert causes(anna) == {"behind": 1}
    exchange([anna, ben], clock)
    assert ben.list_number == 1
    assert understand(anna, ben)


def test_a_status_of_another_incarnation_says_nothing_about_this_one():
    (anna, ben), clock = group("anna", "ben")
    show(anna, list_against())
    other = StatusHead(bytes(16), 7, 10**9)
    anna.security.keyring.note_status(ben.name, other, clock.now, online=True)
    assert not anna.packets(ben)
    exchange([anna, ben], clock)
    assert ben.list_number == 1


def test_a_list_is_handed_over_after_1_2_4_and_at_last_every_30_seconds():
    (anna, ben), clock = group("anna", "ben")
    assert understand(anna, ben)
    show(anna, list_against())
    start, times = clock.now, []
    for _ in range(2000):
        if anna.security.tick()[0]:
            times.append(clock.now - start)
        clock.now += 0.1
    gaps = np.diff([0.0, *times])
    assert gaps[:6] == pytest.approx([FIRST_REPEAT, 2, 4, 8, 16, LONGEST_REPEAT], abs=0.11)
    assert gaps[6:] == pytest.approx(LONGEST_REPEAT, abs=0.11)
    exchange([anna, ben], clock, rounds=40)
    assert exchange([anna, ben], clock, rounds=100) == 0
    assert understand(anna, ben)


def test_a_list_goes_to_nobody_who_is_only_a_card():
    """The broker keeps cards of the dead."""
    clock = Clock()
    anna, dead = person("anna", clock), person("dead", clock)
    assert hears_card(anna, dead)
    anna.security.receive(
        topics.status(SWARM, dead.name), dead.security.will(b'{"state": "offline"}')
    )
    show(anna, list_against())
    assert exchange([anna], clock, rounds=100) == 0
    assert not anna.packets(dead)


def test_a_list_is_handed_over_without_a_model_in_common():
    clock = Clock()
    anna, ben = person("anna", clock, ("red",)), person("ben", clock, ("blue",))
    introduce([anna, ben])
    show(anna, list_against())
    exchange([anna, ben], clock)
    assert ben.list_number == 1
    assert not causes(ben)


def test_only_the_owners_list_counts_whoever_hands_it_over():
    (anna, ben), clock = group("anna", "ben")
    forged = Revocations().add(["x@y"]).sign(anna.identity, SWARM)
    anna.security.keyring.set_list(1, forged, clock.now)
    assert exchange([anna, ben], clock, rounds=10) > 0
    assert ben.list_number == 0
    assert causes(ben).keys() == {"signature"}


def test_a_list_that_grows_while_it_is_handed_over_arrives_in_its_newest_form():
    (anna, ben, carl), clock = group("anna", "ben", "carl")
    show(anna, list_against(number=1))
    exchange([anna, ben, carl], clock, rounds=2)
    show(carl, list_against(number=3))
    exchange([anna, ben, carl], clock, rounds=10)
    assert [one.list_number for one in (anna, ben, carl)] == [3, 3, 3]
    assert understand(anna, ben)


def test_a_restart_forgets_no_list():
    (anna, ben), clock = group("anna", "ben")
    for one in (anna, ben):
        show(one, list_against())
    again = restarted(anna, clock)
    introduce([again, ben])
    assert exchange([again, ben], clock, rounds=40) == 0
    assert understand(again, ben)


def test_no_list_can_be_read_off_the_broker_or_told_from_other_packets():
    (anna, ben), clock = group("anna", "ben")
    (before,) = anna.packets(ben)
    show(anna, list_against())
    clock.now += FIRST_REPEAT
    ((_, _, packet),) = anna.security.tick()[0]
    assert packet[:16] == before[:16]  # magic, version, both keys: the same
    assert b"GSMS" not in packet
    assert b"else" not in packet


def pretend(liar, listener, number, clock):
    """Let a liar seal for somebody as if that one had the same list."""
    head = StatusHead(listener.security.keyring.incarnation, 1, number)
    liar.security.keyring.note_status(listener.name, head, clock.now, online=True)


# --- revoked members and those who do not know it -----------------------------------------------------


def revoked_trio():
    """Anna knows that Carl was revoked; Ben and Carl do not."""
    (anna, ben, carl), clock = group("anna", "ben", "carl")
    told = show(anna, list_against(carl))
    assert told == [("removed", carl.name), ("reissue-status", anna.name)]
    return anna, ben, carl, clock


def test_a_passive_revoked_member_gets_nothing_and_is_heard_by_nobody():
    anna, ben, carl, clock = revoked_trio()
    assert not anna.packets(carl)
    assert received(anna, carl.packets(anna)) == []
    assert causes(anna) == {"unknown-sender": 2}
    exchange([anna, ben, carl], clock)
    assert ("removed", carl.name) in [(h.kind, h.peer) for h in ben.heard]
    assert not ben.packets(carl)
    assert received(ben, carl.packets(ben)) == []
    assert understand(anna, ben)
    assert carl.list_number == 0  # nobody had anything to say to it
    assert not hears_card(ben, carl)


@pytest.mark.parametrize("claimed", [0, 1, 2, 2**63 - 1])
def test_an_active_revoked_member_gets_nothing_whatever_list_it_claims_to_have(claimed):
    """It keeps the list to itself, and says in packets and statuses what suits it."""
    anna, ben, carl, clock = revoked_trio()
    carl.security.keyring.set_list(claimed, b"", clock.now)
    for listener in (anna, ben):
        pretend(carl, listener, claimed, clock)
    claim_list(carl, ben, claimed)
    heard = received(ben, carl.packets(ben))
    assert bool(heard) is (claimed == 0)  # Ben knows no better yet
    assert received(anna, carl.packets(anna)) == []
    exchange([anna, ben, carl], clock, rounds=5)
    assert ben.list_number == 1
    assert received(ben, carl.packets(ben)) == []
    assert not ben.packets(carl)
    assert understand(anna, ben)


def test_who_lies_about_its_list_silences_itself_alone():
    people, clock = group("anna", "ben", "liar")
    anna, ben, liar = people
    liar.security.keyring.set_list(10**9, b"GSMS nonsense", clock.now)
    for listener in (anna, ben):
        pretend(liar, listener, 10**9, clock)
        claim_list(liar, listener, 10**9)
    assert received(anna, liar.packets(anna)) == []
    exchange(people, clock, rounds=10)
    assert (anna.list_number, ben.list_number) == (0, 0)
    assert understand(anna, ben)
    assert received(anna, liar.packets(anna)) == []


def test_an_uninformed_peer_learns_the_list_from_its_first_packet_to_somebody_who_knows():
    """The broker hides the list from Ben, and Ben's statuses from Anna."""
    clock = Clock()
    anna, ben, carl = (person(label, clock) for label in ("anna", "ben", "carl"))
    introduce([ben, carl])
    hears_card(anna, ben)
    hears_card(ben, anna)
    show(anna, list_against(carl))
    assert exchange([anna, ben], clock, rounds=10) == 0  # Ben may be a card without a peer
    assert received(anna, ben.packets(anna)) == []
    exchange([anna, ben], clock)
    assert ben.list_number == 1
    assert not ben.packets(carl)
    assert understand(anna, ben)


def test_a_server_that_is_behind_averages_nothing_of_those_who_know_until_it_knows_too():
    (server, *clients, gone), clock = group("server", "anna", "ben", "carl", "gone")
    for client in clients:
        show(client, list_against(gone))
    assert received(server, gone.packets(server))  # the server still believes in it
    for client in clients:
        assert not client.packets(server)
        assert received(client, server.packets(client)) == []
    exchange([server, *clients, gone], clock)
    assert received(server, gone.packets(server)) == []
    for client in clients:
        assert understand(client, server)


@pytest.mark.parametrize("seed", range(6))
def test_in_a_random_swarm_of_eight_a_list_shown_to_two_fifths_reaches_all(seed):
    """Models, losses and who is shown the list are drawn; statuses are withheld from then on."""
    rng, clock = np.random.default_rng(seed), Clock()
    models = ("global", "red", "blue")
    people = []
    for number in range(8):
        shared = tuple(model for model in models if rng.random() < 0.6) or ("global",)
        people.append(person(f"p{number}", clock, shared))
    introduce(people)
    gone, *members = people
    data = list_against(gone)
    for index in rng.choice(len(members), size=round(0.4 * len(people)), replace=False):
        show(members[index], data)
    for _ in range(60):
        exchange(people, clock, rounds=1, carries=lambda *_: rng.random() < 0.7)
        one, other = rng.choice(len(people), size=2, replace=False)
        one, other = people[one], people[other]
        for model in one.models:
            if received(other, one.packets(other, model), model):
                assert one.list_number == other.list_number
    exchange(people, clock, rounds=40)
    assert [one.list_number for one in members] == [1] * 7
    assert gone.list_number == 0
    for one in members:
        for other in members:
            for model in {*one.models} & {*other.models} if one is not other else ():
                assert received(other, one.packets(other, model), model)
        assert not any(one.packets(gone, model) for model in one.models)
