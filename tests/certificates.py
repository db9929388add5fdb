"""Certificates in files, made for a test."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization

from kvstore.env.tls import Tls

ROLE = "kvstore"
"""Role in the bookie's and the client's certificates. Apache's BookieAuthZFactory reads it from the unit's name."""


@dataclass(frozen=True, slots=True)
class Files:
    """Certificates by one authority, and by another one."""

    bookie: Tls
    client: Tls
    stranger: Tls
    """A certificate of an authority that nobody else trusts."""
    expired: Tls
    """A bookie's of yesterday."""

    @classmethod
    def issue(cls, directory: Path) -> Files:
        ours, other, ca = trustme.CA(), trustme.CA(), directory / "ca.pem"
        ours.cert_pem.write_to_path(str(ca))
        return cls(
            _issued(directory / "bookie", ours, ca, "127.0.0.1", "localhost"),
            _issued(directory / "client", ours, ca, "application.example"),
            _issued(directory / "stranger", other, ca, "127.0.0.1"),
            _issued(directory / "expired", ours, ca, "127.0.0.1", not_after=datetime.now(UTC) - timedelta(days=1)),
        )


def _issued(place: Path, authority: trustme.CA, ca: Path, *hosts: str, not_after: datetime | None = None) -> Tls:
    cert, key = place.with_suffix(".pem"), place.with_suffix(".key")
    issued = authority.issue_cert(*hosts, organization_unit_name=f"0:{ROLE}", not_after=not_after)
    issued.cert_chain_pems[0].write_to_path(str(cert))
    private = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    form = serialization.PrivateFormat.PKCS8  # the only one that Netty reads
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return Tls(cert=cert, key=key, ca=ca)
