"""Where a broker is, how to be sure that it is the right one, and how to connect to it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from ..settings import Positive, SettingsTable, checked
from .base import TransportError
from .paho_socket import TidySocket

_SCHEMES: dict[str, tuple[int, bool, Literal["tcp", "websockets"]]] = {
    "mqtt": (1883, False, "tcp"),
    "mqtts": (8883, True, "tcp"),
    "ws": (80, False, "websockets"),
    "wss": (443, True, "websockets"),
}


@dataclass(frozen=True, slots=True)
class Address:
    """A broker's URL, taken apart. The password never shows in `repr` or `str`."""

    host: str
    port: int
    tls: bool
    transport: Literal["tcp", "websockets"]
    path: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, password: str | None = None) -> Address:
        """Read `mqtt[s]://` or `ws[s]://` `[user[:password]@]host[:port][/path]`.

        password: of the user that the URL names, if it is not in the URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
            raise TransportError("url", f"a broker's URL starts with one of {known}: {_hide(url)}")
        port, tls, transport = _SCHEMES[parts.scheme]
        try:
            port = parts.port or port
        except ValueError:
            raise TransportError("url", f"not a port number in {_hide(url)}") from None
        if not parts.hostname:
            raise TransportError("url", f"no host in {_hide(url)}")
        if transport == "tcp" and parts.path not in ("", "/"):
            raise TransportError("url", f"{parts.scheme}:// takes no path: {_hide(url)}")
        if password is not None and not parts.username:
            raise TransportError("url", f"a password needs a user name, NAME@host: {_hide(url)}")
        return cls(
            host=parts.hostname,
            port=port,
            tls=tls,
            transport=transport,
            path=parts.path or "/mqtt",
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else password,
        )

    def __str__(self) -> str:
        scheme = ("mqtt" if self.transport == "tcp" else "ws") + ("s" if self.tls else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        path = self.path if self.transport == "websockets" else ""
        return f"{scheme}://{host}:{self.port}{path}"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files for TLS. Without `ca` the system's authorities are trusted.

    `certificate` and `key` are ours, for brokers that ask clients for one.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """A context that verifies the broker's certificate and name. Reads files: may block."""
        for what, path in (("CA", self.ca), ("certificate", self.certificate), ("key", self.key)):
            if path is not None and not Path(path).is_file():
                raise TransportError("certificate", f"the {what} file {path} does not exist")
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.sslsocket_class = TidySocket
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except (ssl.SSLError, OSError) as error:
            names = ", ".join(str(path) for path in (self.ca, self.certificate, self.key) if path)
            raise TransportError("certificate", f"cannot use {names}: {error}") from None
        return context


def _hide(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://…@{tail}" if at else url


# --- settings -----------------------------------------------------------------------------------------

SMALLEST_PACKET = 512
"""Packets are made no smaller than this: with the longest topic and a seal, little less would do."""
LARGEST_PACKET = 16 * 1024 * 1024
"""Peers take in no larger ones."""
LONGEST_KEEPALIVE = 65535
"""Seconds: MQTT has two bytes for them."""


def check_packet(size: int) -> None:
    """Raise ValueError unless packets may be made of this size."""
    if not SMALLEST_PACKET <= size <= LARGEST_PACKET:
        raise ValueError(
            f"packets have {SMALLEST_PACKET} to {LARGEST_PACKET} bytes, not {size}: give the broker's "
            "limit (mosquitto: max_packet_size or message_size_limit), or leave it out"
        )


def check_keepalive(seconds: int) -> None:
    """Raise ValueError unless a connection can be tested after so many seconds."""
    if not 1 <= seconds <= LONGEST_KEEPALIVE:
        raise ValueError(f"a keepalive has 1 to {LONGEST_KEEPALIVE} seconds, not {seconds}")


class LinkSettings(SettingsTable):
    """The link to the broker, as far as a config or a device's file has a say in it."""

    connect_timeout: Positive = 15.0
    """Seconds that the first connection may fail before that is an error. Raise it when broker and peers
    start together."""
    keepalive: Annotated[int, checked(check_keepalive)] = 30
    """Seconds of silence before the link is tested, 1 to 65535; a dead link, or a broker that answers but
    delivers nothing, is noticed after up to twice that. Lower it on links that die silently, raise it to save
    a device's battery."""
    max_packet: Annotated[int, checked(check_packet)] = LARGEST_PACKET
    """Bytes of the largest packet to send, 512 to 16777216; less if the broker says so (MQTT 5). Should the
    broker close the connection on smaller ones, or drop them without a word, chunks are halved until it does
    not: see `PacketLimit`. Lower it to the broker's limit, where you know it, to spare the search."""


class MqttOptions(LinkSettings):
    """All settings of a connection."""

    version: Literal["3.1.1", "5"] = "3.1.1"
    """The protocol's version. 5 reports why a broker cut us off and how large a packet may be; 3.1.1 is what
    nats-server and old brokers speak."""
    first_delay: float = 0.2
    """Seconds of the first wait between attempts to reconnect; each wait is shortened by up to half at
    random, so that a swarm does not return all at once."""
    longest_delay: float = 15.0
    """Seconds of the longest such wait."""
    max_inbound_messages: int = 16 * 1024
    """Bound of the messages that wait to be read; see `Inbox`."""
    max_inbound_bytes: int = 64 * 1024 * 1024
    """Bound of their bytes."""
    max_inbound_payload: int = LARGEST_PACKET
    """Larger payloads are dropped, and refused beforehand in MQTT 5."""
    max_outbound_bytes: int = 64 * 1024 * 1024
    """Bound of what waits to be written; gossip beyond it is dropped and counted."""
