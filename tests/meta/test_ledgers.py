from dataclasses import replace

import pytest

from kvstore.errors import MetadataUnavailable, MetadataUnknown, NodeExists, NoSuchLedger, VersionConflict
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import ensure_path
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, LedgerState, Quorum
from tests.meta.drivers import FaultyStore, Hint

BOOKIES = tuple(BookieId(f"b{i}-1") for i in (1, 2, 3))


def ledger(ledger_id: int, token: int = 42) -> LedgerMetadata:
    return LedgerMetadata(
        LedgerId(ledger_id), Quorum(ensemble=3, write=3, ack=2), (Fragment(EntryId(0), BOOKIES),), token=token
    )


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
async def ledgers(store: FaultyStore) -> LedgerStore:
    await ensure_path(store, paths.LEDGERS)
    return LedgerStore(store)


async def test_created_ledger_is_read_with_its_version(ledgers: LedgerStore) -> None:
    assert await ledgers.create(ledger(7)) == 0
    assert await ledgers.read(LedgerId(7)) == (ledger(7), 0)


async def test_unknown_ledger_is_no_such_ledger(ledgers: LedgerStore) -> None:
    for call in (ledgers.read(LedgerId(7)), ledgers.write(ledger(7), 0), ledgers.update(LedgerId(7), lambda it: it)):
        with pytest.raises(NoSuchLedger):
            await call


async def test_pages_list_ledgers_by_rising_ids(ledgers: LedgerStore) -> None:
    ids = (7, 9_999, 10_000, 2**30, 2**31, 2**40)
    for ledger_id in reversed(ids):
        await ledgers.create(ledger(ledger_id))
    pages = [page async for page in ledgers.pages()]
    assert pages == [[7, 9_999], [10_000], [2**30], [2**31], [2**40]]


async def test_bookie_counts_once_for_each_readable_ledger_that_names_it(
    ledgers: LedgerStore, store: FaultyStore
) -> None:
    two = Fragment(EntryId(5), (BOOKIES[0], BOOKIES[1], BookieId("b4-1")))
    await ledgers.create(ledger(7))
    await ledgers.create(replace(ledger(8), fragments=(*ledger(8).fragments, two)))
    await ledgers.create(ledger(9))
    await store.set(paths.ledger(LedgerId(9)), b"unreadable", 0)
    assert await ledgers.count_by_bookie() == dict(zip((*BOOKIES, "b4-1"), (2, 2, 2, 1), strict=True))


async def test_id_belongs_to_its_first_creator(ledgers: LedgerStore) -> None:
    await ledgers.create(ledger(7, token=1))
    with pytest.raises(NodeExists):
        await ledgers.create(ledger(7, token=2))


@pytest.mark.parametrize("kind", ["lost", "done"])
async def test_creator_recognises_its_own_create_after_a_broken_connection(
    ledgers: LedgerStore, store: FaultyStore, kind: str
) -> None:
    await ensure_path(store, "/ledgers/00/0000")
    store.faults = [("create", kind)]
    assert await ledgers.create(ledger(7)) == 0
    assert (await ledgers.read(LedgerId(7)))[0].token == 42
    assert not store.faults


async def test_create_taken_over_by_a_recovery_is_no_longer_own(ledgers: LedgerStore, store: FaultyStore) -> None:
    await ledgers.create(ledger(7))
    await ledgers.update(LedgerId(7), LedgerMetadata.recovering)
    with pytest.raises(NodeExists):
        await ledgers.create(ledger(7))


async def test_create_without_a_token_is_refused(ledgers: LedgerStore) -> None:
    with pytest.raises(ValueError, match="token"):
        await ledgers.create(ledger(7, token=0))


async def test_second_ledger_writer_at_one_version_loses(ledgers: LedgerStore) -> None:
    await ledgers.create(ledger(7))
    assert await ledgers.write(ledger(7).recovering(), 0) == 1
    with pytest.raises(VersionConflict):
        await ledgers.write(ledger(7).closed(EntryId(3), 30), 0)


async def test_update_is_decided_on_the_stored_value(ledgers: LedgerStore) -> None:
    await ledgers.create(ledger(7))
    metadata, version = await ledgers.update(LedgerId(7), LedgerMetadata.recovering)
    assert (metadata.state, version) == (LedgerState.IN_RECOVERY, 1)
    assert await ledgers.read(LedgerId(7)) == (metadata, 1)


async def test_removed_ledger_leaves_no_empty_parents(ledgers: LedgerStore, store: FaultyStore) -> None:
    await ledgers.create(ledger(7))
    await ledgers.create(ledger(10007))
    await ledgers.remove(LedgerId(7), 0)
    assert await ledgers.list_ids() == [10007]
    assert await store.children("/ledgers/00") == ["0001"]
    await ledgers.remove(LedgerId(10007), -1)
    assert await store.children(paths.LEDGERS) == []


async def test_removing_an_absent_ledger_is_no_error(ledgers: LedgerStore, store: FaultyStore) -> None:
    await ledgers.remove(LedgerId(7), 0)
    await ledgers.create(ledger(7))
    store.faults = [("delete", "done")]
    await ledgers.remove(LedgerId(7), 0)
    assert await ledgers.list_ids() == []


async def test_changed_ledger_is_not_removed(ledgers: LedgerStore) -> None:
    await ledgers.create(ledger(7))
    await ledgers.update(LedgerId(7), LedgerMetadata.recovering)
    with pytest.raises(VersionConflict):
        await ledgers.remove(LedgerId(7), 0)


async def test_parents_removed_during_a_create_are_recreated(ledgers: LedgerStore, store: FaultyStore) -> None:
    class Sweeping(MemoryStore):
        sweeps = 3

        async def create(
            self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False
        ) -> str:
            if path.endswith("L0007") and self.sweeps and self.tree.paths().count("/ledgers/00/0000"):
                self.sweeps -= 1
                await self.delete("/ledgers/00/0000", -1)
                await self.delete("/ledgers/00", -1)
            return await super().create(path, data, ephemeral=ephemeral, sequential=sequential)

    sweeping = Sweeping(store.tree)
    await LedgerStore(sweeping).create(ledger(7))
    assert sweeping.sweeps == 0
    assert await ledgers.list_ids() == [7]


async def test_all_ids_are_listed_in_order_short_and_long(ledgers: LedgerStore) -> None:
    ids = [0, 7, 10000, 123456789, 2**31 - 2, 2**31 - 1, 2**32 + 5]
    for each in reversed(ids):
        await ledgers.create(ledger(each))
    assert await ledgers.list_ids() == ids


async def test_other_nodes_are_not_listed_as_ledgers(ledgers: LedgerStore, store: FaultyStore) -> None:
    for path in ("/ledgers/available/b1", "/ledgers/idgen", "/ledgers/00/0000/L12345", "/ledgers/00/xxxx/L0001"):
        await ensure_path(store, path)
    assert await ledgers.list_ids() == []


@pytest.mark.parametrize("broken_call", range(8))
async def test_broken_listing_raises_wherever_it_breaks(
    ledgers: LedgerStore, store: FaultyStore, broken_call: int
) -> None:
    for each in (7, 10007, 2**31 + 1):
        await ledgers.create(ledger(each))
    listings = store.calls.count("children")
    await ledgers.list_ids()
    assert store.calls.count("children") - listings == 8
    breaking = _BreakingAt(store, broken_call)
    with pytest.raises(MetadataUnknown):
        await LedgerStore(breaking).list_ids()


class _BreakingAt(FaultyStore):
    def __init__(self, store: FaultyStore, broken_call: int) -> None:
        super().__init__(store.tree)
        self._left = broken_call

    async def children(self, path: str) -> list[str]:
        self._left -= 1
        if self._left < 0:
            raise MetadataUnknown(path)
        return await super().children(path)


async def test_listing_without_a_connection_or_a_cluster_raises(ledgers: LedgerStore, store: FaultyStore) -> None:
    store.suspend()
    with pytest.raises(MetadataUnavailable):
        await ledgers.list_ids()


async def test_watch_is_called_when_the_metadata_change(ledgers: LedgerStore) -> None:
    await ledgers.create(ledger(7))
    hint = Hint()
    ledgers.watch(LedgerId(7), hint)
    await ledgers.update(LedgerId(7), lambda metadata: replace(metadata, password=b"x"))
    await hint.wait()
