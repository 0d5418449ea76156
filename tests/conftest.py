"""Brokers that tests share. One of each kind is started when first asked for, and kept."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before numpy is loaded here or in any process that a test starts: its threads wait by spinning, and every
# core runs tests already. With a thread per core, tests of spectra take five times as long.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import pytest
from hypothesis import HealthCheck, settings

from gossamer.gossip import MemoryBroker, MemoryTransport, MqttOptions, MqttTransport, TlsFiles
from gossamer.peer import Authority, Broker, BrokerSettings, BrokerTls, find_mosquitto

# How long an example takes says something about the machine, not about the code.
settings.register_profile(
    "unhurried", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """Half as many processes again as cores: some tests wait, for a broker or for what must not happen."""
    cores = yield
    return cores if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else cores + (cores + 1) // 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from reading all modules and tests again and again: they stay anyway."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


RIGS = [
    "memory", "nats", "nats-tls", "nats-websockets", "nats-tls-websockets",
    "mosquitto-3.1.1", "mosquitto-5", "mosquitto-tls",
]  # fmt: skip


def require_mosquitto() -> None:
    """Skip without mosquitto, unless the environment says that it must be there."""
    if find_mosquitto() is None:
        if os.environ.get("GOSSAMER_REQUIRE_MOSQUITTO") == "1":
            pytest.fail("GOSSAMER_REQUIRE_MOSQUITTO=1, but mosquitto is not on PATH")
        pytest.skip("mosquitto is not on PATH")


@pytest.fixture
def mosquitto_required() -> Callable[[], None]:
    """Skip, or fail where it must be there, without mosquitto."""
    return require_mosquitto


@pytest.fixture(autouse=True)
def forget_modules_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the next test import a file that has the name of one that this test wrote and imported."""
    before = set(sys.modules)
    yield
    files = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(files):
            del sys.modules[name]


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine in a new event loop, and fail rather than hang."""

    def runner(coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(240):
                return await coroutine

        return asyncio.run(bounded())

    return runner


@dataclass
class Rig:
    """One kind of broker and transport, behind one interface."""

    name: str
    broker: Broker | None = None
    memory: MemoryBroker | None = None
    tls: TlsFiles | None = None
    websockets: bool = False
    transports: list[Any] = field(default_factory=list)

    def client(self, client_id: str, **options: Any) -> Any:
        bounds = {key: options.pop(key) for key in list(options) if key.startswith("max_")}
        if self.memory is not None:
            transport = MemoryTransport(self.memory, client_id, **options, **bounds)
        else:
            assert self.broker is not None
            url = self.broker.websocket_url if self.websockets else self.broker.url
            version = "5" if self.name.endswith("-5") else "3.1.1"
            knobs = MqttOptions(
                version=version,
                connect_timeout=120.0,
                first_delay=0.05,
                longest_delay=0.5,
                **bounds,
            )
            transport = MqttTransport(
                url, client_id, tls=self.tls, options=knobs, seed=1, **options
            )
        self.transports.append(transport)
        return transport

    async def restart(self) -> None:
        """Stop the broker, start it again, and let every client come back."""
        if self.memory is not None:
            self.memory.stop()
            await asyncio.sleep(0)
            open_ones = [one for one in self.transports if one.connection.state == "lost"]
            await self.memory.start(open_ones)
        else:
            assert self.broker is not None
            await asyncio.to_thread(self.broker.restart)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def brokers(authority: Authority) -> Iterator[Callable[[str], Broker]]:
    """Starts (once) and returns the broker that a rig needs."""
    running: dict[str, Broker] = {}

    def get(name: str) -> Broker:
        if name not in running:
            if name.startswith("mosquitto"):
                require_mosquitto()
            kind = "mosquitto" if name.startswith("mosquitto") else "nats"
            tls = None
            if "-tls" in name:
                server = authority.issue_server()
                tls = BrokerTls(authority.certificate, server.certificate, server.key)
            port = 0 if name.endswith("-websockets") else None
            running[name] = Broker(BrokerSettings(tls=tls, websocket_port=port), kind=kind)
            running[name].start()
        return running[name]

    yield get
    for broker in running.values():
        broker.close()


@pytest.fixture
def empty_broker() -> Iterator[Broker]:
    """A broker that remembers no other test's peers."""
    with Broker(BrokerSettings(), kind="nats") as broker:
        yield broker


@pytest.fixture(params=RIGS)
def rig(
    request: pytest.FixtureRequest, brokers: Callable[[str], Broker], authority: Authority
) -> Rig:
    name: str = request.param
    if name == "memory":
        return Rig(name, memory=MemoryBroker())
    kind = "mosquitto" if name in ("mosquitto-3.1.1", "mosquitto-5") else name
    return Rig(
        name,
        broker=brokers(kind),
        tls=TlsFiles(ca=Path(authority.certificate)) if "-tls" in name else None,
        websockets=name.endswith("-websockets"),
    )


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port of ours on which nobody listens, and nobody else can while the test runs."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


@pytest.fixture
def mosquitto(brokers: Callable[[str], Broker]) -> Broker:
    """The shared plain mosquitto; skips without one."""
    return brokers("mosquitto")


@pytest.fixture
def short_wait_for_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker on this machine needs no five seconds to say that it has nothing."""
    monkeypatch.setattr("gossamer.experiments.cli.trust._RETAINED_SECONDS", 1.0)
