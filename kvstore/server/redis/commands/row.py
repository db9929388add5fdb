"""The row of a Redis command: everything that the server knows about one command, and the handler that does it.

A handler is a function that makes a plan (plans.py), or `Alone`. Each file of this folder beside this one has the rows
of one family, next to their handlers; table.py finds a command's row by its name. Decides only.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from kvstore.server.redis import replies
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.gate import Need
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import Build, CommandError, Context, Plan, Reply

OPTIONS_MAX = 32
"""Words of a command that takes options or names."""


class InMulti(Enum):
    """The ways in which a command is treated between MULTI and EXEC."""

    QUEUED = auto()
    """It is queued, and EXEC carries it out."""
    IGNORED = auto()
    """It is queued, and EXEC replies OK."""
    AT_ONCE = auto()
    """It is carried out at once."""
    REFUSED = auto()
    """It is refused, and EXEC discards the transaction."""


class Keys(NamedTuple):
    """Places of a command's keys among its words: the first, the last (negative: from the end), and the step between
    them. All 0: the command names no keys, or their places depend on its words."""

    first: int = 0
    last: int = 0
    step: int = 0


ONE_KEY, TWO_KEYS, ALL_KEYS, PAIRS = Keys(1, 1, 1), Keys(1, 2, 1), Keys(1, -1, 1), Keys(1, -1, 2)
NO_KEYS = Keys()


class Alone(NamedTuple):
    """The handler of a command that is more than operations on keys. The command begins when every command before it
    has been answered, and no command after it begins before it is answered."""

    act: Callable[[Performer, Words], None]
    """Carries the command out. Raises CommandError."""
    reply_bytes: Callable[[Performer, Words], int] = lambda performer, words: 0
    """The largest number of bytes that the reply, and the keys or values that it is made of, may take; 0: few. The
    command begins when there is that much room. Raises CommandError."""
    in_multi: InMulti = InMulti.REFUSED
    begins_operations: bool = False
    """True if `act` itself begins operations of the connection. The command waits while the connection may begin none.
    """


class Command(NamedTuple):
    """The row of a command that is supported."""

    name: str
    """In capital letters."""
    summary: str
    """One sentence, for COMMAND DOCS and docs/reference/redis.md."""
    handler: Build | Alone
    least: int
    """The smallest number of words, the name included."""
    most: int
    """The largest number of words; 0: any number."""
    need: Need | Callable[[Words], Need]
    """What the command needs of its user; a function if it depends on the subcommand."""
    keys: Keys = NO_KEYS
    flag: str = ""
    """`readonly` or `write`, for clients that choose among nodes; empty if the command is about no keys."""
    differs: str = ""
    """How the command differs from the one of Redis, for docs/reference/redis.md."""

    @property
    def in_multi(self) -> InMulti:
        return self.handler.in_multi if isinstance(self.handler, Alone) else InMulti.QUEUED

    def need_of(self, words: Words) -> Need:
        return self.need if isinstance(self.need, Need) else self.need(words)

    def plan_in_multi(self, words: Words, context: Context) -> Plan:
        """Return the plan that a transaction queues. Raises CommandError if the command is not allowed in one. As in
        Redis, wrong arguments fail only the command itself, at EXEC."""
        if isinstance(self.handler, Alone):
            if self.handler.in_multi is InMulti.IGNORED:
                return Reply(replies.OK)
            raise CommandError(f"ERR {self.name} is not allowed in transactions")
        try:
            return self.handler(words, context)
        except CommandError as error:
            return Reply(replies.error(str(error)))


class Unsupported(NamedTuple):
    """The row of a command that Redis has and this store has not."""

    name: str
    reason: str
    """What to do instead, or why there is no such command."""


class Family(NamedTuple):
    """The commands of one kind."""

    title: str
    group: str
    """The name of Redis for this kind, for COMMAND DOCS."""
    rows: tuple[Command, ...]


def reads(
    name: str, summary: str, handler: Build | Alone, least: int, most: int, keys: Keys = ONE_KEY, differs: str = ""
) -> Command:
    """Return the row of a command that reads the keys that it names."""
    return Command(name, summary, handler, least, most, Need.OPERATIONS, keys, "readonly", differs)


def writes(
    name: str, summary: str, handler: Build | Alone, least: int, most: int, keys: Keys = ONE_KEY, differs: str = ""
) -> Command:
    """Return the row of a command that writes keys that it names."""
    return Command(name, summary, handler, least, most, Need.OPERATIONS, keys, "write", differs)


def subcommands(name: str, known: dict[str, tuple[int, int, Build]], hint: str = "") -> Build:
    """Return the handler of a command that is several by its second word. `known`: the smallest and the largest number
    of words of each subcommand, both names included, and its handler. Every such command has HELP too. `hint`: where to
    find what the other subcommands of Redis do."""
    told = f"{name} has {', '.join(sorted(known))} here{hint}"

    def build(words: Words, context: Context) -> Plan:
        second = words[1].upper().decode("utf-8", "replace")
        if second == "HELP" and len(words) == 2:
            return Reply(replies.array([replies.status(told)]))
        if second not in known:
            raise CommandError(f"ERR unknown subcommand. {told}")
        least, most, plan = known[second]
        if not least <= len(words) <= most:
            raise CommandError(f"ERR wrong number of arguments for '{name.lower()}|{second.lower()}' command")
        return plan(words, context)

    return build


def replying(make: Callable[[Performer, Words], bytes], in_multi: InMulti = InMulti.REFUSED) -> Alone:
    """Return the handler that replies with the result of `make`."""
    return Alone(lambda performer, words: performer.replies.reply(make(performer, words)), in_multi=in_multi)


def in_turn(make: Callable[[Performer, Words], bytes]) -> Alone:
    """Return the handler that replies with the result of `make`, in another turn of the event loop: a reply that is
    much larger than its command. So one turn makes only one of them, however many a client sends at once."""

    def act(performer: Performer, words: Words) -> None:
        async def work() -> bytes:
            return make(performer, words)

        performer.run_alone(work())

    return Alone(act)
