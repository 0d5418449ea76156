"""A certificate authority (CA) for a swarm's broker, and the certificates that it signs.

    authority = Authority.open(folder)                # created at first use, valid for ten years
    server = authority.issue_server(["broker.lan"])   # localhost and 127.0.0.1 are always included
    client = authority.issue_client("ann")

Peers trust the authority's certificate, `ca.pem`, so the broker's own certificate can be renewed without
changing any peer. Only the current user can read the key files. This is good enough for a laboratory; a swarm
of several organisations should use certificates from a professionally run authority.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gossamer.files import write_atomically

from .config import BrokerError, write_private

AUTHORITY_DAYS = 3650
"""Days for which an authority is valid: ten years, because every device has a copy of its certificate."""
ISSUED_DAYS = 730
"""Days for which an issued certificate is valid."""
RENEWAL_DAYS = 365
"""A broker that starts renews its certificate if it expires within so many days, so that it works for a year
without a restart."""
_AUTHORITY_NAME = "gossamer local swarm"
_BACKDATE = timedelta(hours=1)  # clocks of small devices may be slow
_REMEDY = "give --tls another folder, and its new ca.pem to every peer"


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The files of one certificate and its private key."""

    certificate: Path
    key: Path

    @classmethod
    def in_folder(cls, folder: Path, file: str) -> CertificateFiles:
        """Return the paths for a file name in a folder, whether the files exist or not."""
        return cls(folder / f"{file}.pem", folder / f"{file}.key")

    def present(self) -> list[Path]:
        """Return those of the two files that exist."""
        return [path for path in (self.certificate, self.key) if path.exists()]


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority in a folder. Give `certificate` to the peers; keep `key` secret."""

    folder: Path
    certificate: Path
    key: Path

    @property
    def server(self) -> CertificateFiles:
        """The files of the broker's own certificate."""
        return CertificateFiles.in_folder(self.folder, "server")

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """Return the authority in a folder; create one if the folder has no certificates.

        Raises BrokerError, and changes no file, if the certificates in the folder are not gossamer's or
        have expired.
        """
        folder = Path(folder)
        files = CertificateFiles.in_folder(folder, "ca")
        with _one_line_errors(folder):
            if not files.present():
                if broker_files := CertificateFiles.in_folder(folder, "server").present():
                    raise BrokerError(
                        f"{broker_files[0]} exists without its authority, ca.pem: {_REMEDY}"
                    )
                return cls.create(folder)
            if not files.certificate.exists():
                raise BrokerError(f"{files.certificate} is missing: put it back, or {_REMEDY}")
            certificate = _read_certificate(files.certificate)
            if certificate.subject != _name(_AUTHORITY_NAME) or not _signed_by(
                certificate, certificate
            ):
                raise BrokerError(
                    f"{files.certificate} is not an authority that gossamer made, but "
                    f"{certificate.subject.rfc4514_string() or 'one without a name'}: {_REMEDY}"
                )
            if not files.key.exists():
                raise BrokerError(f"{files.key} is missing: put it back, or {_REMEDY}")
            key = _read_key(files.key)
            if key.public_key() != certificate.public_key():
                raise BrokerError(
                    f"{files.key} is not the key of {files.certificate}: put the right one back, "
                    f"or {_REMEDY}"
                )
            now = datetime.now(UTC)
            if now > certificate.not_valid_after_utc:
                end = certificate.not_valid_after_utc
                raise BrokerError(f"{files.certificate} expired on {end:%Y-%m-%d}: {_REMEDY}")
            if now < certificate.not_valid_before_utc:
                raise BrokerError(
                    f"{files.certificate} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d}: "
                    "set this machine's clock"
                )
            files.key.chmod(0o600)
        return cls(folder, files.certificate, files.key)

    @classmethod
    def create(cls, folder: Path, *, days: float = AUTHORITY_DAYS) -> Authority:
        """Make a new authority in a folder that has none.

        `days` below zero makes one that has already expired (for tests).
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if existing := CertificateFiles.in_folder(folder, "ca").present():
            raise BrokerError(f"{existing[0]} exists: use Authority.open, or another folder")
        files = _make(folder, "ca", _AUTHORITY_NAME, days)
        return cls(folder, files.certificate, files.key)

    def why_renew_server(self, names: Iterable[str]) -> str | None:
        """Return why the broker needs a new certificate for these names, or None if it does not.

        Raises BrokerError if the one in the folder was not issued by this authority.
        """
        files = self.server
        with _one_line_errors(self.folder):
            if not files.certificate.exists():
                if files.key.exists():  # it may belong to another certificate: do not overwrite it
                    raise BrokerError(f"{files.key} has no certificate beside it: move it away")
                return "there was none"
            issuer = _read_certificate(self.certificate)
            certificate = _read_certificate(files.certificate)
            if not _signed_by(certificate, issuer):
                raise BrokerError(
                    f"{files.certificate} was not issued by {self.certificate}: move it and its key "
                    "away, or give --tls another folder"
                )
            if not files.key.exists() or (
                _read_key(files.key).public_key() != certificate.public_key()
            ):
                return "its key was missing"
        end = certificate.not_valid_after_utc
        if end < min(datetime.now(UTC) + timedelta(days=RENEWAL_DAYS), issuer.not_valid_after_utc):
            return f"it expires on {end:%Y-%m-%d}"
        covered = _alternative_names(certificate)
        missing = [name for name in _server_names(names) if _general_name(name) not in covered]
        return f"it did not cover {', '.join(missing)}" if missing else None

    def issue_server(
        self,
        names: Iterable[str] = (),
        *,
        file: str = "server",
        days: float = ISSUED_DAYS,
        node: bool = False,
    ) -> CertificateFiles:
        """Issue a certificate for a broker at localhost, 127.0.0.1, ::1 and these names or addresses.

        `days` below zero makes one that has already expired (for tests). node: the broker is a node of a
        cluster: it also connects to the other nodes as a client, with this certificate.
        """
        alternatives = [_general_name(name) for name in _server_names(names)]
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH]
        if node:
            purposes.append(ExtendedKeyUsageOID.CLIENT_AUTH)
        extension = x509.SubjectAlternativeName(alternatives)
        return self._issue(file, "gossamer broker", purposes, days, extension)

    def issue_client(self, peer: str) -> CertificateFiles:
        """Issue a client certificate for `peer`: client-{peer}.pem and .key."""
        return self._issue(f"client-{peer}", peer, [ExtendedKeyUsageOID.CLIENT_AUTH], ISSUED_DAYS)

    def _issue(
        self,
        file: str,
        subject: str,
        purposes: list[x509.ObjectIdentifier],
        days: float,
        *extensions: x509.ExtensionType,
    ) -> CertificateFiles:
        usage = x509.ExtendedKeyUsage(purposes)
        with _one_line_errors(self.folder):
            issuer = _read_certificate(self.certificate), _read_key(self.key)
            return _make(self.folder, file, subject, days, usage, *extensions, issuer=issuer)


@contextlib.contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a BrokerError of one line that names the file."""
    try:
        yield
    except OSError as error:
        raise BrokerError(f"{error.filename or folder}: {error.strerror}") from None


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise BrokerError(f"{path} is not a certificate in PEM format: {_REMEDY}") from None


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key: PrivateKeyTypes | None = None
    # A TypeError means that the key has a passphrase; keys made here have none.
    with contextlib.suppress(ValueError, TypeError, UnsupportedAlgorithm):
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BrokerError(f"{path} is not a key that gossamer made: {_REMEDY}")
    return key


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _make(
    folder: Path,
    file: str,
    subject: str,
    days: float,
    *extensions: x509.ExtensionType,
    issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None = None,
) -> CertificateFiles:
    """Make a key and a certificate for it, signed by the issuer; without issuer, an authority's own."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    start, issuer_name, issuer_key = min(now, end) - _BACKDATE, _name(subject), key
    is_authority = issuer is None
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    if issuer is not None:
        issuer_name, issuer_key = issuer[0].subject, issuer[1]
        end = min(end, issuer[0].not_valid_after_utc)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(
            x509.BasicConstraints(is_authority, path_length=0 if is_authority else None),
            critical=True,
        )
        .add_extension(_key_usage(signs_certificates=is_authority), critical=True)
    )
    for extension in (identifier, *extensions):
        builder = builder.add_extension(extension, critical=False)
    certificate = builder.sign(issuer_key, hashes.SHA256())
    # The certificate first: if writing the key then fails, `why_renew_server` finds a certificate of this
    # authority with a missing or old key, and both are made anew.
    files = CertificateFiles.in_folder(folder, file)
    write_atomically(files.certificate, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    private_key = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    write_private(files.key, private_key)
    return files


def _server_names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(["localhost", "127.0.0.1", "::1", *names]))


def _alternative_names(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """Return the subject alternative names of a certificate."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return list(extension.value)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
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
