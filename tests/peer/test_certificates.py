"""Certificates: the authority is kept, what is not ours is left alone, the broker's own is renewed."""

from __future__ import annotations

import shutil
import socket
import ssl
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509

from gossamer.gossip import MqttTransport, TlsFiles
from gossamer.peer.broker import (
    Authority,
    Broker,
    BrokerError,
    BrokerSettings,
    BrokerTls,
    host_for_others,
    is_host,
    is_loopback,
    machine_addresses,
)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def ends(path: Path) -> datetime:
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def test_keys_are_private_and_certificates_verify(tmp_path):
    authority = Authority.open(tmp_path / "deep" / "er")
    server = authority.issue_server(["broker.lan", "10.0.0.7"])
    client = authority.issue_client("ann")
    for key in (authority.key, server.key, client.key):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    context = ssl.create_default_context(cafile=authority.certificate)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(server.certificate, server.key)
    for name in ("localhost", "127.0.0.1", "broker.lan", "10.0.0.7"):
        assert handshake(context, serving, name)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(context, serving, "elsewhere.lan")


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> bool:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(6):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ours.version() is not None


def test_authority_is_kept_for_ten_years(tmp_path):
    first = Authority.open(tmp_path)
    kept = contents(tmp_path)
    first.key.chmod(0o644)
    again = Authority.open(tmp_path)
    assert again == first
    assert contents(tmp_path) == kept
    assert stat.S_IMODE(first.key.stat().st_mode) == 0o600
    assert timedelta(days=3649) < ends(first.certificate) - datetime.now(UTC)
    with pytest.raises(BrokerError, match=r"ca\.pem exists"):
        Authority.create(tmp_path)
    assert contents(tmp_path) == kept


def corporate(folder: Path) -> None:
    """An authority that another program made, with its key."""
    authority = trustme.CA(organization_name="Corp")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    authority.private_key_pem.write_to_path(folder / "ca.key")


def corporate_without_key(folder: Path) -> None:
    trustme.CA(organization_name="Corp").cert_pem.write_to_path(folder / "ca.pem")


def without_key(folder: Path) -> None:
    Authority.create(folder).key.unlink()


def without_certificate(folder: Path) -> None:
    Authority.create(folder).certificate.unlink()


def with_the_key_of_another(folder: Path) -> None:
    Authority.create(folder)
    shutil.copy(Authority.create(folder / "other").key, folder / "ca.key")
    shutil.rmtree(folder / "other")


def with_a_key_that_is_none(folder: Path) -> None:
    Authority.create(folder).key.write_text("secret\n")


def with_text(folder: Path) -> None:
    Authority.create(folder).certificate.write_text("not a certificate\n")


def expired(folder: Path) -> None:
    Authority.create(folder, days=-1)


def server_alone(folder: Path) -> None:
    (folder / "server.key").write_text("somebody's own key\n")


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (corporate, "ca.pem is not an authority that gossamer made"),
        (corporate_without_key, "ca.pem is not an authority that gossamer made"),
        (without_key, "ca.key is missing"),
        (without_certificate, "ca.pem is missing"),
        (with_the_key_of_another, "ca.key is not the key of"),
        (with_a_key_that_is_none, "ca.key is not a key that gossamer made"),
        (with_text, "ca.pem is not a certificate"),
        (expired, "ca.pem expired on"),
        (server_alone, "server.key exists without its authority"),
    ],
)
def test_authority_that_cannot_be_kept_is_refused(
    tmp_path: Path, prepare: Callable[[Path], None], words: str
) -> None:
    prepare(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(BrokerError) as refused:
        Authority.open(tmp_path)
    text = str(refused.value)
    assert words in text
    assert "--tls another folder" in text
    assert "\n" not in text
    assert contents(tmp_path) == before


def test_server_certificate_of_somebody_else_is_refused(tmp_path):
    authority = Authority.open(tmp_path)
    issued = trustme.CA().issue_cert("broker.lan")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    issued.private_key_pem.write_to_path(tmp_path / "server.key")
    with pytest.raises(BrokerError, match=r"server\.pem was not issued by .*ca\.pem"):
        authority.why_renew_server([])
    (tmp_path / "server.pem").unlink()
    with pytest.raises(BrokerError, match=r"server\.key has no certificate"):
        authority.why_renew_server([])


def test_server_certificate_is_renewed_when_it_has_to_be(tmp_path):
    authority = Authority.open(tmp_path)
    assert authority.why_renew_server([]) == "there was none"
    authority.issue_server(["broker.lan", "10.0.0.7"])
    assert authority.why_renew_server(["10.0.0.7", "localhost"]) is None
    assert authority.why_renew_server(["a.lan", "broker.lan"]) == "it did not cover a.lan"
    assert authority.why_renew_server(["10.0.0.8"]) == "it did not cover 10.0.0.8"
    shutil.copy(authority.key, authority.server.key)
    assert authority.why_renew_server([]) == "its key was missing"
    authority.server.key.unlink()
    assert authority.why_renew_server([]) == "its key was missing"
    for days in (-1, 300):
        authority.issue_server(days=days)
        assert str(authority.why_renew_server([])).startswith("it expires on 20")


def test_nothing_outlives_its_authority(tmp_path):
    authority = Authority.create(tmp_path, days=20)
    for issued in (authority.issue_server(), authority.issue_client("ann")):
        assert ends(issued.certificate) == ends(authority.certificate)
    assert authority.why_renew_server([]) is None  # a new one would end no later


def test_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("ordinary")
    with pytest.raises(BrokerError, match="file/tls: Not a directory"):
        Authority.open(tmp_path / "file" / "tls")


def test_client_certificate_survives_a_restart_and_a_renewal(run, mosquitto, tmp_path):
    first = Authority.open(tmp_path / "tls")
    ann = first.issue_client("ann")
    pinned = Path(shutil.copy(first.certificate, tmp_path / "pinned.pem"))

    async def connect(days: float) -> bytes:
        authority = Authority.open(tmp_path / "tls")
        server = authority.issue_server(days=days)
        tls = BrokerTls(authority.certificate, server.certificate, server.key, require_client=True)
        async with Broker(BrokerSettings(tls=tls), kind="mosquitto") as broker:
            files = TlsFiles(pinned, ann.certificate, ann.key)
            async with MqttTransport(broker.url, "ann", tls=files) as transport:
                await transport.subscribe("x")
                await transport.publish("x", b"sealed")
                return (await anext(transport.messages())).payload

    assert run(connect(10)) == run(connect(700)) == b"sealed"


def test_addresses_for_other_devices():
    assert "127.0.0.1" in machine_addresses()
    assert host_for_others("192.168.7.5") == "192.168.7.5"
    assert host_for_others("127.0.0.1") == "127.0.0.1"
    everywhere = host_for_others("0.0.0.0")
    assert not is_loopback(everywhere)
    assert everywhere in machine_addresses() or everywhere == socket.gethostname()


def test_urls_for_other_devices():
    def urls(**settings) -> list[str]:
        return Broker(BrokerSettings(port=1883, **settings)).public_urls

    assert urls() == ["mqtt://127.0.0.1:1883"]
    assert urls(host="::1") == ["mqtt://[::1]:1883"]
    assert urls(host="0.0.0.0") == [f"mqtt://{host_for_others('0.0.0.0')}:1883"]
    assert urls(host="0.0.0.0", public_name="broker.lan", websocket_port=8080) == [
        "mqtt://broker.lan:1883",
        "ws://broker.lan:8080/mqtt",
    ]


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("broker.lan", True),
        ("my_pi", True),
        ("10.0.0.7", True),
        ("fd00::2", True),
        ("", False),
        ("*.lan", False),
        ("broker.lan:8883", False),
        ("mqtts://broker.lan", False),
        ("grün.lan", False),
        ("-a.lan", False),
        ("a..b", False),
    ],
)
def test_hosts(text, good):
    assert is_host(text) == good
