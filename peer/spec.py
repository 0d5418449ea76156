"""Specifications of peers and of the processes that run them, and the addresses of their brokers.

Whoever starts a process writes its specification as JSON. Nothing here loads torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, TypeAdapter, ValidationError

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
from .exits import PeerError
from .settings import Settings

if TYPE_CHECKING:
    from .lifecycle import Connect

ECHO = "@echo"
"""The inbox for the transport's own echo messages; no partial model can have this name."""


class BrokerAddress(MqttOptions):
    """The URL of a broker or of a cluster's nodes, our credentials, and the options of the connection."""

    url: str
    """The URL of the broker, which starts with mqtt://, mqtts://, ws:// or wss://; for a cluster, those of
    its nodes with commas between them."""
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

    @property
    def tls_files(self) -> TlsFiles:
        """The certificate files, of which any may be missing."""
        files = (self.ca, self.certificate, self.key)
        return TlsFiles(*(None if file is None else Path(file) for file in files))

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
        name = f"peer {status_topic.peer}"
        return mqtt_transport(
            broker, client_id, will=will, on_connect=on_connect, echo=echo, name=name
        )

    return connect


def mqtt_transport(
    broker: BrokerAddress,
    client_id: str,
    *,
    will: Will | None = None,
    on_connect: Hook | None = None,
    echo: str | None = None,
    name: str | None = None,
) -> MqttTransport:
    """Return a transport to this broker, not connected yet; see MqttTransport."""
    return MqttTransport(
        broker.url, client_id, password=broker.password, will=will,
        tls=broker.tls_files if broker.ca or broker.certificate else None,
        options=broker, on_connect=on_connect, echo=echo, name=name,
    )  # fmt: skip


WITH_PARENT = "--with-parent"
"""Option of the command line: the peers leave at end of file on standard input. Do not use it for peers
that a person or an init system starts: their standard input may be closed from the start."""
LOG_JSON = "--log-json"
"""Option of the command line: log lines are JSON objects."""


@dataclass(frozen=True)
class PeerSpec:
    """One peer of a process: its name, its learner, its settings and its initial parameters.

    name: the peer's name, also the prefix of its files' names; with trust, the label of its key.
    entry: `module:function`; the function is called with `arguments` and returns a Learner.
    samples: its weight in the average, used only if settings.weights is "samples".
    seed: of its random choices, such as the neighbours to push to; give each peer a different one.
    network: a safetensors file with initial parameters; set settings.trained if they come from earlier
        training.
    """

    name: str
    entry: str
    arguments: dict[str, Any]
    settings: Settings
    samples: int = 1
    seed: int = 0
    network: str | None = None


@dataclass(frozen=True)
class ProcessSpec:
    """What a process runs: its peers, their broker, and the folder of their results.

    threads: number of torch's threads, shared by all peers of the process.
    """

    broker: BrokerAddress
    folder: str
    peers: list[PeerSpec] = field(default_factory=list)
    threads: int = 1

    def write(self, path: Path) -> None:
        """Write the spec as JSON that only this user can read: it may contain the broker's password."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as out:
            os.fchmod(out.fileno(), 0o600)  # also if the file existed with other permissions
            out.write(TypeAdapter(ProcessSpec).dump_json(self, indent=1))

    @classmethod
    def read(cls, path: Path) -> ProcessSpec:
        """Read a spec that `write` wrote. A PeerError names a file that is missing or not such a spec."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except OSError as error:
            raise PeerError(f"{path}: cannot be read ({error.strerror})") from None
        except ValidationError as error:
            # Without the values: the broker's password may be one of them.
            first = error.errors(include_input=False, include_url=False)[0]
            key = ".".join(map(str, first["loc"])) or "the file"
            raise PeerError(f"{path}: not the spec of a process: {key}: {first['msg']}") from None
