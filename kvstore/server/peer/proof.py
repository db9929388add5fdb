"""The mutual proof of two servers that they belong to one cluster, before anything else on a link (docs/protocol.md
H8). Decides only. Its test has golden bytes.

    caller → KVSTORE.PEER version from to cluster nonce      a RESP array of bulk strings
    called → +nonce                                          64 hexadecimal digits, and CR LF
    caller → proof                                           32 bytes
    called → +proof                                          64 hexadecimal digits, and CR LF

    nonce  := 32 bytes that were never used before
    proof  := HMAC-SHA256(key, each of: role, version, cluster, from, to, caller's nonce, called one's nonce;
              before each its length as u16 big endian)
    role   := "caller" | "called"

The caller chooses the version among those that both sides support (docs/protocol.md V3). The version is part of both
proofs, so an attacker cannot lower it. The called side proves nothing to a caller that has not proven itself. A proof
cannot be replayed, because both nonces are part of it; it cannot be reflected, because it names the role; and it is
useless at another server or in another cluster.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.server.peer.frames import FrameError
from kvstore.types import ServerId
from kvstore.versions import LINK_FIRST, LINK_LATEST

PURPOSE = "peer link"
NONCE_BYTES = 32
PROOF_BYTES = 32
_LINE_MAX = 1024
_CALLER, _CALLED = b"caller", b"called"


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secrets with which a server proves that it belongs to the cluster."""

    server: ServerId
    cluster: str
    """The cluster's instance id."""
    keys: tuple[bytes, ...] = field(repr=False)
    """Keys derived from the cluster's secret for this purpose. The first is used for new proofs; all are accepted."""
    nonce: Callable[[], bytes] = field(repr=False)


class HandshakeRefused(Exception):
    """Raised to refuse the other side. `answer` is sent to it, and the text of the error is logged."""

    def __init__(self, answer: str, text: str = "") -> None:
        super().__init__(text or answer)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class _Meeting:
    """The values that both sides of a link exchange in their greetings."""

    version: int
    caller: bytes
    called: bytes
    cluster: bytes
    callers_nonce: bytes
    calleds_nonce: bytes

    def proof(self, key: bytes, role: bytes) -> bytes:
        fields = (
            role,
            b"%d" % self.version,
            self.cluster,
            self.caller,
            self.called,
            self.callers_nonce,
            self.calleds_nonce,
        )
        return hmac.digest(key, b"".join(len(each).to_bytes(2, "big") + each for each in fields), hashlib.sha256)


class CallingSide:
    """The side that opens the connection. Call `take` with received bytes until `is_proven` is True."""

    def __init__(self, credentials: Credentials, called: ServerId, version: int = LINK_FIRST) -> None:
        """`version` is the version of the link."""
        self.is_proven = False
        self.version = version
        self._own, self._called = credentials, called
        self._nonce = credentials.nonce()
        self._meeting: _Meeting | None = None
        self._received = b""

    def hello(self) -> bytes:
        """Return the first message to send."""
        own = self._own
        words = [
            b"KVSTORE.PEER",
            b"%d" % self.version,
            own.server.encode(),
            self._called.encode(),
            own.cluster.encode(),
        ]
        words.append(self._nonce)
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Handle received bytes. Return the bytes to send, and the received bytes that follow the other side's
        proof. Raises FrameError if the other side refuses the link or does not belong to this cluster."""
        self._received += data
        line, end, rest = self._received.partition(b"\r\n")
        if not end:
            if len(line) > _LINE_MAX:
                raise FrameError("expected a greeting, got none")
            return b"", b""
        self._received = b""
        if not line.startswith(b"+"):
            raise FrameError(f"the link was refused: {line[:200].decode('utf-8', 'replace')}")
        found = _unhexed(line[1:])
        if self._meeting is None:
            if rest:
                raise FrameError("unexpected bytes after a nonce")
            return self._answer(found), b""
        if not hmac.compare_digest(found, self._meeting.proof(self._own.keys[0], _CALLED)):
            raise FrameError(f"the process at the address of {self._called} does not know the cluster's secret")
        self.is_proven = True
        return b"", rest

    def _answer(self, nonce: bytes) -> bytes:
        own = self._own
        names = (own.server.encode(), self._called.encode(), own.cluster.encode())
        self._meeting = _Meeting(self.version, *names, self._nonce, nonce)
        return self._meeting.proof(own.keys[0], _CALLER)


class CalledSide:
    """The side that accepts the connection of a caller that claims to be a server."""

    def __init__(
        self, credentials: Credentials, words: list[bytes], *, least: int = LINK_FIRST, most: int = LINK_LATEST
    ) -> None:
        """`words` are the words of the caller's greeting after the first. `least` and `most` are the lowest and
        highest accepted link versions. Raises HandshakeRefused."""
        own = credentials
        version = next((each for each in range(least, most + 1) if words[0] == b"%d" % each), None)
        if version is None:
            wanted = f"{least} to {most}" if least < most else str(most)
            raise HandshakeRefused(f"peer version: expected {wanted}, got {_shown(words[0])}")
        if len(words) != 5 or len(words[4]) != NONCE_BYTES:
            raise HandshakeRefused(f"peer: expected version, from, to, cluster and a nonce of {NONCE_BYTES} bytes")
        _, caller, called, cluster, nonce = words
        if cluster != own.cluster.encode():
            raise HandshakeRefused("peer: this server is of another cluster", f"it is of cluster {_shown(cluster)}")
        if called != own.server.encode():
            raise HandshakeRefused(f"peer: this is server {own.server}, not {_shown(called)}")
        if not 1 <= len(caller) <= 128 or caller == called:
            raise HandshakeRefused(f"peer: expected another server, got {_shown(caller)}")
        self.caller = ServerId(caller.decode("utf-8", "replace"))
        self.version = version
        self._own = own
        self._meeting = _Meeting(version, caller, called, cluster, nonce, own.nonce())
        self._received = b""

    def nonce(self) -> bytes:
        """Return the first message to send, which contains this side's nonce."""
        return b"+%b\r\n" % self._meeting.calleds_nonce.hex().encode()

    def take(self, data: bytes) -> bytes:
        """Handle received bytes. Return the answer to a valid proof, or empty bytes while the proof is incomplete.
        Raises HandshakeRefused."""
        self._received += data
        if len(self._received) > PROOF_BYTES:
            raise HandshakeRefused(f"peer: expected a proof of {PROOF_BYTES} bytes and nothing more")
        if len(self._received) < PROOF_BYTES:
            return b""
        for key in self._own.keys:
            if hmac.compare_digest(self._received, self._meeting.proof(key, _CALLER)):
                return b"+%b\r\n" % self._meeting.proof(key, _CALLED).hex().encode()
        raise HandshakeRefused("peer: not proven: the cluster's secret is another one")


def _unhexed(text: bytes) -> bytes:
    try:
        found = bytes.fromhex(text.decode("ascii"))
    except (UnicodeDecodeError, ValueError):
        found = b""
    if len(found) != NONCE_BYTES:
        raise FrameError(
            f"expected {2 * NONCE_BYTES} hexadecimal digits, got {_shown(text)}; the peer may not be a kvstore server"
        )
    return found


def _shown(text: bytes) -> str:
    return repr(text[:64].decode("utf-8", "replace"))
