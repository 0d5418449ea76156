"""One swarm on several hosts: each runs some peers of the same config, and the last one collects the reports.

Every host publishes a record of its part (version, config, indices of its peers), which the others compare
with their own, and at its end the reports of its peers. Neither is signed: this is for swarms without trust.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from gossamer import __version__

from ...gossip import ROOT, MqttTransport, Transport, TransportError, Will
from ...peer import BrokerAddress, Report, mqtt_transport
from ..cli import console
from ..config.tables import Config, ConfigError, differing_key

Record = dict[str, Any]
T = TypeVar("T")

LISTEN_SECONDS = 3.0
"""Seconds for which a starting host listens for the records of others."""
COLLECT_SECONDS = 60.0
"""Seconds for which the last host waits for reports of other hosts after its own peers have ended."""
PUBLISH_SECONDS = 30.0
"""Seconds in which the broker must accept what a host publishes when its peers have ended."""


def parse_peers(text: str, peers: int) -> list[int]:
    """Parse indices of peers such as `0-31`, `4` or `0-3,8-11`; ConfigError names what is wrong."""
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or not (last if dash else first).isdecimal():
            raise ConfigError(f"--peers {text}: write indices such as 0-31 or 0-3,8-11")
        low, high = int(first), int(last if dash else first)
        if low > high or high >= peers:
            raise ConfigError(f"--peers {text}: {part} is not within 0-{peers - 1}")
        chosen |= set(range(low, high + 1))
    return sorted(chosen)


class HostPart:
    """This host's part of a swarm that runs on several hosts; peers: the indices of those that run here."""

    def __init__(
        self, config: Config, swarm: str, broker: BrokerAddress, peers: Sequence[int]
    ) -> None:
        self._count, self._peers, self._broker = config.peers, list(peers), broker
        self._config = config.model_dump(mode="json")
        record = {"version": __version__, "peers": self._peers, "config": self._config}
        self._record = json.dumps(record).encode()
        self._base = f"{ROOT}/{swarm}/hosts"
        # Ends in /status so that transports keep and repeat it like any retained message.
        self._topic = f"{self._base}/{peers[0]}-{peers[-1]}/status"

    @property
    def collects(self) -> bool:
        """Whether this host collects the reports of all hosts: the one that runs the last peer does."""
        return self._count - 1 in self._peers

    def announce(self) -> None:
        """Publish this host's part; ConfigError names the first key in which another host differs."""
        asyncio.run(self._announce())

    def withdraw(self) -> None:
        """Clear this host's record, as its peers do not run; has no effect without a broker."""

        async def clear() -> None:
            async with self._client() as transport:
                await _put(transport, self._topic, b"")

        with suppress(TransportError):
            asyncio.run(clear())

    @asynccontextmanager
    async def keep_published(self) -> AsyncIterator[None]:
        """Keep this host's record published while its peers run; if it crashes, its last will clears it."""
        async with self._client(will=Will(self._topic, b"")) as transport:
            await _put(transport, self._topic, self._record)
            try:
                yield
            finally:
                with suppress(TransportError):  # if the broker is gone, peers have reported that
                    await _put(transport, self._topic, b"")

    async def _announce(self) -> None:
        async with self._client() as transport:
            # Published first: of two hosts that start together, at least one sees the other's record.
            await _put(transport, self._topic, self._record)
            await transport.subscribe(f"{self._base}/+/status")
            try:
                async with asyncio.timeout(LISTEN_SECONDS):
                    async for message in transport.messages():
                        other = _read(_PART, message.payload)
                        if message.topic != self._topic and other is not None:
                            self._compare(message.topic, other)
            except TimeoutError:
                pass
            except ConfigError:
                await _put(transport, self._topic, b"")
                raise

    def _compare(self, topic: str, other: _Part) -> None:
        """Raise ConfigError if another host's record contradicts this one's; topic: that of the record."""
        where = topic.split("/")[-2]  # the range of its peers
        if other.version != __version__:
            raise ConfigError(
                f"version is {__version__} here and {other.version} on the host of peers {where}: install "
                "the same"
            )
        if key := differing_key(self._config, other.config):
            raise ConfigError(
                f"key {key!r} is not the same here and on the host of peers {where}: use one config on all "
                "hosts, or another name for this swarm"
            )
        if shared := sorted(set(self._peers) & set(other.peers)):
            raise ConfigError(
                f"--peers: peer {shared[0]} runs on the host of peers {where} too; if it was lost just now, "
                "try again in a minute"
            )

    def exchange_reports(self, reports: Mapping[str, Record]) -> dict[str, Record]:
        """Publish the reports of this host's peers; return those of all hosts, if this one collects them.

        Without a broker, it warns and returns the reports of this host.
        """
        try:
            return asyncio.run(self._exchange_reports(dict(reports)))
        except TransportError as error:
            console.warn(f"no reports are exchanged with other hosts: {error}")
            return dict(reports)

    async def _exchange_reports(self, reports: dict[str, Record]) -> dict[str, Record]:
        async with self._client() as transport:
            for name, report in reports.items():
                await _put(transport, self._report_topic(name), json.dumps(report).encode())
            if self.collects:
                reports |= await self._collect(transport, reports)
                for name in reports:
                    await _put(transport, self._report_topic(name), b"")
        return reports

    async def _collect(self, transport: MqttTransport, known: Collection[str]) -> dict[str, Record]:
        """Return the reports of all peers except the known ones, as far as they arrive in time."""
        missing = {str(index) for index in range(self._count)} - set(known)
        collected: dict[str, Record] = {}
        for name in missing:
            await transport.subscribe(self._report_topic(name))
        try:
            async with asyncio.timeout(COLLECT_SECONDS if missing else 0):
                async for message in transport.messages():
                    name = message.topic.split("/")[-2]
                    if name in missing and _read(_REPORT, message.payload) is not None:
                        collected[name] = json.loads(bytes(message.payload))
                        if len(collected) == len(missing):
                            break
        except TimeoutError:
            pass
        return collected

    def _report_topic(self, name: str) -> str:
        return f"{self._base}/report/{name}/summary"

    def _client(self, **options: Any) -> MqttTransport:
        return mqtt_transport(self._broker, f"host-{secrets.token_hex(6)}", **options)


async def _put(transport: Transport, topic: str, payload: bytes) -> None:
    """Publish a retained message; TransportError if the broker does not accept it in time."""
    try:
        async with asyncio.timeout(PUBLISH_SECONDS):
            await transport.publish(topic, payload, retain=True)
    except TimeoutError:
        cause = transport.connection.cause or "it does not answer"
        raise TransportError("silent", f"the broker did not accept a message: {cause}") from None


@dataclass(frozen=True)
class _Part:
    """The record of a host; see `HostPart`."""

    version: str
    peers: list[int]
    config: dict[str, Any]


_PART, _REPORT = TypeAdapter(_Part), TypeAdapter(Report)


def _read(adapter: TypeAdapter[T], payload: bytes | memoryview) -> T | None:
    """Return what a host has published; None if it is something else: any client can publish there."""
    try:
        return adapter.validate_json(bytes(payload), strict=True)
    except ValidationError:
        return None
