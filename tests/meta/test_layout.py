import pytest

from kvstore.errors import ConfigError, NodeExists
from kvstore.meta import paths
from kvstore.meta.layout import LayoutStore
from kvstore.meta.memory import MemoryStore
from tests.meta.drivers import FaultyStore

ID, OTHER_ID = "0e3c7b1c-5d0f-4b6e-9a55-0f8f4c1d2e3f", "7a1c1f9e-1111-4222-8333-944445555666"


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


async def test_new_cluster_has_apaches_nodes(store: FaultyStore) -> None:
    await LayoutStore(store).initialise(ID)
    layout, _ = await store.get(paths.LAYOUT)
    assert layout == b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1"
    assert (await store.get(paths.INSTANCE_ID))[0] == ID.encode()
    names = ["INSTANCEID", "LAYOUT", "available", "cookies", "idgen", "underreplication"]
    assert await store.children(paths.LEDGERS) == names
    assert await store.children(paths.UNDERREPLICATION) == ["LAYOUT", "auditorelection", "ledgers", "locks"]
    assert await store.children(paths.AVAILABLE) == ["readonly"]


async def test_cluster_is_created_once(store: FaultyStore) -> None:
    await LayoutStore(store).initialise(ID)
    with pytest.raises(NodeExists):
        await LayoutStore(MemoryStore(store.tree)).initialise(OTHER_ID)
    assert await LayoutStore(store).instance_id() == ID


@pytest.mark.parametrize("kind", ["lost", "done"])
async def test_creation_of_unknown_outcome_is_recognised(store: FaultyStore, kind: str) -> None:
    store.faults = [("multi", kind)]
    await LayoutStore(store).initialise(ID)
    assert await LayoutStore(store).instance_id() == ID


async def test_all_founders_agree_on_the_clusters_identity(store: FaultyStore) -> None:
    assert await LayoutStore(store).ensure(ID) == ID
    assert await LayoutStore(MemoryStore(store.tree)).ensure(OTHER_ID) == ID


async def test_chroot_without_a_cluster_has_no_identity(store: FaultyStore) -> None:
    with pytest.raises(ConfigError, match="no cluster"):
        await LayoutStore(store).instance_id()


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (b"3\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1", "format '3'"),
        (b"2\norg.apache.bookkeeper.meta.FlatLedgerManagerFactory:1", "Flat"),
        (b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:2", "version=2"),
        (b"2\nHierarchical", "colon"),
        (b"2\nHierarchical:" + b"1" * 5_000, "colon"),
        (b"", "format ''"),
    ],
)
async def test_unsupported_layout_is_refused(store: FaultyStore, layout: bytes, says: str) -> None:
    layouts = LayoutStore(store)
    await layouts.initialise(ID)
    await store.set(paths.LAYOUT, layout, 0)
    with pytest.raises(ConfigError, match=says):
        await layouts.ensure(OTHER_ID)


async def test_cluster_without_layout_is_refused(store: FaultyStore) -> None:
    layouts = LayoutStore(store)
    await layouts.initialise(ID)
    await store.delete(paths.LAYOUT, 0)
    with pytest.raises(ConfigError, match="missing"):
        await layouts.ensure(OTHER_ID)
