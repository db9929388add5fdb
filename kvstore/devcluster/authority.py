"""A certificate authority in a folder: its own certificate, and the certificates that it issues. Blocking.

    <folder>/ca.pem  ca.key      the authority
    <folder>/<name>.pem          a private key and its certificate

Key and certificate share a file, so that both are always replaced together. Only the owner can read these files.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvstore.env.certificates import expiry_of
from kvstore.env.files.private import read_private, write_private
from kvstore.errors import ConfigError

AUTHORITY_DAYS = 3650
ISSUED_DAYS = 365
RENEW_DAYS = 60
"""A certificate with less validity left is replaced by the next `up`. Nodes warn 30 days before expiry, which means
that `up` has not run for a month."""
_BEFORE = timedelta(hours=1)
"""Tolerance for machines whose clocks are behind."""


class CertificateAuthority:
    """The authority of one folder, created if the folder has none. Raises ConfigError if the files are not those of an
    authority, OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.cert = folder / "ca.pem"
        self._key = folder / "ca.key"
        if not self.cert.exists():
            self._refuse_if_lost()
            self._make()
        try:
            x509.load_pem_x509_certificate(self.cert.read_bytes())
        except ValueError as error:  # otherwise every connection would fail, as if the nodes did not answer
            raise ConfigError(f"{self.cert}: expected a certificate, got {error}; restore it") from error

    def issue(self, name: str, hosts: Sequence[str]) -> Path:
        """Return the file of a certificate for a common name and hosts. A missing certificate, or one that expires
        within RENEW_DAYS, is issued again. It serves as server and as client certificate. Raises ConfigError,
        OSError."""
        path = self._folder / f"{name}.pem"
        if not _is_fresh(path):
            write_private(path, self._issued(name, hosts))
        return path

    def _refuse_if_lost(self) -> None:
        """Raise ConfigError if certificates exist without their authority. A new authority would not match them, and
        running processes would adopt it."""
        if issued := sorted(each.name for each in self._folder.glob("*.pem")):
            raise ConfigError(
                f"{self.cert} is missing, but it issued {', '.join(issued)}; restore it; or, with all nodes down, "
                "remove "
                f"{self._folder}/*.pem and ca.key, and all certificates are issued again"
            )

    def _make(self) -> None:
        """Write the key before the certificate. After a crash in between, both are created again."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"kvstore local cluster {secrets.token_hex(4)}")
        certificate = (
            _builder(name, name, key.public_key(), AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs=False, issues=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        write_private(self._key, _key_pem(key))
        write_private(self.cert, certificate.public_bytes(serialization.Encoding.PEM))

    def _issued(self, name: str, hosts: Sequence[str]) -> bytes:
        issuer_key, issuer = self._read()
        key = ec.generate_private_key(ec.SECP256R1())
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_name(name), issuer.subject, key.public_key(), ISSUED_DAYS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs=True, issues=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in (name, *hosts)]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
            .sign(issuer_key, hashes.SHA256())
        )
        return _key_pem(key) + certificate.public_bytes(serialization.Encoding.PEM)

    def _read(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        try:
            key = serialization.load_pem_private_key(read_private(self._key), None)
            certificate = x509.load_pem_x509_certificate(self.cert.read_bytes())
        except FileNotFoundError as error:
            raise ConfigError(
                f"{error.filename}: the key of the cluster's certificate authority is missing, but a certificate must "
                "be "
                "issued; restore the key, or provide the certificates yourself"
            ) from error
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self._folder}: expected a certificate authority in ca.pem and ca.key, got {error}"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"{self._key}: expected the key of {self.cert}, got a different key")
        return key, certificate


def _is_fresh(path: Path) -> bool:
    try:
        until = expiry_of(path.read_bytes())
    except (OSError, ValueError):
        return False
    return until - datetime.now(UTC).timestamp() > timedelta(days=RENEW_DAYS).total_seconds()


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + timedelta(days=days))
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, signs: bool, issues: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=signs,
        key_cert_sign=issues,
        crl_sign=issues,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
