"""TLS by certificate files: what a node or a client is told, and the contexts made of it. One node's files serve all of
its doors, and its connections to other nodes."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvstore.env.files.private import check_private, read_private
from kvstore.ranges import WrongSettings

CIPHERS_1_2 = "@SECLEVEL=2:ECDHE+AESGCM:ECDHE+CHACHA20"
"""Cipher suites of TLS 1.2: forward secrecy and authenticated encryption. Those of TLS 1.3 all have both."""


class Mode(StrEnum):
    """How far TLS goes at a node that has a certificate."""

    REQUIRE = "require"
    """Nothing without it, in neither direction."""
    PREFER = "prefer"
    """On the way to REQUIRE, while some nodes and clients have none yet: listeners take both on the same port, and
    others are called by TLS first, then without. It keeps nobody out who can come between (docs/protocol.md S1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Paths of PEM files. Nothing set: no TLS."""

    cert: Path | None = None
    """One's own certificate, and the intermediate ones after it. It names the hosts by which others connect."""
    key: Path | None = None
    """Its private key, without a passphrase, in a file that other accounts cannot use (mode 0600)."""
    ca: Path | None = None
    """Whose certificates are trusted; for a client, None: those that the system trusts."""
    verify_clients: bool = False
    """Refuse each client that connects without a certificate of the same CA."""
    mode: Mode = Mode.REQUIRE
    """Of a node's own doors and calls."""

    def __post_init__(self) -> None:
        faults = []
        if (self.cert is None) != (self.key is None):
            faults.append("cert and key: want both or neither")
        if self.verify_clients and self.ca is None:
            faults.append("verify_clients: want a ca to verify them by")
        if self.admits_plain and self.cert is None:
            faults.append('mode: want cert and key where it is "prefer"')
        if faults:
            raise WrongSettings(*faults)

    @property
    def serves(self) -> bool:
        """Whether listeners speak TLS."""
        return self.cert is not None

    @property
    def admits_plain(self) -> bool:
        """Whether connections may be without TLS beside those with it."""
        return self.mode is Mode.PREFER

    def server_context(self, *, is_lenient: bool = False) -> ssl.SSLContext | None:
        """For listeners; None: plain TCP. A lenient one verifies the certificates of clients that have one, and lets
        the others connect. Raises OSError for files that are none."""
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
        """For connections to others: verifies them, host name included. Raises OSError."""
        with _named(self.ca):
            context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert is not None:
            self._load_own(context)
        return context

    def _load_own(self, context: ssl.SSLContext) -> None:
        """A key that is encrypted is an error: OpenSSL would ask for its password where there is a terminal, and the
        event loop would wait for somebody to type it. A key that other accounts can use is an error too."""
        assert self.cert is not None
        assert self.key is not None
        with _named(self.cert, self.key):
            check_private(self.key)
            context.load_cert_chain(self.cert, self.key, password=bytes)

    def contents(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """CA, key and certificate as read from their files, None for those not set. Raises OSError."""
        ca, cert = (None if path is None else path.read_bytes() for path in (self.ca, self.cert))
        return ca, None if self.key is None else read_private(self.key), cert


@contextmanager
def _named(*files: Path | None) -> Iterator[None]:
    """Errors say which files they are about, as OpenSSL's own do not."""
    try:
        yield
    except OSError as error:
        reason = f"not a certificate or key in PEM form: {error}" if isinstance(error, ssl.SSLError) else error.strerror
        raise OSError(error.errno, reason, " and ".join(map(str, files))) from error
