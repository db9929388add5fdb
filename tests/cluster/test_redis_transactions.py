"""Transactions of Redis clients over several partitions of a real cluster.

Accounts show this: each transfer changes two accounts of different partitions and counts itself, in one EXEC. So the
sum of all accounts never changes, in any reading transaction, and each counter ends between the number of acknowledged
transfers and that number plus those with an unknown outcome.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import redis

from kvstore.ring.builder import new_ring
from kvstore.ring.hashing import hash_named
from kvstore.types import PartitionId, ServerId
from tests.beside import beside
from tests.cluster.harness import Cluster, running_cluster
from tests.server.redis.playing import OF_TRANSACTIONS, check
from tests.server.redis.resp_port import Raw

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PARTITIONS = 6
BALANCE = 1000
TELLERS = 6
REST_S = 0.05
"""Pause of a teller between two transfers, and of the auditor between two readings. Shorter pauses take the processors
that a takeover, and the tests beside this one, need."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = ("redis.transactions_across_slots=true", "server.redis_flush=true")
    with running_cluster(tmp_path_factory.mktemp("cluster"), partitions=PARTITIONS, settings=settings) as cluster:
        cluster.wait_until(lambda: can_transact(cluster), "all logs have the version of transactions")
        yield cluster


def can_transact(cluster: Cluster) -> bool:
    """Return True if every partition can be home of a transaction, and take part in one."""
    keys = keys_of(cluster, "begin")
    try:
        for number in range(len(keys)):
            together(cluster.redis(cluster.ids[0]), *(("SET", key, "1") for key in keys[number:] + keys[:number]))
    except redis.ResponseError as error:
        if "log version" not in str(error):
            raise
        return False
    return True


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """The cluster, complete again after the previous test."""
    started.start()
    started.wait_led()
    return started


def keys_of(cluster: Cluster, name: str) -> list[bytes]:
    """Return a key of each partition that no other test uses, in the order of partitions."""
    partitions = [PartitionId(f"p{number + 1}") for number in range(PARTITIONS)]
    ring = new_ring(
        partitions,
        {ServerId(node): "" for node in cluster.ids},
        cluster.file.replicas,
        hash_named(cluster.file.key_hash),
    )
    found: dict[str, bytes] = {}
    for number in range(1000):
        key = f"{name}-{number}".encode()
        found.setdefault(ring.partition_of(key), key)
    return [found[partition] for partition in partitions]


def together(client: redis.Redis, *queued: tuple[Any, ...]) -> list[Any]:
    with client.pipeline() as pipe:
        for words in queued:
            pipe.execute_command(*words)
        found: list[Any] = pipe.execute()
        return found


def packed(*words: bytes | str) -> bytes:
    encoded = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)


class Teller:
    """Transfers money between random accounts through one node, with WATCH, and counts the transfers."""

    def __init__(self, cluster: Cluster, number: int, accounts: list[bytes]) -> None:
        self.counter = b"transfers of %d" % number
        self.acknowledged = self.unknown = self.conflicts = 0
        self.wrong: list[str] = []
        """Replies that no client should get."""
        self._client = cluster.redis(cluster.ids[number % len(cluster.ids)], socket_timeout=15)
        self._accounts, self._random = accounts, Random(number)

    def run(self, over: threading.Event) -> None:
        while not over.is_set():
            is_executing = False
            try:
                with self._client.pipeline() as pipe:
                    source, target = self._random.sample(self._accounts, 2)
                    amount = self._random.randint(1, 9)
                    pipe.watch(source, target)
                    left, more = int(pipe.get(source)), int(pipe.get(target))
                    pipe.multi()
                    pipe.set(source, left - amount)
                    pipe.set(target, more + amount)
                    pipe.incr(self.counter)
                    is_executing = True
                    pipe.execute()
                self.acknowledged += 1
            except redis.WatchError as error:
                # redis-py raises the same error if the connection breaks while it waits for the reply of EXEC
                is_conflict = str(error) == "Watched variable changed."
                self.conflicts += is_conflict
                self.unknown += is_executing and not is_conflict
            except (redis.ConnectionError, redis.TimeoutError):
                self.unknown += is_executing
                over.wait(0.05)
            except redis.ResponseError as error:
                self._take(error)
            over.wait(REST_S)

    def _take(self, error: redis.ResponseError) -> None:
        if str(error).startswith("UNKNOWN"):
            self.unknown += 1
        elif not isinstance(error, redis.exceptions.TryAgainError | redis.exceptions.ClusterDownError):
            self.wrong.append(str(error))


class Auditor:
    """Reads all accounts in one transaction, again and again, and keeps every sum."""

    def __init__(self, client: redis.Redis, accounts: list[bytes]) -> None:
        self.sums: list[int] = []
        self._client, self._accounts = client, accounts

    def run(self, over: threading.Event) -> None:
        while not over.is_set():
            try:
                found = together(self._client, *(("GET", key) for key in self._accounts))
                self.sums.append(sum(map(int, found)))
            except redis.RedisError:
                pass  # no leader, or the accounts change too often: no reading
            over.wait(REST_S)


@contextmanager
def transferring(cluster: Cluster, name: str) -> Iterator[list[Teller]]:
    """Run tellers and an auditor, and check the books at the end."""
    accounts = keys_of(cluster, name)
    client = cluster.redis(cluster.ids[0])
    counters = [b"transfers of %d" % number for number in range(TELLERS)]
    together(client, *(("SET", key, BALANCE) for key in accounts), *(("DEL", key) for key in counters))
    tellers = [Teller(cluster, number, accounts) for number in range(TELLERS)]
    auditor = Auditor(cluster.redis(cluster.ids[-1]), accounts)
    with beside(auditor.run, *(each.run for each in tellers)):
        wait_going_on(cluster, tellers)
        yield tellers
        cluster.wait_until(lambda: auditor.sums, "the auditor read all accounts")
    cluster.wait_led()
    assert set(auditor.sums) == {BALANCE * len(accounts)}
    for node in cluster.ids:
        found = together(cluster.redis(node), *(("GET", key) for key in accounts))
        assert sum(map(int, found)) == BALANCE * len(accounts), node
    for teller in tellers:
        stored = int(client.get(teller.counter) or 0)
        assert teller.wrong == []
        assert teller.acknowledged <= stored <= teller.acknowledged + teller.unknown, teller.counter


def wait_going_on(cluster: Cluster, tellers: list[Teller]) -> None:
    """Wait until each teller has made five more transfers. All tellers make theirs at once."""
    for teller, until in [(teller, teller.acknowledged + 5) for teller in tellers]:
        cluster.wait_until(lambda teller=teller, until=until: teller.acknowledged >= until, f"{teller.counter!r} rises")


def test_commands_on_keys_of_several_partitions_are_atomic(cluster: Cluster) -> None:
    a, b, c, d, e, f = keys_of(cluster, "commands")
    for node in cluster.ids:
        with cluster.redis(node) as client:
            client.delete(a, b, c, d, e, f)
            found = together(client, ("SET", a, "1"), ("INCR", b), ("APPEND", c, "xyz"), ("GET", a))
            assert found == [True, 1, 3, b"1"]
            assert client.msetnx({d: "4", a: "no"}) is False
            assert client.msetnx({d: "4", e: "5"}) is True
            assert client.rename(a, f) is True
            assert client.renamenx(f, b) is False
            assert client.renamenx(f, a) is True
            assert client.copy(c, f) is True
            assert client.copy(d, f) is False
            assert client.copy(d, f, replace=True) is True
            with pytest.raises(redis.ResponseError, match="value is not an integer"):
                together(client, ("INCR", c), ("SET", b, "after an error"))
            assert together(client, ("MGET", a, b, c, d, e, f)) == [[b"1", b"after an error", b"xyz", b"4", b"5", b"4"]]
            with client.pipeline() as pipe:
                pipe.watch(e)
                cluster.redis(cluster.ids[0]).set(e, "6")
                pipe.multi()
                pipe.set(a, "lost")
                with pytest.raises(redis.WatchError):
                    pipe.execute()
            assert client.get(a) == b"1"


async def test_replies_equal_those_of_a_redis_server(cluster: Cluster) -> None:
    host, port = cluster.address(cluster.ids[0], "resp")
    for script in OF_TRANSACTIONS:
        client = Raw(*await asyncio.open_connection(host, port))
        assert await client.ask(packed("FLUSHALL"), b"+OK\r\n") == b"+OK\r\n"
        await check(client, script)
        client.close()


# docs/protocol.md M15
def test_pipelined_transactions_of_one_connection_keep_their_order(cluster: Cluster) -> None:
    a, b, *_ = keys_of(cluster, "order")
    cluster.redis(cluster.ids[0]).delete(a, b)
    rounds = 20
    commands = [packed("MULTI"), packed("INCR", a), packed("INCR", b), packed("EXEC"), packed("INCR", a)]
    with socket.create_connection(cluster.address(cluster.ids[1], "resp"), timeout=60) as connection:
        connection.sendall(b"".join(commands) * rounds)
        expected = b"".join(
            b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n:%d\r\n:%d\r\n:%d\r\n" % (2 * each + 1, each + 1, 2 * each + 2)
            for each in range(rounds)
        )
        answered = b""
        while len(answered) < len(expected):
            received = connection.recv(1 << 16)
            assert received, answered
            answered += received
        assert answered == expected


def test_concurrent_transfers_lose_nothing_and_keep_the_sum(cluster: Cluster) -> None:
    with transferring(cluster, "concurrent") as tellers:
        wait_going_on(cluster, tellers)
        cluster.wait_until(lambda: sum(teller.conflicts for teller in tellers), "tellers met")
    assert [teller.unknown for teller in tellers] == [0] * TELLERS


def test_transfers_lose_nothing_when_leaders_are_killed(cluster: Cluster) -> None:
    """Each node leads some of the partitions, and is home of some transfers and participant of others."""
    with transferring(cluster, "killed") as tellers:
        for node in cluster.ids:
            cluster.kill(node)
            cluster.wait_led(by_other_than=node)
            others = [teller for number, teller in enumerate(tellers) if cluster.ids[number % len(cluster.ids)] != node]
            wait_going_on(cluster, others)
            cluster.start_node(node)
            cluster.wait_ready(node)
            wait_going_on(cluster, tellers)
