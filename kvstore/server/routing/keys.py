"""Walking over the keys of all partitions: in the order of the ring for SCAN, partition by partition for KEYS and
DBSIZE."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from kvstore.access.ranges import end_of_prefix
from kvstore.errors import InvalidRequest, Moved, NotLeader, OutcomeUnknown, Refused, Unavailable
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Code, Flag, Level, Op
from kvstore.partition.state.traits import LEVEL_AT
from kvstore.ring.hashing import TOKENS, token_of
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId

T = TypeVar("T")
Ask = Callable[[Op, PartitionId], Awaitable[Any]]
Rings = Callable[[], Ring]
"""The ring as it is known now."""

PAGE_KEYS_MAX = 1000
MOVED_S = 0.02
"""Before a partition is asked again that did not own what the ring gives it."""
MOVED_MAX = 100
SCAN_BYTES_MAX = 1 << 20
"""Bytes of keys that one SCAN gathers before it ends; its last page may go beyond."""
MATCH_BYTES_MAX = 64 << 10
"""Bytes of keys that are matched in one turn of the event loop: a key may take as long as the pattern is."""
FIRST_PAGE_KEYS = 100
"""Keys of the first page of a SCAN that shows only some keys: if it has none of them, the shown keys are few."""
SEEK_KEYS_MAX = 2_000
"""A SCAN that shows fewer keys than this in all finds them by their prefixes instead of by the ring."""
SEEKS_MAX = 1_024
"""Prefixes times partitions beyond which a SCAN does not look for keys by their prefixes: each takes a request, and the
client of a SCAN waits for all of them."""
RANGES_MAX = 32
"""Ranges of the ring that one SCAN looks into; it may return nothing and still have more to come."""
STRIDE = TOKENS >> 12
"""A part of the ring. Where the SCAN of a user who may see only some keys ends without having found one, its cursor is
a multiple of it: a key's own place would tell a user who guesses keys which of them there are."""
_SCAN, _SCAN_TOKENS, _COUNT = int(Code.SCAN), int(Code.SCAN_TOKENS), int(Code.COUNT)
_KEYS_ONLY = int(Flag.KEYS_ONLY)
Spans = Sequence[tuple[bytes, bytes | None]]
"""Ranges of keys, each from a first key to the first behind it; None: to the last key."""
ALL_KEYS: Spans = ((b"", None),)


async def scan(
    ask: Ask, rings: Rings, cursor: int, count: int, level: int = Level.LINEARIZABLE
) -> tuple[int, list[bytes]]:
    """(next cursor, keys): the keys whose tokens are at or after `cursor`, `count` or somewhat more, fewer if they are
    long; cursor 0 is the start, and the end.

    The cursor is a token, so it means the same at each server and after each change of the ring: a key that is there
    during the whole scan is returned. Raises StoreError.
    """
    keys: list[bytes] = []
    token, size = cursor, 0
    for _ in range(RANGES_MAX):
        limit = max(1, min(count - len(keys), PAGE_KEYS_MAX))

        async def page(ring: Ring, token: int = token, limit: int = limit) -> tuple[int, Any]:
            owner, end = range_at(ring, token)
            return end, await _page(ask, (_SCAN_TOKENS, token, limit, int(level), _KEYS_ONLY), owner)

        end, (items, after) = await with_one_ring(rings, page)
        # What the partition holds beyond this range belongs to a later part of the walk.
        keys += (found := [key for key, _ in items if token_of(key) <= end])
        size += sum(map(len, found))
        token = after if after is not None and after <= end else end + 1
        if token >= TOKENS:
            return 0, keys
        if len(keys) >= count or size >= SCAN_BYTES_MAX:
            break
    return token, keys


# docs/protocol.md P37
async def _page(ask: Ask, op: Op, owner: PartitionId) -> Any:
    """Ask for a page, and where the replica here leaves it to the leader, that."""
    at = LEVEL_AT[op[0]]
    try:
        return await ask(op, owner)
    except NotLeader:
        if op[at] < Level.SESSION:
            raise
    return await ask((*op[:at], int(Level.LINEARIZABLE), *op[at + 1 :]), owner)


async def scan_shown(
    ask: Ask, rings: Rings, cursor: int, count: int, level: int = Level.LINEARIZABLE, *, shown: Callable[[bytes], bool],
    spans: Spans = ALL_KEYS,
) -> tuple[int, list[bytes]]:  # fmt: skip
    """The same of the keys that are `shown`, all of which are in `spans`. Where they are few among many, they are
    found by their prefixes, and the keys of others cost nothing. What this returns depends on the others only in how
    far it comes, by the stride: a cursor stands behind a key that is shown, or at a multiple of STRIDE, and nowhere
    else. Raises StoreError."""
    keys: list[bytes] = []
    token, end, pages = cursor, TOKENS, 0
    while token < end:
        limit = PAGE_KEYS_MAX if pages else min(max(count, FIRST_PAGE_KEYS), PAGE_KEYS_MAX)

        async def page(ring: Ring, token: int = token, limit: int = limit) -> tuple[int, Any]:
            owner, last = range_at(ring, token)
            return last, await _page(ask, (_SCAN_TOKENS, token, limit, int(level), _KEYS_ONLY), owner)

        last, (items, after) = await with_one_ring(rings, page)
        last = min(last, end - 1)
        keys += [key for key, _ in items if token_of(key) <= last and shown(key)]
        if len(keys) >= count or sum(map(len, keys)) >= SCAN_BYTES_MAX:
            keys.sort(key=token_of)
            behind = token_of(keys[:count][-1]) + 1
            return behind % TOKENS, [key for key in keys if token_of(key) < behind]
        token = after if after is not None and after <= last else last + 1
        pages += 1
        if pages == 1 and not keys and token < end and len(spans) * len(rings().owners) <= SEEKS_MAX:
            mine, is_complete = await keys_in(
                ask, rings, spans, level, keys_max=SEEK_KEYS_MAX, bytes_max=SCAN_BYTES_MAX
            )
            if is_complete:
                return _behind(cursor, filter(shown, mine), count)
        if pages == RANGES_MAX:
            end = -(-token // STRIDE) * STRIDE
    return token % TOKENS, keys


def _behind(cursor: int, keys: Iterable[bytes], count: int) -> tuple[int, list[bytes]]:
    """Return (next cursor, keys) of a SCAN over these keys alone."""
    placed = sorted((token, key) for key in keys if (token := token_of(key)) >= cursor)
    if len(placed) <= count:
        return 0, [key for _, key in placed]
    behind = placed[count - 1][0] + 1
    return behind % TOKENS, [key for token, key in placed if token < behind]


async def keys_in(
    ask: Ask,
    rings: Rings,
    spans: Spans,
    level: int = Level.LINEARIZABLE,
    *,
    keys_max: int,
    bytes_max: int,
    matches: Callable[[bytes], bool] = lambda _: True,
) -> tuple[list[bytes], bool]:
    """Return the keys in some ranges that match, and whether these are all. They are not if the ranges have more than
    `keys_max` keys in all, or those that match have more than `bytes_max` bytes. The cost depends on the keys in the
    ranges and on the number of ranges, and not on other keys. Raises StoreError."""

    async def gather(ring: Ring) -> tuple[list[bytes], bool]:
        found, looked, size = list[bytes](), 0, 0
        for start, end in spans:
            for partition in ring.owners:
                at: bytes | None = start
                while at is not None:
                    limit = min(keys_max - looked + 1, PAGE_KEYS_MAX)
                    items, at = await _page(ask, (_SCAN, at, end or b"", limit, _KEYS_ONLY, int(level), 0), partition)
                    looked += len(items)
                    found += (more := await matching([key for key, _ in items], matches))
                    size += sum(map(len, more))
                    if looked > keys_max or size > bytes_max:
                        return found, False
        return found, True

    return await with_one_ring(rings, gather)


def within(spans: Spans, prefix: bytes) -> Spans:
    """Return the parts of some ranges whose keys begin with a prefix."""
    last = end_of_prefix(prefix)
    found: list[tuple[bytes, bytes | None]] = []
    for first, behind in spans:
        start, end = max(first, prefix), behind if last is None or (behind is not None and behind < last) else last
        if end is None or start < end:
            found.append((start, end))
    return found


def literal_prefix(pattern: bytes) -> bytes:
    """Return the bytes with which each key that matches the pattern begins."""
    found = _LITERAL.match(pattern)
    assert found is not None
    return found[0]


def range_at(ring: Ring, token: int) -> tuple[PartitionId, int]:
    """Return the owner of `token`, and the last token up to which it owns all."""
    place = ring.tokens.bisect_left(token)
    end = ring.tokens.keys()[place] if place < len(ring.tokens) else TOKENS - 1
    return ring.owner_of(token), int(end)


async def all_keys(
    ask: Ask,
    rings: Rings,
    level: int = Level.LINEARIZABLE,
    *,
    matches: Callable[[bytes], bool] = lambda _: True,
    bytes_max: int,
) -> list[bytes]:
    """Every key that `matches`. Raises StoreError, InvalidRequest if they are more than `bytes_max`."""
    keys: list[bytes] = []
    cursor, size, is_begun = 0, 0, False
    while cursor or not is_begun:
        cursor, found = await scan(ask, rings, cursor, PAGE_KEYS_MAX, level)
        is_begun = True
        keys += (more := await matching(found, matches))
        size += sum(map(len, more))
        if size > bytes_max:
            raise InvalidRequest(f"the reply would be larger than {bytes_max} bytes: use SCAN")
    return keys


async def matching(keys: list[bytes], matches: Callable[[bytes], bool]) -> list[bytes]:
    """Return the keys that match. Other work has its turn in between."""
    found, size = list[bytes](), 0
    for key in keys:
        if size > MATCH_BYTES_MAX:
            size = 0
            await asyncio.sleep(0)
        size += len(key)
        if matches(key):
            found.append(key)
    return found


async def count_keys(ask: Ask, rings: Rings, level: int = Level.LINEARIZABLE) -> int:
    """How many keys there are. Raises StoreError."""

    async def count(ring: Ring) -> int:
        total = 0
        for partition in ring.owners:
            total += await ask((_COUNT, b"", int(level)), partition)
        return total

    return await with_one_ring(rings, count)


async def delete_all(ask: Ask, rings: Rings) -> None:
    """Delete every key that was there before it began; of those that are written meanwhile, some. Raises StoreError:
    OutcomeUnknown, once something may have been deleted."""
    done = 0

    async def delete(ring: Ring) -> None:
        nonlocal done
        for partition in ring.owners:
            await ask(commands.delete_range(b"", b""), partition)
            done += 1

    try:
        await with_one_ring(rings, delete)
    except Refused as error:
        if not done:
            raise
        raise OutcomeUnknown(f"some partitions are empty by now, not all: {error}") from error


async def with_one_ring(rings: Rings, work: Callable[[Ring], Awaitable[T]]) -> T:
    """Return what `work` finds out with one ring; it begins again if another ring came meanwhile. Raises StoreError,
    Unavailable if the ring does not come to rest."""
    for _ in range(MOVED_MAX):
        ring = rings()
        try:
            found = await work(ring)
        except Moved:
            await asyncio.sleep(MOVED_S)
            continue
        if rings().routed == ring.routed:
            return found
    raise Unavailable("keys are on their way between partitions all the time")


def matcher(pattern: bytes) -> Callable[[bytes], bool]:
    """Redis's glob: `*`, `?`, `[a-c]`, `[^a]`, and a backslash before what is meant literally.

    Each star takes as little as it can and never gives back (an atomic group), so no pattern takes more than the
    product of the two lengths.
    """
    if pattern == b"*":
        return lambda _: True
    chunks = [b""]
    at = 0
    while at < len(pattern):
        piece, at = _piece(pattern, at)
        if piece is None:
            chunks.append(b"")
        else:
            chunks[-1] += piece
    first, *rest = chunks
    if not rest:
        compiled = re.compile(first, re.DOTALL)
        return lambda key: compiled.fullmatch(key) is not None
    middle = b"".join(b"(?>.*?%b)" % chunk for chunk in rest[:-1] if chunk)
    head = re.compile(first + middle, re.DOTALL)
    # The last chunk ends the key, wherever that is: it is looked for from the end.
    tail = re.compile(b"(?:%b)" % rest[-1], re.DOTALL)
    width = _width(rest[-1])

    def matches(key: bytes) -> bool:
        found = head.match(key)
        start = len(key) - width
        return found is not None and start >= found.end() and tail.fullmatch(key, start) is not None

    return matches


def _piece(pattern: bytes, at: int) -> tuple[bytes | None, int]:
    """One element as a regular expression, None for a star, and where the next one starts."""
    char = pattern[at : at + 1]
    if char == b"*":
        return None, at + 1
    if char == b"?":
        return b".", at + 1
    if char == b"\\" and at + 1 < len(pattern):
        return re.escape(pattern[at + 1 : at + 2]), at + 2
    if char == b"[":
        return _class(pattern, at + 1)
    return re.escape(char), at + 1


def _class(pattern: bytes, at: int) -> tuple[bytes, int]:
    negated = pattern[at : at + 1] == b"^"
    at += negated
    members: set[int] = set()
    while at < len(pattern) and pattern[at : at + 1] != b"]":
        if pattern[at : at + 1] == b"\\" and at + 1 < len(pattern):
            at += 1
        low = pattern[at]
        if pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern) and pattern[at + 2 : at + 3] != b"]":
            low, high = sorted((low, pattern[at + 2]))
            members.update(range(low, high + 1))
            at += 3
        else:
            members.add(low)
            at += 1
    if negated:
        members = set(range(256)) - members
    if not members:
        return b"(?!)", at + 1
    return b"[" + b"".join(b"\\x%02x-\\x%02x" % each for each in _runs(members)) + b"]", at + 1


def _runs(members: set[int]) -> list[tuple[int, int]]:
    """First and last of those that follow each other: a class of few bytes in a pattern stays one of few bytes."""
    firsts = sorted(each for each in members if each - 1 not in members)
    lasts = sorted(each for each in members if each + 1 not in members)
    return list(zip(firsts, lasts, strict=True))


_LITERAL = re.compile(rb"[^*?\[\\]*")
_ELEMENT = re.compile(rb"\[[^]]*\]|\(\?!\)|\\.|.", re.DOTALL)


def _width(expression: bytes) -> int:
    """How many bytes a chunk matches: one per element."""
    return len(_ELEMENT.findall(expression))
