"""Executes frames of operations and returns their answers, for a client's stream on gRPC or on the Redis port, or for
one unary frame.

Operations are submitted as they arrive and answered as they end. A disconnect does not cancel a write: a submitted
operation runs to its end, and its result is dropped. Reads that have not begun are not executed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any, ClassVar, TypeGuard

from kvstore.env import Clock
from kvstore.env.histogram import Histogram
from kvstore.env.slow_log import SlowLog
from kvstore.env.turn_budget import TurnBudget
from kvstore.errors import InvalidRequest, OutcomeUnknown, Overloaded, StoreError, Unavailable
from kvstore.limits import BATCH_OPS_MAX, KEY_BYTES_MAX
from kvstore.partition.state.commands import (
    NOT_NOW,
    Batch,
    Code,
    Delete,
    Flag,
    NotNow,
    Op,
    Put,
    Record,
    Result,
    Sink,
    WriteOp,
)
from kvstore.partition.state.rows import record_of
from kvstore.partition.state.traits import KEYLESS, READS
from kvstore.proto import compact, kv_pb2
from kvstore.rpc.channels import timeout_s
from kvstore.server.grpc.batch_budget import BatchBudget, read_bytes
from kvstore.server.grpc.decode import NUMBER_MAX, OPERATIONS_MAX, check_numbers, ops_of
from kvstore.server.grpc.encode import AnswerColumns, Outbox
from kvstore.server.routing.backend import Backend
from kvstore.server.routing.pending import check_one_partition
from kvstore.types import PartitionId

OPEN_MAX = 16_384
"""Maximum number of operations of one stream that are in flight or whose answers wait to be sent. Above it, the
stream is not read."""
LANES_MAX = 2_048
"""Maximum number of lanes in one frame, because each costs as much as some operations."""
IN_BATCHES_MAX = (512 << 10) // 32 + BATCH_OPS_MAX
"""Maximum number of operations inside the batches of one frame, counted separately: as many as Python clients send.
They close a frame at 512 KiB, each operation takes at least 32 bytes, and the last operation may be a whole batch
(client/core/batching.py)."""
OPEN_BYTES_MAX = 16 << 20
"""Maximum number of bytes of the frames of operations in flight."""
UNSENT_BYTES_MAX = 16 << 20
"""Maximum number of bytes of answers that wait to be sent. Above it, reads, and writes that return records, are
refused, because they can be repeated."""
UNSENT_TOTAL_BYTES_MAX = 256 << 20
"""The same maximum for all streams of a server. Each stream may use an eighth of what the others leave free, so many
slow readers never use all of it. A stream may always have one value."""
UNARY_BYTES_MAX = 2 << 20
"""Maximum number of bytes of the answers to a unary frame, which are one message."""
NOW_MAX = 1_024
"""Maximum number of reads of a lane that are answered at once."""
TURN_WORK = 2_048
"""Number of frames, lanes and operations that all streams of the Redis port together begin in one turn of the event
loop. The last frame of a turn may exceed it. A client could otherwise send 900,000 empty frames in a turn, which take
ten seconds."""
SWEEP_S = 0.05
"""Interval in seconds between two checks for lanes whose time is over."""
Lane = kv_pb2.Lane | compact.CompactLane
_FULL = Overloaded("the answers that wait to be sent are too large; try again")
_RETURN_OLD = int(Flag.RETURN_OLD)
_flags_of = attrgetter("flags")
_PUTS = {Put}
_GET = int(Code.GET)


class _Malformed(WriteOp):
    """Takes the place of a malformed operation of a lane."""

    key: ClassVar[bytes] = b""


_MALFORMED = _Malformed()
_Malformed.code = 0
_WITHOUT_KEY = KEYLESS | {_Malformed.code}


class Unsent:
    """Bytes that wait to be sent on all streams of a server. A session that gets no shared instance is counted
    alone."""

    def __init__(self, bytes_max: int = UNSENT_TOTAL_BYTES_MAX) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max

    @property
    def share(self) -> int:
        """Maximum number of bytes that one stream may have waiting at the moment."""
        return max(0, self._bytes_max - self.bytes) // 8


class FrameSession:
    """The unanswered operations of one stream."""

    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        unsent_bytes_max: int = UNSENT_BYTES_MAX,
        *,
        unsent: Unsent | None = None,
        batches: BatchBudget | None = None,
        took: Histogram | None = None,
        notify: Callable[[], None] | None = None,
        slow: SlowLog | None = None,
    ) -> None:
        """`took` records the seconds from the arrival of a lane to its last answer. `notify` is called when there is
        something to send. Without `notify`, a task must wait in `wait_answers`."""
        self._backend, self._clock = backend, clock
        self._took = took if took is not None else Histogram(1e-6)
        self._slow = slow if slow is not None else SlowLog()
        self._slow_s = self._slow.limit_s
        self._unsent_bytes_max = unsent_bytes_max
        self._unsent = unsent if unsent is not None else Unsent()
        self._batches = batches if batches is not None else BatchBudget()
        self._notify = notify
        self._counted = 0
        """Bytes that `_unsent` counts for this session."""
        self._outbox = Outbox()
        self._partitions: set[str] = set()
        """Partitions whose answers are in the outbox."""
        self._wake = asyncio.Event()
        self._capacity = asyncio.Event()
        self._open = 0
        self._open_bytes = 0
        self._lanes: dict[int, _LaneSink] = {}
        self._lanes_begun = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._finished = False
        self.closed = False

    def accept(self, frame: kv_pb2.Frame | compact.CompactFrame) -> int:
        """Submit a frame's operations, and return their number, including those in batches. A malformed operation is
        answered with its error, and the stream stays open.

        Raises InvalidRequest if the numbers of operations are too large for an answer, or if the frame has more
        operations than one turn of the event loop can begin. In that case no operation is submitted.
        """
        timeout = timeout_s(frame.timeout_ms)
        lanes = frame.lanes
        if len(lanes) > LANES_MAX:
            raise InvalidRequest(f"expected at most {LANES_MAX} lanes in a frame, got {len(lanes)}")
        together = sum(map(_count, lanes))
        if together > OPEN_MAX:
            raise InvalidRequest(f"expected at most {OPEN_MAX} operations in a frame, got {together}")
        within = sum([_in_batches(lane) for lane in lanes if lane.options])
        if within > IN_BATCHES_MAX:
            raise InvalidRequest(
                f"expected at most {IN_BATCHES_MAX} operations in the batches of a frame, got {within}"
            )
        for lane in lanes:
            check_numbers(lane.first)
        for lane in lanes:
            count = _count(lane)
            try:
                if count > OPERATIONS_MAX:
                    raise InvalidRequest(f"expected at most {OPERATIONS_MAX} operations in a lane, got {count}")
                ops = ops_of(lane)
            except InvalidRequest as error:
                ops = [error] * min(count, OPERATIONS_MAX)
            if ops:
                self._submit(ops, lane, frame.ring_version, timeout)
        return together + within

    def use(self, backend: Backend) -> None:
        """Submit later operations to another backend, because the permissions of the client have changed."""
        self._backend = backend

    def answer_now(self, frame: compact.CompactFrame) -> compact.CompactAnswers[Record] | None:
        """Return the answers to a frame of linearizable GETs of one lane, if nothing is in flight here and the keys
        can be looked up at once. Otherwise return None, and the frame must be accepted."""
        lanes, version = frame.lanes, frame.ring_version
        if self._open or len(lanes) != 1 or self._outbox.count or version != self._backend.topology.ring.routed:
            return None
        (lane,) = lanes
        number = lane.first
        if lane.level or lane.values or lane.sequences or number > NUMBER_MAX:
            return None
        sequence, time_ms = progress_of(self._backend, self._clock, lane.partition)
        if lane.token > sequence:
            return None
        rows = self._rows_now(lane)
        if not isinstance(rows, list):
            return None
        self._took.add(0.0)
        progress = [compact.CompactProgress(lane.partition, sequence, time_ms)]
        answers: compact.CompactAnswers[Record] = compact.CompactAnswers(version, progress, [], [], [], [], [])
        for place, row in enumerate(rows, number):
            if row is None:
                answers.absent.append(place)
            else:
                answers.found.append(place)
                answers.records.append(record_of(row))
        return answers

    def _rows_now(self, lane: compact.CompactLane) -> list[bytes | None] | NotNow:
        """Return the rows of the keys of a lane that contains only GETs, otherwise NOT_NOW."""
        keys, count = lane.keys, len(lane.keys)
        lengths = set(map(len, keys))
        if not 0 < count <= NOW_MAX or len(lane.codes) != count or lane.codes.count(_GET) != count:
            return NOT_NOW
        return self._backend.read_now(keys) if 0 not in lengths and max(lengths) <= KEY_BYTES_MAX else NOT_NOW

    def _submit(self, ops: list[Op | StoreError], lane: Lane, ring_version: int, timeout: float) -> None:
        self._lanes_begun += 1
        partition = PartitionId(lane.partition) if lane.partition else None
        loop = asyncio.get_running_loop()
        sink = _LaneSink(self, self._lanes_begun, lane, ops, ring_version, self._clock.now(), loop.time() + timeout)
        self._lanes[self._lanes_begun] = sink
        self._open += len(ops)
        self._open_bytes += sink.size
        if self._sweeper is None:
            self._sweeper = loop.call_later(min(timeout, SWEEP_S), self._sweep)
        submit = self._backend.submit
        if len(ops) > 1 and _are_puts(ops) and ring_version <= self._backend.topology.ring.routed:
            return submit(ops, sink, range(len(ops)))
        for token, op in enumerate(ops):
            if isinstance(op, StoreError):
                sink.ops[token] = _MALFORMED
                sink.complete(token, op)
            elif op.ops or ((op.__class__ is Put or op.__class__ is Delete) and op.flags & _RETURN_OLD):
                self._submit_counted(op, sink, token, ring_version)
            else:
                submit((op,), sink, (token,), ring_version, partition if op.code in KEYLESS else None)
        sink.flush()

    def _submit_counted(self, op: Op, lane: _LaneSink, token: int, ring_version: int) -> None:
        """Submit an operation that may return values and cannot be repeated, if there is capacity for its values."""
        try:
            if isinstance(op, Batch):
                check_one_partition(op, self._backend.topology.ring.partition_of)
            if self._outbox.bytes >= self._bytes_max() and read_bytes(op):
                lane.complete(token, _FULL)
                return
            sink = self._batches.sink(op, lane)
        except (InvalidRequest, Overloaded) as error:
            lane.complete(token, error)
            return
        self._backend.submit((op,), sink, (token,), ring_version)

    def take_in(self, lane: _LaneSink, done: list[tuple[int, Result | StoreError]]) -> None:
        """Take in results of a lane. `partition` of the lane owns its keys by its `ring_version`. By a later ring
        another partition may have answered, and the client must learn that partition's progress."""
        self._open -= len(done)
        if not self.closed:
            self._outbox.add_all(lane.first, lane.ops, done, self._bytes_max(), _FULL)
            self._count()
            self._partitions.add(lane.partition)
            ring = self._backend.topology.ring
            if ring.routed != lane.ring_version:
                keyed = (lane.ops[token] for token, _ in done)
                self._partitions.update(ring.partition_of(op.key) for op in keyed if op.code not in _WITHOUT_KEY)
        if not lane.left:
            del self._lanes[lane.place]
            self._open_bytes -= lane.size
            took = self._clock.now() - lane.begun
            self._took.add(took)
            if took > self._slow_s:
                self._note_slow(lane, took)
        self.wake()

    def _note_slow(self, lane: _LaneSink, took: float) -> None:
        op = next((each for each in lane.ops if each is not _MALFORMED), _MALFORMED)
        key = op.key if op.code not in _WITHOUT_KEY else None
        name = Code(op.code).name if op.code else "malformed"
        self._slow.note("endpoint", name, took, key=key, partition=lane.partition, operations=len(lane.ops))

    def _bytes_max(self) -> int:
        """Return how many bytes of values may wait to be sent. One value always may."""
        return max(1, min(self._unsent_bytes_max, self._unsent.share))

    def _count(self) -> None:
        self._unsent.bytes += self._outbox.bytes - self._counted
        self._counted = self._outbox.bytes

    def _sweep(self) -> None:
        """Answer the operations that have not ended in time."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for lane in [each for each in self._lanes.values() if each.until <= now]:
            lane.expire()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep) if self._lanes else None

    def wake(self) -> None:
        """Signal that there is an answer to send, or capacity to read more frames."""
        if self._notify is not None:
            self._notify()
        self._wake.set()
        self._capacity.set()

    @property
    def has_capacity(self) -> bool:
        """True if another frame can be accepted."""
        return self._open + self._outbox.count < OPEN_MAX and self._open_bytes < OPEN_BYTES_MAX

    async def wait_capacity(self) -> None:
        """Wait until another frame can be accepted."""
        while not self.has_capacity:
            self._capacity.clear()
            await self._capacity.wait()

    async def wait_answers(self) -> None:
        """Wait until there is an answer to send."""
        self._wake.clear()
        if self._outbox.is_empty() and not self.is_finished:
            await self._wake.wait()

    async def wait_all_done(self) -> None:
        """Wait until every operation has ended."""
        while self._open:
            self._capacity.clear()
            await self._capacity.wait()

    def finish(self) -> None:
        """Record that no more frames will arrive."""
        self._finished = True
        self.wake()

    @property
    def is_finished(self) -> bool:
        """True if no more frames will come, nothing is in flight, and nothing waits to be sent."""
        return self._finished and not self._open and self._outbox.is_empty()

    def take(self) -> Iterator[kv_pb2.Answers]:
        """Yield messages with the waiting answers, including answers that arrive during the iteration."""
        while self._outbox.count:
            columns, progress = self._take()
            answers = columns.message()
            answers.ring_version = self._backend.topology.ring.routed
            answers.progress.extend(starmap(_progress_message, progress))
            yield answers
        self._capacity.set()

    def take_compact(self) -> kv_pb2.Answers | compact.CompactAnswers[Record] | None:
        """Return the next message, in the compact form that streams without gRPC use. Return None if no answer
        waits."""
        if not self._outbox.count:
            return None
        columns, progress = self._take()
        answers = columns.compact_or_message()
        answers.ring_version = self._backend.topology.ring.routed
        if isinstance(answers, kv_pb2.Answers):
            answers.progress.extend(starmap(_progress_message, progress))
        else:
            answers.progress = [compact.CompactProgress(*each) for each in progress]
        return answers

    def _take(self) -> tuple[AnswerColumns, list[tuple[str, int, int]]]:
        """Return the columns of the next message and the progress of the partitions in it. The progress is read for
        each message, because answers that arrived during the sending of the previous message are newer than that
        message's progress."""
        columns = self._outbox.take()
        self._count()
        names = sorted(self._partitions)
        if not self._outbox.count:
            self._partitions.clear()
        return columns, [(each, *progress_of(self._backend, self._clock, each)) for each in names if each]

    def late(self, op: Op, partition: str) -> StoreError:
        """Return the error of an operation that has not ended in time. If its partition has no leader, the error
        says so."""
        topology = self._backend.topology
        if not partition and op.code not in _WITHOUT_KEY:
            partition = topology.ring.partition_of(op.key)
        is_led = not partition or PartitionId(partition) in topology.leaders
        return _late(op, "" if is_led else f": partition {partition} has no leader")

    def close(self) -> None:
        """Drop the answers of operations that are still in flight."""
        self.closed = True
        self._unsent.bytes -= self._counted
        self._counted = 0
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None


class _LaneSink(Sink):
    """The sink of the operations of one lane. Results that arrive in one turn of the event loop are handled
    together."""

    __slots__ = (
        *("_done", "_session", "_waits", "begun", "first", "left", "ops", "partition", "place", "ring_version"),
        *("size", "until"),
    )

    def __init__(
        self,
        session: FrameSession,
        place: int,
        lane: Lane,
        ops: list[Any],
        ring_version: int,
        begun: float,
        until: float,
    ) -> None:
        self._session, self.place, self.ring_version = session, place, ring_version
        self.begun, self.until = begun, until
        """By the server's clock, and by the event loop's."""
        self.first, self.partition, self.ops = lane.first, lane.partition, ops
        self._done: list[tuple[int, Result | StoreError]] = []
        self._waits = bytearray(b"\1" * len(ops))
        """0 for answered operations."""
        self.left = len(ops)
        self.size = lane.ByteSize()

    @property
    def line(self) -> object:
        return self._session

    @property
    def is_gone(self) -> bool:
        return self._session.closed or not self.left

    def complete(self, token: int, result: Result | StoreError) -> None:
        if self._waits[token]:  # it had not timed out
            self._waits[token] = 0
            self._done.append((token, result))

    def complete_all(self, tokens: Sequence[int], results: Sequence[Result | StoreError]) -> None:
        if len(tokens) == len(self._waits) and 0 not in self._waits:  # the whole lane at once
            self._waits = bytearray(len(tokens))
            self._done += zip(tokens, results, strict=True)
            return
        for token, result in zip(tokens, results, strict=True):
            self.complete(token, result)

    def flush(self) -> None:
        done = self._done
        if done:
            self._done = []
            self.left -= len(done)
            self._session.take_in(self, done)

    def expire(self) -> None:
        """Answer operations that have not ended in time."""
        for token, op in enumerate(self.ops):
            if self._waits[token]:
                self.complete(token, self._session.late(op, self.partition))
        self.flush()


class Sessions:
    """The state that all streams and unary frames of a server share."""

    def __init__(self, backend: Backend, clock: Clock, slow: SlowLog | None = None) -> None:
        self.backend, self._clock, self._slow = backend, clock, slow
        self.unsent, self.batches = Unsent(), BatchBudget()
        self.turn = TurnBudget(TURN_WORK)
        self.histograms = {name: Histogram(1e-6) for name in ("Execute", "Session")}
        """Duration of lanes in seconds, including refused ones."""

    def open(
        self,
        method: str,
        unsent_bytes_max: int,
        notify: Callable[[], None] | None = None,
        backend: Backend | None = None,
    ) -> FrameSession:
        """Begin a session. `backend` has the permissions of the client. `notify` has the same meaning as for
        FrameSession."""
        return FrameSession(
            backend if backend is not None else self.backend,
            self._clock,
            unsent_bytes_max,
            unsent=self.unsent,
            batches=self.batches,
            took=self.histograms[method],
            notify=notify,
            slow=self._slow,
        )


def _count(lane: Lane) -> int:
    """Return the number of operations of a lane whose columns may have different lengths."""
    return max(len(lane.keys), len(lane.codes))


def _in_batches(lane: Lane) -> int:
    """Return the number of operations inside a lane's batches and transactions. A batch with too many operations is
    refused before it is decoded."""
    counts = (len(each.operations) for each in lane.options)
    return sum(count for count in counts if count <= BATCH_OPS_MAX)


def _are_puts(ops: list[Op | StoreError]) -> TypeGuard[list[Op]]:
    if ops[0].__class__ is not Put or set(map(type, ops)) != _PUTS:  # the first alone decides for most other lanes
        return False
    flags = set(map(_flags_of, ops))
    return flags == {0} or not any(each & _RETURN_OLD for each in flags)


def _late(op: Op, why: str) -> StoreError:
    if op.code not in READS:
        return OutcomeUnknown(f"the server knew no outcome when the request timed out{why}")
    return Unavailable(f"the server had no answer when the request timed out{why}")


def progress_of(backend: Backend, clock: Clock, partition: str) -> tuple[int, int]:
    """Return the progress of a partition, as answers carry it: its sequence, and the time of its next record.

    Its last record may be old, and a request that carries an old time is refused. A leader stamps records with its
    clock, but never earlier than the last one.
    """
    sequence, time_ms = backend.progress(PartitionId(partition))
    return sequence, max(time_ms, clock.shown_ms())


def progress_message(backend: Backend, clock: Clock, partition: str) -> kv_pb2.Progress:
    """Return the progress of a partition as a message."""
    return _progress_message(partition, *progress_of(backend, clock, partition))


def _progress_message(partition: str, sequence: int, time_ms: int) -> kv_pb2.Progress:
    return kv_pb2.Progress(partition=partition, sequence=sequence, time_ms=time_ms)
