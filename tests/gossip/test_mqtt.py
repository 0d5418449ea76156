"""MqttTransport beyond the contract of all transports: URLs, fatal errors, takeover, size limits."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from paho.mqtt import client as paho
from waiting import until, wait_until

from gossamer.gossip.transport import (
    Address,
    MqttOptions,
    MqttTransport,
    Received,
    RetainedFilter,
    TlsFiles,
    TransportError,
    with_user,
    without_passwords,
)
from gossamer.peer import Authority, Broker, BrokerSettings, BrokerTls

IMPATIENT = MqttOptions(connect_timeout=0.3, first_delay=0.05)


ATTEMPT = 120.0
"""Seconds for one attempt to connect, with a short connect_timeout: on a slow machine an attempt must not
time out before it has the cause of the failure."""


def failure(run, url: str, **options) -> TransportError:
    """Return the error of a connection that must fail; its message must be one line."""

    async def scenario():
        async with MqttTransport(url, "nobody", **options):
            pass

    with pytest.raises(TransportError) as error:
        run(scenario())
    assert "\n" not in str(error.value)
    return error.value


# --- addresses ---------------------------------------------------------------------------------


def test_urls_are_parsed():
    address = Address.parse("mqtts://ann:p%40ss@broker.lan")
    assert (address.host, address.port, address.tls) == ("broker.lan", 8883, True)
    assert (address.username, address.password) == ("ann", "p@ss")
    assert Address.parse("mqtt://h:99").port == 99
    assert Address.parse("ws://h/path").path == "/path"
    assert str(Address.parse("wss://[::1]:44")) == "wss://[::1]:44/mqtt"


def test_urls_of_a_cluster_are_parsed():
    urls = "mqtt://a, mqtt://ann:x,y@b:99,ws://c"
    assert [str(each) for each in Address.parse_all(urls)] == [
        "mqtt://a:1883", "mqtt://b:99", "ws://c:80/mqtt",
    ]  # fmt: skip
    assert Address.parse_all(urls)[1].password == "x,y"
    assert without_passwords(urls) == "mqtt://a:1883,mqtt://b:99,ws://c:80/mqtt"
    assert with_user("mqtt://a,mqtt://ann@b", "b@n") == "mqtt://b%40n@a,mqtt://ann@b"


def test_a_cluster_uses_tls_for_all_nodes_or_for_none():
    with pytest.raises(TransportError, match=r"mqtts://b:8883 uses TLS and mqtt://a:1883 does not"):
        Address.parse_all("mqtt://a,mqtts://b")


def test_a_lost_node_is_followed_by_the_next(run, mosquitto, silent_port):
    # Two brokers that do not know each other: which of them we are connected to shows.
    async def scenario():
        options = MqttOptions(first_delay=0.02, longest_delay=0.1)
        connections: list[str] = []

        async def note() -> None:
            connections.append(str(transport.address))

        async with Broker(kind="mosquitto") as one, Broker(kind="mosquitto") as two:
            urls = f"{one.url},mqtt://127.0.0.1:{silent_port},{two.url}"
            transport = MqttTransport(urls, "a", options=options, on_connect=note)
            async with transport:
                await transport.subscribe("x/status")
                for payload in (b"on the other", b"back on the first"):
                    current = {one.url: one, two.url: two}[connections[-1]]
                    await asyncio.to_thread(current.stop)
                    await until(lambda c=current: connections[-1] != c.url)
                    assert await transport.publish("x/status", payload)
                    assert (await anext(transport.messages())).payload == payload
                    await asyncio.to_thread(current.start)
                assert len(connections) == 3

    run(scenario())


@pytest.mark.parametrize("cluster", [False, True])
def test_what_the_nodes_of_a_cluster_lost_is_noticed_when_it_is_asked_for_again(cluster):
    filter = RetainedFilter(cluster=cluster)
    assert not filter.is_known("x/status", b"live", retain=False, now=0.0)
    assert filter.is_known(
        "x/status", b"before it", retain=True, now=1.0
    )  # retained a little later
    assert filter.is_known("x/status", b"live", retain=True, now=60.0)
    assert filter.is_known("x/status", b"lost", retain=True, now=61.0) is not cluster
    assert not filter.is_known("x/card", b"first", retain=True, now=61.0)
    assert filter.is_known("x/card", b"first", retain=True, now=62.0)
    assert not filter.is_known("x/card", b"second", retain=True, now=62.0)


def test_a_wrong_password_at_one_node_is_no_error(run, mosquitto):
    async def scenario():
        options = MqttOptions(first_delay=0.02, longest_delay=0.1)
        strict = BrokerSettings(users={"ann": "other"})
        async with Broker(strict, kind="mosquitto") as one, Broker(kind="mosquitto") as two:
            port = one.url.rpartition(":")[2]
            for seed in range(4):  # whichever node comes first
                urls = f"mqtt://ann:wrong@127.0.0.1:{port},{two.url}"
                async with MqttTransport(urls, "a", options=options, seed=seed) as transport:
                    assert str(transport.address) == two.url

    run(scenario())


def test_a_wrong_password_at_all_nodes_is_an_error(run, mosquitto):
    with (
        Broker(BrokerSettings(users={"ann": "other"}), kind="mosquitto") as one,
        Broker(BrokerSettings(users={"ann": "other"}), kind="mosquitto") as two,
    ):
        ports = (broker.url.rpartition(":")[2] for broker in (one, two))
        urls = ",".join(f"mqtt://ann@127.0.0.1:{port}" for port in ports)
        assert failure(run, urls, password="wrong").cause == "password"


def test_passwords_never_show():
    address = Address.parse("mqtt://ann:secret@broker.lan")
    assert "secret" not in f"{address} {address!r}"
    with pytest.raises(TransportError) as error:
        Address.parse("http://ann:secret@broker.lan")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "", "broker", "http://h", "mqtt://", "mqtt://h:nan", "mqtt://h/p", "mqtt://[::1",
        "mqtt://ann:1#secret@h", "ws://h/mqtt?token=secret",
    ],
)  # fmt: skip
def test_bad_urls_are_refused(url):
    with pytest.raises(TransportError) as error:
        Address.parse(url)
    assert error.value.cause == "url"


def test_a_bad_url_is_refused_whether_or_not_it_gets_a_user():
    with pytest.raises(TransportError, match="Invalid IPv6 URL: mqtt://…@"):
        with_user("mqtt://ann:secret@[::1", "bob")


# --- fatal errors ------------------------------------------------------------------------------


def test_unknown_host(run):
    error = failure(run, "mqtt://no-such-host.invalid", options=IMPATIENT, attempt_timeout=ATTEMPT)
    assert error.cause == "unknown-host"
    assert "no-such-host.invalid" in str(error)


def test_nobody_listens(run, silent_port):
    error = failure(
        run, f"mqtt://127.0.0.1:{silent_port}", options=IMPATIENT, attempt_timeout=ATTEMPT
    )
    assert error.cause == "refused"


def test_a_server_that_is_no_broker_closes_the_connection(run):
    async def scenario():
        async def rude(reader, writer):
            await reader.read(1)
            writer.close()

        server = await asyncio.start_server(rude, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            with pytest.raises(
                TransportError, match=r"closed the connection .* uses TLS, write mqtts://"
            ):
                async with MqttTransport(
                    f"mqtt://127.0.0.1:{port}", "a", options=IMPATIENT, attempt_timeout=ATTEMPT
                ):
                    pass

    run(scenario())


def test_a_socket_may_be_closed_before_the_event_loop_watches_it(run, monkeypatch, caplog):
    """The connecting thread closes the socket if it cannot send: the event loop may be busy just then."""
    connect = paho.Client.connect

    async def scenario():
        loop = asyncio.get_running_loop()

        def closing(self, *args, **options):
            busy, closed = threading.Event(), threading.Event()

            def block_the_loop():
                busy.set()
                closed.wait(60)

            loop.call_soon_threadsafe(block_the_loop)
            busy.wait(60)
            try:
                code = connect(self, *args, **options)
                self.socket().close()
            finally:
                closed.set()
            return code

        monkeypatch.setattr(paho.Client, "connect", closing)
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        url = f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            with pytest.raises(TransportError):
                async with MqttTransport(url, "a", options=IMPATIENT, attempt_timeout=ATTEMPT):
                    pass

    run(scenario())
    assert [r.getMessage() for r in caplog.records if r.name == "asyncio"] == []


def test_a_refusal_may_be_read_before_the_connecting_thread_has_returned(run, monkeypatch, caplog):
    """asyncio must not log an exception that was never retrieved after the error."""
    connect = paho.Client.connect

    def slow(self, *args, **options):
        code = connect(self, *args, **options)
        wait_until(lambda: self.socket() is None, "the refusal is read")
        return code

    monkeypatch.setattr(paho.Client, "connect", slow)

    async def scenario():
        async def broker(reader, writer):
            await reader.read(1000)
            writer.write(b"\x20\x02\x00\x05")  # CONNACK: not authorised
            writer.close()

        server = await asyncio.start_server(broker, "127.0.0.1", 0)
        url = f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            with pytest.raises(TransportError) as error:
                async with MqttTransport(url, "a", options=IMPATIENT, attempt_timeout=ATTEMPT):
                    pass
            assert error.value.cause == "password"

    run(scenario())
    gc.collect()
    assert [r.getMessage() for r in caplog.records if r.name == "asyncio"] == []


@pytest.mark.parametrize(
    ("kind", "version"), [("mosquitto", "3.1.1"), ("mosquitto", "5"), ("nats", "3.1.1")]
)
def test_wrong_password(run, request, kind, version):
    if kind == "mosquitto":
        request.getfixturevalue("mosquitto")
    options = MqttOptions(version=version)
    with Broker(BrokerSettings(users={"ann": "right:word"}), kind=kind) as broker:
        place = f"127.0.0.1:{broker.port}"
        for credentials in ("ann:wrong@", "bob:right%3Aword@", ""):
            error = failure(run, f"mqtt://{credentials}{place}", options=options)
            assert error.cause == "password", error
            assert "wrong" not in str(error)

        async def right():
            async with MqttTransport(f"mqtt://ann:right%3Aword@{place}", "a", options=options):
                pass

        run(right())


def test_untrusted_and_misnamed_certificates(run, brokers, authority, tmp_path):
    broker = brokers("mosquitto-tls")
    stranger = Authority.create(tmp_path)
    error = failure(run, broker.url, tls=TlsFiles(ca=stranger.certificate))
    assert error.cause == "certificate"
    assert f"not trusted: the authority (CA) in {stranger.certificate} did not sign it" in str(
        error
    )
    error = failure(run, broker.url)
    assert "not trusted: give the certificate of the authority" in str(error)
    assert "--ca" in str(error)
    other = authority.issue_server(file="any-address")
    tls = BrokerTls(authority.certificate, other.certificate, other.key)
    with Broker(BrokerSettings(host="127.0.0.2", tls=tls), kind="mosquitto") as misnamed:
        error = failure(run, misnamed.url, tls=TlsFiles(ca=authority.certificate))
    assert error.cause == "certificate"
    assert "another address" in str(error)


def test_expired_certificate(run, mosquitto, authority):
    expired = authority.issue_server(file="expired", days=-1)
    tls = BrokerTls(authority.certificate, expired.certificate, expired.key)
    with Broker(BrokerSettings(tls=tls), kind="mosquitto") as broker:
        error = failure(run, broker.url, tls=TlsFiles(ca=authority.certificate))
    assert error.cause == "certificate"
    assert "expired" in str(error)


def test_client_certificate_is_asked_for_and_accepted(run, mosquitto, authority):
    server = authority.issue_server(file="strict")
    tls = BrokerTls(authority.certificate, server.certificate, server.key, require_client=True)
    ann = authority.issue_client("ann")
    with Broker(BrokerSettings(tls=tls), kind="mosquitto") as broker:
        error = failure(run, broker.url, tls=TlsFiles(ca=authority.certificate))
        assert error.cause == "certificate"
        assert "client certificate" in str(error)

        async def welcome():
            files = TlsFiles(authority.certificate, ann.certificate, ann.key)
            async with MqttTransport(broker.url, "ann", tls=files) as transport:
                return transport.connection.state

        assert run(welcome()) == "connected"


def test_a_key_that_cannot_be_used_is_refused_at_once(authority, tmp_path):
    ann = authority.issue_client("locked")
    private = load_pem_private_key(ann.key.read_bytes(), None)
    secret = private.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"nobody types this")
    )
    (tmp_path / "locked.pem").write_bytes(secret)
    with pytest.raises(TransportError, match=r"locked.pem has a passphrase: save it without one"):
        TlsFiles(authority.certificate, ann.certificate, tmp_path / "locked.pem").context()
    with pytest.raises(TransportError, match="is of no use without --certificate"):
        TlsFiles(authority.certificate, key=ann.key).context()


def test_tls_to_a_plain_port_and_missing_files(run, mosquitto):
    error = failure(
        run, mosquitto.url.replace("mqtt:", "mqtts:"), options=IMPATIENT, attempt_timeout=ATTEMPT
    )
    assert "is that a TLS port?" in str(error)
    error = failure(run, "mqtts://127.0.0.1:1", tls=TlsFiles(ca=Path("nowhere.pem")))
    assert "nowhere.pem" in str(error)
    with pytest.raises(TransportError, match="does not use TLS"):
        MqttTransport("mqtt://h", "a", tls=TlsFiles())


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_a_broker_that_refuses_us_for_a_while_is_waited_for(run, mosquitto, caplog, version):
    """A broker that accepted us before may have been restarted with wrong rules, which will be corrected."""

    def refusals():
        lines = [
            r for r in caplog.records if "give a user name and password; trying again" in r.message
        ]
        assert all(line.levelno == logging.WARNING for line in lines)
        return len(lines)

    async def scenario():
        first = Broker(kind="mosquitto")
        await asyncio.to_thread(first.start)
        port = first.port
        try:
            options = MqttOptions(version=version, first_delay=0.02, longest_delay=0.1)
            async with MqttTransport(
                f"mqtt://127.0.0.1:{port}", "a", options=options, name="peer anna"
            ) as a:
                await a.subscribe("x/status")
                await asyncio.to_thread(first.close)
                async with Broker(BrokerSettings(port=port, users={"b": "c"}), kind="mosquitto"):
                    await until(lambda: refusals() >= 2 or a.connection.state == "failed")
                    assert a.connection.state != "failed"
                async with Broker(BrokerSettings(port=port), kind="mosquitto"):
                    assert await a.publish("x/status", b"state")
                    assert (await anext(a.messages())).payload == b"state"
                lines = [line for line in caplog.messages if line.startswith("peer anna: ")]
                assert f"peer anna: connected to mqtt://127.0.0.1:{port} again" in lines
                assert any(line.endswith("trying again") for line in lines)
        finally:
            await asyncio.to_thread(first.close)

    with caplog.at_level(logging.INFO):
        run(scenario())


def test_a_subscription_during_a_reconnection_is_not_left_out(run):
    """It comes while the broker has not answered yet that it knows the subscriptions of before."""
    connections: list[asyncio.StreamWriter] = []
    subscribed: list[str] = []
    again, may_answer = asyncio.Event(), asyncio.Event()

    async def broker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while first := await reader.read(1):
            body = await reader.readexactly((await reader.readexactly(1))[0])
            if first == b"\x10":  # CONNECT
                writer.write(b"\x20\x02\x00\x00")
            elif first == b"\x82":  # SUBSCRIBE to one topic
                if len(connections) == 2:
                    again.set()
                    await may_answer.wait()
                    subscribed.append(body[4:-1].decode())
                writer.write(b"\x90\x03" + body[:2] + b"\x00")

    async def scenario() -> None:
        server = await asyncio.start_server(broker, "127.0.0.1", 0)
        url = f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, MqttTransport(url, "a", options=MqttOptions(first_delay=0.01)) as a:
            await a.subscribe("x/first")
            connections[0].close()
            await again.wait()
            await a.subscribe("x/second")
            may_answer.set()
            await until(lambda: subscribed == ["x/first", "x/second"], "both are subscribed")
            connections[1].close()

    run(scenario())


# --- MQTT 5 --------------------------------------------------------------------------------------


def test_a_takeover_is_reported_in_mqtt_5(run):
    # mosquitto 2.0.11 hangs up without the reason that MQTT 5 has for it: play a broker that tells.
    async def scenario():
        connected = asyncio.Event()

        async def broker(reader, writer):
            await reader.read(1000)
            writer.write(b"\x20\x03\x00\x00\x00")  # CONNACK: welcome
            await connected.wait()
            writer.write(b"\xe0\x02\x8e\x00")  # DISCONNECT: session taken over
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(broker, "127.0.0.1", 0)
        url = f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with (
            server,
            MqttTransport(url, "same", options=MqttOptions(version="5")) as transport,
        ):
            connected.set()
            with pytest.raises(TransportError) as error:
                await anext(transport.messages())
            assert error.value.cause == "taken-over"
            assert transport.connection.state == "failed"

    run(scenario())


def test_brokers_packet_limit_is_known_in_mqtt_5_and_fits_exactly(run, mosquitto):
    async def scenario():
        with Broker(BrokerSettings(max_packet=100_000), kind="mosquitto") as broker:
            async with MqttTransport(broker.url, "a", options=MqttOptions(version="5")) as a:
                await a.subscribe("x/#")
                largest = a.max_payload("x/inbox")
                assert 99_900 < largest < 100_000
                assert await a.publish("x/inbox", bytes(largest), qos=1)
                assert len((await anext(a.messages())).payload) == largest
                assert a.counters["reconnects"] == 0

    run(scenario())


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_oversized_arrivals_never_reach_the_consumer(run, mosquitto, version):
    async def scenario():
        small = MqttOptions(version=version, max_inbound_payload=10_000)
        async with (
            MqttTransport(mosquitto.url, "a") as a,
            MqttTransport(mosquitto.url, "b", options=small) as b,
        ):
            await b.subscribe("x/#")
            await a.publish("x/inbox", bytes(20_000))
            await a.publish("x/inbox", b"fits")
            assert (await anext(b.messages())).payload == b"fits"
            assert b.counters["inbound-too-large"] == (1 if version == "3.1.1" else 0)

    run(scenario())


# --- the event loop ------------------------------------------------------------------------------


def test_nothing_blocks_the_loop(run, mosquitto, authority, brokers):
    secure = brokers("mosquitto-tls")

    async def scenario(url: str, tls: TlsFiles | None) -> None:
        async with MqttTransport(url, "a", tls=tls) as a, MqttTransport(url, "b", tls=tls) as b:
            await b.subscribe("x/#")
            for _ in range(3):
                await a.publish("x/inbox", bytes(1_000_000))
                assert len((await anext(b.messages())).payload) == 1_000_000

    with blockbuster_ctx("gossamer"):
        run(scenario(mosquitto.url, None))
        run(scenario(secure.url, TlsFiles(ca=authority.certificate)))


def test_unsolicited_messages_are_dropped(run, mosquitto):
    async def scenario():
        async with MqttTransport(mosquitto.url, "a") as a:
            await a.subscribe("x/#")
            a.receive("y/inbox", b"?", False)
            assert a.counters["inbound-unsolicited"] == 1
            await a.publish("x/inbox", b"!")
            assert await anext(a.messages()) == Received("x/inbox", b"!", False)

    run(scenario())


def test_hook_that_fails_is_reported(run, mosquitto):
    async def hook() -> None:
        raise KeyError("oops")

    error = failure(run, mosquitto.url, on_connect=hook)
    assert error.cause == "hook"
    assert "oops" in str(error)


def test_a_broker_that_is_slow_to_read_gets_the_disconnect_all_the_same(run):
    """Otherwise its own writes would fail first, and it would publish a last will after a goodbye."""
    ends: list[bytes] = []

    async def broker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(b"\x20\x02\x00\x00")  # CONNACK: welcome
        while (first := await reader.readexactly(1)) != b"\xe0":  # DISCONNECT
            await reader.readexactly((await reader.readexactly(1))[0])
        # It has not noticed yet, and writes on; a closed socket would answer with a reset.
        for _ in range(100):
            writer.write(b"\x30\x05\x00\x01t\x00x")
            await writer.drain()
            await asyncio.sleep(0)
        ends.append(first + await reader.read())
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(broker, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with MqttTransport(f"mqtt://127.0.0.1:{port}", "small"):
            pass
        server.close()

    run(scenario())
    assert len(ends) == 1
