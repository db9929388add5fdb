"""Handles a connection from a client that claims to be another server, until that server has proven its identity
(docs/protocol.md H8)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from kvstore import versions
from kvstore.env import Clock, Stream, StreamHandler
from kvstore.server.peer.identity import Certificate, certificate_fault
from kvstore.server.peer.proof import CalledSide, Credentials, HandshakeRefused
from kvstore.types import ServerId

log = logging.getLogger(__name__)

PROOF_S = 2.0
"""Maximum time in seconds for a proof."""
LOG_EVERY_S = 60.0
ADDRESSES_MAX = 1_000
"""Maximum number of remembered addresses. An address is remembered so that it is logged only once per LOG_EVERY_S."""


class RefusedPeers:
    """Counts refused connections, and logs each address at most once a minute."""

    def __init__(self, clock: Clock) -> None:
        self.count = 0
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def note(self, address: str, text: str) -> None:
        self.count += 1
        now = self._clock.now()
        if now - self._logged_at.get(address, now - LOG_EVERY_S) < LOG_EVERY_S:
            return
        log.warning(
            "refused a server link address=%s reason=%r", address, text
        )  # partly written by an unauthenticated peer
        self._logged_at.pop(address, None)
        if len(self._logged_at) >= ADDRESSES_MAX:
            del self._logged_at[next(iter(self._logged_at))]
        self._logged_at[address] = now


def shown_on(stream: Stream) -> Certificate | None:
    """Return the certificate of the other side, or None if the listener requests none."""
    found: Certificate | None = stream.get_extra_info("peercert")
    return found


class HandshakeOwner(Protocol):
    """Accepts links of other servers. Implemented by kvstore.server.peer.server.PeerServer."""

    credentials: Credentials
    versions: versions.Versions

    def host_of(self, server: ServerId) -> str | None:
        """Return the host at which the server is registered or was last registered, or None."""
        ...

    def open(self, server: ServerId, stream: Stream, answer: bytes, version: int) -> StreamHandler:
        """Start the link of a server that has proven its identity. Raises HandshakeRefused."""
        ...

    def note_refused(self, stream: Stream, refused: HandshakeRefused) -> None: ...


class PeerHandshake:
    """The StreamHandler of a connection during the handshake, until the link takes over the stream or the other side
    disconnects. `leave` is called at that moment."""

    def __init__(self, owner: HandshakeOwner, words: list[bytes], stream: Stream, leave: Callable[[], None]) -> None:
        """Raises HandshakeRefused."""
        self._owner, self._stream, self._leave = owner, stream, leave
        known = owner.versions  # refuse a server that does not support the cluster version (docs/protocol.md V2)
        least, most = versions.link_version(known.cluster), versions.link_version(known.can)
        self._called = CalledSide(owner.credentials, words, least=least, most=most)
        caller = self._called.caller
        if fault := certificate_fault(shown_on(stream), caller, owner.host_of(caller)):
            raise HandshakeRefused("peer: the certificate is not that of a server", f"from={caller} {fault}")
        self._timer = asyncio.get_running_loop().call_later(PROOF_S, self._time_is_up)
        stream.write(self._called.nonce())

    def connection_made(self, transport: Stream) -> None:
        raise AssertionError("the connection existed before the handshake")

    def data_received(self, data: bytes) -> None:
        if self._stream.is_closing():
            return
        try:
            answer = self._called.take(data)
            if answer:
                self._timer.cancel()
                link = self._owner.open(self._called.caller, self._stream, answer, self._called.version)
                self._leave()
                self._stream.set_protocol(link)
        except HandshakeRefused as refused:
            self._refuse(refused)

    def eof_received(self) -> bool | None:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._leave()

    def pause_writing(self) -> None:
        """Does nothing, because the handshake sends few bytes."""

    def resume_writing(self) -> None:
        """Does nothing, because the handshake sends few bytes."""

    def _time_is_up(self) -> None:
        self._refuse(HandshakeRefused(f"peer: no proof within {PROOF_S:g} s"))

    def _refuse(self, refused: HandshakeRefused) -> None:
        self._timer.cancel()
        self._owner.note_refused(self._stream, refused)
        self._stream.write(f"-ERR {refused.answer}\r\n".encode())
        self._stream.close()
