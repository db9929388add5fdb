"""The Redis endpoint, with one connection per user, and its Locust user.

Commands that were certainly not applied (connection refused, TRYAGAIN, CLUSTERDOWN) and all reads are retried until
the timeout ends, as the gRPC client does internally. If a node refuses connections, the next node is tried. A write
whose connection broke is not retried, because it may have been applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

import gevent

from kvstore.errors import Refused, Unavailable
from kvstore.loadtest.generator.endpoints import Stopwatch
from kvstore.loadtest.generator.expectations import Expectations
from kvstore.loadtest.generator.resp_wire import CONNECT_S, BlockingRespConnection, Unreachable
from kvstore.loadtest.generator.users import PacedUser, RunContext
from kvstore.loadtest.generator.values import encode
from kvstore.loadtest.generator.workloads import Keyspace
from kvstore.loadtest.resp import Lost, ReplyError

PATIENCE_S = 5.0
"""Timeout of one command in seconds, the same as the client library's."""
PAUSE_S = 0.05
AWAITED_MAX = 1_000
"""Maximum number of keys that a complete SCAN is checked for."""
REFUSALS = ("TRYAGAIN", "CLUSTERDOWN")


class RespEndpoint:
    """Sends commands over one connection to one node, or to the next node if that one is unreachable."""

    name = "resp"

    def __init__(self, nodes: Sequence[str], first: int, expectations: Expectations, keyspace: Keyspace) -> None:
        self._nodes, self._next = nodes, first
        self._expectations, self._keyspace = expectations, keyspace
        self._connection: BlockingRespConnection | None = None
        self.watch = Stopwatch()
        self._cursor = b"0"
        self._awaited: set[bytes] = set()
        """Keys that the current SCAN has not returned yet."""

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
        """Read, then write. This endpoint has no compare-and-set, and YCSB does not require one."""
        return len(self._read(key)) + self.write(key, size)

    def compare_and_set(self, number: int, size: int) -> int:
        """Increment a counter: the atomic change of this endpoint. Each result must be higher than all that ended
        before the increment began, and unique."""
        key = self._keyspace.counter(number)
        floor = self._expectations.count_floor(key)
        count = self._ask(b"INCR", key, is_read=False)
        self._expectations.counted(key, count, floor)
        return 8

    def scan(self, start: bytes, end: bytes, length: int) -> int:
        """Run one step of SCAN, in the store's own order, from where this user's last step ended; then read the values.
        A complete SCAN must have returned every key that existed when it began."""
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
        """Return the reply. Raises Refused, ReplyError, or an error that leaves a write's outcome unknown."""
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
            gevent.sleep(PAUSE_S)

    def _connected(self) -> BlockingRespConnection:
        """Return the open connection, or connect. Raises Unreachable."""
        if self._connection is None:
            address = self._nodes[self._next % len(self._nodes)]
            self._connection = BlockingRespConnection(address, self.watch, connect_s=CONNECT_S, patience_s=PATIENCE_S)
        return self._connection


class RespUser(PacedUser):
    """A user with a schedule, through the Redis endpoint."""

    def open_endpoint(self, session: RunContext, number: int) -> RespEndpoint:
        return RespEndpoint(session.resp, number // len(session.draws), session.expectations, session.keyspace)
