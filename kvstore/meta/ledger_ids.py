"""Assigns unique ledger ids with sequential nodes, in Apache BookKeeper's layout and with Apache's scheme for ids
beyond 31 bits.

The metadata store's counter also shows up to which id ledgers exist. If a ledger has a higher id, a later copy of the
metadata created it. For metadata that were moved here by a file, /counted records the former counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from kvstore.errors import MetadataError, MetadataUnavailable, MetadataUnknown, NodeExists, NoSuchNode
from kvstore.meta import codec, paths
from kvstore.meta.store import MetadataStore, ensure_path
from kvstore.meta.update import until_known
from kvstore.types import NO_LEDGER, LedgerId

_LOW_END = 2**31 - 1
"""Numbers from here on are not used, because the store's counters have 32 bits."""
_ID = "ID-"
_HOB = "HOB-"
RANGE_BITS = 32
"""After a move, ids continue in the next range of 2^32 ids."""


# docs/protocol.md B29
@dataclass(frozen=True, slots=True)
class FormerCount:
    """The state of an id counter at the time when its metadata were written to a file."""

    to: LedgerId
    is_sure: bool
    """True if the counter itself was read. Otherwise `to` is the first id behind the ledgers of the file, and later ids
    may have been assigned to ledgers that were deleted."""

    def has_not_reached(self, ledger: int) -> bool:
        """Return True if the counter had not reached this id of its range."""
        return self.to <= ledger and ledger >> RANGE_BITS == self.to >> RANGE_BITS


# docs/protocol.md B29
@dataclass(frozen=True, slots=True)
class LedgerIdCount:
    """The ledger ids that have been assigned, in this metadata store and in those where its metadata were before."""

    to: LedgerId
    """An id above all assigned ids."""
    former: tuple[FormerCount, ...] = ()

    def never_gave(self, ledger: int) -> bool:
        """Return True if a ledger with this id proves that a later copy of the metadata exists. Valid only for
        ledgers whose creator did not choose the id."""
        return self.to <= ledger or any(each.is_sure and each.has_not_reached(ledger) for each in self.former)

    def may_be_missing(self, ledger: int) -> bool:
        """Return True if a ledger with this id, whoever created it, may come from a later copy of the metadata.

        Creators may choose ids, as Apache's clients do. Such ids are usually in another range far above the counter,
        and prove nothing.
        """
        return FormerCount(self.to, True).has_not_reached(ledger) or any(
            each.has_not_reached(ledger) for each in self.former
        )


@dataclass(frozen=True, slots=True)
class _Document:
    """The contents of the node."""

    former: list[FormerCount]


async def former_counts(store: MetadataStore) -> tuple[FormerCount, ...]:
    """Return the former counters of metadata that were moved to this store. Raises MetadataUnavailable,
    MetadataUnknown, UndecodableNode."""
    try:
        data, _ = await store.get(paths.COUNTED)
    except NoSuchNode:
        return ()
    return decode_former(data)


def encode_former(former: Iterable[FormerCount]) -> bytes:
    """Encode former counters for the node /counted, sorted by range."""
    return codec.encode(_Document(sorted(former, key=lambda each: each.to)))


def decode_former(data: bytes) -> tuple[FormerCount, ...]:
    """Decode the former counters in the node /counted. Raises UndecodableNode."""
    return tuple(codec.decode(_Document, data, what=paths.COUNTED).former)


class LedgerIdGenerator:
    """Generates ledger ids. Ids rise across all creators of a cluster, with gaps. After 2^31 - 1 ids, the generator
    counts the high-order bits in a separate counter."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._is_long = False

    async def next_id(self, seen: LedgerId = NO_LEDGER) -> LedgerId:
        """Return an id that was never assigned before.

        If the counter was deleted, ids continue in a new range above `seen`, the highest known id. Raises
        MetadataUnavailable or MetadataUnknown; then an id may have been used up, which does no harm.
        """
        if not self._is_long:
            self._is_long = await self._has_long_ids()
        if not self._is_long and seen != NO_LEDGER and not await self._is_there(paths.IDGEN):
            await self._store.sync(paths.LEDGERS)  # a server that lags may not have the counter yet
            if not await self._has_long_ids() and not await self._is_there(paths.IDGEN):
                await ensure_path(self._store, paths.IDGEN_LONG)
                await self._create_counter((seen >> RANGE_BITS) + 1)
            self._is_long = await self._has_long_ids()
        if not self._is_long:
            number = await self._next_number(paths.IDGEN)
            if 0 <= number < _LOW_END:
                return LedgerId(number)
            await ensure_path(self._store, paths.IDGEN_LONG)
            self._is_long = True
        return await self._next_long()

    async def _has_long_ids(self) -> bool:
        return await self._is_there(paths.IDGEN_LONG)

    async def _is_there(self, path: str) -> bool:
        try:
            await self._store.get(path)
        except NoSuchNode:
            return False
        return True

    async def _next_number(self, parent: str) -> int:
        try:
            path = await until_known(lambda: self._create_numbered(parent))
        except NoSuchNode:
            await ensure_path(self._store, parent)
            path = await until_known(lambda: self._create_numbered(parent))
        # The node is ephemeral. Its number is ours even if the delete fails.
        with suppress(NoSuchNode, MetadataUnavailable, MetadataUnknown):
            await self._store.delete(path, -1)
        return int(path.rpartition("/")[2].removeprefix(_ID))

    async def _create_numbered(self, parent: str) -> str:
        return await self._store.create(paths.join(parent, _ID), ephemeral=True, sequential=True)

    async def _next_long(self) -> LedgerId:
        high = await self._highest_bits()
        number = await self._next_number(_counter(high))
        if not 0 <= number < _LOW_END:
            high += 1
            await self._create_counter(high)
            number = await self._next_number(_counter(high))
            if not 0 <= number < _LOW_END:
                raise MetadataError(f"ids below {_counter(high)} are used up already")
        return LedgerId(high << 32 | number)

    async def _highest_bits(self) -> int:
        high = _highest(await self._store.children(paths.IDGEN_LONG))
        if not high:
            high = 1
            await self._create_counter(high)
        return high

    async def _create_counter(self, high: int) -> None:
        with suppress(NodeExists):  # another creator was first
            await self._store.create(_counter(high))


def counter_above(nodes: Iterable[str]) -> dict[str, bytes]:
    """Return the nodes to create so that new ids start above all ids of the store from which `nodes` come. `nodes`
    themselves do not show how far the counters of that store were."""
    names = (path.rpartition("/")[2] for path in nodes if paths.parent(path) == paths.IDGEN_LONG)
    return {paths.IDGEN_LONG: b"", _counter(_highest(names) + 1): b""}


# docs/protocol.md B29
def counts_with(nodes: Mapping[str, bytes], counted_to: LedgerId) -> dict[str, bytes]:
    """Return the node that records the counters of `nodes`, of which the current counter is at `counted_to`. Raises
    UndecodableNode."""
    return _with(nodes, FormerCount(counted_to, is_sure=True))


# docs/protocol.md B29
def counts_by_ledgers(nodes: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the node that records the counters of a file of metadata whose current counter may be missing. Raises
    UndecodableNode."""
    high = _highest(path.rpartition("/")[2] for path in nodes if paths.parent(path) == paths.IDGEN_LONG)
    if any(each.to >> RANGE_BITS == high for each in _former(nodes)):
        return {}
    ledgers = (ledger for path in nodes if (ledger := paths.ledger_of(path)) is not None)
    last = max((each for each in ledgers if each >> RANGE_BITS == high), default=(high << RANGE_BITS) - 1)
    return _with(nodes, FormerCount(LedgerId(last + 1), is_sure=False))


def _with(nodes: Mapping[str, bytes], count: FormerCount) -> dict[str, bytes]:
    others = (each for each in _former(nodes) if each.to >> RANGE_BITS != count.to >> RANGE_BITS)
    return {paths.COUNTED: encode_former([*others, count])}


def _former(nodes: Mapping[str, bytes]) -> tuple[FormerCount, ...]:
    return decode_former(nodes[paths.COUNTED]) if paths.COUNTED in nodes else ()


def _highest(names: Iterable[str]) -> int:
    """Return the high-order bits in use; 0 if there are none yet."""
    counters = (name.removeprefix(_HOB) for name in names if name.startswith(_HOB))
    return max((int(digits) for digits in counters if digits.isdigit()), default=0)


def _counter(high: int) -> str:
    return f"{paths.IDGEN_LONG}/{_HOB}{high:010d}"
