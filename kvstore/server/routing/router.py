"""Decides where each operation goes, and in which order, as one state machine. Decides only.

`handle` takes events and returns commands; the dispatcher and the links perform them. Until its sink has the result, an
operation at this server is in one of these places:

    submitted ──► the local replica that leads
        │             │ rejected: it does not own the key
        │             ▼
        │         redirected, by key ──────────────┐ when the ring has changed, or a little later
        │             ▲                            │
        │             │ moved                      ▼
        ├──► in transit to the leader's server ◄─ sent
        │             │ not led there, link lost   ▲
        │             ▼                            │
        └──► waiting for a leader, by partition ───┘ when the topology has changed, or a little later

**Promise to clients** (docs/protocol.md M15): operations that a client awaits one after the other, and writes on one
key that come over one connection without being awaited, are done in their order of arrival. A server keeps the order
for all writes on one key that it receives, which requires no knowledge of connections:

1. To one server, operations of a partition go over one link, in order.
2. A partition's operations go to another server only when none of them is in transit to the former one.
3. An operation that a server refused is sent again in its old position: before later operations on the same partition
   if the server does not lead it, or on the same key if the server does not own it.
4. A key is *held* while an operation on it is redirected, or in transit to a partition that does not own it any more
   and may send it back. A write on a held key is redirected as well, behind the others.
5. The answering server does its part: after a refusal it does nothing that was sent before the refusal was received
   (`peer/refusals.py`).

Reads need not wait for writes of others; endpoints let the reads of a connection wait for its own writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import assert_never

from msgspec.structs import replace

from kvstore.errors import InvalidRequest, Moved, NotLeader, OutcomeUnknown, Overloaded, StoreError, Unavailable
from kvstore.partition.state.commands import Batch, Level, Op, Sink
from kvstore.partition.state.traits import KEYLESS, POINT_READS, READS, UNORDERED
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.routing.events import (
    Closing,
    Command,
    Connect,
    Event,
    Fail,
    HostingChanged,
    LinkLost,
    LinkOpened,
    MovedRejected,
    ReadLeader,
    ReadRing,
    ReadsAnswered,
    RefusedByPeer,
    RejectedHere,
    RejectMoved,
    RejectPeer,
    Send,
    SentByPeer,
    SubmitHere,
    Submitted,
    Ticked,
    TopologyChanged,
)
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.pending import PeerSink, Pending, check_one_partition, keys_of
from kvstore.server.routing.redirects import WAIT_S, Redirected, Redirects
from kvstore.server.routing.routes import Routes
from kvstore.server.routing.waiting_lines import WaitingLines
from kvstore.types import PartitionId, ServerId

SUSPECT_AGAIN_S = 0.25
"""Interval of rereading the ring because a partition did not own what the ring assigns to it."""
_ARRIVED = 1 << 60
"""Separates positions: new operations get higher ones, and operations that a local replica rejected get lower ones,
because they arrived before."""

_value_of = attrgetter("value")
_GONE = "its client is gone"
_LINEARIZABLE, _SESSION = int(Level.LINEARIZABLE), int(Level.SESSION)
FOLLOWER_LEVELS = frozenset({_SESSION, int(Level.STALE)})
"""Levels of reads that any replica may answer."""


class Router:
    """Routes the operations of one server. `serves` tells whether the local replica of a partition leads and serves."""

    def __init__(
        self,
        server: ServerId,
        topology: ClusterTopology,
        serves: Callable[[PartitionId], bool],
        *,
        waiting_max: int,
        bytes_max: int,
    ) -> None:
        self._server, self._serves = server, serves
        self.topology = topology
        self.partition_of, self.owner_of = topology.ring.partition_of, topology.ring.owner_of
        self.ring_version = topology.ring.routed
        self._here: set[PartitionId] = set()
        self.waiting = WaitingLines(operations_max=waiting_max, bytes_max=bytes_max)
        self.redirects = Redirects(self._fail, operations_max=waiting_max, bytes_max=bytes_max)
        self.routes = Routes()
        self._arrivals = _ARRIVED
        self._rejections = 0
        self._suspected_at = -SUSPECT_AGAIN_S
        self._is_grouping_stale = False
        """True if keys have moved since waiting operations were sorted by partition."""
        self._now = 0.0
        self._commands: list[Command] = []
        self.forwarded = self.waited = self.timed_out = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handle an event and return the commands to execute, in order. `now` is the clock in seconds."""
        self._now = now
        match event:
            case Submitted():
                self._submitted(event)
            case SentByPeer():
                self._sent_by_peer(event)
            case RejectedHere(op, sink, token, moved):
                self._rejected_here(op, sink, token, moved)
            case RefusedByPeer(flight, errors):
                self._refused(flight, errors)
            case ReadsAnswered(flight, is_check):
                self._reads_answered(flight, is_check=is_check)
            case LinkOpened(flight):
                self.routes.open(flight)
            case LinkLost(flight, first_unsent):
                self._link_lost(flight, first_unsent)
            case TopologyChanged(topology):
                self._topology_changed(topology)
            case MovedRejected():
                if self._is_grouping_stale:
                    self._regroup_waiting()
                self._send_redirected()
                self._drain()
            case HostingChanged(partition, is_here):
                self._hosting_changed(partition, is_here)
            case Ticked():
                self._drain()
                self._send_redirected()
            case Closing():
                self._closing()
            case _:
                assert_never(event)
        commands, self._commands = self._commands, []
        return commands

    @property
    def is_waiting(self) -> bool:
        """True if waiting operations must be checked again."""
        return bool(self.waiting.lines or self.redirects.keys)

    def follow(self, flight: Flight, partition: PartitionId, op: Op, sink: Sink, token: int) -> int:
        """Add an operation to the flight behind earlier ones, while no key is held. Return its number, or 0 if there
        is no capacity."""
        number = flight.begin(partition, Pending(self._arrivals + 1, op, sink, token))
        if number:
            self._arrivals += 1
            self.forwarded += 1
        return number

    def follow_puts(
        self, flight: Flight, partition: PartitionId, ops: Sequence[Op], sink: Sink, tokens: Sequence[int]
    ) -> range:
        """Add puts of one sink to the flight, which must have capacity for them. Return their numbers."""
        first, count = self._arrivals + 1, len(ops)
        self._arrivals += count
        self.forwarded += count
        orders, sizes = range(first, first + count), map(len, map(_value_of, ops))
        return flight.begin_all(partition, list(map(Pending, orders, ops, repeat(sink), tokens, sizes)))

    # ── arrivals ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _submitted(self, event: Submitted) -> None:
        op, sink, token, ring_version = event.op, event.sink, event.token, event.ring_version
        partition = event.partition
        if partition is None:
            partition = self.partition_of(op.key)
        elif ring_version and ring_version != self.ring_version:
            return self._fail_moved(op, sink, token, ring_version)
        if op.level in FOLLOWER_LEVELS:
            if (
                op.level == _SESSION
                and op.code in POINT_READS
                and _may_mean_another(op, ring_version, self.ring_version)
            ):
                op = replace(op, level=_LINEARIZABLE, seq=0)
            elif partition in self._here:
                return self._commands.append(SubmitHere(partition, op, sink, token))
        self._arrivals += 1
        pending = Pending(self._arrivals, op, sink, token)
        if self._is_held(op):
            self._redirect(pending)
        elif event.awaits_ring or partition in self.waiting or not self._send(partition, pending):
            self._wait(partition, pending)

    def _sent_by_peer(self, event: SentByPeer) -> None:
        partition, op, sink, token = event.partition, event.op, event.sink, event.token
        if partition not in self._here:
            self._fail(sink, token, self.topology.not_leader(partition))
        elif event.ring_version != self.ring_version and (
            op.code in KEYLESS or not self.topology.may_answer(partition, op.key, event.ring_version)
        ):
            self._fail_moved(op, sink, token, event.ring_version)
        elif self._serves(partition) and partition not in self.waiting:
            self._commands.append(SubmitHere(partition, op, sink, token))
        elif self.topology.is_led_by(self._server, partition):
            self._arrivals += 1
            self._wait(partition, Pending(self._arrivals, op, sink, token, is_of_peer=True))
        else:
            self._fail(sink, token, self.topology.not_leader(partition))

    # ── returns ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _rejected_here(self, op: Op, sink: Sink, token: int, moved: Moved) -> None:
        if isinstance(sink, PeerSink):
            return self._fail_moved(op, sink, token, partition=moved.partition)
        if not isinstance(sink, Redirected):
            sink = Redirected(sink, self._now + WAIT_S)
        if not sink.place:
            # Anything else on this key that has come back or waits was submitted later.
            sink.place = self._rejections = self._rejections + 1
        self._redirect(Pending(sink.place, op, sink, token))

    def _refused(self, flight: Flight, errors: list[tuple[int, NotLeader | Moved]]) -> None:
        moved: set[bytes] = set()
        for number, error in errors:
            found = flight.end(number)
            if found is None:
                continue
            partition, pending = found
            self._take_back(partition, pending, error, flight.server)
            if isinstance(error, Moved) and pending.op.code not in UNORDERED:
                moved.update(keys_of(pending.op))
        if moved:
            self.redirects.expect(flight, flight.writes_on(moved))
        self._send_reads(flight)

    def _link_lost(self, flight: Flight, first_unsent: int) -> None:
        """Route reads and unsent operations again. Mutations that had been sent fail with OutcomeUnknown."""
        server = flight.server
        self.routes.lost(flight)
        self._recall_reads(flight)
        for number, (partition, pending) in flight.end_all().items():
            if number >= first_unsent or pending.op.code in READS:
                error: StoreError = Unavailable(f"the link to {server} broke before it was asked")
                self._take_back(partition, pending, error, server)
            else:
                self._fail(
                    pending.sink, pending.token, OutcomeUnknown(f"the link to {server} broke before it answered")
                )

    def _take_back(self, partition: PartitionId, pending: Pending, error: StoreError, server: ServerId) -> None:
        """Take back an operation that `server` refused or did not receive. The operation is routed again, or fails
        with `error` if its time is over."""
        if isinstance(error, NotLeader):
            self.routes.note_refused(partition, server, self._now)
            self._commands.append(ReadLeader(partition))
        if self._now >= pending.deadline > 0:
            self._fail(pending.sink, pending.token, error)
        elif isinstance(error, Moved) or (
            pending.op.code not in KEYLESS and self.partition_of(pending.op.key) != partition
        ):
            self._redirect(pending)
        else:
            self._wait(partition, pending)

    # ── what the cluster is like ──────────────────────────────────────────────────────────────────────────────────────

    def _topology_changed(self, topology: ClusterTopology) -> None:
        before, self.topology = self.topology, topology
        self.partition_of, self.owner_of = topology.ring.partition_of, topology.ring.owner_of
        self.ring_version = topology.ring.routed
        self.routes.note_leaders(before, topology, self._now)
        for _, flight in sorted(self.routes.flights.items()):
            self._recall_reads(flight)
        if topology.ring.routed != before.ring.routed:
            for flight, numbers in self.routes.misdirected(self.partition_of):
                self.redirects.expect(flight, numbers)
            self._commands.append(RejectMoved())
            self._is_grouping_stale = True

    def _hosting_changed(self, partition: PartitionId, is_here: bool) -> None:
        self.routes.end_direct(partition)
        if is_here:
            self._here.add(partition)
        else:
            self._here.discard(partition)
            self._drain()

    def _regroup_waiting(self) -> None:
        """Sort waiting operations by partition again, because the ring has changed."""
        self._is_grouping_stale = False
        for _, pending in self.waiting.take_all():
            if pending.op.code in KEYLESS:
                self._fail_moved(pending.op, pending.sink, pending.token)
            elif not pending.is_of_peer and self._is_held(pending.op):
                self._redirect(pending)
            else:
                self.waiting.put_back(self.partition_of(pending.op.key), pending)

    def _closing(self) -> None:
        error = Unavailable("this server is stopping")
        for _, flight in sorted(self.routes.flights.items()):
            self._recall_reads(flight)
        for _, pending in self.waiting.take_all():
            self._fail(pending.sink, pending.token, error)
        self.redirects.fail_all(error)

    # ── what goes out ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, partition: PartitionId, pending: Pending, *, is_its_turn: bool = False) -> bool:
        """Send the operation to the partition's leader, or queue it until its client's turn. Return False if the
        leader is unknown or cannot receive an operation now."""
        if self._serves(partition):
            if not self.routes.is_settled(partition, self._server):
                return False
            self._commands.append(SubmitHere(partition, pending.op, pending.sink, pending.token))
            return True
        leader = self.topology.leader_of(partition)
        if pending.is_of_peer and (partition not in self._here or (leader is not None and leader != self._server)):
            self._fail(pending.sink, pending.token, self.topology.not_leader(partition))
            return True
        if leader is None or leader == self._server or self.routes.is_backing_off(partition):
            return False
        flight = self.routes.flights.get(leader)
        if flight is None:
            self._commands.append(Connect(leader))
        if flight is None or not flight.has_capacity() or not self.routes.is_settled(partition, leader):
            return False
        is_scheduled = flight.reads.is_on and pending.op.code in POINT_READS
        if is_scheduled and not is_its_turn and not flight.reads.may_begin(pending):
            flight.reads.wait(partition, pending, self._now)
            self.routes.take(partition, flight, is_direct=partition not in self.waiting)
            return True
        number = flight.begin(partition, pending)
        if is_scheduled:
            flight.reads.begin(number, pending)
        self._commands.append(Send(leader, partition, number, pending.op))
        self.routes.take(partition, flight, is_direct=partition not in self.waiting)
        self.forwarded += 1
        return True

    def _drain(self) -> None:
        """Send the waiting operations that can be sent, in order, and fail those that have waited too long."""
        for partition in sorted(self.waiting.lines):
            self.routes.ask_again(partition, self._now)
            self.waiting.drain(partition, partial(self._leaves_line, partition))
            if partition in self.waiting:  # a link may have become full, so new operations queue behind the rest
                self.routes.end_direct(partition)

    def _leaves_line(self, partition: PartitionId, pending: Pending) -> bool:
        """Return True if the operation, which is the first of its line, was sent, redirected or failed, so that it
        leaves the line."""
        if pending.deadline <= self._now:
            self.timed_out += 1
            self._fail(pending.sink, pending.token, self.topology.no_leader(partition))
        elif pending.sink.is_gone and pending.op.code in READS:
            self._fail(pending.sink, pending.token, Unavailable(_GONE))
        elif not pending.is_of_peer and self._is_held(pending.op):
            self._redirect(pending)
        else:
            return self._send(partition, pending)
        return True

    def _send_redirected(self) -> None:
        for pending in self.redirects.take(self._now):
            op, partition = pending.op, self.partition_of(pending.op.key)
            if (
                op.__class__ is Batch and op.request is None
            ):  # with a request id it may already be done, which its owner knows
                try:
                    check_one_partition(op, self.partition_of)
                except InvalidRequest as error:
                    self._fail(pending.sink, pending.token, error)
                    continue
            if partition in self.waiting or not self._send(partition, pending):
                self._wait(partition, pending)

    def _reads_answered(self, flight: Flight, *, is_check: bool) -> None:
        for pending in flight.reads.take_late(self._now) if is_check else ():
            late = Unavailable(f"{flight.server} answers none of the client's reads, so this read was not sent")
            self._fail(pending.sink, pending.token, late)
        self._send_reads(flight)

    def _send_reads(self, flight: Flight) -> None:
        """Send the waiting reads that may be sent now."""
        while flight.reads.count and (pending := flight.reads.next_or_none()) is not None:
            partition = self.partition_of(pending.op.key)
            if pending.sink.is_gone:
                self._fail(pending.sink, pending.token, Unavailable(_GONE))
            elif partition in self.waiting or not self._send(partition, pending, is_its_turn=True):
                self._wait(partition, pending)

    def _recall_reads(self, flight: Flight) -> None:
        """Take back the reads that wait for their turn. They may have to go to another server, before later
        operations."""
        for _, pending in flight.reads.take_all():
            self._wait(self.partition_of(pending.op.key), pending)

    # ── where something is kept, or how it ends ───────────────────────────────────────────────────────────────────────

    def _wait(self, partition: PartitionId, pending: Pending) -> None:
        pending.deadline = pending.deadline or self._now + (pending.left_s or WAIT_S)
        if self.waiting.add(partition, pending):
            self.waited += 1
            self.routes.end_direct(partition)
        else:
            error = Overloaded(f"{self.waiting.count} operations of {self.waiting.bytes} bytes wait for leaders")
            self._fail(pending.sink, pending.token, error)

    def _redirect(self, pending: Pending) -> None:
        if pending.op.code in KEYLESS:
            return self._fail_moved(pending.op, pending.sink, pending.token)
        if self._now - self._suspected_at > SUSPECT_AGAIN_S:  # a watch also reports ring changes
            self._suspected_at = self._now
            self._commands.append(ReadRing())
        self.redirects.add(pending, self._now)

    def _fail_moved(self, op: Op, sink: Sink, token: int, ring_version: int = 0, partition: str = "") -> None:
        """Fail an operation that was routed by another version of the ring than the known one."""
        if ring_version > self.ring_version:
            self._commands.append(ReadRing(ring_version))
        moved = Moved(partition, self.ring_version)
        if isinstance(sink, PeerSink):
            self._commands.append(RejectPeer(sink, op, token, moved))
        else:
            self._fail(sink, token, moved)

    def _fail(self, sink: Sink, token: int, error: StoreError) -> None:
        self._commands.append(Fail(sink, token, error))

    # ── questions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _is_held(self, op: Op) -> bool:
        """Return True if another operation on the same key must be executed before this one."""
        return bool(self.redirects.keys) and op.code not in UNORDERED and self.redirects.holds(op)

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        self.waiting.check()
        self.redirects.check()
        self.routes.check()
        for partition in self.routes.direct:
            assert partition not in self.waiting, "waiting operations would be overtaken"


def _may_mean_another(op: Op, ring_version: int, known: int) -> bool:
    """Return True if the session of a read may belong to another partition than the one asked. Only the leader can
    then give a correct answer (docs/protocol.md M16)."""
    return ring_version != known and bool(ring_version or op.seq)
