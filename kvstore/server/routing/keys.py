"""Lists and counts the keys of all partitions: in ring order for SCAN, and partition by partition for KEYS and
DBSIZE. Lists and counts the keys of one slot of Redis Cluster."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from kvstore.access.ranges import end_of_prefix
from kvstore.errors import InvalidRequest, Moved, NotLeader, OutcomeUnknown, Refused, Unavailable
from kvstore.partition.state.commands import Count, DeleteRange, Flag, Level, Op, Scan, ScanTokens
from kvstore.ring.hashing import TOKENS, KeyHash, tokens_of_slot
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId

T = TypeVar("T")
Ask = Callable[[Op, PartitionId], Awaitable[Any]]
Rings = Callable[[], Ring]
"""Returns the currently known ring."""

PAGE_KEYS_MAX = 1000
MOVED_S = 0.02
"""Delay in seconds before a partition is asked again that did not own the keys that the ring assigns to it."""
MOVED_MAX = 100
SCAN_BYTES_MAX = 1 << 20
"""Total size of keys in bytes after which a SCAN returns. Its last page may exceed the limit."""
MATCH_BYTES_MAX = 64 << 10
"""Bytes of keys matched in one turn of the event loop. Matching a key takes time proportional to the pattern."""
FIRST_PAGE_KEYS = 100
"""Number of keys in the first page of a SCAN for a user who may read only some keys, and of the keys of a slot. If the
user may read none of them, readable keys are probably few."""
SEEK_KEYS_MAX = 2_000
"""Maximum number of readable keys that a SCAN finds by prefix instead of in ring order."""
SEEKS_MAX = 1_024
"""Maximum product of prefixes and partitions for which a SCAN searches by prefix. Each combination takes one
request, and the client waits for all of them."""
RANGES_MAX = 32
"""Maximum number of ring ranges examined by one SCAN. It may return nothing although more keys follow."""
STRIDE = TOKENS >> 12
"""A section of the ring. If a SCAN by a user with limited rights ends at a hidden key, its cursor is rounded to a
multiple of STRIDE. Otherwise the cursor would be the token of a hidden key, and would confirm to a user who guesses
keys which of them exist."""
_KEYS_ONLY = int(Flag.KEYS_ONLY)
Spans = Sequence[tuple[bytes, bytes | None]]
"""Ranges of keys, each from a first key to the first key after the range. None instead of the latter means up to the
last key."""
ALL_KEYS: Spans = ((b"", None),)


async def scan(
    ask: Ask, rings: Rings, cursor: int, count: int, level: int = Level.LINEARIZABLE
) -> tuple[int, list[bytes]]:
    """Return (next cursor, keys) of a SCAN: about `count` keys whose tokens are at or after `cursor`, or fewer if the
    keys are long. Pass cursor 0 to start; a returned cursor 0 is the end.

    A cursor is a token of the ring, so it is valid on every server and after every change of the ring. A key that
    exists during the whole scan is returned at least once. Raises StoreError.
    """
    keys: list[bytes] = []
    token, size, token_of = cursor, 0, rings().hash.token_of
    for _ in range(RANGES_MAX):
        limit = max(1, min(count - len(keys), PAGE_KEYS_MAX))

        async def page(ring: Ring, token: int = token, limit: int = limit) -> tuple[int, Any]:
            owner, end = range_at(ring, token)
            return end, await _page(ask, ScanTokens(token, limit, int(level), _KEYS_ONLY), owner)

        end, (items, after) = await with_one_ring(rings, page)
        # Keys of the partition beyond this range belong to a later part of the traversal.
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
    """Request a page from the owner. If the local replica lags behind the session, request the page from the leader."""
    try:
        return await ask(op, owner)
    except NotLeader:
        if op.level < Level.SESSION:
            raise
    return await ask(replace(op, level=int(Level.LINEARIZABLE)), owner)


async def scan_shown(
    ask: Ask, rings: Rings, cursor: int, count: int, level: int = Level.LINEARIZABLE, *, shown: Callable[[bytes], bool],
    spans: Spans = ALL_KEYS,
) -> tuple[int, list[bytes]]:  # fmt: skip
    """Like `scan`, but returns only keys for which `shown` is true. All of these keys are in `spans`. If they are
    few among many, they are found by prefix, so that hidden keys cost nothing. The returned cursor reveals little
    about hidden keys, because it is always right after a shown key or a multiple of STRIDE. Raises StoreError."""
    keys: list[bytes] = []
    token, end, pages, hash = cursor, TOKENS, 0, rings().hash
    token_of = hash.token_of
    while token < end:
        limit = PAGE_KEYS_MAX if pages else min(max(count, FIRST_PAGE_KEYS), PAGE_KEYS_MAX)

        async def page(ring: Ring, token: int = token, limit: int = limit) -> tuple[int, Any]:
            owner, last = range_at(ring, token)
            return last, await _page(ask, ScanTokens(token, limit, int(level), _KEYS_ONLY), owner)

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
                return _behind(hash, cursor, filter(shown, mine), count)
        if pages == RANGES_MAX:
            end = -(-token // STRIDE) * STRIDE
    return token % TOKENS, keys


def _behind(hash: KeyHash, cursor: int, keys: Iterable[bytes], count: int) -> tuple[int, list[bytes]]:
    """Return (next cursor, keys) of a SCAN over these keys only."""
    placed = sorted((token, key) for key in keys if (token := hash.token_of(key)) >= cursor)
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
    """Return the matching keys in the ranges `spans`, and True if the list is complete. It is incomplete if the
    ranges contain more than `keys_max` keys, or if the matching keys exceed `bytes_max` bytes. The cost depends only
    on the number of ranges and on the keys in them. Raises StoreError."""

    async def gather(ring: Ring) -> tuple[list[bytes], bool]:
        found, examined, size = list[bytes](), 0, 0
        for start, end in spans:
            for partition in ring.owners:
                at: bytes | None = start
                while at is not None:
                    limit = min(keys_max - examined + 1, PAGE_KEYS_MAX)
                    items, at = await _page(ask, Scan(at, end or b"", limit, _KEYS_ONLY, int(level), 0), partition)
                    examined += len(items)
                    found += (more := await matching([key for key, _ in items], matches))
                    size += sum(map(len, more))
                    if examined > keys_max or size > bytes_max:
                        return found, False
        return found, True

    return await with_one_ring(rings, gather)


def within(spans: Spans, prefix: bytes) -> Spans:
    """Return the parts of the ranges in which all keys begin with the prefix."""
    last = end_of_prefix(prefix)
    found: list[tuple[bytes, bytes | None]] = []
    for first, behind in spans:
        start, end = max(first, prefix), behind if last is None or (behind is not None and behind < last) else last
        if end is None or start < end:
            found.append((start, end))
    return found


def literal_prefix(pattern: bytes) -> bytes:
    """Return the literal bytes at the start of the pattern, with which every matching key begins."""
    found = _LITERAL.match(pattern)
    assert found is not None
    return found[0]


def range_at(ring: Ring, token: int) -> tuple[PartitionId, int]:
    """Return the partition that owns `token`, and the last token of the contiguous range that it owns from there."""
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
    """Return every matching key of the store. Raises StoreError, and InvalidRequest if these keys exceed `bytes_max`
    bytes."""
    keys: list[bytes] = []
    cursor, size, is_begun = 0, 0, False
    while cursor or not is_begun:
        cursor, found = await scan(ask, rings, cursor, PAGE_KEYS_MAX, level)
        is_begun = True
        keys += (more := await matching(found, matches))
        size += sum(map(len, more))
        if size > bytes_max:
            raise InvalidRequest(f"the reply would be larger than {bytes_max} bytes; use SCAN")
    return keys


async def matching(keys: list[bytes], matches: Callable[[bytes], bool]) -> list[bytes]:
    """Return the keys that match. Lets other work run between chunks of keys."""
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
    """Return the number of keys in the store. Raises StoreError."""

    async def count(ring: Ring) -> int:
        total = 0
        for partition in ring.owners:
            total += await ask(Count(level=int(level)), partition)
        return total

    return await with_one_ring(rings, count)


async def count_slot(ask: Ask, rings: Rings, slot: int, level: int = Level.LINEARIZABLE) -> int:
    """Return the number of keys in the slot. The key hash must be `slots`. Takes one request per PAGE_KEYS_MAX keys.
    Raises StoreError."""

    async def count(ring: Ring) -> int:
        return sum([len(page) async for page in _slot_pages(ask, ring, slot, level)])

    return await with_one_ring(rings, count)


async def keys_of_slot(
    ask: Ask, rings: Rings, slot: int, level: int = Level.LINEARIZABLE, *, most: int, bytes_max: int
) -> list[bytes]:
    """Return keys of the slot, at most `most`. The key hash must be `slots`. Raises StoreError, and InvalidRequest if
    the keys exceed `bytes_max` bytes."""

    async def gather(ring: Ring) -> list[bytes]:
        found, size = list[bytes](), 0
        async for page in _slot_pages(ask, ring, slot, level):
            found += (more := page[: most - len(found)])
            size += sum(map(len, more))
            if size > bytes_max:
                raise InvalidRequest(f"the reply would be larger than {bytes_max} bytes; ask for fewer keys")
            if len(found) == most:
                break
        return found

    return await with_one_ring(rings, gather) if most else []


async def _slot_pages(ask: Ask, ring: Ring, slot: int, level: int) -> AsyncIterator[list[bytes]]:
    """Yield the keys of the slot in pages, in the order of tokens. The first page is short, because most slots have few
    keys, and the rest of a page are keys of other slots."""
    first, last = tokens_of_slot(slot)
    owner, limit = ring.owner_of(first), FIRST_PAGE_KEYS
    after: int | None = first
    while after is not None and after <= last:
        items, after = await _page(ask, ScanTokens(after, limit, int(level), _KEYS_ONLY), owner)
        yield [key for key, _ in items if ring.hash.token_of(key) <= last]
        limit = PAGE_KEYS_MAX


async def delete_all(ask: Ask, rings: Rings) -> None:
    """Delete every key that existed before the call. Keys written during the call may or may not be deleted. Raises
    StoreError, which is OutcomeUnknown if some keys may already be deleted."""
    done = 0

    async def delete(ring: Ring) -> None:
        nonlocal done
        for partition in ring.owners:
            await ask(DeleteRange(b"", b""), partition)
            done += 1

    try:
        await with_one_ring(rings, delete)
    except Refused as error:
        if not done:
            raise
        raise OutcomeUnknown(f"some partitions are empty by now, but not all: {error}") from error


async def with_one_ring(rings: Rings, work: Callable[[Ring], Awaitable[T]]) -> T:
    """Return the result of `work`, which receives a ring. If the ring has changed by the end of `work`, start again.
    Raises StoreError, which is Unavailable if the ring keeps changing."""
    for _ in range(MOVED_MAX):
        ring = rings()
        try:
            found = await work(ring)
        except Moved:
            await asyncio.sleep(MOVED_S)
            continue
        if rings().routed == ring.routed:
            return found
    raise Unavailable("keys keep moving between partitions; retry later")


def matcher(pattern: bytes) -> Callable[[bytes], bool]:
    """Compile a Redis glob: `*`, `?`, `[a-c]`, `[^a]`, and a backslash before a literal character.

    Each star matches as little as possible and never backtracks (an atomic group), so matching takes at most the
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
    # The last chunk must match the end of the key, so it is matched from the end.
    tail = re.compile(b"(?:%b)" % rest[-1], re.DOTALL)
    width = _width(rest[-1])

    def matches(key: bytes) -> bool:
        found = head.match(key)
        start = len(key) - width
        return found is not None and start >= found.end() and tail.fullmatch(key, start) is not None

    return matches


def _piece(pattern: bytes, at: int) -> tuple[bytes | None, int]:
    """Return the pattern element at position `at` as a regular expression, or None for a star, and the position of
    the next element."""
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
    """Return (first, last) of each run of consecutive bytes. Runs keep the regular expression of a character class
    short."""
    firsts = sorted(each for each in members if each - 1 not in members)
    lasts = sorted(each for each in members if each + 1 not in members)
    return list(zip(firsts, lasts, strict=True))


_LITERAL = re.compile(rb"[^*?\[\\]*")
_ELEMENT = re.compile(rb"\[[^]]*\]|\(\?!\)|\\.|.", re.DOTALL)


def _width(expression: bytes) -> int:
    """Return the number of bytes that a sequence of pattern elements matches: one for each element."""
    return len(_ELEMENT.findall(expression))
