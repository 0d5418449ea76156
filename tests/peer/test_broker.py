from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from io import StringIO

import pytest

from gossamer.gossip import MqttTransport
from gossamer.peer import broker as module
from gossamer.peer.broker import Broker, BrokerError, BrokerSettings, BrokerTls, free_port, serve


@pytest.fixture(params=["mosquitto", "amqtt"])
def kind(request):
    if request.param == "mosquitto":
        request.getfixturevalue("mosquitto")
    return request.param


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_runs_restarts_on_the_same_port_and_leaves_nothing_behind(kind):
    with Broker(kind=kind) as broker:
        url, port, pid = broker.url, broker.port, broker.pid
        assert broker.kind == kind
        assert url == f"mqtt://127.0.0.1:{port}"
        assert listening(port)
        with pytest.raises(BrokerError, match="already runs"):
            broker.start()
        broker.restart()
        assert (broker.url, broker.port) == (url, port)
        assert broker.pid != pid
        assert listening(port)
        folder = broker._folder.name
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert broker.pid is None
    assert not listening(port)
    assert not os.path.exists(folder)


def test_says_which_broker_and_why(mosquitto, monkeypatch):
    assert Broker().kind == "mosquitto"
    assert "mosquitto" in Broker().reason
    assert Broker().reason.startswith("mosquitto 2")
    assert "asked for" in Broker(kind="amqtt").reason
    websockets = Broker(BrokerSettings(websocket_port=0))
    assert websockets.kind == "amqtt"
    assert "websockets" in websockets.reason
    with pytest.raises(BrokerError, match="embedded"):
        Broker(BrokerSettings(websocket_port=0), kind="mosquitto")
    monkeypatch.setattr(module, "find_mosquitto", lambda: None)
    assert Broker().kind == "amqtt"
    assert "not found on PATH" in Broker().reason
    with pytest.raises(BrokerError, match="not found"):
        Broker(kind="mosquitto")


def test_port_in_use_is_an_error_that_says_so(kind):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # The taken port accepts connections: the broker's own exit must be noticed all the same.
        with pytest.raises(BrokerError, match=f"port {port}.*in use"):
            Broker(BrokerSettings(port=port), kind=kind).start()


def test_listens_on_loopback_only(kind):
    with Broker(kind=kind) as broker:
        with open("/proc/net/tcp") as table:
            rows = [line.split()[1] for line in table if f":{broker.port:04X}" in line.split()[1]]
        assert "0100007F" in {row.split(":")[0] for row in rows}
        assert {row.split(":")[0] for row in rows} == {"0100007F"}


def test_embedded_broker_ends_with_its_parent(tmp_path):
    code = (
        "import os\n"
        "from gossamer.peer.broker import Broker\n"
        "broker = Broker(kind='amqtt')\n"
        "broker.start()\n"
        "print(broker.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    # The killed parent cannot remove its temporary folder: let pytest do it.
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == -9, done.stderr
    pid = int(done.stdout)
    for _ in range(10_000):
        try:
            with open(f"/proc/{pid}/stat") as state:
                if state.read().rsplit(")", 1)[1].split()[0] == "Z":
                    break
        except FileNotFoundError:
            break
        signal.sigtimedwait([], 0.02)
    else:
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the embedded broker outlived its parent")


def test_serve_prints_where_and_ends_on_sigterm(kind):
    out = StringIO()
    code = serve(kind=kind, out=out, ready=lambda broker: os.kill(os.getpid(), signal.SIGTERM))
    assert code == 0
    first, url = out.getvalue().splitlines()
    assert first.startswith(f"{kind}: ")
    assert url.startswith("mqtt://127.0.0.1:")
    assert not listening(int(url.rsplit(":", 1)[1]))


def test_serve_notices_that_the_broker_died(kind, capsys):
    out = StringIO()
    assert serve(kind=kind, out=out, ready=lambda broker: os.kill(broker.pid, 9)) == 1
    assert f"{kind} died" in capsys.readouterr().err


def test_async_context_and_log(run, kind):
    async def scenario():
        async with Broker(kind=kind) as broker:
            async with MqttTransport(broker.url, "someone-1"):
                pass
            return broker.log()

    log = run(scenario())
    assert kind == "amqtt" or "someone-1" in log


def test_embedded_broker_with_tls(run, authority):
    from gossamer.gossip import TlsFiles

    server = authority.issue_server(file="embedded")
    tls = BrokerTls(authority.certificate, server.certificate, server.key)
    with pytest.raises(BrokerError, match="client certificates"):
        Broker(BrokerSettings(tls=BrokerTls(tls.ca, tls.certificate, tls.key, True)), kind="amqtt")

    async def scenario():
        async with Broker(BrokerSettings(tls=tls), kind="amqtt") as broker:
            files = TlsFiles(ca=authority.certificate)
            async with MqttTransport(broker.url, "a", tls=files) as a:
                await a.subscribe("x")
                await a.publish("x", b"sealed")
                return (await anext(a.messages())).payload

    assert run(scenario()) == b"sealed"


def test_bad_user_names_are_refused(mosquitto):
    with pytest.raises(BrokerError, match="a:b"):
        Broker(BrokerSettings(users={"a:b": "c"}), kind="mosquitto").start()


@pytest.mark.parametrize("port", [0, 18_830])
def test_host_that_is_not_ours_is_an_error_that_says_so(kind, port):
    with pytest.raises(
        BrokerError, match=r"cannot listen on host '203.0.113.1'.*0\.0\.0\.0 for all"
    ):
        Broker(BrokerSettings(host="203.0.113.1", port=port), kind=kind).start()


def test_free_ports_differ_from_taken_ones():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert free_port() != taken.getsockname()[1]


def test_clients_of_the_embedded_broker_that_come_all_at_once_hear_each_other(run):
    """Each brings a subscription of its own while others are being greeted with what is retained."""

    async def client(broker, number: int) -> int:
        await asyncio.sleep(0.005 * number)
        async with MqttTransport(broker.url, f"crowd-{number}") as one:
            await one.subscribe("crowd/+/status")
            await one.subscribe(f"crowd/inbox/{number}")
            await one.publish(f"crowd/{number}/status", b"here", retain=True)
            await one.publish(f"crowd/inbox/{number}", b"to myself", qos=1)
            async for topic, _, _ in one.messages():
                if topic == f"crowd/inbox/{number}":
                    break
            return one.counters["reconnects"] + one.counters["inbound-unsolicited"]

    async def scenario():
        async with Broker(kind="amqtt") as broker:
            troubles = await asyncio.gather(*(client(broker, number) for number in range(40)))
            return troubles, broker.log()

    troubles, log = run(scenario())
    assert troubles == [0] * 40
    assert "Unhandled exception" not in log


def test_a_subscription_of_the_embedded_broker_belongs_to_one_connection(run):
    """The end of an old connection of the same name takes nothing away from the new one."""
    from amqtt.session import Session

    from gossamer.peer.embedded_broker import mended_broker

    async def scenario():
        plugins = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
        broker = mended_broker({"plugins": plugins})
        old, new = Session(), Session()
        old.client_id = new.client_id = "anna"
        wanted = ("inbox/+", 1)
        broker._sessions["anna"] = (old, None)
        assert await broker.add_subscription(wanted, old) == 1
        broker._sessions["anna"] = (new, None)
        assert await broker.add_subscription(wanted, new) == 1
        assert broker._subscriptions["inbox/+"] == [(new, 1)]
        await broker._del_all_subscriptions(old)
        assert broker._subscriptions["inbox/+"] == [(new, 1)]
        assert await broker.add_subscription(wanted, old) == 0x80  # too late
        assert broker._subscriptions["inbox/+"] == [(new, 1)]
        await broker._del_all_subscriptions(new)
        assert "inbox/+" not in broker._subscriptions

    run(scenario())
