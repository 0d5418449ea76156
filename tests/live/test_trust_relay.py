"""On a real mosquitto: an outsider through whose hands all packets go, and one who brings back old words."""

from __future__ import annotations

import numpy as np
import pytest
from relay import Relay, diverted
from trusting import Gate, Outsider, Swarmlet, config_of
from waiting import until

from gossamer.experiments.build import Swarm
from gossamer.gossip import ONE, topics
from gossamer.peer import Limits, PeerError

PACKET = 600


def test_chunks_that_are_reordered_and_spliced_stay_parts_of_their_own_message(
    mosquitto, run, tmp_path
):
    """In lockstep the outcome is known: that of peers whom nobody disturbs."""
    limits = Limits(max_packet=PACKET)
    quiet = config_of(3, 4, mode="rounds", trust="none")
    loud = quiet.model_copy(update={"name": quiet.name + "x", "trust": config_of(1, 1).trust})

    async def calm():
        swarm = Swarmlet(quiet, tmp_path / "quiet", mosquitto.url, limits=limits)
        swarm.start_all()
        await swarm.reports()
        return swarm

    async def relayed():
        swarm = Swarmlet(loud, tmp_path / "loud", mosquitto.url, diverted(mosquitto.url), limits)
        async with Relay(mosquitto.url, swarm.swarm) as relay:
            swarm.start_all()
            return swarm, await swarm.reports(), relay.counts

    twins = run(calm()).members
    swarm, reports, counts = run(relayed())
    chunks = swarm.members[0].network.read("global").numel() * 4 // PACKET
    assert chunks >= 3
    assert counts["pairs"] >= 3 * 2 * 4 * (chunks - 1)  # in every transfer of every round
    assert weight(reports) == 3 * ONE
    for member, twin in zip(swarm.members, twins, strict=True):
        np.testing.assert_allclose(member.network.flat, twin.network.flat, atol=1e-5)
    for report in reports:  # one transfer from each of two others in every round, once
        assert report.gossip["credited"] == 2 * 4
        # Refused by their seals, one by one. A splice that opens shows elsewhere: it uses up the number
        # of a true packet (replayed), or spoils the message that it gets into (checksum).
        assert report.dropped["untrusted-forged"] > counts["splices"] / 3 / 2
        assert set(report.dropped) <= {"untrusted-forged", "untrusted-unknown-sender"}


def weight(reports):
    return sum(sum(report.weight["global"][:2]) for report in reports)


def test_a_peers_own_old_words_do_not_keep_it_from_starting(mosquitto, run, tmp_path):
    config = config_of(2, 3)

    async def scenario():
        swarm = Swarmlet(config, tmp_path, mosquitto.url, limits=Limits(name_grace=1.0))
        place = topics.status(swarm.swarm, swarm.names[0])
        async with Outsider(mosquitto.url, swarm.swarm) as eve:
            swarm.start_all()
            await swarm.reports()
            old = [data for topic, data in eve.heard if topic == place and b'"online"' in data]
            eve.react = lambda topic, _: [(place, data) for data in old if topic == place]
            await eve.say(place, old[-1], retain=True)
            swarm.start_all()  # new lives
            return len(old), await swarm.reports()

    old, reports = run(scenario())
    assert old >= 2
    assert [report.rounds for report in reports] == [3, 3]
    assert reports[0].dropped["untrusted-unanswered"] >= 2
    assert weight(reports) == 2 * ONE


def test_a_second_life_of_one_key_is_refused_while_the_first_goes_on(mosquitto, run, tmp_path):
    config = config_of(2, 3)

    async def scenario():
        swarm = Swarmlet(config, tmp_path, mosquitto.url, limits=Limits(name_grace=0.3))
        gate = Gate(swarm.members[0].learner, at=1)
        swarm.start_all({0: gate})
        await until(gate.reached.is_set)
        first = swarm.tasks[0]
        swarm.start(0, Swarm(config).members()[0].learner)
        with pytest.raises(PeerError, match="the name is already online"):
            await swarm.tasks[0]
        swarm.tasks[0] = first
        gate.open.set()
        return await swarm.reports()

    reports = run(scenario())
    assert [report.rounds for report in reports] == [3, 3]
    assert weight(reports) == 2 * ONE
