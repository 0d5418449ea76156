"""One connection to an MQTT broker, from its opening to its loss. `mqtt.py` makes a new one to reconnect.

aiomqtt does the work. Three things that it does not report are read from the paho client inside it: the
broker's packet limit, the reason code of a disconnection, and that the broker closed the connection before
it answered our CONNECT.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import aiomqtt
import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from .base import REFUSALS, Payload, TransportError, Will, end_task
from .options import Address, MqttOptions
from .paho_socket import Deliver, PacketSocket

_log = logging.getLogger(__name__)
_paho_log = logging.getLogger(f"{__name__}.paho")
# Failures that matter are raised as TransportErrors; set this logger to DEBUG to see all that paho logs.
_paho_log.setLevel(logging.CRITICAL)
_DISCONNECT_TIMEOUT = 2.0  # seconds that a DISCONNECT may take before the socket is closed


class BrokerConnection:
    """An MQTT connection that is opened once and never reopened: after its loss a new object is made.

    receive: called with every message that arrives.
    timeout: seconds after which an attempt to connect or to subscribe has failed.
    ca: the file with the authority that `tls` trusts, for the text of an error.
    `lost` is a future that is done once the connection is lost or closed; see `why_lost`.
    """

    def __init__(
        self,
        address: Address,
        client_id: str,
        receive: Deliver,
        options: MqttOptions,
        *,
        timeout: float,
        will: Will | None,
        tls: ssl.SSLContext | None,
        ca: Path | None = None,
    ) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.max_packet: int | None = None
        """Bytes of the largest packet that the broker accepts, if it announced a limit (MQTT 5)."""
        self.answer_timeout = 2.0 * options.keepalive
        """Seconds after which the broker is taken to have failed if it still owes an answer."""
        self._address, self._receive, self._ca = address, receive, ca
        self._version5 = options.version == "5"
        self._pending_publishes: dict[int, asyncio.Future[bool]] = {}
        """By packet id: messages not yet written to the socket or, at QoS 1, not yet acknowledged."""
        self._reason_code: Any = None
        self._closed_for: TransportError | None = None
        """Why we closed the connection ourselves; see `give_up`."""
        self._pinging: asyncio.Task[None] | None = None
        self._answered = False
        """Whether the broker has answered our CONNECT."""
        self._opened = False
        properties = None
        if self._version5:
            properties = Properties(PacketTypes.CONNECT)
            properties.MaximumPacketSize = options.max_inbound_payload + 1024
        self._client = aiomqtt.Client(
            address.host,
            address.port,
            username=address.username,
            password=address.password,
            identifier=client_id.replace(".", "~"),  # nats-server forbids dots; our ids have no "~"
            protocol=aiomqtt.ProtocolVersion.V5 if self._version5 else aiomqtt.ProtocolVersion.V311,
            clean_session=None if self._version5 else True,
            properties=properties,
            transport=address.transport,
            websocket_path=address.path if address.transport == "websockets" else None,
            keepalive=options.keepalive,
            timeout=timeout,
            tls_context=tls,
            will=will and aiomqtt.Will(will.topic, will.payload, will.qos, will.retain),
            max_inflight_messages=8,  # at QoS 1, which only small messages use
            logger=_paho_log,
        )
        # aiomqtt has no public access to its paho client, which is needed for the reason codes, the packet
        # limit and `PacketSocket`.
        self._paho: paho.Client = self._client._client
        self._paho.connect_timeout = min(5.0, timeout)
        self._socket: PacketSocket | None = None
        self._install_callbacks()

    def _install_callbacks(self) -> None:
        """Wrap or replace aiomqtt's paho callbacks."""
        loop, loop_thread, client = asyncio.get_running_loop(), threading.get_ident(), self._paho
        aiomqtt_on_connect = cast(Any, client.on_connect)
        aiomqtt_on_disconnect = cast(Any, client.on_disconnect)

        def on_socket_open(_client: Any, _data: Any, _sock: Any) -> None:
            # Runs in the executor thread in which aiomqtt connects, and which closes the socket if it cannot
            # send its CONNECT. So the socket is watched only if it is still open when the loop comes to it;
            # aiomqtt watches a descriptor that may be closed by then, or another socket's.
            self._socket = PacketSocket(client, self._receive, version5=self._version5)
            loop.call_soon_threadsafe(watch, self._socket)

        def watch(sock: PacketSocket) -> None:
            if client.socket() is sock and add_if_open(loop.add_reader, sock, read):
                self._pinging = loop.create_task(self._ping())
            else:
                self._lose()

        def add_if_open(add: Callable[..., None], sock: Any, callback: Callable[[], None]) -> bool:
            """Register a callback for the socket; return False if the socket is closed already."""
            try:
                add(sock.fileno(), callback)
            except (OSError, ValueError):
                return False
            return True

        def read() -> None:
            # aiomqtt's read callback swallows exceptions and leaves the connection open.
            try:
                assert self._socket is not None
                if self._socket.read():
                    client.loop_read()
                while client.socket() and self._socket.pending():
                    client.loop_read()
            except Exception as error:
                _log.debug("%s: cannot read: %r", self._address, error)
                self.hang_up()

        def write() -> None:
            try:
                client.loop_write()
            except Exception as error:
                _log.debug("%s: cannot write: %r", self._address, error)
                self.hang_up()

        def add_writer_if_needed(sock: Any) -> None:
            if client.socket() is sock and client.want_write():
                add_if_open(loop.add_writer, sock, write)

        def on_socket_register_write(_client: Any, _data: Any, sock: Any) -> None:
            # aiomqtt always defers add_writer: by then nothing may be left to write, the socket may be
            # closed, or its descriptor may have been reused.
            if threading.get_ident() == loop_thread:
                add_if_open(loop.add_writer, sock, write)
            else:
                loop.call_soon_threadsafe(add_writer_if_needed, sock)

        def on_connect(_client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
            self._answered = True
            if code.is_failure:
                self._reason_code = code
            self.max_packet = getattr(properties, "MaximumPacketSize", None)
            aiomqtt_on_connect(client, data, flags, code, properties)

        def on_disconnect(_client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
            self._reason_code = self._reason_code or code
            if not code.is_failure:  # aiomqtt needs this callback only after a DISCONNECT of ours
                aiomqtt_on_disconnect(client, data, flags, code, properties)
            loop.call_soon_threadsafe(self._lose)

        def on_publish(_client: Any, _data: Any, mid: int, _code: Any, _properties: Any) -> None:
            outcome = self._pending_publishes.pop(mid, None)
            if outcome is None or outcome.done():
                return
            if self._socket is not None and mid in self._socket.too_large:
                self._socket.too_large.discard(mid)
                outcome.set_exception(
                    TransportError(
                        "too-large",
                        f"{self._address} refused a message as too large: raise the broker's packet limit "
                        "(mosquitto: message_size_limit)",
                    )
                )
            else:
                outcome.set_result(True)

        def on_message(_client: Any, _data: Any, message: paho.MQTTMessage) -> None:
            self._receive(message.topic, bytes(message.payload), message.retain)

        client.on_socket_open = on_socket_open
        client.on_socket_register_write = on_socket_register_write
        client.on_connect, client.on_disconnect = on_connect, on_disconnect
        client.on_publish, client.on_message = on_publish, on_message

    def _lose(self) -> None:
        """Mark the connection as lost, and all pending messages as not sent."""
        if not self.lost.done():
            self.lost.set_result(None)
        if self._pinging is not None:
            self._pinging.cancel()
        for outcome in self._pending_publishes.values():
            if not outcome.done():
                outcome.set_result(False)
        self._pending_publishes.clear()

    async def _ping(self) -> None:
        """Let paho send its keepalive pings, and notice when one is not answered."""
        while self._paho.loop_misc() == paho.MQTT_ERR_SUCCESS:  # noqa: ASYNC110
            await asyncio.sleep(1)

    async def open(self) -> None:
        """Connect, or raise a TransportError with the cause of the failure."""
        connecting = asyncio.ensure_future(self._client.__aenter__())
        try:
            await asyncio.wait((connecting, self.lost), return_when=asyncio.FIRST_COMPLETED)
            # If aiomqtt has the CONNACK, it is about to return, or to raise an error.
            if self._answered:
                await asyncio.wait((connecting,))
            if not connecting.done():  # aiomqtt would wait for its timeout
                hint = "" if self._address.tls else "; if it uses TLS, write mqtts:// or wss://"
                raise aiomqtt.MqttError(
                    f"the broker closed the connection before it answered{hint}"
                )
            await connecting
            self._opened = True
        except BaseException as error:
            # The thread that connects cannot be cancelled: wait for it, then clean up.
            await asyncio.wait(
                (connecting,), timeout=0 if self.lost.done() else self._paho.connect_timeout
            )
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await self.close()
            if isinstance(error, aiomqtt.MqttError | ValueError):
                raise self._explain(error) from error
            raise

    def _explain(self, error: BaseException) -> TransportError:
        """Return `explain`'s error for this connection."""
        # In TLS 1.3 a broker rejects our certificate only after the handshake, by an alert that the first
        # read raises.
        alert = None if self._socket is None else self._socket.error
        root = alert if isinstance(alert, ssl.SSLError) else error
        return explain(root, self._address, getattr(self._reason_code, "value", None), self._ca)

    def why_lost(self) -> TransportError:
        """Return the cause of the loss, as far as it is known."""
        if self._closed_for is not None:
            return self._closed_for
        return self._explain(aiomqtt.MqttError("connection lost"))

    def give_up(self, cause: str, text: str) -> None:
        """Close the connection to a broker that misbehaves; `why_lost` then returns this cause and text."""
        if not self.lost.done():
            self._closed_for = TransportError(cause, f"{self._address} {text}")
            self.hang_up()

    def congested(self) -> bool:
        """Return whether bytes are still to be written, so that an answer cannot be expected yet."""
        return self._paho.want_write()

    async def run_until_lost(self, work: Awaitable[Any]) -> bool:
        """Run `work`, but cancel it if the connection is lost or given up; True if `work` completed."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self.lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_task(task)
        if task.cancelled():
            return False
        try:
            task.result()
        except aiomqtt.MqttError as error:
            # Without a SUBACK we cannot tell which subscriptions the broker has: start over.
            self.give_up("no-answer", f"did not answer a subscription: {error}")
            return False
        return True

    async def publish(self, topic: str, payload: Payload, qos: int, retain: bool) -> bool:
        """Send; True when written to the socket (QoS 0) or acknowledged (QoS 1), False if not.

        Raises TransportError if the broker answers that the message is too large (MQTT 5, QoS 1). If an
        acknowledgement does not come within `answer_timeout` after all bytes were written, the connection is
        closed. (aiomqtt's own `publish` makes two tasks for every message; this one makes one future.)
        """
        if self.lost.done() or self._socket is None:
            return False
        if qos or retain:
            info = self._paho.publish(topic, bytes(payload), qos, retain)
        else:
            info = self._socket.publish(topic, payload)
        if info is None:
            return True
        if info.rc != paho.MQTT_ERR_SUCCESS:
            return False
        if info.is_published():
            return True
        outcome = self._pending_publishes[info.mid] = asyncio.get_running_loop().create_future()
        try:
            while qos and not outcome.done():
                await asyncio.wait((outcome,), timeout=self.answer_timeout)
                if not outcome.done() and not self.congested():
                    self.give_up("no-answer", "did not acknowledge a message")
                    return False
            return await outcome
        finally:
            self._pending_publishes.pop(info.mid, None)

    async def subscribe(self, patterns: list[tuple[str, int]]) -> None:
        """Subscribe to all patterns in one packet, each with its QoS."""
        codes = await self._client.subscribe(patterns)
        for (pattern, _), code in zip(patterns, codes, strict=False):
            if getattr(code, "is_failure", False):
                raise TransportError(
                    "not-authorised",
                    f"{self._address} refused the subscription to {pattern!r}: check the swarm's name, and "
                    "that this user may read it",
                )

    def hang_up(self) -> None:
        """Close the socket without a DISCONNECT, so that the broker publishes our last will."""
        if self._socket is not None and self._paho.socket() is not None:
            self._socket.hang_up()
        self._lose()

    async def close(self) -> None:
        """Disconnect cleanly if still connected, else close the socket."""
        duplicate: socket.socket | None = None  # stays open when aiomqtt closes its own
        try:
            if not self.lost.done() and self._opened:
                if (paho_socket := self._paho.socket()) is not None:
                    with contextlib.suppress(OSError):
                        duplicate = socket.socket(fileno=os.dup(paho_socket.fileno()))
                with contextlib.suppress(aiomqtt.MqttError, TimeoutError):
                    await asyncio.wait_for(
                        self._client.__aexit__(None, None, None), _DISCONNECT_TIMEOUT
                    )
        finally:
            self.hang_up()
            if duplicate is not None:
                with contextlib.closing(duplicate):
                    await _wait_until_closed(duplicate)


async def _wait_until_closed(sock: socket.socket) -> None:
    """Read until the broker has closed the connection, as it does when it has read our DISCONNECT.

    If we closed it earlier, a broker that still writes to us would see an error before it reads the
    DISCONNECT, and publish our last will after our goodbye.
    """
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, TimeoutError):
        sock.setblocking(False)
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_DISCONNECT_TIMEOUT):
            while await loop.sock_recv(sock, 1 << 16):
                pass


# --- causes of failures ----------------------------------------------------------------------------------

ALWAYS_FATAL = frozenset({"taken-over"})
"""Causes for which there is no retry, neither before nor after the first connection."""
FATAL_AT_FIRST = REFUSALS | {"unknown-host", "protocol"}
"""Causes that end the first attempt to connect: the user's settings are wrong. After a first connection they
are retried: a broker that accepted us before may be restarted with wrong rules or an expired certificate."""

_PASSWORD = ("password", "{at} refused {who}: {credentials}")
_REASON_CODES = {  # reason codes of MQTT 5, to which paho also translates those of 3.1.1
    # Unsupported Protocol Version
    132: ("protocol", "{at} does not support MQTT 5: use 3.1.1"),
    134: _PASSWORD,  # Bad User Name or Password
    135: _PASSWORD,  # Not authorized; some brokers answer a wrong password with this code
    # Keep Alive timeout; paho uses this code for its own ping timeout
    141: ("silent", "{at} did not answer our keepalive ping"),
    142: ("taken-over", "another client with our id connected to {at}"),  # Session taken over
    # Packet too large
    149: ("too-large", "{at} closed the connection: a packet was too large for it"),
}
_UNTRUSTED = "is not trusted: {ca}"
_VERIFY_CODES = {  # OpenSSL's reasons to reject a certificate, without their prefix X509_V_ERR_
    9: "is not valid yet: check this machine's clock",  # CERT_NOT_YET_VALID
    10: "has expired: renew it",  # CERT_HAS_EXPIRED
    # DEPTH_ZERO_SELF_SIGNED_CERT
    18: "is self-signed and not trusted: give it as --ca if you trust it",
    19: _UNTRUSTED,  # SELF_SIGNED_CERT_IN_CHAIN
    20: _UNTRUSTED,  # UNABLE_TO_GET_ISSUER_CERT_LOCALLY
    21: _UNTRUSTED,  # UNABLE_TO_VERIFY_LEAF_SIGNATURE
    # HOSTNAME_MISMATCH
    62: "is for another host name than {host!r}: use a name that it covers",
    # IP_ADDRESS_MISMATCH
    64: "is for another address than {host!r}: use a name that it covers",
}


def explain(
    error: BaseException, address: Address, code: int | None = None, ca: Path | None = None
) -> TransportError:
    """Return a TransportError that says why a connection failed or was lost, and what to do about it.

    code: the MQTT 5 reason code of the broker, if it sent one. ca: the file of the authority that is trusted.
    """
    # aiomqtt raises its errors `from None`, but `__context__` still holds the exception that caused them.
    root = error
    while isinstance(root, aiomqtt.MqttError):
        inner = root.__cause__ or root.__context__
        if inner is None or isinstance(inner, KeyError):
            break  # a KeyError is from a look-up inside the libraries, not from the network
        root = inner
    why: object = root
    if isinstance(root, ssl.SSLCertVerificationError):
        why = root.verify_message
        reason = _VERIFY_CODES.get(root.verify_code, "is not acceptable: {why}")
        cause, text = "certificate", "the certificate of {at} " + reason
    elif isinstance(root, ssl.SSLError):
        alert = str(root).lower().replace("_", " ")
        if "certificate required" in alert:
            cause, text = (
                "certificate",
                "{at} requires a client certificate: give --certificate and --key",
            )
        elif "alert" in alert:
            cause, text = "certificate", "{at} refused our certificate: {why}"
        else:
            why = root.reason or root
            cause, text = "tls", "TLS with {at} failed: {why}: is that a TLS port?"
    elif isinstance(root, socket.gaierror):
        cause, text = "unknown-host", "unknown host {host!r}: check the URL"
    elif isinstance(root, ConnectionRefusedError):
        cause, text = "refused", "nothing listens at {at}: is the broker running?"
    elif isinstance(root, ConnectionResetError):
        cause, text = "hung-up", "{at} closed the connection during connect: is that {port} port?"
    elif isinstance(root, TimeoutError):
        cause, text = "unreachable", "{at} does not answer: is that {port} port of a broker?"
    else:
        cause, text = _REASON_CODES.get(code or 0, ("unreachable", "no connection to {at}: {why}"))
    if address.username and address.password is None:
        who = f"user {address.username!r} without a password"
        credentials = "give --password-file, or set GOSSAMER_BROKER_PASSWORD"
    elif address.username:
        who, credentials = f"user {address.username!r}", "check name and password"
    else:
        who, credentials = "an anonymous connection", "give a user name and password"
    port = "a TLS" if address.tls else "an MQTT"
    authority = (
        "give the certificate of the authority (CA) that signed it as --ca"
        if ca is None
        else f"the authority (CA) in {ca} did not sign it; give the right one as --ca"
    )
    text = text.format(
        at=address, host=address.host, why=why, who=who, credentials=credentials, port=port,
        ca=authority,
    )  # fmt: skip
    return TransportError(cause, text)
