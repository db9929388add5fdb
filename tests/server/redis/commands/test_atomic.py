"""Commands on keys of several partitions, with `[redis] transactions_across_slots`: they are transactions, which are
tried again after a conflict."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis
from redis import exceptions

from kvstore.access import RevokeRole
from kvstore.errors import Conflict, InvalidRequest, OutcomeUnknown, Unavailable
from kvstore.limits import BATCH_BYTES_MAX, TRANSACTION_KEYS_MAX
from kvstore.partition.state.commands import Batch, Delete, Op, Put, Transact
from kvstore.server.access.identities import Access
from kvstore.server.redis.commands.atomic import CONFLICTS_S, PAUSE_MAX_S, Atomic
from kvstore.types import PartitionId
from tests.server.access.tables import table
from tests.server.redis.resp_port import RespPort, redis_port
from tests.server.redis.transacting import Transacting

PARTITIONS = 3
P1 = PartitionId("p1")


@pytest.fixture
async def resp(tmp_path: Path) -> AsyncIterator[RespPort]:
    async with redis_port(tmp_path, partitions=PARTITIONS, transactions_across_slots=True) as opened:
        yield opened


@pytest.fixture
def transacting(resp: RespPort) -> Transacting:
    return Transacting(resp.backend)


def client_of(resp: RespPort, **options: Any) -> redis.Redis:
    return redis.Redis(host=resp.host, port=resp.port, retry=None, single_connection_client=True, **options)


def one_key_of_each(resp: RespPort, count: int = PARTITIONS, prefix: str = "") -> list[bytes]:
    """Return keys of so many different partitions."""
    found: dict[str, bytes] = {}
    number = 0
    while len(found) < count:
        key = f"{prefix}k{number}".encode()
        found.setdefault(resp.backend.topology.ring.partition_of(key), key)
        number += 1
    return list(found.values())


async def together(client: redis.Redis, *queued: tuple[Any, ...]) -> list[Any]:
    """Execute commands between MULTI and EXEC, and return their results. An error of a command is its result."""
    async with client.pipeline() as pipe:
        for words in queued:
            pipe.execute_command(*words)
        found: list[Any] = await pipe.execute(raise_on_error=False)
        return found


def packed(*words: bytes | str) -> bytes:
    encoded = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)


# ── what becomes a transaction ────────────────────────────────────────────────────────────────────────────────────────


async def test_exec_over_partitions_is_one_transaction(resp: RespPort, transacting: Transacting) -> None:
    a, b, c = one_key_of_each(resp)
    async with client_of(resp) as client:
        await client.set(b, "old")
        found = await together(client, ("GET", b), ("SET", a, "1"), ("INCR", c), ("SET", b, "2", "NX"), ("MGET", a, b))
        assert found == [b"old", True, 1, None, [b"1", b"old"]]
    (op,) = transacting.transactions
    assert op.key == a, "the home is the owner of the first written key"
    assert [each.key for each in op.ops] == [b, a, c, b, a, b]


async def test_exec_with_keys_of_one_tag_stays_a_batch(resp: RespPort, transacting: Transacting) -> None:
    async with client_of(resp) as client:
        assert await together(client, ("SET", "{t}a", 1), ("SET", "{t}b", 2)) == [True, True]
    assert transacting.transactions == []
    assert [type(op) for op in resp.backend.submitted] == [Batch]


async def test_exec_with_tags_of_one_partition_is_a_batch(resp: RespPort, transacting: Transacting) -> None:
    """The bounds of a transaction over several partitions do not apply then."""
    keys = [b"n%d" % number for number in range(1000)]
    keys = [key for key in keys if resp.backend.topology.ring.partition_of(key) == "p1"]
    assert len(keys) > TRANSACTION_KEYS_MAX
    async with client_of(resp) as client:
        assert await together(client, *(("SET", key, "1") for key in keys)) == [True] * len(keys)
    assert transacting.transactions == []


async def test_error_of_one_command_does_not_undo_the_others(resp: RespPort, transacting: Transacting) -> None:
    a, b, _ = one_key_of_each(resp)
    async with client_of(resp) as client:
        await client.set(a, "text")
        first, second = await together(client, ("INCR", a), ("SET", b, "1"))
        assert isinstance(first, exceptions.ResponseError)
        assert second is True
        assert await client.get(b) == b"1"


async def test_exec_is_nil_if_a_watched_key_of_another_partition_changed(
    resp: RespPort, transacting: Transacting
) -> None:
    a, b, c = one_key_of_each(resp)
    async with client_of(resp) as client, client_of(resp) as other:
        for changes in (True, False):
            async with client.pipeline() as pipe:
                await pipe.watch(a, b)
                if changes:
                    await other.set(b, "changed")
                pipe.multi()
                pipe.set(c, "written")
                if changes:
                    with pytest.raises(exceptions.WatchError):
                        await pipe.execute()
                    assert await other.exists(a, c) == 0
                else:
                    assert await pipe.execute() == [True]
        assert await other.get(c) == b"written"
    assert [len(op.ops) for op in transacting.transactions] == [3, 3], "two checks and one write"
    assert {op.key for op in transacting.transactions} == {c}, "a check is no write"


async def test_exec_that_only_reads_is_a_read_transaction(resp: RespPort, transacting: Transacting) -> None:
    """It logs nothing (docs/protocol.md Tx11)."""
    a, b, c = one_key_of_each(resp)
    async with client_of(resp) as client:
        await client.mset({a: "1", b: "22", c: "3"})
        logged = [len(each.log.payloads) for each in resp.backend.partitions.values()]
        async with client.pipeline() as pipe:
            await pipe.watch(c)
            pipe.multi()
            pipe.mget(a, b)
            pipe.strlen(b)
            assert await pipe.execute() == [[b"1", b"22"], 2]
        assert [len(each.log.payloads) for each in resp.backend.partitions.values()] == logged
    assert transacting.transactions == []


async def test_msetnx_sets_all_keys_or_none(resp: RespPort, transacting: Transacting) -> None:
    a, b, c = one_key_of_each(resp)
    async with client_of(resp) as client:
        assert await client.msetnx({a: "1", b: "2"}) is True
        assert await client.msetnx({c: "3", b: "4"}) is False
        assert await client.mget(a, b, c) == [b"1", b"2", None]


async def test_rename_and_copy_carry_value_and_expiry(resp: RespPort, transacting: Transacting) -> None:
    a, b, c = one_key_of_each(resp)
    async with client_of(resp) as client:
        await client.set(a, "1", ex=1000)
        assert await client.rename(a, b) is True
        assert await client.mget(a, b) == [None, b"1"]
        assert 900 < await client.ttl(b) <= 1000
        assert await client.copy(b, c) is True
        assert await client.copy(b, c) is False
        assert await client.renamenx(b, c) is False
        await client.set(b, "2")
        assert await client.copy(b, c, replace=True) is True
        assert (await client.get(c), await client.ttl(c)) == (b"2", -1)
        with pytest.raises(exceptions.ResponseError, match="no such key"):
            await client.rename(a, b)
        assert await client.renamenx(c, a) is True
        assert await client.mget(a, b, c) == [b"2", b"2", None]


async def test_rename_of_the_largest_value_is_a_transaction(resp: RespPort, transacting: Transacting) -> None:
    a, b, _ = one_key_of_each(resp)
    async with client_of(resp) as client:
        await client.set(a, bytes(BATCH_BYTES_MAX))
        assert await client.rename(a, b) is True
        assert await client.strlen(b) == BATCH_BYTES_MAX


async def test_rename_starts_again_when_the_source_changes(
    resp: RespPort, transacting: Transacting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value that RENAME moves is the one that the key has when it disappears."""
    a, b, _ = one_key_of_each(resp)
    async with client_of(resp) as client, client_of(resp) as other:
        await client.set(a, "0")
        result, changed = transacting._result, list[bytes]()

        async def changing(op: Transact) -> Any:
            if isinstance(op.ops[0], Delete) and len(changed) < 3:
                changed.append(b"%d" % len(changed))
                await transacting._batch([Put(a, changed[-1])], 0)
            return await result(op)

        monkeypatch.setattr(transacting, "_result", changing)
        assert await client.rename(a, b) is True
        assert await other.mget(a, b) == [None, b"2"]


async def test_mset_over_partitions_stays_independent_puts(resp: RespPort, transacting: Transacting) -> None:
    a, b, c = one_key_of_each(resp)
    async with client_of(resp) as client:
        assert await client.mset({a: "1", b: "2", c: "3"}) is True
    assert transacting.transactions == []


# ── conflicts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_conflict_is_tried_again(resp: RespPort, transacting: Transacting) -> None:
    a, b, _ = one_key_of_each(resp)
    transacting.conflicts = 3
    async with client_of(resp) as client:
        assert await client.msetnx({a: "1", b: "2"}) is True
        transacting.conflicts = 3
        assert await together(client, ("INCR", a), ("INCR", b)) == [2, 3]
    assert len(transacting.transactions) == 8


async def test_watched_key_that_changes_between_attempts_makes_exec_nil(
    resp: RespPort, transacting: Transacting
) -> None:
    a, b, c = one_key_of_each(resp)
    async with client_of(resp) as client, client_of(resp) as other:
        changes: list[asyncio.Task[Any]] = []
        transacting.when_refused = lambda: changes.append(asyncio.ensure_future(other.set(a, "changed")))
        async with client.pipeline() as pipe:
            await pipe.watch(a)
            pipe.multi()
            pipe.set(b, 1)
            pipe.set(c, 1)
            transacting.conflicts = 12
            with pytest.raises(exceptions.WatchError):
                await pipe.execute()
        await asyncio.gather(*changes)
        assert await client.exists(b, c) == 0


# docs/protocol.md M15
async def test_pipelined_commands_keep_their_order_around_a_retried_exec(
    resp: RespPort, transacting: Transacting
) -> None:
    """A later write of the connection must not overtake a transaction that is tried again."""
    a, b, _ = one_key_of_each(resp)
    transacting.conflicts = 5
    async with resp.raw() as client:
        sent = [
            *(packed("SET", a, "1"), packed("MULTI"), packed("INCR", a), packed("INCR", b), packed("EXEC")),
            *(packed("SET", a, "9"), packed("APPEND", b, "0"), packed("MGET", a, b)),
        ]
        expected = b"+OK\r\n+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n:2\r\n:1\r\n+OK\r\n:2\r\n*2\r\n$1\r\n9\r\n$2\r\n10\r\n"
        assert await client.ask(b"".join(sent), expected) == expected


class Clock:
    """A clock that advances with each look, by as much as a pause could take."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.looks = 0

    def now(self) -> float:
        self.looks += 1
        self.now_s += PAUSE_MAX_S
        return self.now_s


def always(error: Exception) -> tuple[Callable[[Op], Any], list[Op]]:
    asked: list[Op] = []

    async def ask(op: Op) -> Any:
        asked.append(op)
        raise error

    return ask, asked


def owner_by_first_byte(key: bytes) -> PartitionId:
    return PartitionId(f"p{key[:1].decode()}")


async def test_conflict_is_reported_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.sleep", _no_sleep)
    ask, asked = always(Conflict("key a is held"))
    clock = Clock()
    atomic = Atomic(ask, owner_by_first_byte, spans_slots=True, now=clock.now, random=random.Random(1))
    with pytest.raises(Conflict, match="key a is held"):
        await atomic((Put(b"a", b""), Put(b"b", b"")))
    assert clock.now_s < CONFLICTS_S + 2 * PAUSE_MAX_S
    assert len(asked) > CONFLICTS_S / PAUSE_MAX_S / 2, "it was tried again until then"
    with pytest.raises(Conflict):  # another attempt of the same command has no time of its own
        await atomic((Put(b"a", b""), Put(b"b", b"")))
    assert clock.now_s < CONFLICTS_S + 4 * PAUSE_MAX_S


async def _no_sleep(delay: float) -> None:
    assert 0 <= delay <= PAUSE_MAX_S


async def test_pauses_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two transactions that meet would meet again."""
    pauses: dict[int, list[float]] = {}
    for seed in (1, 2):
        slept = pauses[seed] = []

        async def sleep(delay: float, slept: list[float] = slept) -> None:
            slept.append(delay)

        monkeypatch.setattr("asyncio.sleep", sleep)
        ask, _ = always(Conflict())
        atomic = Atomic(ask, owner_by_first_byte, spans_slots=True, now=Clock().now, random=random.Random(seed))
        with pytest.raises(Conflict):
            await atomic((Put(b"a", b""), Put(b"b", b"")))
    assert pauses[1] != pauses[2]


async def test_nothing_is_tried_again_for_a_lost_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.sleep", _no_sleep)
    ask, asked = always(Conflict())
    atomic = Atomic(ask, owner_by_first_byte, spans_slots=True, now=Clock().now, is_gone=lambda: True)
    with pytest.raises(Unavailable):
        await atomic((Put(b"a", b""), Put(b"b", b"")))
    assert len(asked) == 1


async def test_conflict_becomes_tryagain(
    resp: RespPort, transacting: Transacting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.server.redis.commands.atomic.CONFLICTS_S", 0.0)
    a, b, _ = one_key_of_each(resp)
    transacting.conflicts = 2
    async with resp.raw() as client:
        expected = b"-TRYAGAIN another transaction holds a key\r\n"
        assert await client.ask(packed("MSETNX", a, "1", b, "2"), expected) == expected
        sent = packed("MULTI") + packed("SET", a, "1") + packed("SET", b, "2") + packed("EXEC")
        expected = b"+OK\r\n+QUEUED\r\n+QUEUED\r\n" + expected
        assert await client.ask(sent, expected) == expected


async def test_outcome_that_is_unknown_is_not_tried_again(resp: RespPort, transacting: Transacting) -> None:
    a, b, _ = one_key_of_each(resp)
    transacting.failure = OutcomeUnknown("the link broke")
    async with client_of(resp) as client:
        with pytest.raises(exceptions.ResponseError, match=r"^UNKNOWN the write may or may not have been done"):
            await together(client, ("INCR", a), ("INCR", b))
    assert len(transacting.transactions) == 1


async def test_batch_becomes_a_transaction_when_its_keys_were_divided() -> None:
    """A move of keys reaches a batch on its way: the next attempt knows their owners."""
    owners, asked = {b"a": P1, b"b": P1}, list[Op]()

    async def ask(op: Op) -> Any:
        asked.append(op)
        if isinstance(op, Batch):
            owners[b"b"] = PartitionId("p2")
            raise InvalidRequest("expected all keys of a batch in one partition")
        return [1, 2], [("p1", 1), ("p2", 2)]

    atomic = Atomic(ask, lambda key: owners[key], spans_slots=True)
    assert await atomic((Put(b"a", b""), Put(b"b", b""))) == [1, 2]
    assert [type(op) for op in asked] == [Batch, Transact]


async def test_invalid_batch_is_not_tried_again() -> None:
    ask, asked = always(InvalidRequest("expected something else"))
    for spans_slots in (True, False):
        with pytest.raises(InvalidRequest):
            await Atomic(ask, lambda key: P1, spans_slots=spans_slots)((Put(b"a", b""), Put(b"b", b"")))
    assert len(asked) == 2


# ── bounds ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_exec_above_a_limit_is_refused_and_does_nothing(resp: RespPort, transacting: Transacting) -> None:
    a, b, _ = one_key_of_each(resp)
    async with client_of(resp) as client:
        with pytest.raises(exceptions.ResponseError, match="expected at most 100 keys in a transaction"):
            await together(client, *(("SET", f"n{number}", 1) for number in range(TRANSACTION_KEYS_MAX + 1)))
        with pytest.raises(exceptions.ResponseError, match="expected at most 1048576 bytes of keys and values"):
            await together(client, ("SET", a, bytes(BATCH_BYTES_MAX)), ("SET", b, ""))
        with pytest.raises(exceptions.ResponseError, match="expected no key of a session, lock, election"):
            await together(client, *(("SET", key, "") for key in (a, b, b"{a}/lock/l/1")))
        assert await client.dbsize() == 0
    assert transacting.transactions == []


# ── permissions ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_permissions_are_required_for_every_key(tmp_path: Path) -> None:
    async with redis_port(tmp_path, access=Access(table()), transactions_across_slots=True) as resp:
        transacting = Transacting(resp.backend)
        mine, also_mine, _ = one_key_of_each(resp, prefix="t/")
        other = next(key for key in one_key_of_each(resp, prefix="u/") if _differ(resp, key, mine))
        async with client_of(resp, username="tenant", password="secret", protocol=3) as client:
            await client.set(mine, "1")
            for words in (
                ("MSETNX", also_mine, 1, other, 2),
                ("RENAME", mine, other),
                ("RENAMENX", other, mine),
                ("COPY", other, mine, "REPLACE"),
                ("COPY", mine, other),
            ):
                with pytest.raises(exceptions.NoPermissionError):
                    await client.execute_command(*words)
            with pytest.raises(exceptions.NoPermissionError):
                await together(client, ("SET", mine, "2"), ("SET", other, "2"))
            assert await client.get(mine) == b"1"
            assert not any(isinstance(each, Put) for op in transacting.transactions for each in op.ops)
            assert await client.rename(mine, also_mine) is True


def _differ(resp: RespPort, one: bytes, two: bytes) -> bool:
    partition_of = resp.backend.topology.ring.partition_of
    return partition_of(one) != partition_of(two)


async def test_revoked_right_ends_a_transaction_that_is_tried_again(tmp_path: Path) -> None:
    """Permissions are those of the moment of each attempt."""
    access = Access(table())
    async with redis_port(tmp_path, access=access, transactions_across_slots=True) as resp:
        transacting = Transacting(resp.backend)
        transacting.conflicts = 1
        transacting.when_refused = lambda: access.take(table(RevokeRole("tenant", "owns")))
        a, b, _ = one_key_of_each(resp, prefix="t/")
        async with client_of(resp, username="tenant", password="secret", protocol=3) as client:
            with pytest.raises(exceptions.NoPermissionError):
                await together(client, ("SET", a, "1"), ("SET", b, "2"))
        assert len(transacting.transactions) == 1
        assert [each.state.key_count for each in resp.backend.partitions.values()] == [0] * PARTITIONS
