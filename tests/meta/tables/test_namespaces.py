"""The table of namespaces in the metadata store, and the behaviour of every table."""

from contextlib import suppress

import pytest

from kvstore.errors import MetadataUnknown, NotThere, UndecodableNode
from kvstore.meta import codec, paths
from kvstore.meta.store import MetadataStore
from kvstore.meta.tables.namespaces import NamespaceStore
from kvstore.namespaces import Add, Namespace, NamespaceTable, Remove, Set

SHOP = Namespace(name="shop", prefix=b"shop/", keys_max=5)


@pytest.fixture
async def table(store: MetadataStore) -> NamespaceStore:
    found = NamespaceStore(store)
    await found.change(Add(SHOP))
    return found


def remove_without_an_answer(store: MetadataStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next write be that of a table without namespaces, and its outcome be unknown."""
    real = store.set

    async def set_another(path: str, data: bytes, version: int) -> int:
        monkeypatch.setattr(store, "set", real)
        with suppress(MetadataUnknown):
            await real(path, codec.encode(NamespaceTable()), version)
        raise MetadataUnknown("the answer was lost")

    monkeypatch.setattr(store, "set", set_another)


async def test_namespace_removal_of_unknown_outcome_counts_as_done(
    store: MetadataStore, table: NamespaceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_without_an_answer(store, monkeypatch)
    assert await table.change(Remove("shop")) == NamespaceTable()


async def test_change_of_a_namespace_removed_meanwhile_fails(
    store: MetadataStore, table: NamespaceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_without_an_answer(store, monkeypatch)
    with pytest.raises(NotThere, match="shop"):
        await table.change(Set(name="shop", keys_max=7))
    assert await table.read() == NamespaceTable()


async def test_namespace_table_without_its_part_does_not_count_as_empty(store: MetadataStore) -> None:
    await store.create(paths.NAMESPACES, b'{"format":1}')
    with pytest.raises(UndecodableNode):
        await NamespaceStore(store).read()
