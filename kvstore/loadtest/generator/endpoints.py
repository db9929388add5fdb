"""Performs one operation of a workload through any endpoint of the store, and checks its result."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from time import time
from typing import Protocol

from kvstore.loadtest.generator.expectations import Expectations
from kvstore.loadtest.generator.pacing import Arrivals
from kvstore.loadtest.generator.values import encode
from kvstore.loadtest.generator.workloads import Draws, Keyspace
from kvstore.loadtest.report.goals import CAS, INSERT, MODIFY, READ, SCAN, UPDATE

PART_MAX, PART_BYTES_MAX = 1_000, 8 << 20
"""Maximum number and total bytes of initial records in flight."""


class Contended(Exception):
    """A compare-and-set failed in every round."""


class Stopwatch:
    """Wall-clock times of an operation's first request and latest reply; 0 until then. Drawing the operation, building
    its value and checking the result are the load test's own time and are not included."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.sent = self.received = 0.0

    def reset(self) -> None:
        self.sent = self.received = 0.0

    def mark_sent(self) -> None:
        self.sent = self.sent or time()

    def mark_received(self) -> None:
        self.received = time()

    def set_times(self, sent: float, received: float) -> None:
        """Record times that another process has measured."""
        self.sent, self.received = self.sent or sent, received


class Endpoint(Protocol):
    """An endpoint, with the name that it has in the report."""

    name: str
    watch: Stopwatch

    def close(self) -> None: ...


class WorkloadEndpoint(Endpoint, Protocol):
    """An endpoint that performs the operations of our workloads. Calls return the number of bytes sent or received, and
    raise WrongValue or the endpoint's errors."""

    def read(self, key: bytes) -> int: ...
    def write(self, key: bytes, size: int) -> int: ...
    def scan(self, start: bytes, end: bytes, length: int) -> int: ...
    def modify(self, key: bytes, size: int) -> int: ...
    def compare_and_set(self, number: int, size: int) -> int: ...


class WorkloadOperations:
    """Performs drawn operations through an endpoint, for one user."""

    def __init__(self, endpoint: WorkloadEndpoint, draws: Draws, keyspace: Keyspace, random: Random) -> None:
        self.endpoint = endpoint
        self._draws, self._keyspace, self._random = draws, keyspace, random

    @property
    def arrivals(self) -> Arrivals:
        return self._draws.workload.arrivals

    def draw(self) -> str:
        return self._draws.operation(self._random)

    def perform(self, operation: str) -> int:
        """Perform an operation. Return the number of bytes sent or received."""
        random, draws, keyspace = self._random, self._draws, self._keyspace
        if operation == INSERT:
            key = keyspace.new_record(random)
            length = self.endpoint.write(key, draws.size(random))
            keyspace.inserted(key)
            return length
        number = draws.key(random, keyspace.count)
        if operation == CAS:
            return self.endpoint.compare_and_set(number, draws.size(random))
        key = keyspace.record(number)
        if operation == READ:
            return self.endpoint.read(key)
        if operation == UPDATE:
            return self.endpoint.write(key, draws.size(random))
        if operation == MODIFY:
            return self.endpoint.modify(key, draws.size(random))
        assert operation == SCAN, operation
        return self.endpoint.scan(key, after_prefix(keyspace.records), draws.scan_length(random))


def first_values(
    keyspace: Keyspace, draws: Draws, expectations: Expectations, random: Random
) -> Iterator[dict[bytes, bytes]]:
    """Yield an initial value for every record of the key space, in parts that can be sent at once."""
    part: dict[bytes, bytes] = {}
    part_bytes = 0
    for number in range(keyspace.loaded):
        key = keyspace.record(number)
        write = expectations.begin(key)
        part[key] = encode(key, expectations.stamp(write), draws.size(random))
        part_bytes += len(part[key])
        if len(part) >= PART_MAX or part_bytes >= PART_BYTES_MAX:
            yield part
            part, part_bytes = {}, 0
    if part:
        yield part


def after_prefix(prefix: bytes) -> bytes:
    """Return the first key after all keys with `prefix`. The last byte of `prefix` must not be 255."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))
