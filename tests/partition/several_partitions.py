"""Leaders of several partitions in one event loop, over logs that the test acknowledges. Their messages go through a
network that the test can hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from kvstore.errors import InvalidRequest, NotLeader, StoreError
from kvstore.partition.config import PartitionConfig
from kvstore.partition.moves import pages
from kvstore.partition.state.commands import Batch, Op, RequestId, Sink, Transact
from kvstore.partition.state.entry import Requests
from kvstore.partition.state.move_records import (
    Drop,
    Founded,
    Freeze,
    ImportBegin,
    ImportEnd,
    ImportRows,
    LogVersion,
    MoveRecord,
    Own,
    Release,
)
from kvstore.partition.state.tokens import TokenSpan
from kvstore.partition.state.traits import home_key
from kvstore.partition.transactions.outcomes import END_S
from kvstore.ring.hashing import TOKENS
from kvstore.server.routing.pending import check_one_partition, keys_of
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from tests.partition.one_partition import TIME_MS, Partition
from tests.ring import rings
from tests.sim.world.loop import SimLoop

CLIENT = b"c" * 16


class Member(Partition):
    """One of several partitions. It owns its share of the tokens."""

    def __init__(self, world: Several, place: int, loop: SimLoop | None, config: PartitionConfig | None) -> None:
        self.world, self.place = world, place
        super().__init__(config, partition=PartitionId(f"p{place + 1}"), loop=loop)

    def start(self) -> Member:
        """Let the leader serve, and raise the version of its log."""
        founded = None
        if not self.state.ownership.is_founded:
            founded = Founded((self.world.span(self.place),))
        started = self.loop.create_task(self.leader.start(founded, self.world.redirect, self.world))
        self.settle()
        self.log.acknowledge()
        self.settle()
        started.result()
        if self.state.log_version < 3:
            self.loop.create_task(self.leader.append_record(LogVersion(3)))
            self.settle()
            self.log.acknowledge()
            self.settle()
        return self

    def fail_over(self) -> None:
        """Let a new leader take over. Entries in flight are lost."""
        self.leader.stop(NotLeader(self.state.partition))
        self.open()
        self.start()


class Message:
    """An operation between leaders that the test may deliver, or not."""

    def __init__(self, op: Op, sink: Sink, token: int) -> None:
        self.op, self.sink, self.token = op, sink, token


class Several:
    """Several partitions, and the network between their leaders: the port Participants."""

    def __init__(self, partitions: int = 2, config: PartitionConfig | None = None) -> None:
        self.partitions: list[Member] = []
        self._number = partitions
        for place in range(partitions):
            self.partitions.append(Member(self, place, self.partitions[0].loop if place else None, config))
        self.holds: Callable[[Op], bool] = lambda op: False
        """True for operations that stay in `held` instead of being delivered."""
        self.held: list[Message] = []
        self.sent: list[Op] = []
        self.redirected: list[Op] = []
        self._again: list[Message] = []
        self.before_record: Callable[[MoveRecord], None] = lambda record: None
        """Called before a record of a move is appended."""
        for each in self.partitions:
            each.start()
        self._requests = count(1)

    # the ring
    def span(self, place: int) -> TokenSpan:
        share = TOKENS // self._number
        return TokenSpan(place * share, TOKENS - 1 if place == self._number - 1 else (place + 1) * share - 1)

    def key(self, place: int, number: int = 0) -> bytes:
        """Return a key of the partition at this place; different keys for different numbers."""
        found = (b"k%d" % each for each in count())
        span = self.span(place)
        mine = (key for key in found if span.holds(rings.key_hash.token_of(key)))
        return next(key for at, key in enumerate(mine) if at == number)

    def of(self, key: bytes) -> Member:
        owner = self._owner_or_none(key)
        assert owner is not None, "the key is moving"
        return owner

    def _owner_or_none(self, key: bytes) -> Member | None:
        token = rings.key_hash.token_of(key)
        owns = (each for each in self.partitions if each.leader.serving_ranges.readable.holds(token))
        return next(owns, None)

    # the port Participants
    def owner_of(self, key: bytes) -> PartitionId:
        return self.of(key).state.partition

    def send(self, op: Op, sink: Sink, token: int) -> None:
        self.sent.append(op)
        if self.holds(op):
            self.held.append(Message(op, sink, token))
        else:
            self.deliver(Message(op, sink, token))

    def deliver(self, message: Message) -> None:
        """Hand a message to the leader of the partition that owns its key now. A batch whose keys have got several
        owners is refused, as by the router."""
        if message.op.__class__ is Batch and message.op.request is None:
            try:
                check_one_partition(message.op, self.owner_of)
            except InvalidRequest as error:
                message.sink.complete(message.token, error)
                return
        leader = self.of(message.op.key).leader
        leader._loop.call_soon(leader.submit, (message.op,), message.sink, (message.token,))

    def deliver_held(self) -> None:
        held, self.held = self.held, []
        for message in held:
            self.deliver(message)

    def redirect(self, op: Op, sink: Sink, token: int, moved: StoreError) -> None:
        self.redirected.append(op)
        self._again.append(Message(op, sink, token))
        self._send_again()

    def _send_again(self) -> None:
        """Deliver the redirected operations, except those whose keys are on their way."""
        again, self._again = self._again, []
        for message in again:
            keys = keys_of(message.op) if message.op.__class__ is Batch else [message.op.key]
            if any(self._owner_or_none(key) is None for key in keys):
                self._again.append(message)
            else:
                self.deliver(message)

    # moves
    def log(self, at: Member, record: MoveRecord, requests: Requests | None = None) -> Position:
        """Append a record to a partition's log, and acknowledge it."""
        self.before_record(record)
        task = at.loop.create_task(at.leader.append_record(record, requests))
        self.settle()
        at.acknowledge(len(at.log.in_flight))
        position: Position = task.result()
        return position

    def freeze(self, source: Member, target: Member, move: int, span: TokenSpan | None = None) -> Position:
        """Freeze a range, or everything that the source owned at first."""
        return self.log(source, Freeze(move, target.state.partition, span or self.span(source.place)))

    def finish_move(self, source: Member, target: Member, move: int, freeze: Position) -> None:
        """Copy the frozen range with its remembered results to the target, release it, and let the target own it."""
        span = source.state.ownership.frozen[0].span
        name = source.state.partition
        self.log(target, ImportBegin(move, 1, name, span, Position(LedgerId(0), EntryId(0))))
        cursor = pages.BEGINNING
        while cursor:
            page = pages.page_of(source.state, span, cursor)
            cursor = page.cursor
            self.log(target, ImportRows(move, page.keys, page.rows, cursor, freeze), pages.requests_in(page))
        self.log(target, ImportEnd(move, freeze, source.state.key_count, 0))
        released = self.log(source, Release(move, freeze, source.state.key_count, target.state.partition, span))
        seq, time_ms = source.state.seq, source.state.record_time_ms
        self.log(target, Own(move, freeze, released, seq, time_ms, name, span))
        source.leader.redirect_moved()
        self._send_again()
        self.log(source, Drop(move, b""))
        self.settle()

    def move(self, source: int, target: int, move: int, span: TokenSpan | None = None) -> None:
        """Move a range, or everything that the source owned at first, to another partition."""
        here, there = self.partitions[source], self.partitions[target]
        self.finish_move(here, there, move, self.freeze(here, there, move, span))

    # running
    def settle(self) -> None:
        self.partitions[0].settle()

    def run(self) -> None:
        """Acknowledge all entries until nothing is in flight."""
        self.settle()
        while any(each.log.in_flight for each in self.partitions):
            for each in self.partitions:
                each.log.acknowledge(len(each.log.in_flight))
            self.settle()

    def wait(self, seconds: float) -> None:
        """Let virtual time pass in small steps, and acknowledge all entries."""
        for _ in range(max(1, round(seconds / 0.01))):
            self.partitions[0].wait(0.01)
            self.run()

    def submit(self, op: Op, place: int | None = None) -> Callable[[], Any]:
        """Submit an operation to the owner of its key. Returns a function that returns the result, or "waits"."""
        at = self.of(op.key) if place is None else self.partitions[place]
        (token,) = at.submit(op)
        return lambda: at.result(token)

    def do(self, op: Op, place: int | None = None) -> Any:
        """Carry out an operation, and return its result."""
        result = self.submit(op, place)
        self.run()
        return result()

    def request(self) -> RequestId:
        """Return a new request id."""
        number = next(self._requests)
        return RequestId(CLIENT, number, number, TIME_MS)

    def value(self, key: bytes) -> bytes | None:
        """Return the value of a key in the applied state of its owner."""
        record = self.of(key).state.get(key)
        return None if record is None else record.value

    def is_clean(self) -> bool:
        """Return True if no intent and no decision is left. ENDs are logged a moment after the intents are resolved."""
        if any(len(each.state.intents) for each in self.partitions):
            return False
        self.wait(2 * END_S)
        return not any(len(each.state.intents) or len(each.state.decisions) for each in self.partitions)


def transact(*ops: Op, flags: int = 0, request: RequestId | None = None) -> Transact:
    """Return the transaction of these operations."""
    return Transact(home_key(ops), tuple(ops), flags, request)
