"""The address of a broker, the files for TLS, and the settings of a connection."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import SplitResult, quote, unquote, urlsplit

from ..settings import Positive, SettingsTable, checked
from .base import TransportError
from .paho_socket import SelfClosingSocket

_SCHEMES: dict[str, tuple[int, bool, Literal["tcp", "websockets"]]] = {
    "mqtt": (1883, False, "tcp"),
    "mqtts": (8883, True, "tcp"),
    "ws": (80, False, "websockets"),
    "wss": (443, True, "websockets"),
}
_NEXT_URL = re.compile(rf",\s*(?=(?:{'|'.join(_SCHEMES)})://)")
"""A comma between two URLs; one inside a URL, as in a password, is part of it."""


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of a broker's URL. `repr` and `str` do not show the password."""

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

        password: of the user in the URL, if the URL does not contain it.
        """
        parts = _split(url)
        if parts.scheme not in _SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
            raise TransportError(
                "url", f"a broker's URL starts with one of {known}: {_hide_user(url)}"
            )
        if parts.query or parts.fragment:
            raise TransportError(
                "url",
                f"a broker's URL has no ? or #; in a password write %3F or %23: {_hide_user(url)}",
            )
        port, tls, transport = _SCHEMES[parts.scheme]
        try:
            port = parts.port or port
        except ValueError:
            raise TransportError(
                "url", f"the port is no number up to 65535 in {_hide_user(url)}"
            ) from None
        if not parts.hostname:
            raise TransportError("url", f"no host in {_hide_user(url)}")
        if transport == "tcp" and parts.path not in ("", "/"):
            raise TransportError("url", f"{parts.scheme}:// URLs have no path: {_hide_user(url)}")
        if password is not None and not parts.username:
            raise TransportError(
                "url", f"a password needs a user name, NAME@host: {_hide_user(url)}"
            )
        return cls(
            host=parts.hostname,
            port=port,
            tls=tls,
            transport=transport,
            path=parts.path or "/mqtt",
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else password,
        )

    @classmethod
    def parse_all(cls, urls: str, password: str | None = None) -> tuple[Address, ...]:
        """Read one URL, or those of the nodes of a cluster, with commas between them.

        password: of the users in the URLs, if the URLs do not contain it.
        """
        addresses = tuple(cls.parse(url, password) for url in split_urls(urls))
        by_tls = {address.tls: address for address in addresses}
        if len(by_tls) == 2:
            raise TransportError(
                "url",
                f"{by_tls[True]} uses TLS and {by_tls[False]} does not: give mqtts:// or wss:// for all "
                "nodes of a cluster, or for none",
            )
        return addresses

    def __str__(self) -> str:
        scheme = ("mqtt" if self.transport == "tcp" else "ws") + ("s" if self.tls else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        path = self.path if self.transport == "websockets" else ""
        return f"{scheme}://{host}:{self.port}{path}"


def split_urls(urls: str) -> list[str]:
    """Return the URLs of a cluster's nodes, which have commas between them."""
    return [url.strip() for url in _NEXT_URL.split(urls)]


def with_user(urls: str, user: str) -> str:
    """Return the URL of a broker, or those of a cluster's nodes, with this user where they name none."""
    parts = map(_split, split_urls(urls))
    return ",".join(
        (p if "@" in p.netloc else p._replace(netloc=f"{quote(user, safe='')}@{p.netloc}")).geturl()
        for p in parts
    )


def without_passwords(urls: str) -> str:
    """Return the URL of a broker, or those of a cluster's nodes, without users and passwords."""
    return ",".join(map(str, Address.parse_all(urls)))


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files for TLS.

    ca: certificate of the CA that signed the broker's; by default the CAs of the system are trusted.
    certificate, key: our own, for brokers that require client certificates.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return a context that verifies the broker's certificate and host name. Blocks: it reads files."""
        for what, path in (("CA", self.ca), ("certificate", self.certificate), ("key", self.key)):
            if path is not None and not Path(path).is_file():
                raise TransportError("certificate", f"the {what} file {path} does not exist")
        if self.key is not None and self.certificate is None:
            raise TransportError(
                "certificate", f"the key {self.key} is of no use without --certificate"
            )
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.sslsocket_class = SelfClosingSocket
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key, self._refuse_passphrase)
        except (ssl.SSLError, OSError) as error:
            names = ", ".join(str(path) for path in (self.ca, self.certificate, self.key) if path)
            raise TransportError("certificate", f"cannot use {names}: {error}") from None
        return context

    def _refuse_passphrase(self) -> str:
        """Raise TransportError: OpenSSL would ask on the terminal, and a service would wait for ever."""
        raise TransportError(
            "certificate",
            f"the key {self.key or self.certificate} has a passphrase: save it without one (openssl pkey)",
        )


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:  # such as brackets that do not match
        raise TransportError("url", f"{error}: {_hide_user(url)}") from None


def _hide_user(url: str) -> str:
    """Replace user name and password in a URL, for error messages."""
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://…@{tail}" if at else url


# --- settings -----------------------------------------------------------------------------------------

SMALLEST_PACKET = 512
"""Bytes of the smallest packet limit: the longest topic and encryption need almost as much."""
LARGEST_PACKET = 16 * 1024 * 1024
"""Bytes of the largest packet limit: peers drop larger messages."""
LONGEST_KEEPALIVE = 65535
"""Seconds of the longest keepalive: MQTT encodes it in two bytes."""


def check_packet(size: int) -> None:
    """Raise ValueError unless `size` is a valid packet limit."""
    if not SMALLEST_PACKET <= size <= LARGEST_PACKET:
        raise ValueError(
            f"packets have {SMALLEST_PACKET} to {LARGEST_PACKET} bytes, not {size}: give the broker's "
            "limit (mosquitto: max_packet_size or message_size_limit), or leave it out"
        )


def check_keepalive(seconds: int) -> None:
    """Raise ValueError unless `seconds` is a keepalive that MQTT can encode."""
    if not 1 <= seconds <= LONGEST_KEEPALIVE:
        raise ValueError(f"a keepalive has 1 to {LONGEST_KEEPALIVE} seconds, not {seconds}")


class LinkSettings(SettingsTable):
    """The settings of the connection to the broker that can be set in a config or in a device's file."""

    connect_timeout: Positive = 15.0
    """Seconds for which the first connection is retried before its failure is an error. Raise it if broker
    and peers are started together."""
    keepalive: Annotated[int, checked(check_keepalive)] = 30
    """Seconds without traffic after which the connection is tested, 1 to 65535; a broken connection, or a
    broker that answers but delivers nothing, is detected after up to twice that. Lower it on networks that
    drop connections silently, raise it to save a device's battery."""
    max_packet: Annotated[int, checked(check_packet)] = LARGEST_PACKET
    """Bytes of the largest packet to send, 512 to 16777216; less if the broker announces a lower limit
    (MQTT 5). If the broker closes the connection on smaller packets, or silently drops them, chunks are
    halved until they get through. Lower it to the broker's limit, if you know it, to avoid that search."""


class MqttOptions(LinkSettings):
    """All settings of a connection."""

    version: Literal["3.1.1", "5"] = "3.1.1"
    """The version of MQTT. In 5 a broker reports why it disconnects us and how large a packet may be;
    nats-server and old brokers support only 3.1.1."""
    first_delay: float = 0.2
    """Seconds of the first delay between attempts to reconnect, which doubles with each attempt; each delay
    is shortened by up to half at random, so that the peers of a swarm do not reconnect at the same time."""
    longest_delay: float = 15.0
    """Seconds of the longest delay between attempts to reconnect."""
    max_inbound_messages: int = 16 * 1024
    """Bound of the number of unread messages; see `Inbox`."""
    max_inbound_bytes: int = 64 * 1024 * 1024
    """Bound of the bytes of unread messages."""
    max_inbound_payload: int = LARGEST_PACKET
    """Bytes of the largest payload to receive; larger ones are dropped. In MQTT 5 the limit is announced to
    the broker."""
    max_outbound_bytes: int = 64 * 1024 * 1024
    """Bound of the bytes that are not yet written to the socket; further messages at QoS 0 are dropped and
    counted."""
