"""Death watch: the port by which a process has its own end proven to other processes (docs/protocol.md, G28).

A process has a secret, its *death certificate*. Its *identity* is the SHA-256 of the certificate, and is public while
the process runs. The machine publishes the certificate when the process has ended. Every process that knows the
identity can then verify the end.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256

CERTIFICATE_BYTES = 32


def identity_of(certificate: bytes) -> bytes:
    """Return the identity of the process whose end the certificate proves."""
    return sha256(certificate).digest()


class DeathWatch:
    """Publishes the end of this process. This class watches nothing: for tools, and for machines whose kernel cannot
    tell that a process has ended."""

    certificate: bytes = b""
    """The secret. Empty if the end of this process will never be proven."""

    @property
    def identity(self) -> bytes:
        """The identity of this process; empty without a certificate."""
        return identity_of(self.certificate) if self.certificate else b""

    def leave(self, message: bytes, addresses: Collection[str]) -> None:
        """Send `message` to the addresses once this process has ended. Replaces the message and addresses of earlier
        calls."""


UNPROVEN = DeathWatch()
"""Stateless, so all may share it."""
