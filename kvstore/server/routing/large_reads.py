"""Schedules reads of single keys that are sent to another server while values are large. Decides only.

One link carries the reads of all clients of this server in order. Therefore reads wait here, in one line per client,
and the clients take turns. A client that requests many large values delays only its own reads, and the waiting reads of
a disconnected client are not sent.

Without large values, no read waits and none is counted. Once a large value has arrived,

- clients whose last value was large may have BYTES_AT_ONCE in transit together, one read of each in turn;
- any other client starts with READS_FIRST reads, and gains one with each small answer.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from kvstore.server.routing.pending import Pending
from kvstore.types import PartitionId

LARGE_BYTES = 64 << 10
"""Size above which a value counts as large."""
BYTES_AT_ONCE = 4 << 20
"""Maximum bytes of large values in transit on the link, which may delay a small answer. A single value may be
larger."""
READS_FIRST, READS_KNOWN, READS_MAX = 1, 8, 1_024
QUIET_S = 2.0
"""Time in seconds without large values after which scheduling ends."""
PATIENCE_S = 5.0
"""Time in seconds without answers after which a client's waiting reads fail."""

LEFT_S_MIN = 0.001
"""Minimum remaining time in seconds of a waiting read. The value 0 is reserved for a read that has not waited yet."""


class _ClientReads:
    """One client's reads."""

    __slots__ = ("in_flight", "reads_max", "received_at", "size", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[PartitionId, Pending]] = deque()
        self.in_flight = 0
        """Number of its reads in transit. Reads that were sent before the first large value are not counted."""
        self.size = 0
        """Size of its last value if that was large, otherwise 0."""
        self.reads_max = READS_FIRST
        self.received_at = 0.0


class LargeReads:
    """Decides when reads may be sent on one link. A client is identified by the `line` of its sinks."""

    def __init__(self) -> None:
        self.is_on = False
        """True if large values have arrived recently. A plain attribute, because it is checked for each operation."""
        self.count = 0
        """Number of waiting reads."""
        self._clients: dict[object, _ClientReads] = {}
        self._in_flight: dict[int, _ClientReads] = {}
        self._bytes = 0
        """Estimated bytes of all values in transit. Each value is assumed to be as large as its client's last value."""
        self._turns: OrderedDict[_ClientReads, None] = OrderedDict()
        """Clients with waiting reads; the first has the next turn."""
        self._large_turns: OrderedDict[_ClientReads, None] = OrderedDict()
        """Clients with waiting reads whose last value was large. The first has the next turn."""
        self._until = 0.0

    # ── what goes out ─────────────────────────────────────────────────────────────────────────────────────────────────

    def may_begin(self, pending: Pending) -> bool:
        """Return True if a new read may be sent at once."""
        client = self._client(pending.sink.line)
        return not client.waiting and self._has_capacity(client)

    def begin(self, number: int, pending: Pending) -> None:
        """Count a read that is being sent."""
        client = self._in_flight[number] = self._client(pending.sink.line)
        client.in_flight += 1
        self._bytes += client.size

    def wait(self, partition: PartitionId, pending: Pending, now: float) -> None:
        """Queue a read until its client's turn. It stays valid as long as other reads of the client are answered. A
        read that is queued repeatedly keeps its remaining time."""
        client = self._client(pending.sink.line)
        if pending.deadline:
            pending.left_s = max(pending.deadline - now, LEFT_S_MIN)
        pending.deadline = 0.0
        if not client.waiting:
            client.received_at = now
            self._turns_of(client)[client] = None
        client.waiting.append((partition, pending))
        self.count += 1

    def next_or_none(self) -> Pending | None:
        """Remove and return the next read to send, or None if no read may be sent now."""
        if self._large_turns and self._has_capacity(next(iter(self._large_turns))):
            return self._take(self._large_turns.popitem(last=False)[0])
        for _ in range(len(self._turns)):
            client = self._turns.popitem(last=False)[0]
            if self._has_capacity(client):
                return self._take(client)
            self._turns[client] = None
        return None

    # ── what comes back ───────────────────────────────────────────────────────────────────────────────────────────────

    def ended(self, number: int, size: int, now: float) -> None:
        """Record that a read was answered with a value of `size` bytes; a small size if it returned no value."""
        client = self._uncount(number)
        if client is not None:
            client.received_at = now
            self._judge(client, size)

    def over(self, number: int) -> None:
        """Record that a read was refused or timed out, which tells nothing about the size of its value."""
        self._uncount(number)

    def note_large(self, line: object, size: int, now: float) -> None:
        """Record that this client received a large value, even if the read was not counted."""
        self.is_on, self._until = True, now + QUIET_S
        client = self._client(line)
        client.received_at = now
        self._judge(client, size)

    def take_late(self, now: float) -> list[Pending]:
        """Remove and return the overdue reads, which the caller must fail. Also ends scheduling if no large value
        has arrived for QUIET_S seconds and no read waits."""
        late: list[Pending] = []
        for client in [*self._turns, *self._large_turns]:
            is_late = now - client.received_at > PATIENCE_S
            if is_late or client.waiting[0][1].sink.is_gone:
                over = [pending for _, pending in client.waiting if is_late or pending.sink.is_gone]
                client.waiting = deque(each for each in client.waiting if not (is_late or each[1].sink.is_gone))
                late += over
                if not client.waiting:
                    self._turns_of(client).pop(client)
        self.count -= len(late)
        if self.is_on and now > self._until and not self.count:
            self.is_on = False
            self._clients.clear()
            self._in_flight.clear()
            self._bytes = 0
        else:
            self._clients = {line: each for line, each in self._clients.items() if _is_known(each, now)}
        return late

    def take_all(self) -> list[tuple[PartitionId, Pending]]:
        """Remove and return all waiting reads, because they may have to go to another server."""
        found = [each for client in (*self._turns, *self._large_turns) for each in client.waiting]
        for client in (*self._turns, *self._large_turns):
            client.waiting.clear()
        self._turns.clear()
        self._large_turns.clear()
        self.count = 0
        return found

    def has(self, partition: PartitionId) -> bool:
        """Return True if a read on the partition is waiting."""
        return any(each == partition for client in (*self._turns, *self._large_turns) for each, _ in client.waiting)

    # ── inside ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _client(self, line: object) -> _ClientReads:
        found = self._clients.get(line)
        if found is None:
            found = self._clients[line] = _ClientReads()
        return found

    def _has_capacity(self, client: _ClientReads) -> bool:
        if not client.size:
            return client.in_flight < client.reads_max
        return not self._bytes or self._bytes + client.size <= BYTES_AT_ONCE

    def _turns_of(self, client: _ClientReads) -> OrderedDict[_ClientReads, None]:
        return self._large_turns if client.size else self._turns

    def _take(self, client: _ClientReads) -> Pending:
        _, pending = client.waiting.popleft()
        self.count -= 1
        if client.waiting:
            self._turns_of(client)[client] = None
        return pending

    def _uncount(self, number: int) -> _ClientReads | None:
        client = self._in_flight.pop(number, None)
        if client is not None:
            client.in_flight -= 1
            self._bytes -= client.size
        return client

    def _judge(self, client: _ClientReads, size: int) -> None:
        """Update the estimated size of the client's values."""
        size = size if size > LARGE_BYTES else 0
        is_other = bool(size) != bool(client.size)
        if is_other:
            self._turns_of(client).pop(client, None)
        self._bytes += client.in_flight * (size - client.size)
        client.size = size
        client.reads_max = READS_FIRST if size else min(client.reads_max + 1, READS_MAX)
        if is_other and client.waiting:
            self._turns_of(client)[client] = None

    def check(self) -> None:
        clients = list(self._clients.values())
        assert self.count == sum(len(each.waiting) for each in clients)
        assert all(client in clients for client in self._in_flight.values())
        assert self._bytes == sum(each.in_flight * each.size for each in clients)
        assert sum(each.in_flight for each in clients) == len(self._in_flight)
        assert {id(each) for each in self._turns} == {id(each) for each in clients if each.waiting and not each.size}
        assert {id(each) for each in self._large_turns} == {id(each) for each in clients if each.waiting and each.size}
        assert self.is_on or not self.count
        assert not self._turns or any(each.in_flight for each in self._turns), "no answer would trigger them"
        assert not self._large_turns or self._bytes, "no answer would trigger them"


def _is_known(client: _ClientReads, now: float) -> bool:
    if client.waiting or client.in_flight:
        return True
    # A client that asks once, like each unary call, need not be remembered.
    return (bool(client.size) or client.reads_max > READS_KNOWN) and now - client.received_at <= PATIENCE_S
