"""Transactions: commands that take effect together if the watched keys are unchanged."""

from __future__ import annotations

from typing import Any

from kvstore.errors import StoreError
from kvstore.partition.state import commands
from kvstore.partition.state.operations import BATCH_RESULT_BYTES_MAX
from kvstore.server.redis import replies
from kvstore.server.redis.commands.asking import ask_as_user, atomic
from kvstore.server.redis.commands.atomic import Atomic
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.commands.row import ALL_KEYS, Alone, Command, Family, InMulti, reads, replying
from kvstore.server.redis.gate import Need
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import Reply, Several, check_key, value_bytes
from kvstore.server.redis.session import EXEC_FLAGS, Transaction


def _exec(performer: Performer, words: Words) -> None:
    found = performer.session.execute()
    together = atomic(performer)
    if found.has_effects or together.may_span(found.ops):
        performer.run_alone(_run(performer, together, found))
    elif not found.ops:
        performer.perform(Reply(found.reply([])))
    else:
        batch = together.operation(found.ops, EXEC_FLAGS)
        found.check_size()
        performer.perform(Several([batch], lambda results: found.reply(results[0])))


async def _run(performer: Performer, together: Atomic, found: Transaction) -> bytes:
    """Execute a transaction that publishes messages or whose keys have several tags. Later commands of the connection
    wait meanwhile: for the messages, and because the leader of a key does not know their order while the transaction
    is tried again (docs/protocol.md M15)."""
    outcome: Any = []
    try:
        found.check_size()
        if found.ops:
            outcome = await together(found.ops, EXEC_FLAGS)
    except StoreError as error:
        outcome = error
    return await found.act(outcome, performer.server.channels.work.wait_free)


def _exec_bytes(performer: Performer, words: Words) -> int:
    return value_bytes(performer.session.queued or (), BATCH_RESULT_BYTES_MAX)


def _watch(performer: Performer, words: Words) -> None:
    named = list(dict.fromkeys(map(check_key, words[1:])))
    performer.session.check_watch(named)

    async def work() -> bytes:
        found = [await ask_as_user(performer)(commands.Meta(key)) for key in named]
        for key, each in zip(named, found, strict=True):
            performer.session.watch(key, 0 if each is None else each[1])
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
            "MULTI",
            "Begin a transaction.",
            _MULTI,
            1,
            1,
            Need.LOGIN,
            differs="The keys of a transaction must be in one partition, otherwise EXEC replies CROSSSLOT. Put the "
            "same `{tag}` into the keys, or set `[redis] transactions_across_slots = true`. The limit is 4,096 "
            "commands and 1 MiB, and over several partitions also 100 keys and 16 partitions.",
        ),
        Command(
            "EXEC",
            "Execute the queued commands atomically.",
            _EXEC,
            1,
            1,
            Need.LOGIN,
            differs="Replies TRYAGAIN if other transactions over several partitions hold the keys for 5 seconds.",
        ),
        Command("DISCARD", "Discard the queued commands.", _DISCARD, 1, 1, Need.LOGIN),
        reads(
            "WATCH",
            "Watch keys; the next transaction fails if one of them changes.",
            _WATCH,
            2,
            0,
            ALL_KEYS,
            "EXEC compares versions, so a key that was absent and is absent again counts as unchanged. Watched keys "
            "count as keys of the transaction. The limit is 1,024 keys.",
        ),
        Command("UNWATCH", "Forget the watched keys.", replying(_unwatch, InMulti.IGNORED), 1, 1, Need.LOGIN),
    ),
)
