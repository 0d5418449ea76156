"""A throw-away certificate authority for a local swarm.

    authority = Authority.create(folder)
    server = authority.issue_server(["broker.lan"])   # localhost and 127.0.0.1 are always covered
    client = authority.issue_client("ann")

Keys are files that only their owner can read. Good for a laboratory; a swarm that spans strangers
wants certificates from an authority that somebody guards.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_BACKDATE = timedelta(hours=1)  # clocks of small devices lag


@dataclass(frozen=True, slots=True)
class Identity:
    """The files of one certificate and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority that lives in a folder. Hand out `certificate`; guard `key`."""

    folder: Path
    certificate: Path
    key: Path

    @classmethod
    def create(
        cls, folder: Path, *, name: str = "gossamer local swarm", days: int = 30
    ) -> Authority:
        """Make a new authority in `folder`, replacing what was there."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACKDATE)
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        files = _write(folder, "ca", certificate, key)
        return cls(folder, files.certificate, files.key)

    def issue_server(
        self, names: Iterable[str] = (), *, file: str = "server", days: float = 30
    ) -> Identity:
        """A certificate for a broker at localhost, 127.0.0.1, ::1 and the given names or addresses.

        `days` below zero makes one that has already expired (for tests).
        """
        wanted = dict.fromkeys(["localhost", "127.0.0.1", "::1", *names])
        return self._issue(
            file, "gossamer broker", list(wanted), ExtendedKeyUsageOID.SERVER_AUTH, days
        )

    def issue_client(self, peer: str, *, days: float = 30) -> Identity:
        """A certificate that says its holder is `peer`; written to client-{peer}.pem and .key."""
        return self._issue(f"client-{peer}", peer, [], ExtendedKeyUsageOID.CLIENT_AUTH, days)

    def _issue(
        self,
        file: str,
        subject: str,
        names: Sequence[str],
        purpose: x509.ObjectIdentifier,
        days: float,
    ) -> Identity:
        issuer = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        issuer_key = serialization.load_pem_private_key(self.key.read_bytes(), None)
        assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        end = datetime.now(UTC) + timedelta(days=days)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(issuer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(datetime.now(UTC), end) - _BACKDATE)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
                critical=False,
            )
        )
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False
            )
        return _write(self.folder, file, builder.sign(issuer_key, hashes.SHA256()), key)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(
    folder: Path, file: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> Identity:
    files = Identity(folder / f"{file}.pem", folder / f"{file}.key")
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    files.key.unlink(missing_ok=True)  # an old file may have laxer rights
    handle = os.open(files.key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as out:
        out.write(secret)
    return files
