"""The Redis door: one connection for each user, and its Locust user.

What is certainly not done (nobody listens, TRYAGAIN, CLUSTERDOWN) and every read is tried again until the patience
ends, as the gRPC client does inside; at the next node if nobody listens at this one. A write whose connection broke is
not: it may be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

import gevent

from kvstore.errors import Refused, Unavailable
from kvstore.loadtest.generator.doors import Stopwatch
from kvstore.loadtest.generator.expectations import Expectations
from kvstore.loadtest.generator.resp_wire import CONNECT_S, Lost, ReplyError, RespConnection, Unreachable
from kvstore.loadtest.generator.users import PacedUser, Session
from kvstore.loadtest.generator.values import encode
from kvstore.loadtest.generator.workloads import Keyspace

PATIENCE_S = 5.0
"""For one command, as the client library's timeout."""
REST_S = 0.05
AWAITED_MAX = 1_000
"""Keys that are looked for in a SCAN of all."""
REFUSALS = ("TRYAGAIN", "CLUSTERDOWN")


class RespDoor:
    """Commands on one connection to one node, or the next one if that is gone."""

    name = "resp"

    def __init__(self, nodes: Sequence[str], first: int, expectations: Expectations, keyspace: Keyspace) -> None:
        self._nodes, self._next = nodes, first
        self._expectations, self._keyspace = expectations, keyspace
        self._connection: RespConnection | None = None
        self.watch = Stopwatch()
        self._cursor = b"0"
        self._awaited: set[bytes] = set()
        """Keys that the SCAN under way has not given yet."""

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
        except BaseException:  # also if the user is killed
            self._expectations.unknown(write)
            raise
        self._expectations.acknowledged(write)
        return len(value)

    def modify(self, key: bytes, size: int) -> int:
        """Read, then write: this door has no compare-and-set, and YCSB asks for none."""
        return len(self._read(key)) + self.write(key, size)

    def compare_and_set(self, number: int, size: int) -> int:
        """An increment is this door's atomic change: each must give more than any that ended before it began, and
        what no other gives."""
        key = self._keyspace.counter(number)
        floor = self._expectations.count_floor(key)
        count = self._ask(b"INCR", key, is_read=False)
        self._expectations.counted(key, count, floor)
        return 8

    def scan(self, start: bytes, end: bytes, length: int) -> int:
        """SCAN goes in the store's own order, from where this user's last one ended; then the values. Keys that were
        there when it began must have come when it is through."""
        if self._cursor == b"0":
            self._awaited = set(self._expectations.there(self._keyspace.records, end, AWAITED_MAX))
        self._cursor, keys = self._ask(b"SCAN", self._cursor, b"COUNT", b"%d" % length, is_read=True)
        self._awaited.difference_update(keys)
        if self._cursor == b"0":
            self._expectations.scanned(sorted(self._awaited), (), None)
        records = [key for key in keys if key.startswith(self._keyspace.records)]
        if not records:
            return 0
        floors = [self._expectations.floor(key) for key in records]
        values = self._ask(b"MGET", *records, is_read=True)
        for key, value, floor in zip(records, values, floors, strict=True):
            if value is None:
                raise self._expectations.absent(key)
            self._expectations.check(key, value, floor)
        return sum(map(len, values))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _read(self, key: bytes) -> bytes:
        floor = self._expectations.floor(key)
        value: bytes | None = self._ask(b"GET", key, is_read=True)
        if value is None:
            raise self._expectations.absent(key)
        self._expectations.check(key, value, floor)
        return value

    def _ask(self, *words: bytes, is_read: bool) -> Any:
        """Raises Refused, or the error that leaves a write's outcome unknown, or ReplyError."""
        deadline = monotonic() + PATIENCE_S
        while True:
            try:
                return self._connected().ask(*words)
            except ReplyError as error:
                if not str(error).startswith(REFUSALS):
                    raise
                failure: Exception = error
            except Lost as error:
                self.close()
                if not is_read:
                    raise
                failure = error
            except Unreachable as error:
                self._next += 1
                failure = error
            if monotonic() > deadline:
                raise Unavailable(str(failure)) from failure
            gevent.sleep(REST_S)

    def _connected(self) -> RespConnection:
        """Raises Unreachable."""
        if self._connection is None:
            address = self._nodes[self._next % len(self._nodes)]
            self._connection = RespConnection(address, self.watch, connect_s=CONNECT_S, patience_s=PATIENCE_S)
        return self._connection


class RespUser(PacedUser):
    """A caller with a timetable, through the Redis door."""

    def open_door(self, session: Session, number: int) -> RespDoor:
        return RespDoor(session.resp, number // len(session.draws), session.expectations, session.keyspace)
