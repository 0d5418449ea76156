"""Clusters of nats-servers: on this machine, and as configuration for others."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack

import pytest
from ports import unused_port

from gossamer.gossip import MqttOptions, MqttTransport, TlsFiles, TransportError, topics
from gossamer.peer import BrokerError, Cluster, find_nats, write_cluster

HOSTS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_cluster_has_an_odd_number_of_nodes(nodes):
    with pytest.raises(BrokerError, match="use 3 or 5"):
        Cluster(nodes)


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "b", "a"], ["a", "b", "c:1"]])
def test_wrong_hosts_are_refused(tmp_path, hosts):
    with pytest.raises(BrokerError, match="--nodes") as error:
        write_cluster(tmp_path, hosts, swarm="garden", peers=["anna@x"])
    assert "\n" not in str(error.value)


def test_the_written_configuration_makes_a_cluster(tmp_path, run):
    port, route_port = unused_port(), unused_port()
    folders = write_cluster(
        tmp_path, HOSTS, port=port, swarm="garden", peers=["anna@x", "ben@y"], observers=["watch"]
    )
    again = [json.loads((folder / "nats.conf").read_text()) for folder in folders]
    assert write_cluster(
        tmp_path, HOSTS, port=port, swarm="garden", peers=["anna@x", "ben@y"], observers=["watch"]
    )
    # A second time nothing changes that devices or running nodes have.
    assert [json.loads((folder / "nats.conf").read_text()) for folder in folders] == again
    nats = find_nats()
    assert nats is not None
    with ExitStack() as stack:
        for folder, host in zip(folders, HOSTS, strict=True):
            subprocess.run([nats, "-t", "-c", "nats.conf"], cwd=folder, check=True)
            # All three are on this machine here: each must listen on its own address.
            text = (folder / "nats.conf").read_text().replace("0.0.0.0", host)
            (folder / "nats.conf").write_text(text.replace("6222", str(route_port)))
            with (folder / "log").open("wb") as log:
                node = subprocess.Popen([nats, "-c", "nats.conf"], cwd=folder, stderr=log)
            stack.callback(node.wait)
            stack.callback(node.terminate)
        run(exchange(port, tmp_path))


async def exchange(port, folder) -> None:
    passwords = {
        user: (folder / "rules" / "secrets" / user).read_text().strip()
        for user in ("anna@x", "ben@y")
    }

    def connect(user: str, host: str) -> MqttTransport:
        return MqttTransport(
            f"mqtts://{user.replace('@', '%40')}@{host}:{port}", user.replace("@", "-"),
            password=passwords[user], tls=TlsFiles(folder / "authority" / "ca.pem"),
            options=MqttOptions(connect_timeout=120.0, first_delay=0.1, longest_delay=1.0),
        )  # fmt: skip

    async with connect("anna@x", HOSTS[0]) as anna, connect("ben@y", HOSTS[2]) as ben:
        assert await anna.publish(topics.card("garden", "anna@x"), b"card", retain=True)
        await ben.subscribe(topics.of_all("garden", "card"))
        assert (await anext(ben.messages())).payload == b"card"
        with pytest.raises(TransportError, match="refused the subscription"):
            await ben.subscribe(topics.inboxes("garden", "anna@x"))
