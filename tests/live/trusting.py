"""Peers with security in this process on a real broker, and an outsider who hears and says what it likes."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from swarm_kit import small_config
from waiting import wait_until

from gossamer.experiments.build import Swarm
from gossamer.experiments.config.tables import Config, Model, Trust
from gossamer.experiments.live.layout import plan
from gossamer.gossip import MqttTransport
from gossamer.gossip.security import Identity, Revocations, revocation_topic
from gossamer.models import Metrics
from gossamer.peer import BrokerAddress, Connect, Limits, Link, Peer, Report, mqtt_connect

PAIR = Model(name="pair", layout="0-2-4", peers=[0, 1])


def config_of(
    peers: int, rounds: int, *models: Model, trust: str = "swarm", **gossip: Any
) -> Config:
    """A small swarm under a name of its own: the broker remembers what others left."""
    config = small_config(peers, rounds, **gossip)
    return config.model_copy(
        update={
            "name": f"trust-{secrets.token_hex(4)}",
            "trust": Trust(kind=trust),
            "models": [*config.models, *models],
        }
    )


class Gate:
    """A learner that stops before one of its rounds until the test lets it go on."""

    def __init__(self, inner: Any, at: int):
        self._inner, self._at = inner, at
        self.network = inner.network
        self.rounds = 0
        self.reached, self.open = threading.Event(), threading.Event()

    def train(self, steps: int) -> Metrics:
        if self.rounds == self._at:
            self.reached.set()
            assert self.open.wait(230), "nobody opened the gate"
        self.rounds += 1
        return self._inner.train(steps)

    def test(self) -> Metrics:
        return self._inner.test()

    def state(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "inner": self._inner.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.rounds = state["rounds"]
        self._inner.restore(state["inner"])


class Patient(Gate):
    """A learner that trains its next round only when something else has come as far."""

    def __init__(self, inner: Any, ready: Callable[[int], bool]):
        super().__init__(inner, at=-1)
        self._ready = ready

    def train(self, steps: int) -> Metrics:
        wait_until(lambda: self._ready(self.rounds), "the others to come as far")
        return super().train(steps)


class Swarmlet:
    """A config's peers as tasks of this event loop."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        url: str,
        connect: Connect | None = None,
        limits: Limits | None = None,
        **settings: Any,
    ):
        self.config, self.folder, self.url = config, folder, url
        self._connect = connect or mqtt_connect(BrokerAddress(url))
        self.spec = plan(config, folder, BrokerAddress(url))
        self.swarm = self.spec.swarm
        self.members = Swarm(config).members()
        self.names = self.spec.peers[0].settings.expect
        self._settings, self._limits = settings, limits
        self.peers: dict[int, Peer] = {}
        self.tasks: dict[int, asyncio.Task[Report]] = {}

    def start(self, index: int, learner: Any = None, *, checkpoint: bool = False) -> None:
        one = self.spec.peers[index]
        self.peers[index] = peer = Peer(
            one.name,
            learner or self.members[index].learner,
            one.settings.updated(tick=0.02, **self._settings),
            self._connect,
            seed=one.seed,
            limits=self._limits,
            checkpoint=self.folder / f"{one.name}.checkpoint" if checkpoint else None,
        )
        self.tasks[index] = asyncio.create_task(peer.run(), name=peer.name)

    def start_all(self, learners: dict[int, Any] | None = None) -> None:
        for index in range(len(self.members)):
            self.start(index, (learners or {}).get(index))

    async def crash(self, index: int) -> None:
        """End a peer as kill -9 would: no goodbye, nothing saved."""
        await self.member(index).transport.abort()
        self.tasks[index].cancel()
        await asyncio.gather(self.tasks[index], return_exceptions=True)

    async def reports(self) -> list[Report]:
        return list(await asyncio.gather(*self.tasks.values()))

    def member(self, index: int) -> Link:
        member = self.peers[index].link
        assert member is not None
        return member

    def trust(self, index: int) -> Any:
        return self.member(index).security

    def revoke(self, index: int) -> bytes:
        """The owner's list, with one peer on it."""
        owner = Identity.load(self.folder / "trust" / "owner.key")
        return Revocations().add([self.names[index]]).sign(owner, self.swarm)

    async def publish_revocations(self, data: bytes) -> None:
        async with MqttTransport(self.url, f"owner-{secrets.token_hex(4)}") as transport:
            await transport.publish(revocation_topic(self.swarm), data, retain=True, qos=1)


class Outsider:
    """Somebody with access to the broker: hears everything, and may react to it."""

    def __init__(self, url: str, swarm: str):
        self._transport = MqttTransport(url, f"eve-{secrets.token_hex(4)}")
        self._pattern = f"gossamer/v1/{swarm}/#"
        self.heard: list[tuple[str, bytes]] = []
        self._said: set[bytes] = set()
        self.react: Callable[[str, bytes], list[tuple[str, bytes]]] = lambda _topic, _payload: []

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        await self._transport.subscribe(self._pattern)
        self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task.done():
            self._task.result()  # it fell over something: say so
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._transport.__aexit__(None, None, None)

    async def _listen(self) -> None:
        async for topic, payload, _ in self._transport.messages():
            data = bytes(payload)
            if data in self._said:
                continue  # its own words
            self.heard.append((topic, data))
            for where, what in self.react(topic, data):
                await self.say(where, what)

    async def say(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self._said.add(payload)
        await self._transport.publish(topic, payload, retain=retain)


def windows(data: bytes, step: int = 1) -> set[bytes]:
    """All runs of 8 bytes, but for zeros."""
    found = {data[at : at + 8] for at in range(0, len(data) - 7, step)}
    found.discard(bytes(8))
    return found
