"""Protocols through which command handlers use the connection and the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any, Protocol

from kvstore.env.slow_log import SlowLog
from kvstore.namespaces.rates import Rates
from kvstore.partition.state.commands import Op
from kvstore.ring.ring import Ring
from kvstore.server.access.changes import AdminChanges
from kvstore.server.access.identities import Access, UserIdentity
from kvstore.server.access.logins import Logins
from kvstore.server.redis.channels import Channels
from kvstore.server.redis.commands.lock_scripts import Scripts
from kvstore.server.redis.gate import CommandGate
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import Plan
from kvstore.server.redis.session import Facts, RespSession
from kvstore.server.redis.shared_answer import SharedAnswer
from kvstore.server.routing.backend import Backend
from kvstore.server.routing.scan_slots import ScanSlots
from kvstore.types import PartitionId, ServerId


class CommandServer(Protocol):
    """The server, as commands use it. Implemented by kvstore.server.redis.listener.RespServer."""

    clients: SharedAnswer[bytes]
    info: SharedAnswer[Facts]
    access: Access
    logins: Logins
    scripts: Scripts
    id: ServerId
    random: Random
    backend: Backend
    allows_flush: bool
    transactions_across_slots: bool
    slow: SlowLog
    changes: AdminChanges
    scans: ScanSlots
    rates: Callable[[], Rates | None]
    channels: Channels

    @property
    def ring(self) -> Ring: ...
    @property
    def mode(self) -> str: ...
    def now(self) -> float: ...
    def now_ms(self) -> int: ...
    def owner_of(self, key: bytes) -> PartitionId: ...
    def ask(self, op: Op, partition: PartitionId) -> Awaitable[Any]: ...
    def note_browser(self, address: str) -> None: ...


class CommandConnection(Protocol):
    """The connection, as commands use it. Implemented by kvstore.server.redis.connection.RespConnection."""

    @property
    def address(self) -> str: ...
    @property
    def host(self) -> str:
        """The client's address without the port."""
        ...

    def identity_of_certificate(self) -> UserIdentity | None:
        """Return the user that the client's certificate names."""
        ...

    def authenticated(self) -> None:
        """Record that the client has authenticated."""
        ...

    def become_peer(self, words: Words) -> None:
        """Hand the connection over to the link of another server. Raises CommandError."""
        ...


class CommandReplies(Protocol):
    """The replies of the connection. Implemented by kvstore.server.redis.pipeline.reply_queue.ReplyQueue."""

    is_gone: bool
    backend: Backend

    def reply(self, data: bytes) -> None: ...
    def use_protocol(self, version: int) -> None: ...


class CommandSubscriber(Protocol):
    """The subscriptions of the connection. Implemented by kvstore.server.redis.pipeline.subscriber.ClientSubscriber."""

    channels: dict[bytes, None]
    patterns: dict[bytes, None]

    @property
    def count(self) -> int:
        """Number of subscriptions."""
        ...

    def subscribe(self, names: list[bytes], *, are_patterns: bool) -> list[int]: ...
    def unsubscribe(self, names: list[bytes], *, are_patterns: bool) -> list[int]: ...
    def settle(self) -> None:
        """Queue the messages of this turn ahead of later replies."""
        ...


class Performer(Protocol):
    """Executes the commands of a client. Implemented by kvstore.server.redis.pipeline.pipeline.Pipeline."""

    session: RespSession
    gate: CommandGate | None

    @property
    def server(self) -> CommandServer: ...
    @property
    def client(self) -> CommandConnection: ...
    @property
    def replies(self) -> CommandReplies: ...
    def perform(self, found: Plan) -> bool: ...

    def check(self, words: Words) -> None:
        """Raise CommandError if the user may not execute the command at this moment."""
        ...

    def guard(self, identity: UserIdentity | None) -> None:
        """Use the permissions of this user for all later commands."""
        ...

    def subscriber(self) -> CommandSubscriber:
        """Return the subscriptions of the client."""
        ...

    def unsubscribe(self) -> None:
        """End all subscriptions of the client."""
        ...

    def run_alone(self, work: Coroutine[Any, Any, bytes]) -> None:
        """Run `work` and reply with its result. No other command begins before `work` has ended."""
        ...

    def quit(self, farewell: bytes = ...) -> None:
        """Send a last reply and close the connection. Later commands of the client are not read."""
        ...
