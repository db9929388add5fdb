"""New ledger ids that nobody else gets, by sequential nodes. Apache BookKeeper's layout and its way out of 31 bits."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from kvstore.errors import MetadataError, MetadataUnavailable, MetadataUnknown, NodeExists, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore, ensure_path
from kvstore.meta.update import until_known
from kvstore.types import LedgerId

_LOW_END = 2**31 - 1
"""Numbers from here on are not used: the store's counters are 32 bits wide."""
_ID = "ID-"
_HOB = "HOB-"


class LedgerIdGenerator:
    """Ids that rise over all creators of a cluster, with gaps. After 2^31 - 1 of them, high-order bits are counted
    apart."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._is_long = False

    async def next_id(self) -> LedgerId:
        """An id that was never given before. Raises MetadataUnavailable, MetadataUnknown (an id may be lost: no
        harm)."""
        if not self._is_long:
            self._is_long = await self._has_long_ids()
        if not self._is_long:
            number = await self._next_number(paths.IDGEN)
            if 0 <= number < _LOW_END:
                return LedgerId(number)
            await ensure_path(self._store, paths.IDGEN_LONG)
            self._is_long = True
        return await self._next_long()

    async def _has_long_ids(self) -> bool:
        try:
            await self._store.get(paths.IDGEN_LONG)
        except NoSuchNode:
            return False
        return True

    async def _next_number(self, parent: str) -> int:
        try:
            path = await until_known(lambda: self._create_numbered(parent))
        except NoSuchNode:
            await ensure_path(self._store, parent)
            path = await until_known(lambda: self._create_numbered(parent))
        with suppress(
            NoSuchNode, MetadataUnavailable, MetadataUnknown
        ):  # it is ephemeral; the number is ours all the same
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
    """The nodes with which ids begin above all that were given where these nodes are from: how far their counters had
    come is not in them."""
    names = (path.rpartition("/")[2] for path in nodes if paths.parent(path) == paths.IDGEN_LONG)
    return {paths.IDGEN_LONG: b"", _counter(_highest(names) + 1): b""}


def _highest(names: Iterable[str]) -> int:
    """The high-order bits that are counted in now; 0: none yet."""
    counters = (name.removeprefix(_HOB) for name in names if name.startswith(_HOB))
    return max((int(digits) for digits in counters if digits.isdigit()), default=0)


def _counter(high: int) -> str:
    return f"{paths.IDGEN_LONG}/{_HOB}{high:010d}"
