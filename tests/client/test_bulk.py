"""Bulk loads: every row is written, rows of one key in order, whatever servers and ring do meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from sortedcontainers import SortedDict

from kvstore.client import bulk
from kvstore.client.bulk import BACKLOG_BATCHES, Loader, Row
from kvstore.client.core.config import parse_url
from kvstore.env.library_env import library_env
from kvstore.errors import InvalidRequest, Moved, OutcomeUnknown, StoreError, Unavailable
from kvstore.partition.state.commands import Code, Delete, Op, Put
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId
from tests.client.model import ModelCluster
from tests.client.serving import HandClock, Servers, serving
from tests.waiting import PATIENCE_S

P1, P2 = PartitionId("p1"), PartitionId("p2")
WRITES = (Code.PUT, Code.BATCH)


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    async with serving(ModelCluster()) as running:
        yield running


def loader(servers: Servers, **options: Any) -> Loader:
    return Loader(parse_url(servers.patient_url), **options)


def rows(count: int, *, value: bytes = b"v") -> list[Row]:
    return [Row(b"key-%d" % number, value + b"%d" % number) for number in range(count)]


def stored(servers: Servers) -> dict[bytes, bytes]:
    """Return the data of the keys' owners."""
    cluster = servers.cluster
    return {
        key: record.value
        for name, partition in cluster.partitions.items()
        for key, record in partition.data.items()
        if cluster.ring.partition_of(key) == name
    }


def on_first_writes(servers: Servers, count: int, happens: Any) -> None:
    """`happens(op)` returns the answer to each of the first `count` writes; None: the model's answer."""
    left = count

    def intercept(op: Op, answer: Any) -> bool:
        nonlocal left
        if not left or op.code not in WRITES:
            return False
        left -= 1
        result = happens(op)
        if result is not None:
            asyncio.get_running_loop().call_soon(answer, result)
        return result is not None

    for each in servers.cluster.servers:
        each.intercept = intercept


async def test_all_rows_are_written_when_the_load_ends(servers: Servers) -> None:
    async with loader(servers, batch_rows=7) as load:
        for part in (rows(100), rows(200)[100:]):
            await load.add(part)
    assert stored(servers) == {row.key: row.value for row in rows(200)}
    assert load.written == 200


async def test_last_row_of_a_key_wins(servers: Servers) -> None:
    on_first_writes(servers, 2, lambda op: Unavailable("no leader"))
    async with loader(servers, batch_rows=3) as load:
        for turn in range(20):
            await load.add([Row(b"a", b"%d" % turn), Row(b"b", b"%d" % turn)])
    assert stored(servers) == {b"a": b"19", b"b": b"19"}


async def test_row_can_expire_and_row_without_a_value_deletes(servers: Servers) -> None:
    async with loader(servers) as load:
        await load.add([Row(b"gone", b"v"), Row(b"late", b"v", 1 << 40), Row(b"gone", None)])
    assert stored(servers) == {b"late": b"v"}
    owner = servers.cluster.partitions[servers.cluster.ring.partition_of(b"late")]
    assert owner.data[b"late"].expires_ms == 1 << 40


async def test_existing_keys_can_be_skipped(servers: Servers) -> None:
    async with loader(servers) as load:
        await load.add(rows(10))
    async with loader(servers, if_absent=True) as load:
        await load.add(rows(30, value=b"w"))
    assert (load.written, load.kept) == (20, 10)
    found = stored(servers)
    assert found[b"key-9"] == b"v9"
    assert found[b"key-10"] == b"w10"


@pytest.mark.parametrize("if_absent", [False, True])
async def test_value_of_the_largest_size_is_written(servers: Servers, if_absent: bool) -> None:
    """The value leaves no capacity for its key in a batch."""
    async with loader(servers, if_absent=if_absent) as load:
        await load.add([Row(b"large", bytes(1 << 20)), Row(b"large", b"later")])
    assert len(stored(servers)[b"large"]) == (1 << 20 if if_absent else 5)
    assert (load.written, load.kept) == ((1, 1) if if_absent else (2, 0))


async def test_batch_of_unknown_outcome_is_sent_again(servers: Servers) -> None:
    on_first_writes(servers, 3, lambda op: OutcomeUnknown("lost"))
    async with loader(servers) as load:
        await load.add(rows(50))
    assert stored(servers) == {row.key: row.value for row in rows(50)}
    assert servers.cluster.doubly_applied() == []


@pytest.mark.parametrize("if_absent", [False, True])
async def test_batch_whose_outcome_stays_unknown_is_not_written_again(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, if_absent: bool
) -> None:
    """Another client deletes a row of the batch before the timeout."""
    clock, (kept, deleted) = HandClock(), (servers.cluster.key_of(P1, number) for number in range(2))
    monkeypatch.setattr(bulk, "library_env", lambda name: replace(library_env(name), clock=clock))

    def no_answer_in_time(op: Op) -> StoreError:
        for each in (op, Delete(deleted)):
            servers.cluster.partitions[P1].run(each)
        clock.at += PATIENCE_S
        return OutcomeUnknown("lost")

    on_first_writes(servers, 1, no_answer_in_time)
    with pytest.raises(OutcomeUnknown):
        async with loader(servers, if_absent=if_absent) as load:
            await load.add([Row(kept, b"v"), Row(deleted, b"v")])
    assert stored(servers) == {kept: b"v"}


async def test_rows_of_a_batch_whose_answer_was_lost_count_as_written(servers: Servers) -> None:
    on_first_writes(servers, 1, lambda op: servers.cluster.partitions[P1].run(op) and OutcomeUnknown("lost"))
    async with loader(servers, if_absent=True) as load:
        await load.add([Row(servers.cluster.key_of(P1, number), b"v") for number in range(2)])
    assert (load.written, load.kept) == (2, 0)


async def test_row_that_exists_is_kept_after_an_attempt_was_lost(servers: Servers) -> None:
    key = servers.cluster.key_of(P1)
    servers.cluster.partitions[P1].run(Put(key, b"first"))
    on_first_writes(servers, 1, lambda op: OutcomeUnknown("lost"))
    async with loader(servers, if_absent=True) as load:
        await load.add([Row(key, b"v")])
    assert stored(servers) == {key: b"first"}
    assert (load.written, load.kept) == (0, 1)


@pytest.mark.parametrize("is_sent", [False, True])
async def test_batch_that_a_new_ring_splits_is_written_in_parts(servers: Servers, is_sent: bool) -> None:
    cluster = servers.cluster

    def half_of_p1_moves(op: Op) -> StoreError:
        """Once, when the first batch of p1 is in flight."""
        ring = cluster.ring
        if ring.version == 1 and ring.partition_of(op.key) == P1:
            tokens = SortedDict(ring.tokens)
            last = next(token for token, owner in tokens.items() if owner == P1)
            first = max((token for token in tokens if token < last), default=0)
            tokens[(first + last) // 2] = P2
            cluster.ring = Ring(ring.version + 1, ring.partitions, tokens, ring.hash)
            cluster.changed()
        return OutcomeUnknown("lost") if is_sent else Moved("p2", cluster.ring.version)

    on_first_writes(servers, 3, half_of_p1_moves)
    async with loader(servers) as load:
        await load.add(rows(300))
        await load.add(rows(300, value=b"w"))
    assert cluster.ring.version == 2
    assert stored(servers) == {row.key: row.value for row in rows(300, value=b"w")}
    assert load.written == 600


async def test_failed_load_reports_its_error_and_does_not_wait(servers: Servers) -> None:
    on_first_writes(servers, 1000, lambda op: InvalidRequest("no"))
    with pytest.raises(InvalidRequest, match="no"):
        async with loader(servers) as load:
            await load.add(rows(50))


async def test_row_that_the_store_would_refuse_is_refused_at_once(servers: Servers) -> None:
    with pytest.raises(InvalidRequest, match="expected a key of 1 to"):
        async with loader(servers) as load:
            await load.add([Row(b"", b"v")])


async def test_adding_after_a_refused_row_raises_its_error_again(servers: Servers) -> None:
    wrong = [*rows(2), Row(b"", b"v")]
    load = await loader(servers).__aenter__()
    async with asyncio.timeout(PATIENCE_S):
        for call in (load.add(wrong), load.add(rows(1)), load.__aexit__(None, None, None)):
            with pytest.raises(InvalidRequest, match="expected a key of 1 to"):
                await call


async def test_malformed_row_ends_the_load_without_blocking_it(servers: Servers) -> None:
    text: Any = "text"
    with pytest.raises(TypeError):
        async with asyncio.timeout(PATIENCE_S), loader(servers) as load:
            await load.add([Row(b"k", text)])


async def test_load_holds_a_bounded_number_of_rows(servers: Servers) -> None:
    for each in servers.cluster.servers:
        each.intercept = lambda op, answer: op.code in WRITES
    large = [Row(b"key-%d" % number, bytes(1000)) for number in range(BACKLOG_BATCHES + 1)]
    with pytest.raises(TimeoutError):
        async with loader(servers, batch_bytes=1000) as load, asyncio.timeout(0.2):
            await load.add(large)


async def test_load_does_not_begin_without_a_server() -> None:
    with pytest.raises(Unavailable):
        async with Loader(parse_url("kv://127.0.0.1:1?timeout=300ms")):
            raise AssertionError("unreachable")
