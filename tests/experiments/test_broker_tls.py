"""`gossamer broker --tls`: peers that trust its authority find it again after restarts and renewals."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cli_kit import runs

from gossamer.gossip import MqttTransport, TlsFiles
from gossamer.peer import Authority, machine_names

GOSSAMER = "from gossamer.experiments.cli import main; main()"


@dataclass(frozen=True)
class Running:
    """A broker that was started by the command."""

    url: str
    said: list[str]

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def certificate(self, ca: Path, name: str) -> bytes | None:
        """The certificate that it shows to a client which trusts `ca` and calls it `name`."""
        context = ssl.create_default_context(cafile=ca)
        with (
            socket.create_connection(("127.0.0.1", self.port)) as plain,
            context.wrap_socket(plain, server_hostname=name) as secure,
        ):
            return secure.getpeercert(binary_form=True)


@contextmanager
def broker(folder: Path, *options: str) -> Iterator[Running]:
    command = [sys.executable, "-c", GOSSAMER, "broker", "--tls", "tls", "--port", "0", *options]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said: list[str] = []
        while not (said and said[-1].startswith("mqtts://")):
            said.append(process.stdout.readline().rstrip("\n"))
            assert said[-1], f"the broker ended: {said}"
        yield Running(said[-1], said)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 0


gossamer = runs()


def test_pinned_authority_holds_after_restart_and_renewal(tmp_path, mosquitto, run):
    pinned = tmp_path / "pinned.pem"

    async def echo(url: str) -> bytes:
        async with MqttTransport(url, "a", tls=TlsFiles(ca=pinned)) as transport:
            await transport.subscribe("x")
            await transport.publish("x", b"sealed")
            return (await anext(transport.messages())).payload

    with broker(tmp_path) as running:
        shutil.copy(tmp_path / "tls" / "ca.pem", pinned)
        assert "new server certificate: there was none" in running.said
        assert "peers need: --ca tls/ca.pem (copy it to other devices)" in running.said
        first = running.certificate(pinned, "localhost")
        assert run(echo(running.url)) == b"sealed"
    with broker(tmp_path) as running:
        assert running.certificate(pinned, "localhost") == first
        assert not any("new server certificate" in line for line in running.said)
    Authority.open(tmp_path / "tls").issue_server(machine_names(), days=-1)
    with broker(tmp_path) as running:
        assert any("new server certificate: it expires on" in line for line in running.said)
        assert running.certificate(pinned, "localhost") != first
        assert run(echo(running.url)) == b"sealed"


def test_certificate_covers_the_machine_and_every_name_given(tmp_path, mosquitto):
    names = ["broker.lan", "10.9.8.7", "fd00::7"]
    with broker(tmp_path) as running:
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            running.certificate(tmp_path / "tls" / "ca.pem", "broker.lan")
        assert running.url == f"mqtts://127.0.0.1:{running.port}"
        assert any("--host 0.0.0.0 to let other devices connect" in line for line in running.said)
    options = [word for name in names for word in ("--tls-name", name)]
    with broker(tmp_path, *options) as running:
        for name in [*names, *machine_names(), "localhost", "127.0.0.1", "::1"]:
            assert running.certificate(tmp_path / "tls" / "ca.pem", name)
        assert running.url == f"mqtts://broker.lan:{running.port}"
        assert "new server certificate: it did not cover broker.lan, 10.9.8.7, fd00::7" in (
            running.said
        )


def test_foreign_authority_is_refused_in_one_line(tmp_path, gossamer):
    Authority.create(tmp_path / "tls").key.unlink()
    before = (tmp_path / "tls" / "ca.pem").read_bytes()
    result = gossamer("broker", "--tls", "tls")
    assert (result.code, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: tls/ca.key is missing")
    assert [path.name for path in (tmp_path / "tls").iterdir()] == ["ca.pem"]
    assert (tmp_path / "tls" / "ca.pem").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tls-name", "broker.lan"], "--tls-name needs --tls FOLDER"),
        (["--tls", "tls", "--tls-name", "broker.lan:8883"], "'broker.lan:8883' is neither"),
        (["--tls", "tls", "--tls-name", "*.lan"], "'*.lan' is neither"),
    ],
)
def test_names_that_no_certificate_can_have_are_refused(tmp_path, gossamer, options, words):
    result = gossamer("broker", *options)
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert words in line
    assert not (tmp_path / "tls").exists()
