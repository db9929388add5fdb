"""The connection of one Redis client: it receives bytes and sends replies. The commands and replies of the
connection are in pipeline/."""

from __future__ import annotations

import asyncio
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
"""Number of commands, over all connections, between two checks for syncs that have ended: half a millisecond of work.
One turn of the event loop may have a thousand commands, and the next group of the journal must not wait for all of
them."""
OUTPUT_HIGH_BYTES = 64 << 10
"""Bytes of replies that the client has not read. Above this limit, no more of its commands begin."""
QUEUED_BYTES = 160
"""Bytes of memory that a command takes in addition to its own bytes, once it has been read."""
UNAUTHENTICATED_INPUT_MAX = 16 << 10
"""Maximum size in bytes of the incomplete and waiting commands of a client that has not authenticated yet. A login
takes little; otherwise some thousands of unauthenticated peers could fill the memory for commands, and connections of
users would be closed."""


class ConnectionServer(PipelineServer, Protocol):
    """The server, as a connection uses it. Implemented by kvstore.server.redis.listener.RespServer."""

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
        """Return the handler that continues the connection of another server. Raises CommandError."""
        ...


@runtime_checkable
class ClientStream(Protocol):
    """A handler that took over a connection but still serves a client. It may have operations in flight when the
    server stops."""

    @property
    def is_done(self) -> bool: ...

    def close_soon(self) -> None: ...

    def when_authenticated(self, authenticated: Callable[[], None]) -> None:
        """Call `authenticated` when the client authenticates, or now if it already has."""
        ...


class RespConnection:
    """The StreamHandler of one client, with its session, its parser and its pipeline of commands."""

    def __init__(self, server: ConnectionServer) -> None:
        self.session = RespSession(server.next_id())
        self.pipeline = Pipeline(server, self.session, self)
        self.replies = self.pipeline.replies
        self._server = server
        self._parser = Parser()
        self._stream: Stream
        self._is_input_noted = False
        """True while the server counts input bytes of this connection: commands that are incomplete or have not begun,
        and watched keys."""
        self._client_stream: ClientStream | None = None
        """The handler that took the connection over and serves a client."""
        self._trial: ServerTrial | None = None
        """Set while the connection has to prove that it belongs to another server."""

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
        """Begin the commands that have arrived. After a call with empty `data`, only those that the parser has not read
        yet."""
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
        elif self._parser.is_behind and not waiting and not pipeline.is_stalled:
            self._parse_soon()
        if waiting or self._parser.kept or self.session.queued or self._is_input_noted:
            self._note_input(len(data) + QUEUED_BYTES * len(waiting) if waiting else 0)
        server = self._server
        if server.commands >= server.reports_at:
            server.reports_at = server.commands + REPORT_EVERY
            server.report_syncs()  # last: the callbacks may concern this connection too

    def caught_up(self) -> None:
        """Called when all waiting commands have begun."""
        self._note_input()
        if self._parser.error is not None:
            self.pipeline.end(f"ERR Protocol error: {self._parser.error}")
        elif self._parser.is_behind:
            self._parse_soon()
        else:
            self.pipeline.continue_reading()

    def _parse_soon(self) -> None:
        """Read the commands that the parser has not read yet in the next turn of the event loop, and no further input
        until then."""
        self._stream.pause_reading()
        asyncio.get_running_loop().call_soon(self._parse_more)

    def _parse_more(self) -> None:
        self.data_received(b"")
        if not self._parser.is_behind and not self.pipeline.is_stalled:
            self.pipeline.continue_reading()

    def _note_input(self, queued: int = 0) -> None:
        size = len(self._parser.kept) + queued + self.session.held_bytes
        if size > UNAUTHENTICATED_INPUT_MAX and self.is_unauthenticated() and not self.pipeline.is_busy:
            return self.abandon(
                f"NOAUTH Authentication required. Expected at most {UNAUTHENTICATED_INPUT_MAX} bytes before it"
            )
        self._is_input_noted = size > 0
        return self._server.note_input(self, size)

    def eof_received(self) -> bool | None:
        """Handle the end of the client's input. Pending replies are sent before the connection closes."""
        return self.pipeline.end_input()

    def connection_lost(self, exc: Exception | None) -> None:
        self.pipeline.lose()
        self._server.forget(self)
        self._end_trial()
        # The parts of a connection reference each other, so they live until the next garbage collection. Drop what may
        # be large.
        self._parser, self.session.queued = Parser(), None

    def pause_writing(self) -> None:
        self.replies.hold_back(self._server.now())

    def resume_writing(self) -> None:
        self.replies.hold_back(None)
        self.pipeline.resume()

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def refuse(self) -> None:
        """Refuse the connection with an error, because the maximum number of connections is reached."""
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
        """Drop the commands that have not begun, send the error `text` and close the connection."""
        self.pipeline.waiting.clear()
        self._parser = Parser()
        self.pipeline.unsubscribe()
        self.session.reset()
        self._server.note_input(self, 0)
        self.pipeline.end(text)

    def close_soon(self) -> None:
        """Begin no more commands, and close the connection when the commands in flight are answered."""
        if self._client_stream is not None:
            self._client_stream.close_soon()
        else:
            self.pipeline.close_soon()

    def is_done(self) -> bool:
        """Return True if no command is in flight and the socket has accepted all replies."""
        if self._client_stream is not None:
            is_answered = self._client_stream.is_done
        else:
            is_answered = self.replies.is_gone or not self.replies.in_flight()
        return is_answered and not self._stream.get_write_buffer_size()

    # ── identity ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def host(self) -> str:
        """The client's address without its port."""
        name = self._stream.get_extra_info("peername") or ("?", 0)
        return str(name[0])

    @property
    def address(self) -> str:
        """The client's address with its port."""
        host, port, *_ = self._stream.get_extra_info("peername") or ("?", 0)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def identity_of_certificate(self) -> UserIdentity | None:
        """Return the user that the client's certificate names, or None."""
        return self._server.access.of_certificate(common_names(self._stream.get_extra_info("peercert")))

    def is_unauthenticated(self) -> bool:
        """Return True if the client must authenticate and has not done so yet."""
        return self._server.access.is_on and self.session.identity is None and not self.pipeline.is_handed_over

    def authenticated(self) -> None:
        """Record that the client has authenticated."""
        self._server.note_active(self)

    def access_changed(self) -> None:
        """Apply a new access table. If its user no longer exists, the client is disconnected."""
        identity = self.session.identity
        if identity is not None and identity.is_gone:
            self.abandon("NOAUTH Authentication required. The user was removed or the password has changed")
        elif not self.pipeline.is_handed_over:
            self.pipeline.guard(identity or self.identity_of_certificate())

    def become_peer(self, words: list[bytes]) -> None:
        """Hand the connection over to the link of another server. It still counts as a client's connection until
        that server has proven its identity. Raises CommandError unless this is the first command."""
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
        """Stop counting the connection as a client's connection. When this server stops, its peer server closes the
        connection in order."""
        self._server.forget(self)
