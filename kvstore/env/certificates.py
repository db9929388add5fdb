"""Certificate files that are loaded again when they change. While new files cannot be used, the old ones stay in use.

One object serves a whole process: its listeners use `serving`, its connections to others use `calling`, and gRPC uses
`contents`.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from errno import EINVAL
from pathlib import Path

from kvstore.env.tls import Tls, usable

log = logging.getLogger(__name__)

CHECK_S = 5.0
"""Interval at which the files are checked, in seconds."""
WARN_S = 30 * 86_400.0
"""Remaining validity of a certificate at the first warning, in seconds."""
_DAY_S = 86_400
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18

_Stamp = tuple[tuple[int, int, int] | None, ...]


class Certificates:
    """The certificates of one process. Raises OSError if the files cannot be used."""

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self.reads = 1
        """Number of times that the files were loaded. Owners of a copy compare it to notice a change."""
        self.is_failing = False
        """True if the files have changed and cannot be used, so that the old ones stay in use."""
        self.plain = 0
        """Connections without TLS at gRPC's port, where TLS is preferred. The transport counts those of other ports."""
        self._stamp: _Stamp = self._stamped()
        self._logged_error = ""
        self._warned_days: int | None = None
        self._changed: list[Callable[[], None]] = []
        self._read()

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` each time new files are in use."""
        self._changed.append(changed)

    def poll(self) -> bool:
        """Load the files if they have changed, and return True if they were loaded. Errors in the files are logged."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return False
        self._stamp = ()  # until new files are loaded: the old files may come back unchanged
        try:
            self._read()
        except OSError as error:
            self.is_failing = True
            if str(error) != self._logged_error:
                self._logged_error = str(error)
                log.error("cannot use the changed certificate files, keeping the old ones: %s", error)
            return False
        if stamp != self._stamped():
            return False  # the files may have changed while they were read: the next check loads them
        self._stamp, self._logged_error, self.is_failing = stamp, "", False
        self.reads += 1
        log.info("loaded new certificate files, valid until %s", self.expires)
        for changed in self._changed:
            changed()
        return True

    @property
    def left_s(self) -> float:
        """Seconds until the certificate expires, negative afterwards. By this machine's clock; others use their own."""
        return self.expires_s - time.time()

    def fault(self) -> str:
        """Return the reason why other processes cannot verify this process, or an empty string if they can."""
        if self.left_s > 0:
            return ""
        return f"the certificate {self.tls.cert} expired at {self.expires}: replace it, no restart is needed"

    def warn(self) -> None:
        """Log once a day that the certificate will expire soon, or has expired."""
        days = int(self.left_s // _DAY_S)
        if self.left_s >= WARN_S or days == self._warned_days:
            return
        self._warned_days = days
        if fault := self.fault():
            log.error("%s", fault)
        else:
            log.warning("the certificate %s expires in %d days, at %s", self.tls.cert, days, self.expires)

    def note_plain(self) -> None:
        """Count a connection without TLS."""
        self.plain += 1

    @property
    def expires(self) -> str:
        """Expiry of the certificate, for people."""
        return datetime.fromtimestamp(self.expires_s, UTC).isoformat()

    def statistics(self) -> dict[str, float]:
        return {
            "tls_expires_s": self.expires_s,
            "tls_reads_total": self.reads,
            "tls_failing": int(self.is_failing),
            "tls_required": int(not self.tls.admits_plain),
            "grpc_connections_plain_total": self.plain,
        }

    def _read(self) -> None:
        """Load all files or none. Raises OSError."""
        serving, calling = self.tls.server_context(), self.tls.client_context()
        lenient = self.tls.server_context(is_lenient=True)
        contents = self.tls.contents()
        assert contents[2] is not None, "a process that serves has a certificate"
        try:
            expires_s = expiry_of(contents[2])
        except ValueError as error:
            raise OSError(EINVAL, str(error), str(self.tls.cert)) from error
        self.serving, self.lenient, self.calling = serving, lenient, calling
        self.contents, self.expires_s = contents, expires_s

    def _stamped(self) -> _Stamp:
        return _stamps_of(self.tls)


class CallingContext:
    """A client's TLS context, made from its files as they are at each call. While new files cannot be used, the old
    ones stay in use. Raises ConfigError if the first files cannot be used."""

    def __init__(self, tls: Tls) -> None:
        self._tls, self._stamp = tls, _stamps_of(tls)
        with usable():
            self._context = tls.client_context()

    def newest(self) -> ssl.SSLContext:
        """Return the context, re-reading the files if they have changed. Errors in the files are logged."""
        stamp = _stamps_of(self._tls)
        if stamp != self._stamp:
            try:
                self._context = self._tls.client_context()
            except OSError as error:
                log.warning("cannot use the changed certificate files, keeping the old ones: %s", error)
                return self._context
            self._stamp = stamp  # from before the read: the next call reads later changes
        return self._context


def _stamps_of(tls: Tls) -> _Stamp:
    return tuple(_stamp_of(path) for path in (tls.cert, tls.key, tls.ca) if path is not None)


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def expiry_of(pem: bytes) -> float:
    """Return the time until which the first certificate of a PEM file is valid, in seconds since 1970. Raises
    ValueError."""
    begin, end = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
    start, stop = pem.find(begin), pem.find(end)
    if start < 0 or stop < start:
        raise ValueError("expected a certificate in PEM form, got none")
    der = ssl.PEM_cert_to_DER_cert(pem[start : stop + len(end)].decode("ascii") + "\n")
    _, certificate, _ = _element(der)
    _, body, _ = _element(certificate)
    tag, _, rest = _element(body)
    for _ in range(3 if tag == _VERSION else 2):  # the serial number where there is a version, algorithm, issuer
        _, _, rest = _element(rest)
    tag, validity, _ = _element(rest)
    if tag != _SEQUENCE:
        raise ValueError(f"expected the validity of a certificate, got an element of kind {tag:#x}")
    _, _, rest = _element(validity)
    kind, text, _ = _element(rest)
    form = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}.get(kind)
    if form is None:
        raise ValueError(f"expected a time, got an element of kind {kind:#x}")
    return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC).timestamp()


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """Return the kind and the content of the first element, and the bytes behind it. Raises ValueError."""
    if len(der) < 2:
        raise ValueError("expected a certificate, got half of one")
    length, at = der[1], 2
    if length & 0x80:
        at = 2 + (length & 0x7F)
        length = int.from_bytes(der[2:at], "big")
    if len(der) < at + length:
        raise ValueError("expected a certificate, got half of one")
    return der[0], der[at : at + length], der[at + length :]
