"""Writes many rows in few batches, for loads that need no answer for each row.

    async with Loader(config) as loader:
        await loader.add(rows)        # as often as there are rows; waits while too many are in flight
    loader.written                    # the number of rows that are acknowledged

A batch holds rows of one partition. Each partition has one batch in flight while the next one fills. So rows of one key
are written in the order in which they were added, and a load has as many batches in flight as there are partitions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvstore.client.aio.engine import AsyncEngine
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.operation import DELETE, PUT, ClientOperation, operation
from kvstore.client.core.operations import check
from kvstore.env import Task
from kvstore.env.library_env import library_env
from kvstore.errors import ConditionFailed, InvalidRequest, OutcomeUnknown
from kvstore.limits import KEY_BYTES_MAX
from kvstore.proto import kv_pb2
from kvstore.rpc.status import restore

BATCH_ROWS = 2_000
BATCH_BYTES = 512 << 10
BACKLOG_BATCHES = 8
"""Maximum number of full batches that wait in one loader."""


class Row(NamedTuple):
    """The change of one key."""

    key: bytes
    value: bytes | None
    """The value; None deletes the key."""
    expires_ms: int = 0
    """Time of expiry, in milliseconds since 1970; 0: never."""


_Row = tuple[bytes, bytes | None, int]
"""A Row, or a plain tuple of its fields."""


class _Batch:
    """Rows that are written together."""

    __slots__ = ("rows", "size")

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.size = 0
        """Bytes of keys and values."""


class _Lane:
    """The rows for one partition."""

    __slots__ = ("full", "gathering", "task")

    def __init__(self) -> None:
        self.full: deque[_Batch] = deque()
        self.gathering = _Batch()
        self.task: Task | None = None

    def __bool__(self) -> bool:
        return bool(self.full or self.gathering.rows)

    def begin(self) -> _Batch:
        """Queue the batch that was filling, and start another one."""
        self.full.append(self.gathering)
        self.gathering = _Batch()
        return self.gathering

    def take(self) -> _Batch:
        """Return the next batch to write, whether it is full or not."""
        if not self.full:
            self.begin()
        return self.full.popleft()


class Loader:
    """One load. All calls come from one event loop, one at a time.

    The loader retries each batch under one request id until the timeout of `config`, so it writes the batch once. The
    exception: if the outcome of a batch is unknown when the ring assigns its rows to two partitions, the loader writes
    the rows again. These writes overwrite what other clients have written to the rows in the meantime.

    The first error ends the load. Rows that were added may or may not be written then. Loading the same rows again
    gives the intended state.

    Args:
        config: Where the cluster is. See `ClientConfig`. A `timeout_s` of more than 10 s also survives a leader that
            hangs.
        if_absent: Skip and count the rows whose key exists.
        batch_rows: Maximum number of rows in a batch.
        batch_bytes: Maximum bytes of keys and values in a batch.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        if_absent: bool = False,
        batch_rows: int = BATCH_ROWS,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._env = library_env("kvstore load")
        self._engine = AsyncEngine(self._env, config)
        self._if_absent, self._batch_rows, self._batch_bytes = if_absent, batch_rows, batch_bytes
        self._lanes: dict[str, _Lane] = {}
        self._ring_version = 0
        self._backlog = 0
        """Bytes of rows that were added and are not written yet."""
        self._progress = asyncio.Event()
        self._failure: BaseException | None = None
        self.written = 0
        """Number of rows that were written, that is put or deleted."""
        self.kept = 0
        """Number of rows that were skipped because their key existed. Rows that were written twice count here, too."""

    async def __aenter__(self) -> Self:
        """Connect to the cluster. Raises Unavailable if no endpoint answers in time."""
        try:
            await self._engine.open()
        except BaseException:
            await self._engine.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until all added rows are written, unless the block has raised an error. Raises StoreError."""
        try:
            if error is None:
                await self._wait_backlog(0)
        finally:
            await self._engine.close()

    async def add(self, rows: Iterable[_Row]) -> None:
        """Add rows, and wait while too many are in flight.

        Costs one round trip for each batch. The calls overlap.

        Args:
            rows: Rows, or tuples of key, value and expiry.

        Raises:
            StoreError: If a row could not be written, including rows of earlier calls.
        """
        self._engine.check_caller()
        routing = self._engine.routing
        if routing.ring_version != self._ring_version:
            await self._wait_backlog(0)  # earlier rows of a key may be on their way to its former partition
            self._ring_version = routing.ring_version
        try:
            self._sort(rows, routing.partition_of)
        except BaseException as error:
            self._failure = self._failure or error  # the rows before it are in lanes that nobody drains
            raise
        for lane in self._lanes.values():
            if lane.task is None and lane:
                lane.task = self._env.nursery.spawn(self._drain(lane), name="lane")
        await self._wait_backlog(BACKLOG_BATCHES * self._batch_bytes)

    def _sort(self, rows: Iterable[_Row], partition_of: Callable[[bytes], str]) -> None:
        """Put rows into the batches of their partitions. This is the only code that runs for each row."""
        lanes, rows_max, bytes_max = self._lanes, self._batch_rows, self._batch_bytes
        for row in rows:
            key, value, _ = row
            size = len(key) + (len(value) if value else 0)
            if size > KEY_BYTES_MAX or not key:  # the limit of values is higher
                check(key, value or b"")
            partition = partition_of(key)
            lane = lanes.get(partition)
            if lane is None:
                lane = lanes[partition] = _Lane()
            batch = lane.gathering
            if batch.rows and (batch.size + size > bytes_max or len(batch.rows) >= rows_max):
                batch = lane.begin()
            batch.rows.append(row)
            batch.size += size
            self._backlog += size

    async def _wait_backlog(self, most: int) -> None:
        while self._failure is None and (self._backlog > most or (most == 0 and self._is_busy())):
            self._progress.clear()
            await self._progress.wait()
        if self._failure is not None:
            raise self._failure

    def _is_busy(self) -> bool:
        return any(lane.task is not None for lane in self._lanes.values())

    async def _drain(self, lane: _Lane) -> None:
        try:
            while lane and self._failure is None:
                batch = lane.take()
                await self._write(batch.rows)
                self._backlog -= batch.size
                self._progress.set()
        except Exception as error:  # noqa: BLE001  # the root of a task: callers of `add` wait for it
            self._failure = self._failure or error
        finally:
            lane.task = None
            self._progress.set()

    async def _write(self, rows: Sequence[_Row]) -> None:
        """Write rows of one lane in order. If a newer ring splits them over several partitions, write several
        batches."""
        if self._engine.routing.ring_version == self._ring_version:
            await self._write_or_halve(rows)
            return
        parts: dict[str, list[_Row]] = {}
        for row in rows:
            parts.setdefault(self._engine.routing.partition_of(row[0]), []).append(row)
        for part in parts.values():
            await self._write_or_halve(part)

    async def _write_or_halve(self, rows: Sequence[_Row]) -> None:
        try:
            kept = await self._run(rows)
        except InvalidRequest:
            if len(rows) == 1:
                raise
            half = len(rows) // 2  # the servers know a newer ring, in which the rows belong to two partitions
            await self._write_or_halve(rows[:half])
            await self._write_or_halve(rows[half:])
            return
        self.kept += kept
        self.written += len(rows) - kept

    async def _run(self, rows: Sequence[_Row]) -> int:
        """Write the rows and return how many were skipped."""
        options = kv_pb2.Options(flags=kv_pb2.INDEPENDENT if self._if_absent else 0)
        for key, value, expires_ms in rows:
            if value is None:
                options.operations.add(code=DELETE, key=key)
            elif self._if_absent or expires_ms:
                flags = kv_pb2.IF_ABSENT if self._if_absent else 0
                conditions = kv_pb2.Options(expires_ms=expires_ms, flags=flags)
                options.operations.add(code=PUT, key=key, value=value, options=conditions)
            else:
                options.operations.add(code=PUT, key=key, value=value)
        if len(rows) == 1:  # a batch cannot hold a value of full size and its key
            return await self._run_alone(options.operations[0])
        whole = operation(kv_pb2.BATCH, rows[0][0], options=options)
        whole.size = options.ByteSize()
        answer = await self._ask(whole)
        return sum(map(_is_kept, answer.results)) if self._if_absent else 0

    async def _run_alone(self, part: kv_pb2.Operation) -> int:
        options = part.options if part.HasField("options") else None
        try:
            await self._ask(operation(part.code, part.key, part.value, options))
        except ConditionFailed:
            return 1
        return 0

    async def _ask(self, asked: ClientOperation) -> Any:
        """Return the answer. Raises StoreError. If the last attempt found that the key exists, or that the rows belong
        to two partitions, this is the error even if an earlier attempt may have been carried out."""
        try:
            return await self._engine.run(asked, None)
        except OutcomeUnknown as error:
            if isinstance(error.__cause__, ConditionFailed | InvalidRequest):
                raise error.__cause__ from None
            raise


def _is_kept(part: kv_pb2.Result) -> bool:
    """Return True if the row was skipped. Raises the error of a row that failed for another reason."""
    if not part.HasField("failure"):
        return False
    error = restore(part.failure.reason, part.failure.message, part.failure.metadata)
    if not isinstance(error, ConditionFailed):
        raise error
    return True
