import pytest

from kvstore.meta import paths
from kvstore.meta.ledger_ids import LedgerIdGenerator
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.store import ensure_path
from tests.meta.drivers import FaultyStore


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


async def test_ids_rise_over_all_creators(store: FaultyStore) -> None:
    other = MemoryStore(store.tree)
    generators = [LedgerIdGenerator(store), LedgerIdGenerator(other)]
    ids = [await generators[i % 2].next_id() for i in range(10)]
    assert ids == sorted(set(ids))


async def test_id_leaves_no_node(store: FaultyStore) -> None:
    await LedgerIdGenerator(store).next_id()
    assert await store.children(paths.IDGEN) == []


@pytest.mark.parametrize("fault", [("create", "done"), ("create", "lost"), ("delete", "done"), ("delete", "lost")])
async def test_broken_connection_costs_at_most_one_id(store: FaultyStore, fault: tuple[str, str]) -> None:
    generator = LedgerIdGenerator(store)
    ids = [await generator.next_id()]
    store.faults = [fault]
    ids += [await generator.next_id(), await generator.next_id()]
    assert ids == sorted(set(ids))
    assert not store.faults
    store.expire()
    store.resume()
    assert await store.children(paths.IDGEN) == []


async def use_up(tree: MemoryTree, path: str) -> None:
    """Raise the counter below `path` to its last number."""
    tree._nodes[path].births = 2**31 - 1


async def test_ids_continue_with_high_order_bits_after_31_bits(store: FaultyStore) -> None:
    before, later = LedgerIdGenerator(store), LedgerIdGenerator(MemoryStore(store.tree))
    await before.next_id()
    await use_up(store.tree, paths.IDGEN)
    ids = [await before.next_id(), await before.next_id(), await later.next_id()]
    assert ids == [1 << 32, 1 << 32 | 1, 1 << 32 | 2]
    assert await store.children(paths.IDGEN_LONG) == ["HOB-0000000001"]


async def test_exhausted_low_bits_raise_the_high_ones(store: FaultyStore) -> None:
    await ensure_path(store, "/ledgers/idgen-long/HOB-0000000001")
    await use_up(store.tree, "/ledgers/idgen-long/HOB-0000000001")
    assert await LedgerIdGenerator(store).next_id() == 2 << 32
    assert await LedgerIdGenerator(store).next_id() == 2 << 32 | 1
