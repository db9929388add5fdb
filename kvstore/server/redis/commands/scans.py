"""Commands on all keys, or on all keys that the user may read: scans, counts, FLUSHALL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import zip_longest

from kvstore.access import Right
from kvstore.env.networks import network_of
from kvstore.limits import KEY_BYTES_MAX
from kvstore.ring.hashing import SLOTS, SLOTS_HASH, TOKENS
from kvstore.server.redis import replies
from kvstore.server.redis.commands.asking import ask_partitions, change, may_count, visible
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.commands.row import NO_KEYS, OPTIONS_MAX, Alone, Command, Family
from kvstore.server.redis.gate import Need
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import REPLY_BYTES_MAX, CommandError, check_pattern, integer
from kvstore.server.routing import keys

KEYS_MAX = 100_000
"""Maximum number of keys in a store for which KEYS is executed, because it would hold all keys in memory at once."""
SCAN_COUNT_MAX = 10_000
SLOT_KEYS_MAX = 10_000
"""Maximum number of keys in the reply to CLUSTER GETKEYSINSLOT. More keys are refused, because a reply with fewer keys
than the client asked for means that the slot has no more."""
_CURSOR_MAX = (1 << 64) - 1


Work = Callable[[keys.Ask, keys.Rings, int], Awaitable[bytes]]
"""Traverses all partitions at a level, by a function that asks one of them. Returns a reply."""


def _traverse(performer: Performer, words: Words, work: Work) -> None:
    """Run `work`, and reply with its result if the user may still execute the command. As at the other endpoints, the
    number of concurrent traversals is limited in total and per user or network. A traversal is charged to the rates of
    the namespaces that contain the user's keys."""
    gate, server, network = performer.gate, performer.server, network_of(performer.client.host)

    async def admitted() -> bytes:
        async with server.scans.place("" if gate is None else gate.identity.name, network):
            rates, starts = server.rates(), [start for start, _ in _spans(performer)]
            if rates is not None and (refusal := rates.refusal_or_none(starts)) is not None:
                raise refusal
            reply = await work(ask_partitions(performer, words), lambda: server.ring, performer.session.level)
            performer.check(words)
            return reply

    performer.run_alone(admitted())


def _spans(performer: Performer) -> keys.Spans:
    """Return the ranges of keys that the user may read."""
    return keys.ALL_KEYS if performer.gate is None else performer.gate.identity.permissions.ranges[Right.READ].spans


def _dbsize(performer: Performer, words: Words) -> None:
    async def work(ask: keys.Ask, rings: keys.Rings, level: int) -> bytes:
        return replies.number(await keys.count_keys(ask, rings, level))

    _traverse(performer, words, work)


def _slot_of(performer: Performer, word: bytes) -> int:
    """Return the number of a slot. Raises CommandError."""
    slot = integer(word)
    if not 0 <= slot < SLOTS:
        raise CommandError("ERR Invalid or out of range slot")
    if performer.server.ring.hash is not SLOTS_HASH:
        raise CommandError(
            f"ERR expected the key hash {SLOTS_HASH.name}, got {performer.server.ring.hash.name}, with which keys are "
            "not stored by slots"
        )
    return slot


def count_keys_in_slot(performer: Performer, words: Words) -> None:
    """Execute CLUSTER COUNTKEYSINSLOT."""
    slot = _slot_of(performer, words[2])

    async def work(ask: keys.Ask, rings: keys.Rings, level: int) -> bytes:
        return replies.number(await keys.count_slot(ask, rings, slot, level))

    _traverse(performer, words, work)


def keys_in_slot(performer: Performer, words: Words) -> None:
    """Execute CLUSTER GETKEYSINSLOT."""
    slot, most = _slot_of(performer, words[2]), integer(words[3])
    if not 0 <= most <= SLOT_KEYS_MAX:
        raise CommandError(f"ERR expected 0 to {SLOT_KEYS_MAX} keys, got {most}")

    async def work(ask: keys.Ask, rings: keys.Rings, level: int) -> bytes:
        found = await keys.keys_of_slot(ask, rings, slot, level, most=most, bytes_max=REPLY_BYTES_MAX)
        return replies.bulks(found)

    _traverse(performer, words, work)


def slot_reply_bytes(words: Words) -> int:
    """Return the maximum number of bytes that the reply to CLUSTER GETKEYSINSLOT takes, with the keys from which it is
    made. Raises CommandError."""
    return 2 * min(max(integer(words[3]), 0) * KEY_BYTES_MAX, REPLY_BYTES_MAX)


def _keys(performer: Performer, words: Words) -> None:
    pattern = check_pattern(words[1])
    fits, prefix = keys.matcher(pattern), keys.literal_prefix(pattern)

    async def some(ask: keys.Ask, rings: keys.Rings, level: int, spans: keys.Spans) -> list[bytes]:
        """Read keys by the prefixes that the user may read. Keys of other users are neither read nor counted."""
        found, is_complete = await keys.keys_in(
            ask, rings, spans, level, keys_max=KEYS_MAX, bytes_max=REPLY_BYTES_MAX, matches=fits
        )
        if not is_complete and sum(map(len, found)) > REPLY_BYTES_MAX:
            raise CommandError(f"ERR expected a reply of at most {REPLY_BYTES_MAX} bytes, got more; use SCAN")
        if not is_complete:
            raise CommandError(f"ERR expected at most {KEYS_MAX} keys with this prefix, got more; use SCAN")
        return found

    async def work(ask: keys.Ask, rings: keys.Rings, level: int) -> bytes:
        spans = keys.within(_spans(performer), prefix)
        if tuple(spans) != tuple(keys.ALL_KEYS):
            found = await some(ask, rings, level, spans)
        else:
            there = await keys.count_keys(ask, rings, level)
            if there > KEYS_MAX:
                raise CommandError(f"ERR expected at most {KEYS_MAX} keys in the store for KEYS, got {there}; use SCAN")
            found = await keys.all_keys(ask, rings, level, matches=fits, bytes_max=REPLY_BYTES_MAX)
        return replies.bulks(visible(performer, found))

    _traverse(performer, words, work)


def _cursor_of(words: Words) -> int:
    """Return the cursor of SCAN. Raises CommandError."""
    if not words[1].isdigit() or len(words[1]) > 20 or int(words[1]) > _CURSOR_MAX:
        raise CommandError("ERR invalid cursor")
    return int(words[1])


def _options_of(words: Words) -> tuple[int, bytes, bool]:
    """Return COUNT, the pattern, and True unless SCAN asks for a type other than string, the only type here. Raises
    CommandError."""
    count, pattern, wants_strings = 10, b"*", True
    for option, value in zip_longest(words[::2], words[1::2]):
        match option.upper() if value is not None else b"":
            case b"COUNT":
                count = min(integer(value), SCAN_COUNT_MAX)
                if count < 1:
                    raise CommandError("ERR syntax error")
            case b"MATCH":
                pattern = check_pattern(value)
            case b"TYPE":
                wants_strings = value.lower() == b"string"
            case _:
                raise CommandError("ERR syntax error")
    return count, pattern, wants_strings


def _scan_bytes(performer: Performer, words: Words) -> int:
    _cursor_of(words)
    return 2 * min(_options_of(words[2:])[0] * KEY_BYTES_MAX, keys.SCAN_BYTES_MAX)


def _scan(performer: Performer, words: Words) -> None:
    cursor = _cursor_of(words)
    count, pattern, wants_strings = _options_of(words[2:])

    async def work(ask: keys.Ask, rings: keys.Rings, level: int) -> bytes:
        matches, after, found = keys.matcher(pattern), 0, list[bytes]()
        if cursor < TOKENS and wants_strings:
            if may_count(performer):
                after, found = await keys.scan(ask, rings, cursor, count, level)
            else:
                after, found = await keys.scan_shown(
                    ask,
                    rings,
                    cursor,
                    count,
                    level,
                    shown=lambda key: bool(visible(performer, [key])),
                    spans=_spans(performer),
                )
        matching = await keys.matching(visible(performer, found), matches)
        return replies.array([replies.bulk(b"%d" % after), replies.bulks(visible(performer, matching))])

    _traverse(performer, words, work)


def _random_key(performer: Performer, words: Words) -> None:
    """Reply with the first key after a random position on the ring. A key is therefore more likely the larger the
    gap before it. If the user may read none of the next keys, find a key by the prefixes that the user may read, so
    that keys of other users cost nothing."""
    start, protocol = performer.server.random.randrange(TOKENS), performer.session.protocol

    async def near(ask: keys.Ask, rings: keys.Rings, level: int) -> list[bytes]:
        count = 1 if may_count(performer) else keys.FIRST_PAGE_KEYS
        after, found = await keys.scan(ask, rings, start, count, level)
        if not found and not after:
            _, found = await keys.scan(ask, rings, 0, count, level)
        return visible(performer, found)

    async def own(ask: keys.Ask, rings: keys.Rings, level: int) -> list[bytes]:
        spans = _spans(performer)
        for span in performer.server.random.sample(spans, len(spans)):
            found, _ = await keys.keys_in(
                ask, rings, (span,), level, keys_max=keys.SEEK_KEYS_MAX, bytes_max=keys.SCAN_BYTES_MAX
            )
            if own_keys := visible(performer, found):
                return own_keys
        return []

    async def work(ask: keys.Ask, rings: keys.Rings, level: int) -> bytes:
        if shown := await near(ask, rings, level):
            return replies.bulk(shown[0])
        if shown := await own(ask, rings, level):
            return replies.bulk(performer.server.random.choice(shown))
        return replies.NULL[protocol]

    _traverse(performer, words, work)


def _flush(performer: Performer, words: Words) -> None:
    """Delete every key, in one partition after the other."""
    if not performer.server.allows_flush:
        raise CommandError(
            f"ERR {words[0].upper().decode()} is disabled; set redis_flush = true in [server] to enable it"
        )
    if len(words) == 2 and words[1].upper() not in (b"SYNC", b"ASYNC"):
        raise CommandError("ERR syntax error")

    async def work() -> bytes:
        await keys.delete_all(ask_partitions(performer, words, as_user=True), lambda: performer.server.ring)
        return replies.OK

    change(performer, words[0].upper().decode(), work)


_FLUSH = (
    "Disabled unless `[server] redis_flush = true`, which is meant for test stores. Deletes one partition after the "
    "other; each deletion goes through the log."
)

FAMILY = Family(
    "Scans",
    "generic",
    (
        Command(
            "SCAN",
            "Return some of the keys and a cursor to continue with.",
            Alone(_scan, _scan_bytes),
            2,
            OPTIONS_MAX,
            Need.READ_SOME,
            differs="The cursor is a position on the ring, and any node accepts it. A key that exists during the whole "
            "scan is returned. All keys of one hash tag come in one reply, whatever COUNT is. If a tag has more than "
            "100,000 keys, or 16 MiB of keys, SCAN fails at that tag for every client: divide the keys among several "
            "tags. Scans over gRPC and HTTP follow the order of keys and have no such limit.",
        ),
        Command(
            "KEYS",
            "Return the keys that match a pattern.",
            Alone(_keys, lambda p, words: 2 * REPLY_BYTES_MAX),
            2,
            2,
            Need.READ_SOME,
            differs="Fails if the store has more than 100,000 keys, or the matching keys exceed 32 MiB: use SCAN. If "
            "the pattern begins with literal bytes, as `user:*` does, only keys with that prefix are counted and read.",
        ),
        Command("RANDOMKEY", "Return a random key.", Alone(_random_key), 1, 1, Need.READ_SOME),
        Command(
            "DBSIZE",
            "Return the number of keys.",
            Alone(_dbsize),
            1,
            1,
            Need.READ_ALL,
            differs="The sum over all partitions, each counted at its own moment.",
        ),
        Command("FLUSHDB", "Delete all keys.", Alone(_flush), 1, 2, Need.WRITE_ALL, NO_KEYS, "write", _FLUSH),
        Command("FLUSHALL", "Delete all keys.", Alone(_flush), 1, 2, Need.WRITE_ALL, NO_KEYS, "write", _FLUSH),
    ),
)
