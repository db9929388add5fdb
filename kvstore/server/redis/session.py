"""The state of a Redis connection besides its bytes: protocol version, user, name, transaction. Decides only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.errors import ConditionFailed, StoreError
from kvstore.limits import BATCH_BYTES_MAX
from kvstore.partition.state.commands import Check, Flag, Level, Op
from kvstore.partition.state.operations import size_of
from kvstore.server.access.identities import UserIdentity
from kvstore.server.redis import replies
from kvstore.server.redis.plans import (
    Build,
    CommandError,
    Context,
    Effect,
    Plan,
    Reply,
    Several,
    Single,
    first_failure,
)
from kvstore.server.redis.replies import FORMATS

QUEUED_MAX = 4096
"""Maximum number of commands in one transaction."""
WATCHED_MAX = 1024
"""Maximum number of keys that one connection watches."""
QUEUED_BYTES_MAX = 4 << 20
"""Maximum size in bytes of the queued commands before EXEC checks the transaction. Each command and each of its words
count with this much in addition to its bytes:"""
_COMMAND_BYTES, _WORD_BYTES = 160, 64
REDIS_VERSION = "7.2.0"
"""The Redis version whose behaviour the commands have. Clients read it."""
_IF_VERSION = int(Flag.IF_VERSION)
Facts = Mapping[str, Mapping[str, object]]
"""The content of INFO: sections of names and values."""


class ShownClient(NamedTuple):
    """A connection to the Redis port, as the dashboard shows it."""

    id: int
    address: str
    name: bytes
    user: str
    """The user that the client has proven to be; empty if it has not authenticated."""
    library: bytes
    protocol: int
    """2 or 3, the version of RESP."""


class Transaction(NamedTuple):
    """The operations of EXEC, which take effect together, and their reply."""

    ops: tuple[Op, ...]
    """The checks of the watched keys, then the operations of the queued commands."""
    answer: Callable[[Any], bytes | list[bytes | Effect]]
    """Returns the replies of the queued commands for the list of results, or one reply for the StoreError with which
    the transaction failed. The effects have not taken place."""
    has_effects: bool

    def reply(self, outcome: Any) -> bytes:
        """Return the reply of a transaction without effects."""
        found = self.answer(outcome)
        return found if isinstance(found, bytes) else replies.array(_act(each) for each in found)

    async def act(self, outcome: Any, wait: Callable[[], Awaitable[None]]) -> bytes:
        """Let the effects take place, one after the other and each after a `wait`, and return the reply."""
        found = self.answer(outcome)
        if isinstance(found, bytes):
            return found
        shares = []
        for each in found:
            if isinstance(each, Effect):
                await wait()
            shares.append(_act(each))
        return replies.array(shares)

    def check_size(self) -> None:
        """Raise CommandError if the transaction carries more bytes than one batch may."""
        size = sum(map(size_of, self.ops))
        if size > BATCH_BYTES_MAX:
            raise CommandError(
                f"ERR expected at most {BATCH_BYTES_MAX} bytes of keys and values in a transaction, got {size}"
            )


EXEC_FLAGS = int(Flag.INDEPENDENT)
"""Flags of the batch of a transaction: as in Redis, the failure of one command does not undo the others."""


class RespSession:
    """The state of one connection."""

    def __init__(self, id_: int) -> None:
        self.id = id_
        self.identity: UserIdentity | None = None
        """The user that the client has proven to be; None: not authenticated."""
        self.protocol = 2
        self.level = self._chosen_level = int(Level.LINEARIZABLE)
        """The level of reads. While keys are watched, the chosen level does not apply: EXEC compares the keys with
        their state at the leader, so reads in between must not be older."""
        self.name = b""
        self.library = {b"LIB-NAME": b"", b"LIB-VER": b""}
        self.queued: list[Plan] | None = None
        """The commands since MULTI; None outside a transaction."""
        self.is_plain = True
        """True if a plain GET or SET may begin at once: neither inside MULTI nor while `is_subscriber`."""
        self._subscriptions = 0
        self.watched: dict[bytes, int] = {}
        """The watched keys and their versions at WATCH; 0: absent."""
        self._watched_bytes = 0
        self._queued_bytes = 0
        self._is_aborted = False

    @property
    def held_bytes(self) -> int:
        """Bytes that the queued commands and the watched keys take."""
        return self._watched_bytes + (self._queued_bytes if self.queued else 0)

    def reset(self) -> None:
        """Reset the connection to its initial state."""
        self.__init__(self.id)  # type: ignore[misc]

    def queue(
        self, words: list[bytes], build: Build, context: Context, check: Callable[[Sequence[Op]], None] | None
    ) -> bytes:
        """Add a command to the transaction and return the reply.

        `build` makes its plan in `context`. `check` raises CommandError for operations that the user may not perform.
        Raises CommandError, which marks the transaction as failed.
        """
        assert self.queued is not None
        try:
            if len(self.queued) >= QUEUED_MAX:
                raise CommandError(f"ERR expected at most {QUEUED_MAX} commands in a transaction, got more")
            size = sum(map(len, words)) + _WORD_BYTES * len(words) + _COMMAND_BYTES
            if self._queued_bytes + size > QUEUED_BYTES_MAX:
                raise CommandError(
                    f"ERR expected at most {BATCH_BYTES_MAX} bytes of keys and values in a transaction, got more"
                )
            found = build(words, context)
            if check is not None:
                check(_ops(found))
        except CommandError:
            self._is_aborted = True
            raise
        self.queued.append(found)
        self._queued_bytes += size
        return replies.QUEUED

    def abort(self) -> None:
        """Note that a command was refused. EXEC discards the transaction."""
        self._is_aborted = True

    def refuse(self, words: list[bytes], error: CommandError) -> CommandError:
        """Note that a command is unknown or has a wrong number of words, and return the error of its reply. An EXEC
        with a wrong number of words discards the transaction at once."""
        self._is_aborted = True
        if self.queued is None or words[0].upper() != b"EXEC":
            return error
        self.discard()
        return CommandError(f"EXECABORT Transaction discarded because of: {str(error).removeprefix('ERR ')}")

    def multi(self) -> bytes:
        if self.queued is not None:
            raise CommandError("ERR MULTI calls can not be nested")
        self.queued, self._queued_bytes, self._is_aborted = [], 0, False
        self.is_plain = False
        return replies.OK

    def discard(self) -> bytes:
        if self.queued is None:
            raise CommandError("ERR DISCARD without MULTI")
        self.queued = None
        self._note_mode()
        self.unwatch()
        return replies.OK

    def abandon(self) -> None:
        """End the transaction whose EXEC is refused, and its watches. Outside a transaction, do nothing."""
        if self.queued is not None:
            self.discard()

    @property
    def is_subscriber(self) -> bool:
        """True if the client has subscriptions and speaks RESP2, in which messages look like replies. It may then send
        only the commands of a subscriber."""
        return self._subscriptions > 0 and self.protocol == 2

    def subscribed(self, subscriptions: int) -> None:
        """Note the number of the client's subscriptions."""
        self._subscriptions = subscriptions
        self._note_mode()

    def use_protocol(self, version: int) -> None:
        """Speak this version of the protocol from now on."""
        self.protocol = version
        self._note_mode()

    def _note_mode(self) -> None:
        self.is_plain = self.queued is None and not self.is_subscriber

    def choose_level(self, level: Level) -> None:
        """Set the level of reads from now on."""
        self._chosen_level = int(level)
        if not self.watched:
            self.level = self._chosen_level

    def watch(self, key: bytes, version: int) -> None:
        """Make the next transaction depend on this version of a key; 0: the key is absent."""
        if key not in self.watched:
            self.watched[key] = version
            self._watched_bytes += len(key) + _WORD_BYTES
        self.level = int(Level.LINEARIZABLE)

    def unwatch(self) -> dict[bytes, int]:
        """Stop watching keys, and return the watched keys."""
        watched, self.watched, self._watched_bytes = self.watched, {}, 0
        self.level = self._chosen_level
        return watched

    def check_watch(self, keys: Sequence[bytes]) -> None:
        """Raise CommandError if the keys cannot be watched."""
        if self.queued is not None:
            raise CommandError("ERR WATCH inside MULTI is not allowed")
        if len(self.watched.keys() | keys) > WATCHED_MAX:
            raise CommandError(f"ERR expected at most {WATCHED_MAX} watched keys, got more")

    def execute(self) -> Transaction:
        """End the transaction and return it, on the condition that the watched keys are unchanged. Raises
        CommandError."""
        if self.queued is None:
            raise CommandError("ERR EXEC without MULTI")
        queued, self.queued = self.queued, None
        self._note_mode()
        watched = self.unwatch()
        if self._is_aborted:
            raise CommandError("EXECABORT Transaction discarded because of previous errors.")
        checks = [Check(key, _IF_VERSION, version, None) for key, version in watched.items()]
        ops = (*checks, *(op for each in queued for op in _ops(each)))
        has_effects = any(isinstance(each, Effect) for each in queued)
        return Transaction(ops, _answering(queued, len(checks), self.protocol), has_effects)

    def shown(self, address: str) -> ShownClient:
        """Return the connection as the dashboard shows it."""
        user = self.identity.name if self.identity is not None else ""
        return ShownClient(self.id, address, self.name, user, self.library[b"LIB-NAME"], self.protocol)

    def describe(self, address: str) -> bytes:
        """Return the connection in the form of CLIENT LIST."""
        library, version = self.library[b"LIB-NAME"], self.library[b"LIB-VER"]
        user = b" user=%b" % self.identity.name.encode() if self.identity is not None else b""
        return b"id=%d addr=%b name=%b db=0%b resp=%d lib-name=%b lib-ver=%b\n" % (
            *(self.id, address.encode(), self.name, user, self.protocol, library, version),
        )


def _ops(queued: Plan) -> tuple[Op, ...]:
    match queued:
        case Single(op, _):
            return (op,)
        case Several(ops):
            return tuple(ops)
        case _:
            return ()


def _answering(queued: list[Plan], checks: int, protocol: int) -> Callable[[Any], bytes | list[bytes | Effect]]:
    formats = FORMATS[protocol]

    def answer(outcome: Any) -> bytes | list[bytes | Effect]:
        if isinstance(outcome, ConditionFailed):  # of the watched keys: other conditions fail only their own operation
            return replies.NULL_ARRAY[protocol]
        if isinstance(outcome, StoreError):
            return first_failure([outcome])
        return _shares(queued, outcome[checks:], formats)

    return answer


def _act(share: bytes | Effect) -> bytes:
    return share if isinstance(share, bytes) else share.act()


def _shares(queued: list[Plan], results: list[Any], formats: tuple[replies.Format, ...]) -> list[bytes | Effect]:
    """Return the reply of each queued command, made of its part of the results, or its effect."""
    shares: list[bytes | Effect] = []
    at = 0
    for each in queued:
        match each:
            case Reply(data):
                shares.append(data)
            case Effect():
                shares.append(each)
            case Single(_, format_):
                shares.append(formats[format_](results[at]))
                at += 1
            case Several(ops, combine, _):
                shares.append(combine(list(results[at : at + len(ops)])))
                at += len(ops)
    return shares
