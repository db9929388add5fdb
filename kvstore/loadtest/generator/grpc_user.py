"""The gRPC endpoint and its Locust user. All users of a process share one client: a sidecar (sidecar_client.py), or in
tests any blocking client."""

from __future__ import annotations

from kvstore.client import Client, Item, Level
from kvstore.errors import ConditionFailed, Refused
from kvstore.loadtest.generator.endpoints import Contended, Stopwatch
from kvstore.loadtest.generator.expectations import NO_FLOOR, Expectations, next_generation
from kvstore.loadtest.generator.sidecar_client import SidecarClient
from kvstore.loadtest.generator.users import PacedUser, RunContext
from kvstore.loadtest.generator.values import Stamp, encode
from kvstore.loadtest.generator.workloads import Keyspace

ROUNDS_MAX = 32
"""Maximum number of rounds of a compare-and-set loop."""


class GrpcEndpoint:
    """Reads and writes through the client library, which batches the users' calls into frames."""

    name = "grpc"

    def __init__(
        self, client: Client | SidecarClient, expectations: Expectations, keyspace: Keyspace, level: Level
    ) -> None:
        self._client, self._expectations, self._keyspace, self._level = client, expectations, keyspace, level
        self.watch = Stopwatch()

    def read(self, key: bytes) -> int:
        floor = self._expectations.floor(key, self._level)
        found = self._get(key, self._level)
        if found is None:
            self._expectations.not_found(key, floor)
            return 0
        self._expectations.check(key, found.value, floor, found.version)
        return len(found.value)

    def write(self, key: bytes, size: int) -> int:
        return self._put(key, size, None)

    def modify(self, key: bytes, size: int) -> int:
        """Read a key and write it if it has not changed; otherwise start again."""
        for _ in range(ROUNDS_MAX):
            floor = self._expectations.floor(key)
            found = self._get(key, Level.LINEARIZABLE)
            if found is None:
                raise self._expectations.absent(key)
            self._expectations.check(key, found.value, floor, found.version)
            try:
                return len(found.value) + self._put(key, size, found.version)
            except ConditionFailed:
                continue
        raise Contended(f"{ROUNDS_MAX} compare-and-sets lost")

    def compare_and_set(self, number: int, size: int) -> int:
        """Do the same on a key whose value counts its generations. No generation may be made twice."""
        key = self._keyspace.register(number)
        for _ in range(ROUNDS_MAX):
            floor = self._expectations.floor(key)
            found = self._get(key, Level.LINEARIZABLE)
            if found is not None:
                self._expectations.check(key, found.value, floor, found.version)
            elif floor.version:
                raise self._expectations.absent(key)
            stamp: Stamp = next_generation(key, found.value if found else None)
            value = encode(key, stamp, size)
            floor = self._expectations.floor(key)
            try:
                version = self._write(key, value, found.version if found else 0)
            except ConditionFailed:
                continue
            self._expectations.rose(key, version, floor)
            self._expectations.won(key, stamp.number)
            return len(value)
        raise Contended(f"{ROUNDS_MAX} compare-and-sets lost")

    def scan(self, start: bytes, end: bytes, length: int) -> int:
        """Scan all partitions and merge the results, because keys are hashed to partitions."""
        total, last = 0, b""
        there = self._expectations.there(start, end, length, self._level)
        self._mark_sent()
        found = list(self._client.scan(start, end, limit=length, level=self._level))
        self._mark_received()
        for key, item in found:
            if key <= last or not start <= key < end:
                raise self._expectations.misplaced(key, last, start, end)
            last = key
            self._expectations.check(key, item.value, there.get(key, NO_FLOOR), item.version)
            total += len(key) + len(item.value)
        self._expectations.scanned(there, dict(found), last if len(found) == length else None)
        return total

    def close(self) -> None:
        """Do nothing: the client belongs to the process."""

    def _put(self, key: bytes, size: int, if_version: int | None) -> int:
        write = self._expectations.begin(key)
        value = encode(key, self._expectations.stamp(write), size)
        try:
            version = self._write(key, value, if_version)
        except Refused:
            self._expectations.refused(write)
            raise
        except BaseException:  # also if the user is killed
            self._expectations.unknown(write)
            raise
        self._expectations.acknowledged(write, version)
        return len(value)

    def _get(self, key: bytes, level: Level) -> Item | None:
        self._mark_sent()
        found = self._client.get(key, level=level)
        self._mark_received()
        return found

    def _write(self, key: bytes, value: bytes, if_version: int | None) -> int:
        self._mark_sent()
        version = self._client.put(key, value, if_version=if_version)
        self._mark_received()
        return version

    def _mark_sent(self) -> None:
        if not isinstance(self._client, SidecarClient):
            self.watch.mark_sent()

    def _mark_received(self) -> None:
        """Use the sidecar's own times, which exclude the way to the sidecar. Late sending shows in any case."""
        if isinstance(self._client, SidecarClient):
            self.watch.set_times(*self._client.times)
        else:
            self.watch.mark_received()


class GrpcUser(PacedUser):
    """A user with a schedule, through the client library."""

    def open_endpoint(self, session: RunContext, number: int) -> GrpcEndpoint:
        client = session.sidecar or session.client
        assert client is not None
        return GrpcEndpoint(client, session.expectations, session.keyspace, session.level)
