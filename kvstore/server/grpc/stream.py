"""Sessions on the Redis port: the frames of kv.proto on a plain stream (kvstore/proto/session_stream.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError
from msgspec import MsgspecError

from kvstore.env import Stream, StreamHandler
from kvstore.env.networks import network_of
from kvstore.env.shares import largest_of_largest
from kvstore.errors import InvalidRequest
from kvstore.proto import compact, kv_pb2
from kvstore.proto.frames import FrameReader
from kvstore.proto.session_stream import (
    COMPACT,
    PROTOBUF,
    WELCOME,
    WORD,
    message_of,
    protobuf_message_of,
    refusal_or_none,
)
from kvstore.rpc.channels import MESSAGE_BYTES_MAX
from kvstore.server.access.guard import Guard
from kvstore.server.access.identities import UserIdentity
from kvstore.server.access.stream_authenticator import StreamAuthenticator
from kvstore.server.grpc.session import UNSENT_BYTES_MAX, Sessions
from kvstore.server.redis.listener import AcceptPeer, Leave
from kvstore.server.redis.plans import CommandError
from kvstore.server.routing.backend import Backend

log = logging.getLogger(__name__)

OUTPUT_HIGH_BYTES = 256 << 10
"""Bytes of answers that the client has not read. Above it, further answers wait as results, within the limits of a
session."""
INPUT_BYTES_MAX, FRAME_BYTES = 256 << 20, 48
"""Maximum number of bytes of incomplete and waiting frames, over all streams, and bytes of memory that a waiting frame
takes in addition to its own. Above the maximum, the stream with the most, of the network with the most, is
disconnected."""


class SessionStreams:
    """The sessions on one server's Redis port."""

    def __init__(
        self, sessions: Sessions, server: str, authenticator: StreamAuthenticator | None = None, cluster: str = ""
    ) -> None:
        """Without `authenticator`, access control is off."""
        self.sessions = sessions
        self.input_bytes = 0
        self.turn = sessions.turn
        self._server, self._authenticator, self._cluster = server, authenticator, cluster
        self._open: dict[SessionStream, None] = {}
        if authenticator is not None:
            authenticator.access.on_change(self._access_changed)

    def with_peers(self, accept_peer: AcceptPeer) -> AcceptPeer:
        """Return a function that takes over connections which do not speak the Redis protocol: those of clients
        here, those of servers by `accept_peer`."""

        def accept(words: list[bytes], stream: Stream, leave: Leave) -> StreamHandler:
            return (self.accept if words[1] == WORD else accept_peer)(words, stream, leave)

        return accept

    def accept(self, words: list[bytes], stream: Stream, leave: Leave) -> StreamHandler:
        """Return the next handler of a connection that began with these words. It still counts as a client's;
        `leave` is called when it is lost. Raises CommandError."""
        refusal = refusal_or_none(words[1:], self._server, self._cluster)
        if refusal is not None:
            raise CommandError(f"ERR {refusal}")
        handler = SessionStream(self, stream, leave)
        self._open[handler] = None
        if self._authenticator is None:
            handler.accept_client(None)
        else:
            self._authenticator.receive(handler, words[4:], stream)
        return handler

    def backend_of(self, identity: UserIdentity | None, stream: Stream) -> Backend:
        """Return the backend with the permissions of a user; None: a client that has not authenticated."""
        backend, authenticator = self.sessions.backend, self._authenticator
        if authenticator is None or not authenticator.access.is_on:
            return backend
        host, port, *_ = stream.get_extra_info("peername") or ("?", 0)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return Guard(authenticator.access, identity or authenticator.access.nobody, backend, address)

    def _access_changed(self) -> None:
        for handler in list(self._open):
            handler.access_changed()

    def forget(self, handler: SessionStream) -> None:
        self._open.pop(handler, None)

    def bound_input(self) -> None:
        """Disconnect streams until the incomplete frames of all others fit."""
        while self.input_bytes > INPUT_BYTES_MAX:
            held = ((each, each.network, each.held_bytes) for each in self._open if each.held_bytes)
            largest_of_largest(held).abandon_input()

    def statistics(self) -> dict[str, int]:
        return {"session_streams": len(self._open), "session_streams_input_bytes": self.input_bytes}


class SessionStream:
    """The StreamHandler of one session. Answers are written when those of a lane are complete, and wait as results
    while the client does not read. Frames are read while the session has capacity."""

    def __init__(self, owner: SessionStreams, stream: Stream, leave: Leave) -> None:
        self._owner, self._stream, self._leave = owner, stream, leave
        self._session = owner.sessions.open("Session", UNSENT_BYTES_MAX, self._send_answers)
        self._frames = FrameReader(MESSAGE_BYTES_MAX)
        self._waiting: list[bytes] = []
        """Frames that arrived while there was no capacity."""
        self.held_bytes = 0
        """Bytes that the owner counts for this stream."""
        self._is_taking = self._is_paused = self._may_write = self._is_accepted = self._is_closing = False
        self._identity: UserIdentity | None = None
        self._authenticated: Callable[[], object] = bool
        stream.set_write_buffer_limits(high=OUTPUT_HIGH_BYTES)

    @property
    def network(self) -> str:
        """The client's network."""
        return network_of(str((self._stream.get_extra_info("peername") or ("?", 0))[0]))

    # ── authentication ──

    def accept_client(self, identity: UserIdentity | None) -> None:
        """Accept the client. Nothing that it sends is read before."""
        if self._session.closed:
            return  # it has disconnected meanwhile
        self._identity = identity
        self._session.use(self._owner.backend_of(identity, self._stream))
        self._stream.write(WELCOME)
        self._is_accepted = self._may_write = True
        self._authenticated()

    def when_authenticated(self, authenticated: Callable[[], None]) -> None:
        """Call the function once the client has been accepted, or now if it already is."""
        self._authenticated = authenticated
        if self._is_accepted:
            authenticated()

    def refuse(self, text: str) -> None:
        """Refuse the client. `text` begins with the code that clients inspect."""
        if self._session.closed:
            return  # it has disconnected meanwhile, and uvloop raises an error for a write to a closed stream
        self._session.close()
        self._stream.write(f"-{text}\r\n".encode())
        self._stream.close()

    def access_changed(self) -> None:
        """Apply the new access table. A client that may not stay is disconnected, and must authenticate again."""
        if not self._is_accepted:
            return
        backend = self._owner.backend_of(self._identity, self._stream)
        is_unauthenticated = self._identity is None or self._identity.is_gone
        if is_unauthenticated and backend is not self._owner.sessions.backend:
            self._end("the user was removed or the password has changed")
        else:
            self._session.use(backend)

    # ── the stream ──

    @property
    def is_done(self) -> bool:
        """True if no answer is due."""
        return self._session.closed or self._session.is_finished

    def close_soon(self) -> None:
        """Begin no more operations; close when those in flight are answered."""
        self._is_closing = True
        self._waiting.clear()
        self._session.finish()

    def connection_made(self, transport: Stream) -> None:
        raise AssertionError("the connection was made before it was taken over")

    def data_received(self, data: bytes) -> None:
        if self._session.closed or self._is_closing:
            return
        if not self._is_accepted:
            return self._end("the client sent a message before the greeting was answered")
        frames = self._frames
        bodies = frames.feed(data)
        if frames.fault:
            self._end(frames.fault)
        elif self._waiting:
            self._waiting += bodies
        else:
            self._take(bodies)
        if frames.buffered_bytes or self._waiting or self.held_bytes:
            self._note_input()

    def eof_received(self) -> bool | None:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._session.close()
        self._forget_input()
        self._owner.forget(self)
        self._leave()

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        self._send_answers()

    # ── frames and answers ──

    def _take(self, bodies: list[bytes]) -> None:
        """Begin frames while there is capacity and the client reads its answers."""
        session, turn = self._session, self._owner.turn
        self._is_taking = True
        try:
            for place, body in enumerate(bodies):
                if turn.is_used_up or not session.has_capacity or not self._may_write:
                    self._pause(bodies[place:])
                    break
                turn.take(self._begin(body))
        except (DecodeError, MsgspecError, InvalidRequest) as error:
            self._end(str(error))
        finally:
            self._is_taking = False

    def _begin(self, body: bytes) -> int:
        """Begin one frame and return its work: the number of its lanes and operations, and one. Raises DecodeError,
        MsgspecError, or InvalidRequest."""
        session = self._session
        kind = body[0] if body else 0
        if kind == COMPACT:
            few = compact.decode_frame(memoryview(body)[1:])
            answers = session.answer_now(few)
            if answers is not None:
                self._stream.write(message_of(answers))
                return 1 + len(few.lanes[0].keys)
            if few.lanes:
                return 1 + len(few.lanes) + session.accept(few)
            self._stream.write(message_of(compact.CompactAnswers(few.ring_version, [], [], [], [], [], [])))
            return 1
        if kind == PROTOBUF:
            frame = kv_pb2.Frame.FromString(body[1:])
            return 1 + len(frame.lanes) + session.accept(frame)
        raise InvalidRequest(f"expected a message of kind {COMPACT} or {PROTOBUF}, got {kind}")

    def _pause(self, rest: list[bytes]) -> None:
        self._waiting = rest
        self._is_paused = True
        self._stream.pause_reading()
        if self._owner.turn.is_used_up:
            self._owner.turn.wait(self._send_answers)

    def _send_answers(self) -> None:
        """Send answers that are ready, and continue reading if there is capacity."""
        session = self._session
        if session.closed:
            return
        while self._may_write and (answers := session.take_compact()) is not None:
            if isinstance(answers, compact.CompactAnswers):
                self._stream.write(message_of(answers))
            else:
                self._stream.write(protobuf_message_of(answers))
        if self._is_closing:
            if session.is_finished:
                self._stream.close()
        elif self._is_paused and self._may_write and session.has_capacity and not self._is_taking:
            if self._owner.turn.is_used_up:
                return self._owner.turn.wait(self._send_answers)
            self._is_paused = False
            self._stream.resume_reading()
            waiting, self._waiting = self._waiting, []
            self._take(waiting)
            self._note_input()
        return None

    def _note_input(self) -> None:
        """Count the frames that are incomplete or wait."""
        if self._session.closed:
            return
        held = self._frames.buffered_bytes + sum(map(len, self._waiting)) + FRAME_BYTES * len(self._waiting)
        self._owner.input_bytes += held - self.held_bytes
        self.held_bytes = held
        self._owner.bound_input()

    def _forget_input(self) -> None:
        self._waiting.clear()
        self._owner.input_bytes -= self.held_bytes
        self.held_bytes = 0

    def abandon_input(self) -> None:
        """Disconnect the client, because the server holds too many frames."""
        self._forget_input()
        self._end("the server holds too many incomplete and waiting frames")

    def _end(self, why: str) -> None:
        log.warning("closed a session on the Redis port: %s", why)
        self._session.close()
        self._stream.abort()
