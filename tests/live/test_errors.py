"""Bad input: one clear line and exit code 2, before any training starts."""

from __future__ import annotations

import asyncio
import datetime
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import pytest
import trustme
from swarm_kit import small_config, small_swarm
from trusting import Swarmlet, config_of
from waiting import until, wait_until

from gossamer.experiments.config.tables import ConfigError, Model
from gossamer.experiments.live.layout import plan
from gossamer.peer import (
    Broker,
    BrokerAddress,
    BrokerSettings,
    BrokerTls,
    ProcessSpec,
)
from gossamer.peer.process import main


class Host(Protocol):
    """Runs what `python -m gossamer.peer` would with these arguments: exit code, and standard error."""

    def __call__(self, *arguments: str) -> tuple[int, str]: ...


@pytest.fixture
def here(capsys) -> Host:
    """A host that does not wait for another process to load torch."""

    def run(*arguments: str) -> tuple[int, str]:
        code = main(arguments)
        return code, capsys.readouterr().err

    return run


def last_line(host: Host, spec, peers: int = 1, **broker) -> tuple[int, str]:
    """Run the first peers to their end: exit code, and the last line that they printed."""
    address = spec.broker.updated(**{"connect_timeout": 120.0, **broker})
    path = spec.folder / "host.json"
    ProcessSpec(address, str(spec.folder), spec.peers[:peers]).write(path)
    code, errors = host(str(path))
    lines = errors.strip().splitlines()
    return code, lines[-1] if lines else ""


def refused(host: Host, spec, *words: str, exit_code: int = 2, **broker) -> None:
    code, line = last_line(host, spec, **broker)
    assert code == exit_code
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    metrics = spec.folder / "0.jsonl"
    assert not metrics.exists() or metrics.read_text() == ""  # nothing was trained


def test_an_unknown_broker(tmp_path, silent_port, here):
    url = f"mqtt://127.0.0.1:{silent_port}"
    spec = small_swarm(small_config(1, 2), tmp_path, url)
    refused(here, spec, url, connect_timeout=1.0, exit_code=5)


def test_a_refused_password(tmp_path, mosquitto, here):
    with Broker(BrokerSettings(users={"anna": "right"}), kind="mosquitto") as broker:
        url = broker.url.replace("mqtt://", "mqtt://anna:wrong@")
        spec = small_swarm(small_config(1, 2), tmp_path, url)
        code, line = last_line(here, spec)
    assert code == 2
    assert "password" in line or "not authorised" in line
    assert "wrong" not in line  # a password has no business in a log


def test_an_expired_certificate(tmp_path, mosquitto, here):
    authority = trustme.CA()
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    server = authority.issue_cert("127.0.0.1", not_after=past)
    ca, certificate, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    server.cert_chain_pems[0].write_to_path(certificate)
    server.private_key_pem.write_to_path(key)
    with Broker(BrokerSettings(tls=BrokerTls(ca, certificate, key)), kind="mosquitto") as broker:
        spec = small_swarm(small_config(1, 2), tmp_path, broker.url)
        refused(here, spec, "expired", ca=str(ca))


def test_a_name_that_is_online_already(tmp_path, mosquitto, here):
    config = config_of(2, 2, trust="none")
    (tmp_path / "second").mkdir()
    second = small_swarm(config, tmp_path / "second", mosquitto.url)
    online, over = threading.Event(), threading.Event()

    async def first() -> None:
        swarm = Swarmlet(config, tmp_path / "first", mosquitto.url, start_timeout=900.0)
        swarm.start(0)  # waits for peer 1
        await until(lambda: (link := swarm.peers[0].link) is not None and link.joined)
        online.set()
        await asyncio.to_thread(over.wait)
        await swarm.crash(0)

    with ThreadPoolExecutor(1) as elsewhere:  # a host has the main thread, for its signals
        running = elsewhere.submit(asyncio.run, first())
        try:
            wait_until(lambda: online.is_set() or running.done())
            refused(here, second, "peer 0: the name is already online", "session")
        finally:
            over.set()
        running.result()


def test_peers_whose_schemas_differ_say_which_field(tmp_path, mosquitto, here):
    config = config_of(2, 2, trust="none")
    other = config.model_copy(update={"models": [Model(name="global", layout="64-9-0")]})
    one = small_swarm(config, tmp_path, mosquitto.url)
    two = small_swarm(other, tmp_path, mosquitto.url)
    code, line = last_line(here, replace(one, peers=[one.peers[0], two.peers[1]]), peers=2)
    assert code == 2
    assert re.search(r"model 'global' is not the same: field .* shape", line)
    assert all((tmp_path / f"{n}.jsonl").read_text() == "" for n in "01")


def test_a_model_that_is_not_connected_on_the_graph_names_its_peers(tmp_path):
    config = small_config(5, 2).model_copy(
        update={"topology": "ring", "models": [Model(name="pair", layout="64-10-0", peers=[0, 2])]}
    )
    with pytest.raises(ConfigError, match=r"topology.*pair: 2 components: \{0\}; \{2\}"):
        plan(config, tmp_path, BrokerAddress("mqtt://127.0.0.1"))


def test_a_checkpoint_of_another_network(tmp_path, mosquitto, here):
    from gossamer.experiments.build import Swarm
    from gossamer.peer import Engine

    config = small_config(1, 2)
    other = config.model_copy(update={"models": [Model(name="global", layout="64-9-0")]})
    learner = Swarm(other).member(0).learner
    spec = small_swarm(config, tmp_path, mosquitto.url, swarm="checkpointed")
    Engine("0", learner, spec.peers[0].settings, checkpoint=tmp_path / "0.checkpoint").save()
    refused(here, spec, "0.checkpoint", "another network")


def test_a_file_that_is_no_checkpoint(tmp_path, mosquitto, here):
    (tmp_path / "0.checkpoint").write_bytes(b"not a checkpoint")
    spec = small_swarm(small_config(1, 2), tmp_path, mosquitto.url, swarm="checkpointed")
    refused(here, spec, "0.checkpoint", "cannot be read")
