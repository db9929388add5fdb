"""One Redis client's connection: bytes in, replies out. pipeline/ has its commands and replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from kvstore.env import Stream, StreamHandler
from kvstore.server.access.certificates import common_names
from kvstore.server.access.identities import UserIdentity
from kvstore.server.redis.admission import REFUSAL, ClientAdmission, ServerTrial
from kvstore.server.redis.parser import Parser
from kvstore.server.redis.pipeline.pipeline import Pipeline
from kvstore.server.redis.pipeline.reply_queue import PipelineServer
from kvstore.server.redis.plans import CommandError
from kvstore.server.redis.session import RespSession

REPORT_EVERY = 32
"""Commands, of all connections, between two looks for syncs that have ended: half a millisecond's work. A turn of the
loop may have a thousand, and the next group of the journal need not wait for all of them."""
OUTPUT_HIGH_BYTES = 64 << 10
"""Bytes of replies that the client has not read; from here on no more of its commands are begun."""
QUEUED_BYTES = 160
"""Memory that a command takes beside its bytes, once it has been read."""
UNAUTHENTICATED_INPUT_MAX = 16 << 10
"""Bytes of commands that are incomplete or wait, of a client that has to say who he is and has not. His login takes
little; else some thousands of strangers could have all the room there is for commands, and users' would be closed."""


class ConnectionServer(PipelineServer, Protocol):
    """The server whose door the client came through: kvstore.server.redis.listener.RespServer."""

    commands: int
    reports_at: int
    report_syncs: Callable[[], None]
    connections_refused: int

    def next_id(self) -> int: ...
    def now(self) -> float: ...
    def admit(self, connection: RespConnection) -> ClientAdmission: ...
    def note_active(self, connection: RespConnection) -> None: ...
    def forget(self, connection: RespConnection) -> None: ...
    def note_input(self, connection: RespConnection, size: int) -> None: ...

    def accept_peer(self, words: list[bytes], stream: Stream, leave: Callable[[], None]) -> StreamHandler:
        """The next handler of another server's connection. Raises CommandError."""
        ...


@runtime_checkable
class ClientStream(Protocol):
    """A next handler that is a client's still, and may have something under way as the door closes."""

    @property
    def is_done(self) -> bool: ...

    def close_soon(self) -> None: ...

    def when_authenticated(self, authenticated: Callable[[], None]) -> None:
        """Call `entered` once the client has authenticated, or now if it has."""
        ...


class RespConnection:
    """The StreamHandler of one client, with its session, its parser and the pipeline of its commands."""

    def __init__(self, server: ConnectionServer) -> None:
        self.session = RespSession(server.next_id())
        self.pipeline = Pipeline(server, self.session, self)
        self.replies = self.pipeline.replies
        self._server = server
        self._parser = Parser()
        self._stream: Stream
        self._is_input_noted = False
        """The server counts bytes that this connection holds of commands which have not begun."""
        self._client_stream: ClientStream | None = None
        """What took the connection over for a client."""
        self._trial: ServerTrial | None = None
        """There while the connection has to show that it is another server's."""

    # ── the stream ────────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: Stream) -> None:
        self._stream = self.pipeline.stream = self.replies.stream = transport
        transport.set_write_buffer_limits(high=OUTPUT_HIGH_BYTES)
        if self._server.access.is_on:
            self.pipeline.guard(self.identity_of_certificate())
        match self._server.admit(self):
            case ClientAdmission.IF_SERVER:
                self._trial = ServerTrial(self.refuse)
            case ClientAdmission.NO:
                self.refuse()

    def data_received(self, data: bytes) -> None:
        if self._trial is not None:
            is_server = self._trial.is_server(data)
            self._end_trial()
            if not is_server:
                self.refuse()
        pipeline = self.pipeline
        if pipeline.is_closing:
            return
        commands = self._parser.parse(data)
        self._server.commands += len(commands)
        if commands and not self.replies.issued and not self.is_unauthenticated():
            self._server.note_active(self)
        pipeline.take(commands)
        waiting = pipeline.waiting
        if self._parser.error is not None and not waiting:
            pipeline.end(f"ERR Protocol error: {self._parser.error}")
        if waiting or self._parser.kept or self.session.queued or self._is_input_noted:
            self._note_input(len(data) + QUEUED_BYTES * len(waiting) if waiting else 0)
        server = self._server
        if server.commands >= server.reports_at:
            server.reports_at = server.commands + REPORT_EVERY
            server.report_syncs()  # last: what it calls may concern this connection too

    def caught_up(self) -> None:
        """All that waited has begun."""
        self._note_input()
        if self._parser.error is not None:
            self.pipeline.end(f"ERR Protocol error: {self._parser.error}")
        else:
            self.pipeline.continue_reading()

    def _note_input(self, queued: int = 0) -> None:
        size = len(self._parser.kept) + queued + self.session.queued_bytes
        if size > UNAUTHENTICATED_INPUT_MAX and self.is_unauthenticated() and not self.pipeline.is_busy:
            return self.abandon(
                f"NOAUTH Authentication required before a command of over {UNAUTHENTICATED_INPUT_MAX} bytes"
            )
        self._is_input_noted = size > 0
        return self._server.note_input(self, size)

    def eof_received(self) -> bool | None:
        """The client sends no more; what it still waits for is answered first."""
        return self.pipeline.end_input()

    def connection_lost(self, exc: Exception | None) -> None:
        self.pipeline.lose()
        self._server.forget(self)
        self._end_trial()
        # Its parts know each other, so they stay until the next look for garbage: without what may be large.
        self._parser, self.session.queued = Parser(), None

    def pause_writing(self) -> None:
        self.replies.hold_back(self._server.now())

    def resume_writing(self) -> None:
        self.replies.hold_back(None)
        self.pipeline.resume()

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def refuse(self) -> None:
        """Refuse the connection, because there are as many as there may be."""
        self._end_trial()
        self.pipeline.is_closing = True
        self._server.connections_refused += 1
        self._stream.write(REFUSAL)
        self._stream.close()

    def _end_trial(self) -> None:
        if self._trial is not None:
            self._trial.end()
            self._trial = None

    def abandon(self, text: str) -> None:
        """Forget what has been read and not begun, and end."""
        self.pipeline.waiting.clear()
        self._parser = Parser()
        self.session.reset()
        self._server.note_input(self, 0)
        self.pipeline.end(text)

    def close_soon(self) -> None:
        """Begin nothing more; close when what is under way is answered."""
        if self._client_stream is not None:
            self._client_stream.close_soon()
        else:
            self.pipeline.close_soon()

    def is_done(self) -> bool:
        """Whether nothing is under way, and the socket has taken what was answered."""
        if self._client_stream is not None:
            is_answered = self._client_stream.is_done
        else:
            is_answered = self.replies.is_gone or not self.replies.in_flight()
        return is_answered and not self._stream.get_write_buffer_size()

    # ── who it is ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def host(self) -> str:
        """The client's, without its port."""
        name = self._stream.get_extra_info("peername") or ("?", 0)
        return str(name[0])

    @property
    def address(self) -> str:
        """The client's."""
        host, port, *_ = self._stream.get_extra_info("peername") or ("?", 0)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def identity_of_certificate(self) -> UserIdentity | None:
        """The user whom its certificate names, if it had to show one."""
        return self._server.access.of_certificate(common_names(self._stream.get_extra_info("peercert")))

    def is_unauthenticated(self) -> bool:
        """Whether it is a client's that has to say who he is, and has not yet."""
        return self._server.access.is_on and self.session.identity is None and not self.pipeline.is_handed_over

    def authenticated(self) -> None:
        """Its user has logged in."""
        self._server.note_active(self)

    def access_changed(self) -> None:
        """Go by another table of users. A client whose user is none any more is sent away."""
        identity = self.session.identity
        if identity is not None and identity.is_gone:
            self.abandon("NOAUTH Authentication required: the user was removed, or has another password")
        elif not self.pipeline.is_handed_over:
            self.pipeline.guard(identity or self.identity_of_certificate())

    def become_peer(self, words: list[bytes]) -> None:
        """Give the connection to another server's link. Until that server has proven itself it counts as a client's.
        Raises CommandError if anything else was asked before."""
        pipeline = self.pipeline
        if self.replies.issued or pipeline.waiting or self._parser.kept:
            raise CommandError("ERR KVSTORE.PEER must be the first command")
        peer = self._server.accept_peer(words, self._stream, self._leave)
        pipeline.is_handed_over = True
        if isinstance(peer, ClientStream):
            self._client_stream = peer
            peer.when_authenticated(self.authenticated)
        self._stream.set_protocol(peer)

    def _leave(self) -> None:
        """The connection is no client's any more: at a stop the peer server ends it, in good order."""
        self._server.forget(self)
