"""The row of a Redis command: everything that the server knows about one command, and its handler.

A handler is a function that makes a plan (plans.py), or `Alone`. Each other file of this folder has the rows of one
family beside their handlers; table.py finds a row by the name of the command. Decides only.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from kvstore.server.redis import replies
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.gate import ChannelNeed, Need
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import Build, CommandError, Context, Plan, Reply

OPTIONS_MAX = 32
"""Maximum number of words of a command that takes options or names."""


class InMulti(Enum):
    """How a command is treated between MULTI and EXEC."""

    QUEUED = auto()
    """The command is queued, and EXEC executes it."""
    IGNORED = auto()
    """The command is queued, and EXEC replies OK."""
    AT_ONCE = auto()
    """The command is executed at once."""
    REFUSED = auto()
    """The command is refused, and EXEC discards the transaction."""


class KeyPositions(NamedTuple):
    """The positions of a command's keys among its words: the first key, the last key (counted from the end if
    negative), and the step between keys. All are 0 if the command has no keys or if their positions depend on its
    words."""

    first: int = 0
    last: int = 0
    step: int = 0


ONE_KEY, TWO_KEYS, ALL_KEYS, PAIRS = (
    KeyPositions(1, 1, 1),
    KeyPositions(1, 2, 1),
    KeyPositions(1, -1, 1),
    KeyPositions(1, -1, 2),
)
NO_KEYS = KeyPositions()
NOT_ATOMIC = "Not atomic across partitions."
"""Difference from Redis of a command on keys of several partitions."""
ONE_PARTITION = (
    "Keys of several partitions need `[redis] transactions_across_slots = true`, otherwise the reply is CROSSSLOT."
)
"""Difference from Redis of a command that changes several keys together."""
READS_FIRST = (
    "Reads the key, then writes if no other client has changed it. Takes at least two log entries, and more when other "
    "clients write the key."
)
"""Difference from Redis of a command that reads before it writes."""


class Alone(NamedTuple):
    """The handler of a command that is more than operations on keys. The command begins when every earlier command has
    been answered, and no later command begins before it is answered."""

    act: Callable[[Performer, Words], None]
    """Executes the command. Raises CommandError. The handler must send a reply, now or later."""
    reply_bytes: Callable[[Performer, Words], int] = lambda performer, words: 0
    """Returns the maximum number of bytes that the reply takes, together with the keys or values from which it is
    made; 0 if they are few. The command begins when that much reply memory is free. Raises CommandError."""
    in_multi: InMulti = InMulti.REFUSED
    begins_operations: bool = False
    """True if `act` itself begins operations of the connection. The command waits while the connection may begin none.
    """
    is_channel_work: bool = False
    """True if `act` begins or ends subscriptions. The command waits while Pub/Sub has enough work (channel_work.py)."""


class Command(NamedTuple):
    """The definition of a supported Redis command."""

    name: str
    """The name in capital letters."""
    summary: str
    """One sentence, for COMMAND DOCS and docs/reference/redis.md."""
    handler: Build | Alone
    least: int
    """The minimum number of words, including the name."""
    most: int
    """The maximum number of words; 0: any number."""
    need: Need | Callable[[Words], Need | ChannelNeed]
    """The permissions that the command requires; a function if they depend on its words."""
    keys: KeyPositions = NO_KEYS
    flag: str = ""
    """`readonly` or `write`, for clients that choose among nodes; `pubsub` if clients choose the node by the names of
    channels; otherwise empty."""
    differs: str = ""
    """How the command differs from Redis, for docs/reference/redis.md."""

    @property
    def in_multi(self) -> InMulti:
        return self.handler.in_multi if isinstance(self.handler, Alone) else InMulti.QUEUED

    def need_of(self, words: Words) -> Need | ChannelNeed:
        return self.need if isinstance(self.need, Need) else self.need(words)

    def plan_in_multi(self, words: Words, context: Context) -> Plan:
        """Return the plan that MULTI queues. Raises CommandError if the command is not allowed in a transaction. As
        in Redis, invalid arguments fail only this command, at EXEC."""
        if isinstance(self.handler, Alone):
            if self.handler.in_multi is InMulti.IGNORED:
                return Reply(replies.OK)
            raise CommandError(f"ERR {self.name} is not allowed in transactions")
        try:
            return self.handler(words, context)
        except CommandError as error:
            return Reply(replies.error(str(error)))


class Unsupported(NamedTuple):
    """The row of a command that Redis has and this store does not support."""

    name: str
    reason: str
    """The alternative, or the reason why there is no such command."""


class Family(NamedTuple):
    """A group of related Redis commands."""

    title: str
    group: str
    """The name that Redis uses for this kind, for COMMAND DOCS."""
    rows: tuple[Command, ...]


def reads(
    name: str,
    summary: str,
    handler: Build | Alone,
    least: int,
    most: int,
    keys: KeyPositions = ONE_KEY,
    differs: str = "",
) -> Command:
    """Return the row of a command that reads its keys."""
    return Command(name, summary, handler, least, most, Need.OPERATIONS, keys, "readonly", differs)


def writes(
    name: str,
    summary: str,
    handler: Build | Alone,
    least: int,
    most: int,
    keys: KeyPositions = ONE_KEY,
    differs: str = "",
) -> Command:
    """Return the row of a command that writes its keys."""
    return Command(name, summary, handler, least, most, Need.OPERATIONS, keys, "write", differs)


def subcommands(name: str, known: dict[str, tuple[int, int, Build]], hint: str = "") -> Build:
    """Return the handler of a command that has subcommands.

    `known` maps the name of each subcommand to its minimum and maximum number of words, which include both names, and
    to its handler. Every such command also supports HELP. `hint` says where to find what other subcommands offer in
    Redis.
    """
    supported = f"{name} supports {', '.join(sorted(known))} here{hint}"

    def build(words: Words, context: Context) -> Plan:
        second = words[1].upper().decode("utf-8", "replace")
        if second == "HELP" and len(words) == 2:
            return Reply(replies.array([replies.status(supported)]))
        if second not in known:
            raise CommandError(f"ERR unknown subcommand. {supported}")
        least, most, plan = known[second]
        if not least <= len(words) <= most:
            raise CommandError(f"ERR wrong number of arguments for '{name.lower()}|{second.lower()}' command")
        return plan(words, context)

    return build


def replying(make: Callable[[Performer, Words], bytes], in_multi: InMulti = InMulti.REFUSED) -> Alone:
    """Return a handler that replies with the result of `make`."""
    return Alone(lambda performer, words: performer.replies.reply(make(performer, words)), in_multi=in_multi)


def in_turn(make: Callable[[Performer, Words], bytes]) -> Alone:
    """Return a handler that replies with the result of `make` in a later turn of the event loop. Use it if the reply
    is much larger than the command: then each turn makes only one such reply, even if a client sends many commands
    at once."""

    def act(performer: Performer, words: Words) -> None:
        async def work() -> bytes:
            return make(performer, words)

        performer.run_alone(work())

    return Alone(act)
