"""TLS from certificate files: the settings of a node or client, and the contexts made from them. One node's files serve
all of its listeners and its connections to other nodes."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvstore.env.files.private import check_private, read_private
from kvstore.errors import ConfigError
from kvstore.ranges import WrongSettings

CIPHERS_1_2 = "@SECLEVEL=2:ECDHE+AESGCM:ECDHE+CHACHA20"
"""Cipher suites of TLS 1.2: forward secrecy and authenticated encryption. Those of TLS 1.3 all have both."""


class Mode(StrEnum):
    """The use of TLS at a node that has a certificate."""

    REQUIRE = "require"
    """No connection without TLS, in either direction."""
    PREFER = "prefer"
    """For the migration to REQUIRE, while some nodes and clients have no TLS: listeners accept both on the same port,
    and other nodes are called with TLS first, then without. It does not protect against an attacker on the network
    (docs/protocol.md S1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Paths of PEM files. None set: no TLS."""

    cert: Path | None = None
    """The own certificate, followed by intermediate ones. It names the hosts by which others connect."""
    key: Path | None = None
    """Its private key, without a passphrase, in a file that other accounts cannot use (mode 0600)."""
    ca: Path | None = None
    """Certificate authority to trust. None on a client: the authorities that the system trusts."""
    verify_clients: bool = False
    """Refuse each client that connects without a certificate of the same authority."""
    mode: Mode = Mode.REQUIRE
    """Mode of the node's listeners and calls."""

    def __post_init__(self) -> None:
        faults = []
        if (self.cert is None) != (self.key is None):
            faults.append("cert and key: expected both or neither")
        if self.verify_clients and self.ca is None:
            faults.append("verify_clients: expected a ca to verify them with")
        if self.admits_plain and self.cert is None:
            faults.append('mode: expected cert and key with "prefer"')
        if faults:
            raise WrongSettings(*faults)

    @property
    def serves(self) -> bool:
        """True if listeners use TLS."""
        return self.cert is not None

    @property
    def admits_plain(self) -> bool:
        """True if connections without TLS are accepted besides those with it."""
        return self.mode is Mode.PREFER

    def server_context(self, *, is_lenient: bool = False) -> ssl.SSLContext | None:
        """Return the context of listeners; None: plain TCP. A lenient context verifies the certificates of clients that
        have one, and accepts the others. Raises OSError if the files cannot be used."""
        if self.cert is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS_1_2)
        self._load_own(context)
        if self.verify_clients:
            with _named(self.ca):
                context.load_verify_locations(self.ca)
            context.verify_mode = ssl.CERT_OPTIONAL if is_lenient else ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the context of connections to others, which verifies them, including the host name. Raises OSError."""
        with _named(self.ca):
            context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert is not None:
            self._load_own(context)
        return context

    def _load_own(self, context: ssl.SSLContext) -> None:
        """Load certificate and key. An encrypted key is an error: OpenSSL would ask for its password on a terminal, and
        the event loop would wait for someone to type it. A key that other accounts can use is an error, too."""
        assert self.cert is not None
        assert self.key is not None
        with _named(self.cert, self.key):
            check_private(self.key)
            context.load_cert_chain(self.cert, self.key, password=bytes)

    def contents(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return CA, key and certificate as read from their files, None for those not set. Raises OSError."""
        ca, cert = (None if path is None else path.read_bytes() for path in (self.ca, self.cert))
        return ca, None if self.key is None else read_private(self.key), cert


@contextmanager
def _named(*files: Path | None) -> Iterator[None]:
    """Add the file names to errors, which OpenSSL's own do not have."""
    try:
        yield
    except OSError as error:
        reason = f"not a certificate or key in PEM form: {error}" if isinstance(error, ssl.SSLError) else error.strerror
        raise OSError(error.errno, reason, " and ".join(map(str, files))) from error


@contextmanager
def usable() -> Iterator[None]:
    """Raise ConfigError instead of the OSError of files that a client cannot use."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"expected certificate and key files that can be read, got {error}") from error
