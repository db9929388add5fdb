"""Moves of metadata to another store: complete or nothing, unused, once; and no ledger id is assigned twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import ConfigError, MetadataError
from kvstore.meta import dump, paths
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledger_ids import (
    FormerCount,
    LedgerIdCount,
    LedgerIdGenerator,
    decode_former,
    encode_former,
    former_counts,
)
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import MetadataStore, ensure_path
from kvstore.meta.transfer import BATCH_NODES, export, restore
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum

INSTANCE = "0f8f2d4e-0000-4000-8000-000000000001"


async def founded(ledgers: int = 3) -> MemoryStore:
    """A cluster's metadata that nobody uses."""
    store = MemoryStore()
    await LayoutStore(store).initialise(INSTANCE)
    for _ in range(ledgers):
        ledger = await LedgerIdGenerator(store).next_id()
        fragment = Fragment(EntryId(0), (BookieId("b1"),))
        await LedgerStore(store).create(LedgerMetadata(ledger, Quorum(1, 1, 1), (fragment,), token=9))
    await ensure_path(store, "/partitions/p1/log")
    await store.set("/partitions/p1/log", bytes(range(256)), 0)
    return store


async def test_imported_store_equals_the_exported_one(store: MetadataStore) -> None:
    nodes, instance = await export(await founded(ledgers=2 * BATCH_NODES))
    await restore(store, *dump.decode(dump.encode(nodes, instance)))
    moved, name = await export(store)
    new = {"/ledgers/idgen-long": b"", "/ledgers/idgen-long/HOB-0000000001": b""}
    counts = decode_former(nodes[paths.COUNTED]), decode_former(moved.pop(paths.COUNTED))
    assert counts[0] == (FormerCount(LedgerId(2 * BATCH_NODES), is_sure=True),)
    assert counts[1] == (*counts[0], FormerCount(LedgerId(1 << 32), is_sure=True))
    assert (moved, name) == ({**{path: data for path, data in nodes.items() if path != paths.COUNTED}, **new}, INSTANCE)
    assert await LedgerStore(store).list_ids() == list(range(2 * BATCH_NODES))
    await LayoutStore(store).check()


async def test_no_ledger_gets_a_used_id_after_a_move(store: MetadataStore) -> None:
    """Also the id of a removed ledger: bookies may have entries of it."""
    source = await founded(ledgers=3)
    await LedgerStore(source).remove(LedgerId(2), 0)
    nodes, instance = await export(source)
    await restore(store, nodes, instance)
    first = await LedgerIdGenerator(store).next_id()
    assert first == 1 << 32
    back = MemoryStore()
    await restore(back, *await export(store))
    assert await LedgerIdGenerator(back).next_id() == 2 << 32


# docs/protocol.md B29
async def test_former_id_counters_are_known_after_a_move(store: MetadataStore) -> None:
    await restore(store, *await export(await founded(ledgers=3)))
    assert await former_counts(store) == (FormerCount(LedgerId(3), is_sure=True),)
    second = MemoryStore()
    await restore(second, *await export(store))
    former = await former_counts(second)
    assert former == (FormerCount(LedgerId(3), is_sure=True), FormerCount(LedgerId(1 << 32), is_sure=True))
    counted = LedgerIdCount(await LedgerIdGenerator(second).next_id(), former)
    given = {0, 2, 3, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 2 << 32, (2 << 32) + 1, 3 << 32}
    assert {each for each in given if not counted.never_gave(each)} == {0, 2}
    assert {each for each in given if not counted.may_be_missing(each)} == {0, 2, 3 << 32}, (
        "of others, of another range"
    )


# docs/protocol.md B29
async def test_id_behind_the_last_ledger_may_be_used_when_the_file_has_no_count() -> None:
    nodes, instance = await export(await founded(ledgers=3))
    del nodes[paths.COUNTED]
    store = MemoryStore()
    await restore(store, nodes, instance)
    counted = LedgerIdCount(LedgerId(1 << 32), await former_counts(store))
    assert counted.former == (FormerCount(LedgerId(3), is_sure=False),)
    assert (counted.may_be_missing(2), counted.may_be_missing(3), counted.never_gave(3)) == (False, True, False)


def test_counts_have_the_documented_bytes() -> None:
    golden = b'{"format":1,"former":[{"to":3,"is_sure":false},{"to":4294967296,"is_sure":true}]}'
    former = (FormerCount(LedgerId(3), is_sure=False), FormerCount(LedgerId(1 << 32), is_sure=True))
    assert encode_former(reversed(former)) == golden
    assert decode_former(golden) == former


# docs/protocol.md A12
async def test_no_bookie_seems_older_than_a_ledger_after_a_move(store: MetadataStore) -> None:
    """A bookie that was set up after a ledger was created may not report its entries as absent; the file does not show
    which was first."""
    source = await founded(ledgers=3)
    await ensure_path(source, paths.cookie(BookieId("10.0.0.1:3181")))
    await restore(store, *await export(source))
    _, cookie = await store.get(paths.cookie(BookieId("10.0.0.1:3181")))
    for ledger in await LedgerStore(store).list_ids():
        _, made = await store.get(paths.ledger(ledger))
        assert made.created < cookie.created


async def test_second_import_is_refused(store: MetadataStore) -> None:
    nodes, instance = await export(await founded())
    await restore(store, nodes, instance)
    with pytest.raises(ConfigError, match="expected an empty place, got a cluster: /counted, /ledgers, /partitions"):
        await restore(store, nodes, instance)
    there, _ = await export(store)
    assert {**nodes, **there, paths.COUNTED: b""} == {**there, paths.COUNTED: b""}


async def test_nothing_is_exported_while_a_process_holds_an_ephemeral() -> None:
    source = await founded()
    node = MemoryStore(source.tree)
    await node.create("/servers")
    await node.create("/servers/n1", ephemeral=True)
    with pytest.raises(ConfigError, match="/servers/n1 belongs to a running process: stop every node"):
        await export(source)
    await node.close()
    await export(source)


async def test_metadata_that_change_while_read_are_not_exported() -> None:
    source = await founded()
    children = source.children

    async def changing(path: str) -> list[str]:
        if path == "/partitions/p1/log":
            await source.set(path, b"new", -1)
        return await children(path)

    source.children = changing  # type: ignore[method-assign]
    with pytest.raises(MetadataError, match="has changed while it was read"):
        await export(source)


async def test_unfinished_import_makes_no_cluster() -> None:
    """And its remains do not count as an empty place."""
    nodes, instance = await export(await founded())
    store = MemoryStore()
    create = store.create

    async def dies(path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        if path == paths.INSTANCE_ID:
            raise MetadataError("gone")
        return await create(path, data)

    store.create = dies  # type: ignore[method-assign]
    with pytest.raises(MetadataError, match="gone"):
        await restore(store, nodes, instance)
    with pytest.raises(ConfigError, match="holds no cluster"):
        await LayoutStore(store).instance_id()
    with pytest.raises(ConfigError, match="an import that did not end"):
        await restore(store, nodes, instance)


async def test_place_without_a_cluster_has_nothing_to_export(store: MetadataStore) -> None:
    with pytest.raises(ConfigError, match="holds no cluster"):
        await export(store)


GOLDEN = (
    b'{"kvstore_metadata":1,"instance":"i"}\n{"path":"/a","data":""}\n{"path":"/a/b","data":"AP8="}\n'
    b'{"nodes":2,"sha256":"d8718890544fa3a0f5040038d93352e0e394c68a7cf8ab52358370dcd749ae40"}\n'
)


def test_dump_file_has_the_documented_bytes() -> None:
    nodes = {"/a/b": b"\0\xff", "/a": b""}
    assert dump.encode(nodes, "i") == GOLDEN
    assert dump.decode(GOLDEN) == (nodes, "i")


def test_damaged_dump_file_is_refused() -> None:
    for place in range(len(GOLDEN) - 1):
        damaged = bytearray(GOLDEN)
        damaged[place] ^= 1
        with pytest.raises(ConfigError):
            dump.decode(bytes(damaged))
    for size in range(len(GOLDEN) - 1):
        with pytest.raises(ConfigError):
            dump.decode(GOLDEN[:size])


@pytest.mark.parametrize(
    ("nodes", "fault"), [({"/a/b": b""}, "/a/b has no parent in the file"), ({"a": b""}, "expected an absolute path")]
)
def test_dump_file_that_is_no_tree_is_refused(nodes: dict[str, bytes], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        dump.decode(dump.encode(nodes, "i"))


def test_later_dump_format_is_refused_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "FORMAT", 2)
    later = dump.encode({}, "i")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="the file has format 2; this build reads 1"):
        dump.decode(later)
