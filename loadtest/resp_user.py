"""The Redis door: one redis-py connection for each user, and its Locust user.

redis-py's own retries are off: they are unsafe for writes. What is certainly not done (nobody listens, TRYAGAIN,
CLUSTERDOWN) and every read is tried again at the next node until the patience ends, as the gRPC client does inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

import gevent
from redis import Connection, RedisError
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as Lost
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as Late
from redis.retry import Retry

from loadtest.expectations import Expectations
from loadtest.users import PacedUser, Session
from loadtest.values import encode
from loadtest.workloads import Keyspace

PATIENCE_S = 5.0
"""For one command, as the client library's timeout."""
CONNECT_S = 1.0
REST_S = 0.05
REFUSALS = ("TRYAGAIN", "CLUSTERDOWN")


class Refused(RedisError):
    """Certainly not done, and the patience is at its end."""


class RespDoor:
    """Commands on one connection to one node, or the next one if that is gone."""

    name = "resp"

    def __init__(self, nodes: Sequence[str], first: int, expectations: Expectations, keyspace: Keyspace) -> None:
        self._nodes, self._next = nodes, first
        self._expectations, self._keyspace = expectations, keyspace
        self._connection: Connection | None = None
        self._cursor = b"0"

    def read(self, key: bytes) -> int:
        return len(self._read(key))

    def write(self, key: bytes, size: int) -> int:
        write = self._expectations.begin(key)
        value = encode(key, self._expectations.stamp(write), size)
        try:
            self._ask(b"SET", key, value, is_read=False)
        except Refused:
            self._expectations.refused(write)
            raise
        self._expectations.acknowledged(write)
        return len(value)

    def modify(self, key: bytes, size: int) -> int:
        """Read, then write: this door has no compare-and-set, and YCSB asks for none."""
        return len(self._read(key)) + self.write(key, size)

    def compare_and_set(self, number: int, size: int) -> int:
        """An increment is this door's atomic change: each must give more than any that ended before it began."""
        key = self._keyspace.counter(number)
        floor = self._expectations.count_floor(key)
        count = self._ask(b"INCR", key, is_read=False)
        self._expectations.counted(key, count, floor)
        return 8

    def scan(self, start: bytes, end: bytes, length: int) -> int:
        """SCAN goes in the store's own order, from where this user's last one ended; then the values."""
        self._cursor, keys = self._ask(b"SCAN", self._cursor, b"COUNT", b"%d" % length, is_read=True)
        records = [key for key in keys if key.startswith(self._keyspace.records)]
        if not records:
            return 0
        values = self._ask(b"MGET", *records, is_read=True)
        for key, value in zip(records, values, strict=True):
            if value is None:
                raise self._expectations.absent(key)
            self._expectations.check(key, value, self._expectations.NO_FLOOR)
        return sum(map(len, values))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    def _read(self, key: bytes) -> bytes:
        floor = self._expectations.floor(key)
        value: bytes | None = self._ask(b"GET", key, is_read=True)
        if value is None:
            raise self._expectations.absent(key)
        self._expectations.check(key, value, floor)
        return value

    def _ask(self, *words: bytes, is_read: bool) -> Any:
        """Raises Refused, or the error that leaves a write's outcome unknown, or ResponseError."""
        deadline = monotonic() + PATIENCE_S
        while True:
            try:
                return self._ask_once(*words)
            except (Lost, Late, ResponseError) as error:
                is_refusal = isinstance(error, Refused) or str(error).startswith(REFUSALS)
                if isinstance(error, Lost | Late):
                    self.close()
                if not (is_refusal or (is_read and isinstance(error, Lost | Late))):
                    raise
                if monotonic() > deadline:
                    raise Refused(str(error)) from error
            except Unreachable as error:
                if monotonic() > deadline:
                    raise Refused(str(error)) from error
            gevent.sleep(REST_S)

    def _ask_once(self, *words: bytes) -> Any:
        connection = self._connection or self._connect()
        connection.send_command(*words)
        return connection.read_response()

    def _connect(self) -> Connection:
        host, _, port = self._nodes[self._next % len(self._nodes)].rpartition(":")
        connection = Connection(
            host=host,
            port=int(port),
            socket_timeout=PATIENCE_S,
            socket_connect_timeout=CONNECT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        try:
            connection.connect()
        except (RedisError, OSError) as error:
            self._next += 1
            raise Unreachable(f"{host}:{port}: {error}") from error
        self._connection = connection
        return connection


class Unreachable(Exception):
    """Nothing was sent: nobody listens."""


class RespUser(PacedUser):
    """A caller with a timetable, through the Redis door."""

    def open_door(self, session: Session, number: int) -> RespDoor:
        return RespDoor(session.resp, number, session.expectations, session.keyspace)
