"""Runs a cluster of nats-servers on this machine, and writes the configuration of one on other machines.

    with Cluster(3) as cluster:
        print(cluster.url)              # mqtt://127.0.0.1:40001,mqtt://127.0.0.1:40002,…

A client may connect to any node. Cards, statuses and messages at QoS 1 are kept by three nodes, so that a
cluster of three works while one of them is down; without a majority of its nodes it accepts no connection.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from ...gossip import MqttOptions, MqttTransport, TlsFiles, TransportError
from .broker import Broker, free_port, is_host, stop_event
from .certificates import Authority
from .config import (
    BrokerError,
    BrokerSettings,
    BrokerTls,
    ClusterNode,
    write_node,
    write_private,
    write_rules,
)

READY_SECONDS = 60.0
"""Seconds in which QoS 1 must begin to work on every node; electing leaders and making streams takes about
five."""
ROUTE_PORT = 6222
"""The port on which nodes on other machines listen for each other."""


class Cluster:
    """Runs several nats-servers as one broker; a context manager.

    nodes: how many; an odd number, as a majority must be up. settings: of every node; with a port other than
    0, the nodes listen on that port and those after it.
    """

    def __init__(self, nodes: int = 3, settings: BrokerSettings | None = None) -> None:
        if nodes < 3 or nodes % 2 == 0:
            raise BrokerError(
                f"a cluster of {nodes} nodes: use 3 or 5, so that a majority stays when one is lost"
            )
        settings = settings or BrokerSettings()
        ports = [free_port() for _ in range(nodes)]
        routes = tuple(f"127.0.0.1:{port}" for port in ports)
        password, name = secrets.token_urlsafe(16), f"gossamer-{secrets.token_hex(4)}"
        self._settings = settings
        self.nodes = [
            Broker(
                replace(
                    settings,
                    port=settings.port and settings.port + index,
                    cluster=ClusterNode(
                        name, f"{name}-{index}", "127.0.0.1", port, routes, password
                    ),
                ),
                kind="nats",
            )
            for index, port in enumerate(ports)
        ]

    @property
    def url(self) -> str:
        """The URLs of all nodes, with commas between them."""
        return ",".join(node.url for node in self.nodes)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def start(self) -> None:
        """Start all nodes, and wait until QoS 1 works on each."""
        try:
            for node in self.nodes:
                node.start()
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self, nodes: Iterable[Broker] | None = None) -> None:
        """Wait until QoS 1 works on these nodes, all of them if left out; BrokerError if it does not."""
        waiting = list(self.nodes if nodes is None else nodes)
        with ThreadPoolExecutor(len(waiting)) as pool:
            errors = list(pool.map(self._why_not_ready, waiting))
        for node, error in zip(waiting, errors, strict=True):
            if error is not None:
                raise BrokerError(f"{node.url}: QoS 1 does not work: {error}")

    def close(self) -> None:
        """Stop all nodes, and remove their folders."""
        for node in self.nodes:
            node.close()

    def _why_not_ready(self, node: Broker) -> str | None:
        """Try for READY_SECONDS until QoS 1 works on a node; return None then, else the last error."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                asyncio.run(self._use_qos_1(node))
                return None
            except (TransportError, TimeoutError) as error:
                if time.monotonic() >= deadline:
                    return str(error) or "no answer"

    async def _use_qos_1(self, node: Broker) -> None:
        """Publish a retained message at QoS 1, receive it, and clear it."""
        users = self._settings.users
        user = next(iter(users), "")
        url = node.url.replace("://", f"://{user}@", 1) if user else node.url
        tls = self._settings.tls
        topic = f"gossamer/ready/{secrets.token_hex(4)}/status"
        async with (
            asyncio.timeout(READY_SECONDS / 4),
            MqttTransport(
                url, f"ready-{secrets.token_hex(4)}", password=users.get(user),
                tls=None if tls is None else TlsFiles(tls.ca),
                options=MqttOptions(connect_timeout=READY_SECONDS / 4),
            ) as transport,
        ):  # fmt: skip
            await transport.subscribe(topic)
            await transport.publish(topic, b"ready", retain=True)
            async for message in transport.messages():
                if message.payload == b"ready":
                    break
            await transport.publish(topic, b"", retain=True)


def serve_cluster(nodes: int, settings: BrokerSettings | None = None) -> int:
    """Run a cluster in the foreground until SIGINT, SIGTERM or SIGHUP; return an exit code.

    Prints the URLs once QoS 1 works on every node. A node that dies is reported; the code is 1 if no majority
    is left, without which a cluster accepts no connection.
    """
    with stop_event() as stop, Cluster(nodes, settings) as cluster:
        print(f"nats: {nodes} nodes of {cluster.nodes[0].reason}")
        print(cluster.url, flush=True)
        running = list(cluster.nodes)
        while not stop.wait(0.5):
            for node in [node for node in running if node.has_died()]:
                running.remove(node)
                print(f"{node.url} died:\n{node.log()[-2000:]}", file=sys.stderr, flush=True)
            if len(running) <= nodes // 2:
                print("no majority of the nodes is left", file=sys.stderr)
                return 1
    return 0


def write_cluster(
    folder: Path,
    hosts: Sequence[str],
    *,
    port: int = 8883,
    swarm: str,
    peers: Iterable[str],
    observers: Iterable[str] = (),
    passwords_in: Path | None = None,
) -> list[Path]:
    """Write a folder of configuration for every node of a cluster on other machines; return the folders.

    Every node's folder has nats.conf, with a swarm's users and permissions, its own certificate, and that of
    the authority, which is made in `folder / "authority"`; the users' passwords are in
    `folder / "rules" / "secrets"`, or in the folder `passwords_in`. An authority and passwords that exist are
    kept, since devices and running nodes have them. A node is started in its folder, with
    `nats-server -c nats.conf`.
    """
    if len(set(hosts)) != len(hosts) or len(hosts) < 3 or len(hosts) % 2 == 0:
        raise BrokerError(
            f"--nodes {','.join(hosts)}: give 3 or 5 different hosts, so that a majority stays when one is "
            "lost"
        )
    for host in hosts:
        if not is_host(host):
            raise BrokerError(f"--nodes: {host!r} is neither a host name nor an address")
    authority = Authority.open(folder / "authority")
    rules = write_rules(
        folder / "rules", swarm, peers, observers=observers, passwords_in=passwords_in
    )
    bracketed = [f"[{host}]" if ":" in host else host for host in hosts]
    routes = tuple(f"{host}:{ROUTE_PORT}" for host in bracketed)
    secret = folder / "rules" / "node"
    if not secret.exists():
        write_private(secret, secrets.token_urlsafe(16))
    password, folders = secret.read_text("utf-8"), []
    for index, host in enumerate(hosts):
        node_folder = folder / host.replace(":", "-")
        node_folder.mkdir(parents=True, exist_ok=True)
        files = authority.issue_server([host], node=True)
        shutil.copy2(authority.certificate, node_folder / authority.certificate.name)
        for file in (files.certificate, files.key):
            shutil.move(file, node_folder / file.name)
        settings = BrokerSettings(
            host="0.0.0.0",
            # Relative paths: they are read on another machine, in the folder in which the server starts.
            tls=BrokerTls(Path("ca.pem"), Path("server.pem"), Path("server.key")),
            cluster=ClusterNode(
                f"gossamer-{swarm}", f"{swarm}-{index + 1}", "0.0.0.0", ROUTE_PORT, routes, password
            ),
        )
        write_node(node_folder, settings, port, rules)
        folders.append(node_folder)
    return folders
