"""Performs and judges one operation of a workload through any endpoint of the store."""

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
"""Of the records to begin with: so many, and so many bytes, are on their way at a time."""


class Contended(Exception):
    """A compare-and-set lost every time."""


class Stopwatch:
    """When an operation's first request went out and its latest answer came, by the wall clock; 0: not yet. Drawing
    the operation, making its value and judging the answer are outside of that: they are the load test's own time."""

    __slots__ = ("heard", "sent")

    def __init__(self) -> None:
        self.sent = self.heard = 0.0

    def reset(self) -> None:
        self.sent = self.heard = 0.0

    def sends(self) -> None:
        self.sent = self.sent or time()

    def hears(self) -> None:
        self.heard = time()

    def took(self, sent: float, heard: float) -> None:
        """The same where somebody else has looked at the clock."""
        self.sent, self.heard = self.sent or sent, heard


class Way(Protocol):
    """A way into the store, under whose name a report shows what was done by it."""

    name: str
    watch: Stopwatch

    def close(self) -> None: ...


class Door(Way, Protocol):
    """One that knows the operations of our workloads. Calls give the bytes that came or went, and raise WrongValue, or
    the door's errors."""

    def read(self, key: bytes) -> int: ...
    def write(self, key: bytes, size: int) -> int: ...
    def scan(self, start: bytes, end: bytes, length: int) -> int: ...
    def modify(self, key: bytes, size: int) -> int: ...
    def compare_and_set(self, number: int, size: int) -> int: ...


class Deeds:
    """Carries out drawn operations through a door, for one user."""

    def __init__(self, door: Door, draws: Draws, keyspace: Keyspace, random: Random) -> None:
        self.door = door
        self._draws, self._keyspace, self._random = draws, keyspace, random

    @property
    def arrivals(self) -> Arrivals:
        return self._draws.workload.arrivals

    def draw(self) -> str:
        return self._draws.operation(self._random)

    def perform(self, operation: str) -> int:
        """The bytes that came or went."""
        random, draws, keyspace = self._random, self._draws, self._keyspace
        if operation == INSERT:
            key = keyspace.new_record(random)
            length = self.door.write(key, draws.size(random))
            keyspace.inserted(key)
            return length
        number = draws.key(random, keyspace.count)
        if operation == CAS:
            return self.door.compare_and_set(number, draws.size(random))
        key = keyspace.record(number)
        if operation == READ:
            return self.door.read(key)
        if operation == UPDATE:
            return self.door.write(key, draws.size(random))
        if operation == MODIFY:
            return self.door.modify(key, draws.size(random))
        assert operation == SCAN, operation
        return self.door.scan(key, after_prefix(keyspace.records), draws.scan_length(random))


def first_values(
    keyspace: Keyspace, draws: Draws, expectations: Expectations, random: Random
) -> Iterator[dict[bytes, bytes]]:
    """Every record of the key space with a value, to begin with, in parts of a size that can be sent at once."""
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
    """The first key that does not begin with `prefix`, whose last byte is not the highest."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))
