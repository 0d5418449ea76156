"""Addresses of brokers, and connections to them. Nothing here loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ..gossip import (
    Hook,
    LinkSettings,
    MqttOptions,
    MqttTransport,
    TlsFiles,
    Transport,
    Will,
    topics,
)

if TYPE_CHECKING:
    from .lifecycle import Connect

ECHO = "@echo"
"""The inbox for the transport's own echo messages; no partial model can have this name."""


class BrokerAddress(MqttOptions):
    """The URL of a broker, our credentials, and the options of the connection."""

    url: str
    """The URL of the broker, which starts with mqtt://, mqtts://, ws:// or wss://."""
    ca: str | None = None
    """File with the certificate of the CA that signed the broker's certificate."""
    certificate: str | None = None
    """File with our own certificate, if the broker requires one."""
    key: str | None = None
    """File with the private key of our own certificate."""
    password: str | None = Field(default=None, repr=False)
    """Password of the user in the URL, if the URL does not contain it."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(**{"url": url, **options})

    def with_defaults(self, link: LinkSettings) -> BrokerAddress:
        """Return a copy with the settings that were set explicitly in `link` but not in this object."""
        from_link = link.model_fields_set & LinkSettings.model_fields.keys()
        missing = from_link - self.model_fields_set
        return self.updated(**{key: getattr(link, key) for key in missing})


def mqtt_connect(broker: BrokerAddress) -> Connect:
    """Return a function that makes a transport to this broker for a peer, with an echo topic of its own."""

    def connect(client_id: str, will: Will, on_connect: Hook) -> Transport:
        status_topic = topics.parse(will.topic)
        echo = topics.inbox(status_topic.swarm, status_topic.peer, ECHO)
        return mqtt_transport(broker, client_id, will=will, on_connect=on_connect, echo=echo)

    return connect


def mqtt_transport(
    broker: BrokerAddress,
    client_id: str,
    *,
    will: Will | None = None,
    on_connect: Hook | None = None,
    echo: str | None = None,
) -> MqttTransport:
    """Return a transport to this broker, not connected yet; see MqttTransport."""
    tls = None
    if broker.ca or broker.certificate:
        tls = TlsFiles(_path(broker.ca), _path(broker.certificate), _path(broker.key))
    return MqttTransport(
        broker.url, client_id, password=broker.password,
        will=will, tls=tls, options=broker, on_connect=on_connect, echo=echo,
    )  # fmt: skip


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
