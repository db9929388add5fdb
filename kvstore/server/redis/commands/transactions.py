"""Transactions: commands that execute as one atomic batch if the watched keys are unchanged."""

from __future__ import annotations

from kvstore.partition.state import commands
from kvstore.partition.state.operations import BATCH_RESULT_BYTES_MAX
from kvstore.server.redis import replies
from kvstore.server.redis.commands.asking import ask_as_user
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.commands.row import ALL_KEYS, Alone, Command, Family, InMulti, reads, replying
from kvstore.server.redis.gate import Need
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import check_key, value_bytes


def _exec(performer: Performer, words: Words) -> None:
    performer.perform(performer.session.execute(performer.server.owner_of))


def _exec_bytes(performer: Performer, words: Words) -> int:
    return value_bytes(performer.session.queued or (), BATCH_RESULT_BYTES_MAX)


def _watch(performer: Performer, words: Words) -> None:
    named = list(dict.fromkeys(map(check_key, words[1:])))
    performer.session.check_watch(named)

    async def work() -> bytes:
        for key in named:
            found = await ask_as_user(performer)(commands.meta(key))
            performer.session.watch(key, 0 if found is None else found[1])
        return replies.OK

    performer.run_alone(work())


def _unwatch(performer: Performer, words: Words) -> bytes:
    performer.session.unwatch()
    return replies.OK


_MULTI = replying(lambda performer, words: performer.session.multi(), InMulti.AT_ONCE)
_EXEC = Alone(_exec, _exec_bytes, InMulti.AT_ONCE, begins_operations=True)
_DISCARD = replying(lambda performer, words: performer.session.discard(), InMulti.AT_ONCE)
_WATCH = Alone(_watch, in_multi=InMulti.AT_ONCE)

FAMILY = Family(
    "Transactions",
    "transactions",
    (
        Command(
            *("MULTI", "Begin a transaction.", _MULTI, 1, 1, Need.LOGIN),
            differs="A transaction is one atomic batch. All its keys must be in one partition, otherwise EXEC replies "
            "CROSSSLOT: put the same `{tag}` into the keys. The limit is 4,096 commands and 1 MiB.",
        ),
        Command("EXEC", "Execute the queued commands atomically.", _EXEC, 1, 1, Need.LOGIN),
        Command("DISCARD", "Discard the queued commands.", _DISCARD, 1, 1, Need.LOGIN),
        reads(
            *("WATCH", "Watch keys; the next transaction fails if one of them changes.", _WATCH, 2, 0, ALL_KEYS),
            "EXEC compares versions, so a key that was absent and is absent again counts as unchanged. The keys "
            "must be in the partition of the transaction. The limit is 1,024 keys.",
        ),
        Command("UNWATCH", "Forget the watched keys.", replying(_unwatch, InMulti.IGNORED), 1, 1, Need.LOGIN),
    ),
)
