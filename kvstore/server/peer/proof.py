"""How two servers prove to each other that they are of one cluster, before anything else is said on a link between
them (docs/protocol.md H8). Decides only. Golden bytes are in its test.

    caller → KVSTORE.PEER version from to cluster nonce      a RESP array of bulk strings
    called → +nonce                                          64 hexadecimal digits, and CR LF
    caller → proof                                           32 bytes
    called → +proof                                          64 hexadecimal digits, and CR LF

    nonce  := 32 bytes that were never used before
    proof  := HMAC-SHA256(key, each of: role, version, cluster, from, to, caller's nonce, called one's nonce;
              before each its length as u16 big endian)
    role   := "caller" | "called"

The version is the caller's choice among those that both can do (docs/protocol.md V3), and part of both proofs: nobody
in between can lower it. The called side proves nothing to a caller that has not proven itself. A proof is of no use a
second time, because both sides put a nonce into it; nor to the other side, because it says whose it is; nor at another
server or in another cluster.
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
    """The secrets by which a server proves itself."""

    server: ServerId
    cluster: str
    """Its instance id."""
    keys: tuple[bytes, ...] = field(repr=False)
    """Keys derived from the cluster's secret for this purpose: the one to use, then those that are accepted beside
    it."""
    nonce: Callable[[], bytes] = field(repr=False)


class HandshakeRefused(Exception):
    """The other side is not let in. `answer` is what it is told, the error's text what the log says."""

    def __init__(self, answer: str, text: str = "") -> None:
        super().__init__(text or answer)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class _Meeting:
    """The greetings of both sides of one link."""

    version: int
    caller: bytes
    called: bytes
    cluster: bytes
    callers_nonce: bytes
    calleds_nonce: bytes

    def proof(self, key: bytes, role: bytes) -> bytes:
        said = (
            role,
            b"%d" % self.version,
            self.cluster,
            self.caller,
            self.called,
            self.callers_nonce,
            self.calleds_nonce,
        )
        return hmac.digest(key, b"".join(len(each).to_bytes(2, "big") + each for each in said), hashlib.sha256)


class CallingSide:
    """The side that has connected. `take` what comes until `is_proven`."""

    def __init__(self, credentials: Credentials, called: ServerId, version: int = LINK_FIRST) -> None:
        """`version`: of the link."""
        self.is_proven = False
        self.version = version
        self._own, self._called = credentials, called
        self._nonce = credentials.nonce()
        self._meeting: _Meeting | None = None
        self._received = b""

    def hello(self) -> bytes:
        """Make the first message."""
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
        """Take bytes of the other side's greeting; return what to send, and what came behind its proof. Raises
        FrameError if that side refuses, or is not of this cluster."""
        self._received += data
        line, end, rest = self._received.partition(b"\r\n")
        if not end:
            if len(line) > _LINE_MAX:
                raise FrameError("no greeting")
            return b"", b""
        self._received = b""
        if not line.startswith(b"+"):
            raise FrameError(f"the link was refused: {line[:200].decode('utf-8', 'replace')}")
        found = _unhexed(line[1:])
        if self._meeting is None:
            if rest:
                raise FrameError("bytes behind a nonce")
            return self._answer(found), b""
        if not hmac.compare_digest(found, self._meeting.proof(self._own.keys[0], _CALLED)):
            raise FrameError(f"who answers for {self._called} does not know the cluster's secret")
        self.is_proven = True
        return b"", rest

    def _answer(self, nonce: bytes) -> bytes:
        own = self._own
        names = (own.server.encode(), self._called.encode(), own.cluster.encode())
        self._meeting = _Meeting(self.version, *names, self._nonce, nonce)
        return self._meeting.proof(own.keys[0], _CALLER)


class CalledSide:
    """The side that was connected to, by a caller which says that it is a server."""

    def __init__(
        self, credentials: Credentials, words: list[bytes], *, least: int = LINK_FIRST, most: int = LINK_LATEST
    ) -> None:
        """`words` of the greeting, behind the first; the versions of the link that will do. Raises HandshakeRefused."""
        own = credentials
        version = next((each for each in range(least, most + 1) if words[0] == b"%d" % each), None)
        if version is None:
            wanted = f"{least} to {most}" if least < most else str(most)
            raise HandshakeRefused(f"peer version: want {wanted}, got {_shown(words[0])}")
        if len(words) != 5 or len(words[4]) != NONCE_BYTES:
            raise HandshakeRefused(f"peer: want version, from, to, cluster and a nonce of {NONCE_BYTES} bytes")
        _, caller, called, cluster, nonce = words
        if cluster != own.cluster.encode():
            raise HandshakeRefused("peer: this server is of another cluster", f"it is of cluster {_shown(cluster)}")
        if called != own.server.encode():
            raise HandshakeRefused(f"peer: this is server {own.server}, not {_shown(called)}")
        if not 1 <= len(caller) <= 128 or caller == called:
            raise HandshakeRefused(f"peer: want another server, got {_shown(caller)}")
        self.caller = ServerId(caller.decode("utf-8", "replace"))
        self.version = version
        self._own = own
        self._meeting = _Meeting(version, caller, called, cluster, nonce, own.nonce())
        self._received = b""

    def nonce(self) -> bytes:
        """Make the first answer."""
        return b"+%b\r\n" % self._meeting.calleds_nonce.hex().encode()

    def take(self, data: bytes) -> bytes:
        """The answer to a proof that is right; empty while it is incomplete. Raises HandshakeRefused."""
        self._received += data
        if len(self._received) > PROOF_BYTES:
            raise HandshakeRefused(f"peer: want a proof of {PROOF_BYTES} bytes and then silence")
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
        raise FrameError(f"want {2 * NONCE_BYTES} hexadecimal digits, got {_shown(text)}: perhaps no server of ours")
    return found


def _shown(text: bytes) -> str:
    return repr(text[:64].decode("utf-8", "replace"))
