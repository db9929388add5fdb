"""Deletion of a ledger by an operator: a ledger that a log has, or will have, remains."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.errors import InvalidRequest, NoSuchLedger, VersionConflict
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.store import Change, ensure_path
from kvstore.server.placement.ledger_deletion import LedgerDeletion
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, PartitionId, Quorum, Seq
from kvstore.wal.creator import OWNER_KEY
from kvstore.wal.ledger_list import LedgerList, Listed
from kvstore.wal.list_codec import encode
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins

P = PartitionId("p1")
FIRST, NEXT = LedgerId(3), LedgerId(7)


def listed(*ledgers: LedgerId) -> LedgerList:
    return LedgerList(1, tuple(Listed(each, Seq(each), exact=True, epoch=1, lease_ms=0) for each in ledgers))


async def with_ledgers(owner: str = P) -> MemoryStore:
    """Set up a log with FIRST, and NEXT, which was created for it and is not listed."""
    store = MemoryStore()
    await ensure_path(store, paths.partition_log(P))
    await store.set(paths.partition_log(P), encode(listed(FIRST)), -1)
    for ledger in (FIRST, NEXT):
        fragment = Fragment(EntryId(0), (BookieId("b1-0"),))
        custom = ((OWNER_KEY, owner.encode()),) if owner else ()
        metadata = LedgerMetadata(ledger, Quorum(1, 1, 1), (fragment,), token=1, custom=custom)
        await LedgerStore(store).create(metadata)
    return store


async def check_there(store: MemoryStore, ledger: LedgerId) -> None:
    await LedgerStore(store).read(ledger)


# docs/protocol.md G15
@pytest.mark.parametrize("owner", [P, ""])
async def test_unneeded_ledger_is_deleted_and_listed_ledger_is_kept(owner: str) -> None:
    store = await with_ledgers(owner)
    await LedgerDeletion(store, NEXT, {P}).commit(0)
    with pytest.raises(NoSuchLedger):
        await LedgerStore(store).read(NEXT)
    with pytest.raises(InvalidRequest, match="ledger 3 is part of the log of partition p1"):
        await LedgerDeletion(store, FIRST, {P}).commit(0)
    await check_there(store, FIRST)


# docs/protocol.md G15
async def test_ledger_listed_during_confirmation_is_kept() -> None:
    store = await with_ledgers()
    deletion = LedgerDeletion(store, NEXT, {P})
    await deletion.check()
    await LedgerLists(store).write(P, listed(FIRST, NEXT), 1, created=NEXT)
    with pytest.raises(InvalidRequest, match="is part of the log"):
        await deletion.commit(0)
    await check_there(store, NEXT)


# docs/protocol.md G15
async def test_ledger_listed_during_deletion_is_kept() -> None:
    class Late(MemoryStore):
        async def multi(self, changes: Sequence[Change]) -> None:
            await LedgerLists(MemoryStore(self.tree)).write(P, listed(FIRST, NEXT), 1, created=NEXT)
            await super().multi(changes)

    tree: MemoryTree = (await with_ledgers()).tree
    with pytest.raises(VersionConflict, match="may be needed"):
        await LedgerDeletion(Late(tree), NEXT, {P}).commit(0)
    await check_there(MemoryStore(tree), NEXT)


# docs/protocol.md F6
async def test_log_of_partition_that_left_is_kept_for_readers() -> None:
    store = await with_ledgers()
    await ensure_path(store, paths.KEPT)
    await store.create(paths.kept_log(P), encode(listed(FIRST, NEXT)))
    with pytest.raises(InvalidRequest, match="which has left the ring"):
        await LedgerDeletion(store, NEXT, set()).commit(0)
    await check_there(store, NEXT)


# docs/protocol.md G14
async def test_pinned_ledger_is_kept() -> None:
    store = await with_ledgers()
    await Pins(store, LedgerLists(store)).hold(P, "snapshot", FIRST)
    with pytest.raises(InvalidRequest, match="held by a pin"):
        await LedgerDeletion(store, NEXT, {P}).commit(0)
    await check_there(store, NEXT)
