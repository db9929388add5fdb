"""Submits operations and makes administrative changes on behalf of a connection's user."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from kvstore.access import Right
from kvstore.errors import Unavailable
from kvstore.limits import VALUE_BYTES_MAX
from kvstore.partition.state.commands import Op
from kvstore.server.access.audit import CallAuthor
from kvstore.server.redis.commands.atomic import Ask, Atomic
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.commands.row import Alone
from kvstore.server.redis.parser import Words
from kvstore.server.routing import keys
from kvstore.server.routing.ask import ask
from kvstore.types import PartitionId

Rewriting = Callable[[Atomic, Words], Coroutine[Any, Any, bytes]]
"""Executes a command that writes its keys together, and returns the reply."""


def ask_as_user(performer: Performer) -> Ask:
    """Return a function that submits an operation with the permissions that the user has at the time of the call.
    Permissions may change while a command waits between its operations."""

    async def asking(op: Op) -> Any:
        return await ask(performer.replies.backend, op)

    return asking


def ask_partitions(performer: Performer, words: Words, *, as_user: bool = False) -> keys.Ask:
    """Return a function that submits an operation to a partition. The function raises an error once the client has
    disconnected or its user may no longer execute the command, so that a long traversal ends.

    With `as_user`, each operation also requires the user's own permissions on its keys.
    """

    async def asking(op: Op, partition: PartitionId) -> Any:
        if performer.replies.is_gone:
            raise Unavailable("the client is gone")
        if as_user:
            return await ask(performer.replies.backend, op, partition)
        performer.check(words)
        return await performer.server.ask(op, partition)

    return asking


def atomic(performer: Performer) -> Atomic:
    """Return an Atomic for one command of the user."""
    server = performer.server
    return Atomic(
        ask_as_user(performer),
        server.owner_of,
        spans_slots=server.transactions_across_slots,
        now=server.now,
        random=server.random,
        is_gone=lambda: performer.replies.is_gone,
    )


def rewriting(command: Rewriting, value_bytes: int = VALUE_BYTES_MAX) -> Alone:
    """Return the handler of a command that writes several keys together, or reads a key before it writes it
    (rewrite.py). `value_bytes` is the maximum size of the value that the command reads."""

    def act(performer: Performer, words: Words) -> None:
        performer.run_alone(command(atomic(performer), words))

    return Alone(act, lambda performer, words: value_bytes)


def change(performer: Performer, call: str, work: Callable[[], Awaitable[bytes]]) -> None:
    """Make the administrative change `work`, audited as `call`, and reply with the bytes that `work` returns."""
    identity = performer.session.identity
    by = CallAuthor("" if identity is None else identity.who, performer.client.address)
    performer.run_alone(performer.server.changes.make(by, call, work))


def visible(performer: Performer, found: list[bytes]) -> list[bytes]:
    """Return those of the keys that the user may read."""
    if performer.gate is None:
        return found
    prefixes = performer.gate.identity.permissions.read
    return [key for key in found if key.startswith(prefixes)]


def may_count(performer: Performer) -> bool:
    """Return True if the user may learn the number of keys, because the user may read every key."""
    return performer.gate is None or performer.gate.identity.permissions.may_all(Right.READ, b"", b"")
