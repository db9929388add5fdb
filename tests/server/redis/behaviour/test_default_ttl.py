"""Keys get the default time to live of their namespace, except keys that already existed without one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvstore.errors import StoreError
from kvstore.partition.state.commands import Expire, Get, Increment, Op, Put, Record
from kvstore.server.redis.commands import keys, strings
from kvstore.server.redis.commands.atomic import Atomic
from kvstore.types import PartitionId
from tests.partition.leading.test_usage import led
from tests.partition.one_partition import TIME_MS, Partition

COMMANDS: dict[bytes, Callable[..., Coroutine[Any, Any, bytes]]] = {
    b"RENAME": keys.rename,
    b"RENAMENX": keys.rename,
    b"COPY": keys.copy,
    b"MSETNX": strings.set_if_none,
    b"SETRANGE": strings.set_range,
    b"INCRBYFLOAT": strings.increment_by_float,
}
TTL_MS = 5_000
"""The default TTL of the namespace with the prefix `b`."""


def rewrite(p: Partition, *words: bytes) -> bytes:
    """Execute a command of the Redis interface against the leader."""

    async def ask(op: Op) -> Any:
        result = p.do(op)
        if isinstance(result, StoreError):
            raise result
        return result

    executing = COMMANDS[words[0]](Atomic(ask, lambda key: PartitionId("p1")), list(words))
    with pytest.raises(StopIteration) as end:
        executing.send(None)
    reply: bytes = end.value.value
    return reply


def expiry_ms(p: Partition, key: bytes) -> int:
    record: Record = p.do(Get(key))
    return record.expires_ms - TIME_MS if record.expires_ms else 0


# docs/protocol.md N4
def test_renamed_key_without_expiry_gets_none() -> None:
    p, _ = led()
    p.do(Put(b"b1", b"x"), Expire(b"b1", 0))
    assert rewrite(p, b"RENAME", b"b1", b"b2") == b"+OK\r\n"
    assert expiry_ms(p, b"b2") == 0
    assert rewrite(p, b"COPY", b"b2", b"b3") == b":1\r\n"
    assert rewrite(p, b"RENAMENX", b"b3", b"b4") == b":1\r\n"
    assert (expiry_ms(p, b"b2"), expiry_ms(p, b"b4")) == (0, 0)
    assert p.do(Get(b"b3")) is None


def test_renamed_key_keeps_its_expiry() -> None:
    p, _ = led()
    p.do(Put(b"b1", b"x", TIME_MS + 60_000))
    rewrite(p, b"COPY", b"b1", b"b2")
    rewrite(p, b"RENAME", b"b1", b"b3")
    assert expiry_ms(p, b"b2") == expiry_ms(p, b"b3") == 60_000


def test_restored_key_gets_no_default_ttl_but_new_key_does() -> None:
    p, _ = led()
    p.do(Put(b"c", b"x"))
    rewrite(p, b"RENAME", b"c", b"b1")
    assert expiry_ms(p, b"b1") == 0
    assert rewrite(p, b"MSETNX", b"b2", b"x", b"b3", b"y") == b":1\r\n"
    rewrite(p, b"SETRANGE", b"b4", b"2", b"x")
    rewrite(p, b"INCRBYFLOAT", b"b5", b"0.5")
    assert [expiry_ms(p, b"b%d" % number) for number in range(2, 6)] == [TTL_MS] * 4
    rewrite(p, b"SETRANGE", b"b1", b"2", b"x")
    assert expiry_ms(p, b"b1") == 0


def test_increment_keeps_a_key_without_expiry() -> None:
    """The tickets of a queue are such keys."""
    p, _ = led()
    for number in range(1, 4):
        counted, _ = p.do(Increment(b"b1", 1), Expire(b"b1", 0))
        assert counted[0] == number
        p.wait(6)
