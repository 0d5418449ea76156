"""Where a broker is, how to be sure that it is the right one, and what went wrong if it is not."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from aiomqtt import MqttError

from .base import TransportError
from .paho_workarounds import TidySocket

_SCHEMES: dict[str, tuple[int, bool, Literal["tcp", "websockets"]]] = {
    "mqtt": (1883, False, "tcp"),
    "mqtts": (8883, True, "tcp"),
    "ws": (80, False, "websockets"),
    "wss": (443, True, "websockets"),
}

ALWAYS_FATAL = frozenset({"taken-over"})
"""Causes that waiting does not cure: no retry, before or after the first connection."""
REFUSALS = frozenset({"password", "not-authorised", "certificate", "tls"})
"""Causes for which a broker does not take us, or we do not take it."""
FATAL_AT_FIRST = REFUSALS | {"unknown-host", "protocol"}
"""Causes that are the user's mistake at the start, but may be a passing fault later: a broker that took
us before may have been started with the wrong rules, or before its certificate was renewed."""


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


def explain(error: BaseException, address: Address, code: int | None = None) -> TransportError:
    """What a failed or lost connection means, in one line that says what to do.

    `code` is the reason that the broker gave, as MQTT 5 numbers them.
    """
    root = _root(error)
    if isinstance(root, ssl.SSLCertVerificationError):
        return _certificate(root, address)
    if isinstance(root, ssl.SSLError):
        alert = explain_alert(str(root), address)
        return alert or TransportError(
            "tls", f"no TLS with {address}: {root.reason or root}: is that a TLS port?"
        )
    if isinstance(root, socket.gaierror):
        return TransportError("unknown-host", f"unknown host {address.host!r}: check the URL")
    if isinstance(root, ConnectionRefusedError):
        return TransportError("refused", f"nothing listens at {address}: is the broker running?")
    if isinstance(root, ConnectionResetError):
        hint = "is that a TLS port?" if address.tls else "is that an MQTT port?"
        return TransportError("hung-up", f"{address} hung up while we connected: {hint}")
    if code in (134, 135):  # brokers do not agree on which of the two a wrong password is
        who = f"user {address.username!r}" if address.username else "a client without a password"
        return TransportError("password", f"{address} refused {who}: check name and password")
    if code == 132:
        return TransportError("protocol", f"{address} does not speak MQTT 5: use 3.1.1")
    if code == 141:
        return TransportError("silent", f"{address} gives no sign of life")
    if code == 142:
        return TransportError("taken-over", f"another client with our id connected to {address}")
    if code == 149:
        return TransportError("too-large", f"{address} cut us off: a packet was too large for it")
    return TransportError("unreachable", f"no connection to {address}: {root}")


def explain_alert(text: str, address: Address) -> TransportError | None:
    """What a TLS alert in a log line means; None if there is none.

    In TLS 1.3 a broker rejects our certificate after the handshake, and paho only logs it.
    """
    lowered = text.lower()
    if "alert" not in lowered and "ssl:" not in lowered:
        return None
    if "certificate required" in lowered or "certificate_required" in lowered:
        return TransportError("certificate", f"{address} asks for a client certificate: give one")
    if "alert" in lowered:
        return TransportError("certificate", f"{address} refused our certificate: {text}")
    return None


def _certificate(error: ssl.SSLCertVerificationError, address: Address) -> TransportError:
    reasons = {
        9: "is not valid yet: check this machine's clock",
        10: "has expired: renew it",
        18: "is not trusted: it signed itself; give its authority's file as CA",
        19: "is not trusted: give its authority's file as CA",
        20: "is not trusted: give its authority's file as CA",
        21: "is not trusted: give its authority's file as CA",
        62: f"is for another host name than {address.host!r}: use a name that it covers",
        64: f"is for another address than {address.host!r}: use a name that it covers",
    }
    reason = reasons.get(error.verify_code, f"is not acceptable: {error.verify_message}")
    return TransportError("certificate", f"the certificate of {address} {reason}")


def _root(error: BaseException) -> BaseException:
    # aiomqtt raises `from None` but Python still keeps what it was handling: the real cause.
    while isinstance(error, MqttError):
        inner = error.__cause__ or error.__context__
        if inner is None or isinstance(inner, KeyError):
            break
        error = inner
    return error


def _hide(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://…@{tail}" if at else url
