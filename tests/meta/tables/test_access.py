"""The access table on each driver of the metadata store."""

import asyncio
from contextlib import suppress
from functools import cache

import pytest

from kvstore.access import (
    AccessTable,
    AddRole,
    AddUser,
    GrantRight,
    GrantRole,
    RemoveUser,
    Right,
    Role,
    Switch,
    applied,
    encoded,
)
from kvstore.errors import InvalidRequest, MetadataUnknown, UndecodableNode
from kvstore.meta import codec, paths
from kvstore.meta.store import MetadataStore
from kvstore.meta.tables.access import KIND, AccessStore
from kvstore.meta.tables.table import TABLE_BYTES_MAX
from tests.waiting import PATIENCE_S

HASH = encoded(b"secret", bytes(16), p=1)


async def test_cluster_without_a_table_requires_no_login(store: MetadataStore) -> None:
    assert await AccessStore(store).read() == AccessTable()


async def test_changes_of_two_writers_are_all_applied(store: MetadataStore, other: MetadataStore) -> None:
    one, two = AccessStore(store), AccessStore(other)
    await one.change(AddUser("root", HASH))
    await asyncio.gather(*(each.change(AddRole(f"r{number}")) for number, each in enumerate((one, two) * 3)))
    await two.change(GrantRight("r1", Right.READ, b"\xff\x00"))
    await one.change(GrantRole("root", "r1"))
    await one.change(Switch(True))
    table = await two.read()
    assert table.is_on
    assert [each.name for each in table.roles] == [f"r{number}" for number in range(6)]
    assert [(each.name, each.roles) for each in table.users] == [("root", ("admin", "r1"))]
    assert await one.read() == table


async def test_change_calls_the_watch(store: MetadataStore, other: MetadataStore) -> None:
    told = asyncio.Event()
    AccessStore(other).watch(told.set)
    await AccessStore(store).change(AddUser("root", HASH))
    await asyncio.wait_for(told.wait(), PATIENCE_S)


async def test_impossible_change_changes_nothing(store: MetadataStore) -> None:
    access = AccessStore(store)
    with pytest.raises(InvalidRequest, match="role admin"):
        await access.change(Switch(True))
    with pytest.raises(InvalidRequest, match="no user"):
        await access.change(RemoveUser("root"))
    assert await access.read() == AccessTable()


async def test_removal_of_unknown_outcome_counts_as_done(store: MetadataStore, monkeypatch: pytest.MonkeyPatch) -> None:
    access = AccessStore(store)
    await access.change(AddUser("root", HASH))
    await access.change(AddUser("anna", HASH))
    real = store.set

    async def set_and_lose_the_answer(path: str, data: bytes, version: int) -> int:
        monkeypatch.setattr(store, "set", real)
        with suppress(MetadataUnknown):
            await real(path, data, version)
        raise MetadataUnknown("the answer was lost")

    monkeypatch.setattr(store, "set", set_and_lose_the_answer)
    assert [each.name for each in (await access.change(RemoveUser("anna"))).users] == ["root"]


async def test_table_of_a_later_build_does_not_count_as_none(store: MetadataStore) -> None:
    await store.create(paths.ACCESS, codec.encode(AccessTable(is_on=True), format=2))
    with pytest.raises(UndecodableNode):
        await AccessStore(store).read()


def right(number: int) -> GrantRight:
    return GrantRight(f"r{number // 60}", Right.READ, b"%04d" % number + bytes(1000))


@cache
def nearly_full() -> tuple[AccessTable, int]:
    """Return a table, and the number of the first permission that does not fit."""
    table = AccessTable(roles=tuple(Role(f"r{number}") for number in range(9)))
    for number in range(540):
        larger = applied(table, right(number))
        if len(codec.encode(larger)) > TABLE_BYTES_MAX:
            return table, number
        table = larger
    raise AssertionError("it is never full")


async def test_oversized_access_table_is_refused(store: MetadataStore) -> None:
    table, number = nearly_full()
    await store.create(paths.ACCESS, codec.encode(table))
    access = AccessStore(store)
    with pytest.raises(InvalidRequest, match="would exceed"):
        await access.change(right(number))
    await access.change(AddUser("anna", HASH))
    assert (await access.read()).roles == table.roles


def test_stored_bytes_of_the_table_are_stable() -> None:
    data = (
        b'{"format":1,"is_on":true,"users":[{"name":"root","password":"' + HASH.encode() + b'","roles":["admin"]}],'
        b'"roles":[{"name":"r","grants":[{"right":"read","prefix":"YS8="}]}]}'
    )
    with_tokens = (
        data[:-1] + b',"tokens":[{"id":"0123456789ab","user":"root","hash":"' + b"ab" * 32 + b'","expires_ms":5}]}'
    )
    assert codec.encode(KIND.decoded(with_tokens)) == with_tokens
    assert codec.encode(KIND.decoded(data)) == data[:-1] + b',"tokens":[]}', "from before there were tokens"
    with pytest.raises(UndecodableNode):
        KIND.decoded(data.replace(b'"read"', b'"rea"'))
    for damaged in (
        data.replace(b'"is_on":true,', b""),
        data.replace(b'"is_on":true', b'"is_on":null'),
        data.replace(b'"is_on"', b'"on"'),
        data.replace(b'"users"', b'"people"'),
        data[: data.index(b',"roles":[{"name"')] + b"}",
        b'{"format":1}',
        b"",
    ):
        with pytest.raises(UndecodableNode):
            KIND.decoded(damaged)
