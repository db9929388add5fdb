"""Outcomes of writes at an etcd that is out of space. It also reports "no space" for transactions that it has carried
out: those that were in flight when the space ran out. Real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvstore.devcluster.etcd import EtcdProcess, start_standalone
from kvstore.errors import MetadataUnavailable, MetadataUnknown, NoSuchNode
from kvstore.meta.etcd import EtcdStore
from kvstore.meta.store import SessionState
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs_etcd

AT_ONCE, ROUNDS_MAX = 40, 30


@pytest.fixture
def small_etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    """A server with a quota of 3 MiB."""
    process = start_standalone(tmp_path / "etcd", settings=("--quota-backend-bytes", str(3 << 20)))
    yield process
    process.kill()


@pytest.fixture
async def store(small_etcd: EtcdProcess) -> AsyncIterator[EtcdStore]:
    address = f"{small_etcd.address}/full"
    store = await EtcdStore.connect(
        address, session_timeout_s=60, call_timeout_s=PATIENCE_S
    )  # it reports all of that itself
    yield store
    await store.close()


async def outcomes(store: EtcdStore, first: int) -> dict[str, BaseException | None]:
    """Return the outcomes of many concurrent creates."""

    async def outcome(name: str) -> tuple[str, BaseException | None]:
        try:
            await store.create(f"/{name}", bytes(60_000))
        except (MetadataUnavailable, MetadataUnknown) as error:
            return name, error
        return name, None

    return dict(await asyncio.gather(*(outcome(f"n{number}") for number in range(first, first + AT_ONCE))))


async def is_there(store: EtcdStore, name: str) -> bool:
    try:
        await store.get(f"/{name}")
    except NoSuchNode:
        return False
    return True


async def test_refused_write_is_not_done_when_etcd_is_full(store: EtcdStore) -> None:
    done: dict[str, BaseException | None] = {}
    for each in range(ROUNDS_MAX):
        done |= await outcomes(store, each * AT_ONCE)
        if any(done.values()):
            break
    there = {name for name in done if await is_there(store, name)}  # such a server may refuse to list them
    assert any(done.values()), "it never was full"
    assert not {name for name, error in done.items() if isinstance(error, MetadataUnavailable)} & there
    assert {name for name, error in done.items() if error is None} <= there


async def test_certainly_refused_write_is_reported_and_keeps_the_connection(store: EtcdStore) -> None:
    states: list[SessionState] = []
    store.on_state(states.append)
    for each in range(ROUNDS_MAX):
        if any((await outcomes(store, each * AT_ONCE)).values()):
            break
    with pytest.raises(MetadataUnavailable, match="space exceeded"):
        await store.create("/late")
    with pytest.raises(MetadataUnavailable, match="space exceeded"):
        await store.set("/n0", b"", 0)
    assert states == []
