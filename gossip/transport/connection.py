"""One connection to an MQTT broker, from its opening to its loss. `mqtt.py` makes a new one each time.

aiomqtt does the work. What it does not tell is taken from the paho client inside it: the broker's packet
limit, the reason it gave for a disconnection, and that it hung up before answering.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Sequence
from typing import Any, cast

import aiomqtt
import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from .base import Payload, TransportError, Will
from .options import Address, MqttOptions
from .paho_socket import Deliver, PacketSocket

_log = logging.getLogger(__name__)
_paho_log = logging.getLogger(f"{__name__}.paho")
_paho_log.setLevel(
    logging.CRITICAL
)  # what matters of it ends in a TransportError; lower it to debug
_GOODBYE = 2.0  # seconds that a polite disconnection may take before we hang up


class Link:
    """A connection that is opened once, used, lost or closed, and thrown away.

    timeout: seconds that it may take to open it, and to subscribe.
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
    ) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.max_packet: int | None = None
        """The largest packet that the broker takes, if it says so (MQTT 5)."""
        self.patience = 2.0 * options.keepalive
        """Seconds after which an answer is not to be expected any more."""
        self._address, self._receive = address, receive
        self._version5 = options.version == "5"
        self._unsent: dict[int, asyncio.Future[bool]] = {}
        self._reason: Any = None
        self._given_up: TransportError | None = None
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
            identifier=client_id.replace(".", "~"),  # nats-server takes no dot; no name has a "~"
            protocol=aiomqtt.ProtocolVersion.V5 if self._version5 else aiomqtt.ProtocolVersion.V311,
            clean_session=None if self._version5 else True,
            properties=properties,
            transport=address.transport,
            websocket_path=address.path if address.transport == "websockets" else None,
            keepalive=options.keepalive,
            timeout=timeout,
            tls_context=tls,
            will=will and aiomqtt.Will(will.topic, will.payload, will.qos, will.retain),
            max_inflight_messages=8,  # QoS 1 is for small cards and status
            logger=_paho_log,
        )
        # The only way to what aiomqtt does not tell, and to `PacketSocket`.
        self._paho: paho.Client = self._client._client
        self._paho.connect_timeout = min(5.0, timeout)
        self._socket: PacketSocket | None = None
        self._listen()

    def _listen(self) -> None:
        """Put callbacks of ours before aiomqtt's, or in their place."""
        loop, here, client = asyncio.get_running_loop(), threading.get_ident(), self._paho
        connected, disconnected = cast(Any, client.on_connect), cast(Any, client.on_disconnect)
        opened = cast(Any, client.on_socket_open)

        def on_socket_open(_client: Any, data: Any, _sock: Any) -> None:
            # Called by the thread that connects.
            self._socket = PacketSocket(client, self._receive, version5=self._version5)
            opened(client, data, self._socket)
            loop.call_soon_threadsafe(loop.add_reader, self._socket.fileno(), read)

        def read() -> None:
            # aiomqtt's own would keep what is raised to itself, and the connection open.
            try:
                client.loop_read()
                while self._socket is not None and client.socket() and self._socket.pending():
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

        def watch(sock: Any) -> None:
            if client.socket() is sock and client.want_write():
                loop.add_writer(sock.fileno(), write)

        def on_socket_register_write(_client: Any, _data: Any, sock: Any) -> None:
            # aiomqtt always does this later. By then all may be written, and the socket be closed or
            # its number be another's.
            if threading.get_ident() == here:
                loop.add_writer(sock.fileno(), write)
            else:
                loop.call_soon_threadsafe(watch, sock)

        def on_connect(_client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
            self._answered = True
            if code.is_failure:
                self._reason = code
            self.max_packet = getattr(properties, "MaximumPacketSize", None)
            connected(client, data, flags, code, properties)

        def on_disconnect(_client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
            self._reason = self._reason or code
            if not code.is_failure:  # aiomqtt has no other use for it than to end a polite goodbye
                disconnected(client, data, flags, code, properties)
            loop.call_soon_threadsafe(self._lose)

        def on_publish(_client: Any, _data: Any, mid: int, _code: Any, _properties: Any) -> None:
            waiting = self._unsent.pop(mid, None)
            if waiting is None or waiting.done():
                return
            if self._socket is not None and mid in self._socket.too_large:
                self._socket.too_large.discard(mid)
                waiting.set_exception(
                    TransportError(
                        "too-large",
                        f"{self._address} refused a message for its size: raise the broker's packet limit "
                        "(mosquitto: message_size_limit)",
                    )
                )
            else:
                waiting.set_result(True)

        def on_message(_client: Any, _data: Any, message: paho.MQTTMessage) -> None:
            self._receive(message.topic, bytes(message.payload), message.retain)

        client.on_socket_open = on_socket_open
        client.on_socket_register_write = on_socket_register_write
        client.on_connect, client.on_disconnect = on_connect, on_disconnect
        client.on_publish, client.on_message = on_publish, on_message

    def _lose(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        for waiting in self._unsent.values():
            if not waiting.done():
                waiting.set_result(False)
        self._unsent.clear()

    async def open(self) -> None:
        """Connect, or raise a TransportError that says why not."""
        connecting = asyncio.ensure_future(self._client.__aenter__())
        try:
            await asyncio.wait((connecting, self.lost), return_when=asyncio.FIRST_COMPLETED)
            if self._answered:  # aiomqtt has the answer, and is about to return or to raise it
                await asyncio.wait((connecting,))
            if not connecting.done():  # aiomqtt would wait for its timeout
                raise aiomqtt.MqttError("the broker hung up before it answered")
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
        # In TLS 1.3 a broker rejects our certificate after the handshake: the first read tells.
        alert = None if self._socket is None else self._socket.error
        root = alert if isinstance(alert, ssl.SSLError) else error
        return explain(root, self._address, getattr(self._reason, "value", None))

    def why_lost(self) -> TransportError:
        """The reason of a loss, as far as anybody said."""
        if self._given_up is not None:
            return self._given_up
        return self._explain(aiomqtt.MqttError("connection lost"))

    def give_up(self, cause: str, text: str) -> None:
        """Hang up on a broker that is there but does not do its part; `why_lost` then says what."""
        if not self.lost.done():
            self._given_up = TransportError(cause, f"{self._address} {text}")
            self.hang_up()

    def congested(self) -> bool:
        """Whether bytes wait to be written, so that an answer cannot be expected yet."""
        return self._paho.want_write()

    async def alive(self, work: Awaitable[Any]) -> bool:
        """Run `work` while the connection lives; False if it was lost, or given up, before the end."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self.lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        if task.cancelled():
            return False
        try:
            task.result()
        except aiomqtt.MqttError as error:
            # Without an answer nobody knows what the broker thinks we subscribed to: start over.
            self.give_up("no-answer", f"did not answer a subscription: {error}")
            return False
        return True

    async def publish(self, topic: str, payload: Payload, qos: int, retain: bool) -> bool:
        """Send; True when written to the socket (QoS 0) or acknowledged (QoS 1), False if lost.

        TransportError if the broker says that it is too large (MQTT 5, QoS 1).
        A broker that owes an acknowledgement for twice the keepalive is given up. (aiomqtt's own
        `publish` makes two tasks for every message; one future will do.)
        """
        if self.lost.done() or self._socket is None:
            return False
        if qos or retain:
            info = self._paho.publish(topic, cast(Any, payload), qos, retain)
        else:
            info = self._socket.publish(topic, payload)
        if info.rc != paho.MQTT_ERR_SUCCESS:
            return False
        if info.is_published():
            return True
        waiting = self._unsent[info.mid] = asyncio.get_running_loop().create_future()
        try:
            while qos and not waiting.done():
                await asyncio.wait((waiting,), timeout=self.patience)
                if not waiting.done() and not self.congested():
                    self.give_up("no-answer", "did not acknowledge a message")
                    return False
            return await waiting
        finally:
            self._unsent.pop(info.mid, None)

    async def subscribe(self, patterns: Sequence[str]) -> None:
        """Subscribe to all patterns in one packet, at QoS 1, so that cards and status keep theirs."""
        codes = await self._client.subscribe([(pattern, 1) for pattern in patterns])
        for pattern, code in zip(patterns, codes, strict=False):
            if getattr(code, "is_failure", False):
                raise TransportError(
                    "not-authorised", f"{self._address} refused the subscription to {pattern!r}"
                )

    def hang_up(self) -> None:
        """Cut the connection without a word."""
        if self._socket is not None and self._paho.socket() is not None:
            self._socket.hang_up()
        self._lose()

    async def close(self) -> None:
        """Say goodbye if anybody listens, else hang up."""
        try:
            if not self.lost.done() and self._opened:
                with contextlib.suppress(aiomqtt.MqttError, TimeoutError):
                    await asyncio.wait_for(self._client.__aexit__(None, None, None), _GOODBYE)
        finally:
            self.hang_up()


# --- what went wrong ----------------------------------------------------------------------------------

ALWAYS_FATAL = frozenset({"taken-over"})
"""Causes that waiting does not cure: no retry, before or after the first connection."""
REFUSALS = frozenset({"password", "not-authorised", "certificate", "tls"})
"""Causes for which a broker does not take us, or we do not take it."""
FATAL_AT_FIRST = REFUSALS | {"unknown-host", "protocol"}
"""Causes that are the user's mistake at the start, but may be a passing fault later: a broker that took
us before may have been started with the wrong rules, or before its certificate was renewed."""

_PASSWORD = ("password", "{at} refused {who}: check name and password")
_CODES = {  # the reason that a broker gives, as MQTT 5 numbers them
    132: ("protocol", "{at} does not speak MQTT 5: use 3.1.1"),
    134: _PASSWORD,  # brokers do not agree on which of the two a wrong password is
    135: _PASSWORD,
    141: ("silent", "{at} gives no sign of life"),
    142: ("taken-over", "another client with our id connected to {at}"),
    149: ("too-large", "{at} cut us off: a packet was too large for it"),
}
_UNTRUSTED = "is not trusted: give its authority's file as CA"
_CERTIFICATES = {  # why OpenSSL does not take one
    9: "is not valid yet: check this machine's clock",
    10: "has expired: renew it",
    18: "is not trusted: it signed itself; give its authority's file as CA",
    19: _UNTRUSTED,
    20: _UNTRUSTED,
    21: _UNTRUSTED,
    62: "is for another host name than {host!r}: use a name that it covers",
    64: "is for another address than {host!r}: use a name that it covers",
}


def explain(error: BaseException, address: Address, code: int | None = None) -> TransportError:
    """What a failed or lost connection means, in one line that says what to do.

    code: the reason that the broker gave.
    """
    # aiomqtt raises `from None` but Python still keeps what it was handling: the real cause.
    root = error
    while isinstance(root, aiomqtt.MqttError):
        inner = root.__cause__ or root.__context__
        if inner is None or isinstance(inner, KeyError):
            break
        root = inner
    why: object = root
    if isinstance(root, ssl.SSLCertVerificationError):
        why = root.verify_message
        reason = _CERTIFICATES.get(root.verify_code, "is not acceptable: {why}")
        cause, text = "certificate", "the certificate of {at} " + reason
    elif isinstance(root, ssl.SSLError):
        alert = str(root).lower().replace("_", " ")
        if "certificate required" in alert:
            cause, text = "certificate", "{at} asks for a client certificate: give one"
        elif "alert" in alert:
            cause, text = "certificate", "{at} refused our certificate: {why}"
        else:
            why = root.reason or root
            cause, text = "tls", "no TLS with {at}: {why}: is that a TLS port?"
    elif isinstance(root, socket.gaierror):
        cause, text = "unknown-host", "unknown host {host!r}: check the URL"
    elif isinstance(root, ConnectionRefusedError):
        cause, text = "refused", "nothing listens at {at}: is the broker running?"
    elif isinstance(root, ConnectionResetError):
        cause, text = "hung-up", "{at} hung up while we connected: is that {port} port?"
    else:
        cause, text = _CODES.get(code or 0, ("unreachable", "no connection to {at}: {why}"))
    who = f"user {address.username!r}" if address.username else "a client without a password"
    port = "a TLS" if address.tls else "an MQTT"
    return TransportError(
        cause, text.format(at=address, host=address.host, why=why, who=who, port=port)
    )
