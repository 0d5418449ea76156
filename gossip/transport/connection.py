"""One connection to an MQTT broker, from its opening to its loss. `mqtt.py` makes a new one each time.

aiomqtt does the work. Three things it does not tell are taken from the paho client inside it: the
broker's packet limit, the reason it gave for a disconnection, and that it hung up before answering.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, cast

import aiomqtt
import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from .base import Payload, TransportError, Will
from .broker_url import Address, explain, explain_alert
from .paho_workarounds import Deliver, Packets, patch_sender, supports

_log = logging.getLogger(__name__)
_GOODBYE = 2.0  # seconds that a polite disconnection may take before we hang up


class Link:
    """A connection that is opened once, used, lost or closed, and thrown away."""

    def __init__(
        self,
        address: Address,
        client_id: str,
        receive: Deliver,
        *,
        version: Literal["3.1.1", "5"],
        keepalive: int,
        max_inbound_payload: int,
        timeout: float,
        will: Will | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.max_packet: int | None = None
        self._address = address
        self._unsent: dict[int, asyncio.Future[bool]] = {}
        self.patience = 2.0 * keepalive
        """Seconds after which an answer is not to be expected any more."""
        self._reason: Any = None
        self._opened = False
        self._given_up: TransportError | None = None
        self._complaint = _Complaint()
        properties = None
        if version == "5":
            properties = Properties(PacketTypes.CONNECT)
            properties.MaximumPacketSize = max_inbound_payload + 1024
        self._client = aiomqtt.Client(
            address.host,
            address.port,
            username=address.username,
            password=address.password,
            identifier=client_id.replace(".", "~"),  # nats-server takes no dot; no name has a "~"
            protocol=aiomqtt.ProtocolVersion.V5 if version == "5" else aiomqtt.ProtocolVersion.V311,
            clean_session=None if version == "5" else True,
            properties=properties,
            transport=address.transport,
            websocket_path=address.path if address.transport == "websockets" else None,
            keepalive=keepalive,
            timeout=timeout,
            tls_context=tls,
            will=None
            if will is None
            else aiomqtt.Will(will.topic, will.payload, will.qos, will.retain),
            # What arrives goes straight to `receive`, which bounds and counts.
            queue_type=cast(Any, lambda maxsize: _Sink(receive)),
            max_inflight_messages=8,  # QoS 1 is for small cards and status
            logger=self._complaint.logger,
        )
        self._client.pending_calls_threshold = 1 << 30  # we bound them ourselves
        self._paho: paho.Client = self._client._client
        self._paho.connect_timeout = min(5.0, timeout)
        self._packets: Packets | None = None
        if address.transport == "tcp" and supports(self._paho):
            self._packets = Packets(
                self._paho, receive, version5=version == "5", log=self._complaint.logger
            )
        self._listen()

    def _listen(self) -> None:
        loop, here = asyncio.get_running_loop(), threading.get_ident()
        connected, disconnected = self._paho.on_connect, self._paho.on_disconnect
        opened = self._paho.on_socket_open

        def on_connect(client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
            if code.is_failure:
                self._reason = code
            self.max_packet = getattr(properties, "MaximumPacketSize", None)
            cast(Any, connected)(client, data, flags, code, properties)

        def on_disconnect(client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
            if self._reason is None:
                self._reason = code
            cast(Any, disconnected)(client, data, flags, code, properties)
            loop.call_soon_threadsafe(self._lose)

        def on_socket_open(client: Any, data: Any, sock: Any) -> None:
            patch_sender(sock)
            cast(Any, opened)(client, data, sock)

        def on_publish(_client: Any, _data: Any, mid: int, _code: Any, _properties: Any) -> None:
            waiting = self._unsent.pop(mid, None)
            if waiting is None or waiting.done():
                return
            if self._packets is not None and mid in self._packets.too_large:
                self._packets.too_large.discard(mid)
                waiting.set_exception(
                    TransportError(
                        "too-large",
                        f"{self._address} refused a message for its size: raise the broker's packet limit "
                        "(mosquitto: message_size_limit)",
                    )
                )
            else:
                waiting.set_result(True)

        def write() -> None:
            try:
                self._paho.loop_write()
            except Exception as error:
                _log.debug("%s: cannot write: %r", self._address, error)
                self.hang_up()

        def watch(sock: Any) -> None:
            if self._paho.socket() is sock and self._paho.want_write():
                loop.add_writer(sock.fileno(), write)

        def on_socket_register_write(_client: Any, _data: Any, sock: Any) -> None:
            # aiomqtt always does this later. By then all may be written, and the socket be closed or
            # its number be another's.
            if threading.get_ident() == here:
                loop.add_writer(sock.fileno(), write)
            else:
                loop.call_soon_threadsafe(watch, sock)

        self._paho.on_socket_register_write = on_socket_register_write
        self._paho.on_socket_open = on_socket_open
        self._paho.on_publish = on_publish
        self._paho.on_connect = on_connect
        self._paho.on_disconnect = on_disconnect

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
            if not self.lost.done() or connecting.done():
                await connecting
                self._opened = True
                return
        except (aiomqtt.MqttError, ValueError) as error:
            await self.close()
            raise self._explain(error) from error
        except BaseException:
            # Cancelled. The thread that connects cannot be: wait for it, then clean up.
            await asyncio.wait((connecting,), timeout=self._paho.connect_timeout)
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await self.close()
            raise
        # The broker hung up before it answered. aiomqtt would wait for its timeout.
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        raise self._explain(aiomqtt.MqttError("the broker hung up before it answered"))

    def _explain(self, error: BaseException) -> TransportError:
        alert = explain_alert(self._complaint.text, self._address)
        if alert is not None:
            return alert
        return explain(error, self._address, getattr(self._reason, "value", None))

    def why_lost(self) -> TransportError:
        """The reason of a loss, as far as anybody said."""
        if self._given_up is not None:
            return self._given_up
        code = getattr(self._reason, "value", None)
        return explain(aiomqtt.MqttError("connection lost"), self._address, code)

    def give_up(self, cause: str, text: str) -> None:
        """Hang up on a broker that is there but does not do its part; `why_lost` then says what."""
        if not self.lost.done():
            self._given_up = TransportError(cause, f"{self._address} {text}")
            self.hang_up()

    def congested(self) -> bool:
        """Whether bytes wait to be written, so that an answer cannot be expected yet."""
        return self._paho.want_write()

    async def alive(self, work: Coroutine[Any, Any, Any]) -> bool:
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
        if self.lost.done():
            return False
        if self._packets is not None and not (qos or retain):
            info = self._packets.publish(topic, payload)
        else:
            info = self._paho.publish(topic, cast(Any, payload), qos, retain)
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
        """Cut the connection without a word. paho notices, and cleans up, in the next turn."""
        sock = self._paho.socket()
        if sock is None or sock.fileno() < 0:
            self._lose()
            return
        # A second handle on the same connection, because paho's may be a wrapper without shutdown.
        with socket.socket(fileno=os.dup(sock.fileno())) as handle, contextlib.suppress(OSError):
            handle.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Say goodbye if anybody listens, else hang up."""
        if not self.lost.done() and self._opened:
            with contextlib.suppress(aiomqtt.MqttError, TimeoutError):
                await asyncio.wait_for(self._client.__aexit__(None, None, None), _GOODBYE)
        if self._paho.socket() is not None:
            self.hang_up()
            await asyncio.wait((self.lost,), timeout=_GOODBYE)
        ended = self._client._disconnected
        if ended.done() and not ended.cancelled():
            ended.exception()  # we know: asyncio need not complain that nobody looked


class _Sink:
    """What aiomqtt takes for its queue."""

    def __init__(self, receive: Deliver) -> None:
        self._receive = receive

    def put_nowait(self, message: aiomqtt.Message) -> None:
        """Hand a message on."""
        payload = message.payload
        if not isinstance(payload, bytes):
            payload = bytes(cast(Any, payload) or b"")
        self._receive(str(message.topic), payload, bool(message.retain))


class _Complaint(logging.Handler):
    """Keeps the last thing that paho complained about: where TLS alerts end up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self.logger = logging.Logger("paho", logging.WARNING)
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Remember the line, and pass it on for those who debug."""
        self.text = record.getMessage()
        _log.debug("paho: %s", self.text)
