"""Frames of operations in, their answers out: one stream of a client, or one unary frame.

Operations are handed over as they come and answered as they end. Whoever goes away takes nothing back: what was
handed over runs to its end, and its result is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from kvstore.env import Clock
from kvstore.env.histogram import Histogram
from kvstore.errors import InvalidRequest, OutcomeUnknown, Overloaded, StoreError, Unavailable
from kvstore.partition.state.commands import Code, Op, Result, Sink
from kvstore.partition.state.traits import KEYLESS, READS
from kvstore.proto import kv_pb2
from kvstore.rpc.channels import timeout_s
from kvstore.server.grpc.batch_budget import BatchBudget, read_bytes
from kvstore.server.grpc.decode import OPERATIONS_MAX, check_numbers, ops_of
from kvstore.server.grpc.encode import Outbox
from kvstore.server.routing.backend import Backend
from kvstore.server.routing.pending import check_one_partition
from kvstore.types import PartitionId

OPEN_MAX = 16_384
"""Operations of one stream that are under way or whose answers wait to be sent. Beyond this it is not read on."""
OPEN_BYTES_MAX = 16 << 20
"""The same for the bytes of their frames."""
UNSENT_BYTES_MAX = 16 << 20
"""Of answers that wait to be sent. Beyond this reads, and batches that read, are refused: they can be asked again."""
UNSENT_TOGETHER_BYTES_MAX = 256 << 20
"""The same of all streams: each may have an eighth of what the others leave, so that many slow readers never leave
nothing; one value it may always have."""
UNARY_BYTES_MAX = 2 << 20
"""The same for a unary frame, whose answers are one message."""
_FULL = Overloaded("the answers that wait to be sent are too large; ask again")
_NO_OP: Op = (0,)
_BATCH = int(Code.BATCH)


class Unsent:
    """Counts what the streams of a server have to send. Without its own argument a Session is alone."""

    def __init__(self, bytes_max: int = UNSENT_TOGETHER_BYTES_MAX) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max

    @property
    def share(self) -> int:
        """How much one of them may have."""
        return max(0, self._bytes_max - self.bytes) // 8


class Session:
    """The operations of one stream that are not yet answered."""

    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        unsent_bytes_max: int = UNSENT_BYTES_MAX,
        *,
        unsent: Unsent | None = None,
        batches: BatchBudget | None = None,
        took: Histogram | None = None,
    ) -> None:
        """`took` gets the seconds from a lane's arrival to its last answer."""
        self._backend, self._clock = backend, clock
        self._took = took if took is not None else Histogram(1e-6)
        self._unsent_bytes_max = unsent_bytes_max
        self._unsent = unsent if unsent is not None else Unsent()
        self._batches = batches if batches is not None else BatchBudget()
        self._counted = 0
        """What `_unsent` counts of this one."""
        self._outbox = Outbox()
        self._partitions: set[str] = set()
        """Whose answers are in the outbox."""
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._open = 0
        self._open_bytes = 0
        self._lanes: dict[int, _Lane] = {}
        self._lanes_begun = 0
        self._finished = False
        self.closed = False

    def accept(self, frame: kv_pb2.Frame) -> None:
        """Hand a frame's operations over. What is malformed is answered so; the stream lives. Raises InvalidRequest
        where its operations' numbers are too large for an answer; nothing of the frame is handed over then."""
        timeout = timeout_s(frame.timeout_ms)
        for lane in frame.lanes:
            check_numbers(lane.first)
        for lane in frame.lanes:
            count = max(len(lane.keys), len(lane.codes))
            try:
                if count > OPERATIONS_MAX:
                    raise InvalidRequest(f"want at most {OPERATIONS_MAX} operations in a lane, got {count}")
                ops = ops_of(lane)
            except InvalidRequest as error:
                ops = [error] * min(count, OPERATIONS_MAX)
            if ops:
                self._submit(ops, lane, frame.ring_version, timeout)

    def _submit(self, ops: list[Op | StoreError], lane: kv_pb2.Lane, ring_version: int, timeout: float) -> None:
        self._lanes_begun += 1
        partition = PartitionId(lane.partition) if lane.partition else None
        sink = _Lane(self, self._lanes_begun, lane, ops, ring_version, self._clock.now())
        self._lanes[self._lanes_begun] = sink
        self._open += len(ops)
        self._open_bytes += sink.size
        sink.timer = asyncio.get_running_loop().call_later(timeout, sink.expire)
        submit = self._backend.submit
        for token, op in enumerate(ops):
            if isinstance(op, StoreError):
                sink.complete(token, op)
            elif op[0] == _BATCH:
                self._submit_batch(op, sink, token, ring_version)
            else:
                submit(op, sink, token, ring_version, partition if op[0] in KEYLESS else None)
        sink.flush()

    def _submit_batch(self, op: Op, lane: _Lane, token: int, ring_version: int) -> None:
        try:
            check_one_partition(op, self._backend.topology.ring.partition_of)
            held = self._outbox.bytes
            if held and (held >= self._unsent_bytes_max or held >= self._unsent.share) and read_bytes(op):
                raise _FULL
            sink = self._batches.sink(op, lane)
        except (InvalidRequest, Overloaded) as error:
            lane.complete(token, error)
            return
        self._backend.submit(op, sink, token, ring_version)

    def answer(
        self, number: int, partition: str, op: Op | StoreError, result: Result | StoreError, ring_version: int
    ) -> None:
        """Take in one result. `partition` is where the key is by `ring_version`: by a later ring another one may have
        answered, and the client must hear of that one's progress."""
        self._open -= 1
        if self.closed:
            return
        held = self._outbox.bytes
        if held and (held >= self._unsent_bytes_max or held >= self._unsent.share) and self._is_read(op):
            result = _FULL
        self._outbox.add(number, op if isinstance(op, tuple) else _NO_OP, result)
        if self._outbox.bytes != held:
            self._count()
        self._partitions.add(partition)
        ring = self._backend.topology.ring
        if ring.routed != ring_version and isinstance(op, tuple) and op[0] not in KEYLESS:
            self._partitions.add(ring.partition_of(op[1]))

    def _is_read(self, op: Op | StoreError) -> bool:
        return isinstance(op, tuple) and op[0] in READS

    def _count(self) -> None:
        self._unsent.bytes += self._outbox.bytes - self._counted
        self._counted = self._outbox.bytes

    def forget(self, lane: _Lane) -> None:
        """A lane has ended."""
        del self._lanes[lane.place]
        self._open_bytes -= lane.size
        self._took.add(self._clock.now() - lane.begun)

    def wake(self) -> None:
        """There is something to send, or room to read on."""
        self._wake.set()
        self._room.set()

    async def wait_room(self) -> None:
        """Return once another frame may be accepted."""
        while self._open + self._outbox.count >= OPEN_MAX or self._open_bytes >= OPEN_BYTES_MAX:
            self._room.clear()
            await self._room.wait()

    async def wait_answers(self) -> None:
        """Return once there is something to send."""
        self._wake.clear()
        if self._outbox.is_empty() and not self.is_finished:
            await self._wake.wait()

    async def wait_all_done(self) -> None:
        """Return once every operation has ended."""
        while self._open:
            self._room.clear()
            await self._room.wait()

    def finish(self) -> None:
        """No more frames will come."""
        self._finished = True
        self.wake()

    @property
    def is_finished(self) -> bool:
        """No more frames will come, nothing is under way, and nothing waits to be sent."""
        return self._finished and not self._open and self._outbox.is_empty()

    def take(self) -> Iterator[kv_pb2.Answers]:
        """The answers that have gathered, message by message."""
        partitions, self._partitions = sorted(self._partitions), set()
        progress = [progress_of(self._backend, self._clock, partition) for partition in partitions if partition]
        version = self._backend.topology.ring.routed
        for answers in self._outbox.take():
            self._count()
            answers.ring_version = version
            answers.progress.extend(progress)
            yield answers
        self._room.set()

    def close(self) -> None:
        """Drop the answers of what is still under way."""
        self.closed = True
        self._unsent.bytes -= self._counted
        self._counted = 0
        for _, lane in sorted(self._lanes.items()):
            lane.cancel_timer()


class _Lane(Sink):
    """The sink of one lane's operations."""

    __slots__ = (
        "_first",
        "_left",
        "_ops",
        "_partition",
        "_ring_version",
        "_session",
        "begun",
        "place",
        "size",
        "timer",
    )

    def __init__(
        self,
        session: Session,
        place: int,
        lane: kv_pb2.Lane,
        ops: list[Op | StoreError],
        ring_version: int,
        begun: float,
    ) -> None:
        self._session, self.place, self._ring_version, self.begun = session, place, ring_version, begun
        self._first, self._partition = lane.first, lane.partition
        self._ops: list[Op | StoreError | None] = [*ops]
        """None once answered."""
        self._left = len(ops)
        self.size = lane.ByteSize()
        self.timer: asyncio.TimerHandle | None = None

    def complete(self, token: int, result: Result | StoreError) -> None:
        op = self._ops[token]
        if op is None:
            return  # it had timed out
        self._ops[token] = None
        self._session.answer(self._first + token, self._partition, op, result, self._ring_version)
        self._left -= 1
        if not self._left:
            self.cancel_timer()
            self._session.forget(self)

    def flush(self) -> None:
        self._session.wake()

    def expire(self) -> None:
        """Answer what has not ended in time."""
        for token, op in enumerate(list(self._ops)):
            if op is not None:
                self.complete(token, _late(op))
        self.flush()

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def _late(op: Op | StoreError) -> StoreError:
    if isinstance(op, tuple) and op[0] not in READS:
        return OutcomeUnknown("no outcome within the frame's time")
    return Unavailable("no answer within the frame's time")


def progress_of(backend: Backend, clock: Clock, partition: str) -> kv_pb2.Progress:
    """How far a partition has come, as answers carry it.

    Its last record may be old, and a request that carries an old time is refused. So the time is that of the next
    record: a leader stamps records with its clock, but never earlier than the last one.
    """
    sequence, time_ms = backend.progress(PartitionId(partition))
    return kv_pb2.Progress(partition=partition, sequence=sequence, time_ms=max(time_ms, clock.shown_ms()))
