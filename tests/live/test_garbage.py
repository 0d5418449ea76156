"""What strangers publish into an inbox is counted by cause and logged; the swarm goes on."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from proxy import read_packet
from swarm_kit import small_config, small_swarm
from waiting import until

from gossamer.gossip import Chunker, Give, encode, inbox
from gossamer.peer import Broker, LocalSwarm

pytestmark = pytest.mark.live

MEGABYTES_50 = 50 * 1024 * 1024


def message(vector: str = "global", schema: str = "0" * 16) -> bytes:
    """A whole, well-formed packet from a stranger."""
    give = Give(vector, "x", "session", 1, "0", "other", 1, np.zeros(4, np.float32))
    (packet,) = Chunker("x/session").split(encode(give, schema))
    return packet


def wrong_version() -> bytes:
    packet = bytearray(message())
    packet[4] = 99
    return bytes(packet)


# payload, the inbox it is put into, and the cause that it must be counted under
POISON = {
    "garbage": (b"\x00garbage of no particular kind, but long enough\xff", "global", "garbage"),
    "truncated": (message()[:-7], "global", "truncated"),
    "version": (wrong_version(), "global", "version"),
    "schema": (message(), "global", "schema"),
    "unknown model": (message("nonsense"), "nonsense", "unknown-model"),
}


async def publish(broker: Broker, topic: str, payload: bytes, folder: Path) -> None:
    """With mosquitto_pub where there is one, else with a client of a few lines."""
    program = shutil.which("mosquitto_pub")
    if program is None:
        await publish_by_hand(broker.port, topic, payload)
        return
    file = folder / "poison"
    file.write_bytes(payload)
    where = ["-h", "127.0.0.1", "-p", str(broker.port), "-t", topic]
    command = [program, *where, "-q", "1" if len(payload) < 1024 else "0", "-f", str(file)]
    await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=300, check=False)


async def publish_by_hand(port: int, topic: str, payload: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(bytes([0x10, 13, 0, 4]) + b"MQTT" + bytes([4, 2, 0, 60, 0, 1]) + b"x")
    await read_packet(reader)
    name = topic.encode()
    body = len(name).to_bytes(2, "big") + name + payload
    size, head = len(body), bytearray([0x30])
    while True:
        size, digit = divmod(size, 128)
        head.append(digit | (0x80 if size else 0))
        if not size:
            break
    writer.write(bytes(head) + body)
    try:
        writer.write(bytes([0xC0, 0]))
        await writer.drain()
        await read_packet(reader)  # an answer to the ping: the message before it was read
        writer.write(bytes([0xE0, 0]))
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # the broker threw us out
    writer.close()


async def poisoned(broker: Broker, folder: Path) -> None:
    """Two peers wait for a third, which comes when all the poison is in."""
    config = small_config(3, 4, mode="async", per_process=2)
    spec = small_swarm(config, folder, broker.url, start_timeout=600.0)
    first = LocalSwarm(replace(spec, peers=spec.peers[:2]))
    third = LocalSwarm(replace(spec, folder=folder / "third", peers=spec.peers[2:]))
    log = folder / "host-0.log"
    task = asyncio.create_task(first.run())
    try:
        await until(lambda: log.exists() and "peer 1 is online" in log.read_text())
        for payload, vector, _ in POISON.values():
            await publish(broker, inbox("small", "0", vector), payload, folder)
        await publish(broker, inbox("small", "0", "global"), bytes(MEGABYTES_50), folder)
        await until(
            lambda: task.done() or log.read_text().count("dropped a message") >= len(POISON)
        )
        await asyncio.gather(task, third.run())
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["mosquitto", "nats"])
def test_poison_is_counted_logged_and_survived(tmp_path, request, kind):
    if kind == "mosquitto":
        request.getfixturevalue("mosquitto")
    with Broker(kind=kind) as broker:
        asyncio.run(poisoned(broker, tmp_path))
        broker_log = broker.log()
    report = json.loads((tmp_path / "0.report.json").read_text())
    log = (tmp_path / "host-0.log").read_text()
    for _, _, cause in POISON.values():
        assert report["dropped"][cause] == 1
        assert f"dropped a message: {cause}: " in log
    # The packet limit keeps the monster out, and the broker says so.
    assert {"mosquitto": "oversize packet", "nats": "maximum payload"}[kind] in broker_log.lower()
    assert "inbound-too-large" not in report["transport"]
    others = [json.loads((tmp_path / f"{n}.report.json").read_text()) for n in ("1", "third/2")]
    assert [r["rounds"] for r in (report, *others)] == [4, 4, 4]
    assert sum(sum(r["weight"]["global"][:2]) for r in (report, *others)) == 3 << 32
