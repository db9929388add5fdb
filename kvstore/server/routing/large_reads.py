"""Reads of one key on their way to one other server while values are large. One link has the reads of all clients of
this server, and what it carries comes in order: so they wait here, a line for each client, and go out in turn. A client
which asks for many large values delays its own reads alone; and what waits for one that has gone is not sent.
Decides only.

While no large value comes there is none of this: nothing waits, and no read is counted. Once one has come,

- clients whose last value was large have BYTES_AT_ONCE under way together, by that value's size, one read of each in
  turn;
- any other has at first ROOM_FIRST, and one more with each small answer.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from kvstore.server.routing.pending import Pending
from kvstore.types import PartitionId

LARGE_BYTES = 64 << 10
"""A value of more is large."""
BYTES_AT_ONCE = 4 << 20
"""What a small answer may have in front of it on the link. A single value may be larger."""
ROOM_FIRST, ROOM_KNOWN, ROOM_MAX = 1, 8, 1_024
QUIET_S = 2.0
"""After so long without a large value all is as before."""
PATIENCE_S = 5.0
"""A client of whose reads none has been answered for so long, while more wait, gets an error for those that wait."""

LEFT_S_MIN = 0.001
"""Of the time of a read that waits for its turn: 0 is one that has not waited for anything yet."""


class _ClientReads:
    """One client's reads."""

    __slots__ = ("heard_at", "room", "size", "under_way", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[PartitionId, Pending]] = deque()
        self.under_way = 0
        """Reads that are counted: not those which left before the first large value had come."""
        self.size = 0
        """The size of its last value, if that was large; else 0."""
        self.room = ROOM_FIRST
        self.heard_at = 0.0


class LargeReads:
    """The reads of one link. A client is named by the line of its sinks."""

    def __init__(self) -> None:
        self.is_on = False
        """Large values have come lately. A plain attribute: it is looked at for each operation."""
        self.count = 0
        """How many wait."""
        self._clients: dict[object, _ClientReads] = {}
        self._under_way: dict[int, _ClientReads] = {}
        self._bytes = 0
        """The bytes of all reads under way, each taken to be as large as its client's last value."""
        self._turns: OrderedDict[_ClientReads, None] = OrderedDict()
        """Clients of which reads wait; whose turn is next is the first."""
        self._large_turns: OrderedDict[_ClientReads, None] = OrderedDict()
        """The same of those whose last value was large."""
        self._until = 0.0

    # ── what goes out ─────────────────────────────────────────────────────────────────────────────────────────────────

    def may_begin(self, pending: Pending) -> bool:
        """Whether a read that has just come may leave at once."""
        client = self._client(pending.sink.line)
        return not client.waiting and self._has_room(client)

    def begin(self, number: int, pending: Pending) -> None:
        """Count a read that leaves."""
        client = self._under_way[number] = self._client(pending.sink.line)
        client.under_way += 1
        self._bytes += client.size

    def wait(self, partition: PartitionId, pending: Pending, now: float) -> None:
        """Let a read wait for its client's turn, as long as others of it are answered. One that comes back again and
        again keeps what is left of its time."""
        client = self._client(pending.sink.line)
        if pending.deadline:
            pending.left_s = max(pending.deadline - now, LEFT_S_MIN)
        pending.deadline = 0.0
        if not client.waiting:
            client.heard_at = now
            self._turns_of(client)[client] = None
        client.waiting.append((partition, pending))
        self.count += 1

    def next_or_none(self) -> Pending | None:
        """Take the read whose turn it is; None if none may leave now."""
        if self._large_turns and self._has_room(next(iter(self._large_turns))):
            return self._take(self._large_turns.popitem(last=False)[0])
        for _ in range(len(self._turns)):
            client = self._turns.popitem(last=False)[0]
            if self._has_room(client):
                return self._take(client)
            self._turns[client] = None
        return None

    # ── what comes back ───────────────────────────────────────────────────────────────────────────────────────────────

    def ended(self, number: int, size: int, now: float) -> None:
        """A read is answered with a value of `size` bytes, or with something else that is small."""
        client = self._uncount(number)
        if client is not None:
            client.heard_at = now
            self._judge(client, size)

    def over(self, number: int) -> None:
        """A read has come back, or nobody waits for it any more: that says nothing about its value."""
        self._uncount(number)

    def note_large(self, line: object, size: int, now: float) -> None:
        """A large value has come for this client, by a read that was counted or by one from before."""
        self.is_on, self._until = True, now + QUIET_S
        client = self._client(line)
        client.heard_at = now
        self._judge(client, size)

    def look(self, now: float) -> list[Pending]:
        """Look after what waits, now and then; returns what is over: it is to be failed. Where nothing large has come
        for a while and nothing waits, all is as before."""
        late: list[Pending] = []
        for client in [*self._turns, *self._large_turns]:
            is_late = now - client.heard_at > PATIENCE_S
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
            self._under_way.clear()
            self._bytes = 0
        else:
            self._clients = {line: each for line, each in self._clients.items() if _is_known(each, now)}
        return late

    def take_all(self) -> list[tuple[PartitionId, Pending]]:
        """Take all that wait, to go another way."""
        found = [each for client in (*self._turns, *self._large_turns) for each in client.waiting]
        for client in (*self._turns, *self._large_turns):
            client.waiting.clear()
        self._turns.clear()
        self._large_turns.clear()
        self.count = 0
        return found

    def has(self, partition: PartitionId) -> bool:
        """Whether a read on the partition waits."""
        return any(each == partition for client in (*self._turns, *self._large_turns) for each, _ in client.waiting)

    # ── inside ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _client(self, line: object) -> _ClientReads:
        found = self._clients.get(line)
        if found is None:
            found = self._clients[line] = _ClientReads()
        return found

    def _has_room(self, client: _ClientReads) -> bool:
        if not client.size:
            return client.under_way < client.room
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
        client = self._under_way.pop(number, None)
        if client is not None:
            client.under_way -= 1
            self._bytes -= client.size
        return client

    def _judge(self, client: _ClientReads, size: int) -> None:
        """Go by this size of its values from now on."""
        size = size if size > LARGE_BYTES else 0
        is_other = bool(size) != bool(client.size)
        if is_other:
            self._turns_of(client).pop(client, None)
        self._bytes += client.under_way * (size - client.size)
        client.size = size
        client.room = ROOM_FIRST if size else min(client.room + 1, ROOM_MAX)
        if is_other and client.waiting:
            self._turns_of(client)[client] = None

    def check(self) -> None:
        clients = list(self._clients.values())
        assert self.count == sum(len(each.waiting) for each in clients)
        assert all(client in clients for client in self._under_way.values())
        assert self._bytes == sum(each.under_way * each.size for each in clients)
        assert sum(each.under_way for each in clients) == len(self._under_way)
        assert {id(each) for each in self._turns} == {id(each) for each in clients if each.waiting and not each.size}
        assert {id(each) for each in self._large_turns} == {id(each) for each in clients if each.waiting and each.size}
        assert self.is_on or not self.count
        assert not self._turns or any(each.under_way for each in self._turns), "nobody would come back to them"
        assert not self._large_turns or self._bytes, "nobody would come back to them"


def _is_known(client: _ClientReads, now: float) -> bool:
    if client.waiting or client.under_way:
        return True
    # One that asks once, as each unary call does, needs not be known again.
    return (bool(client.size) or client.room > ROOM_KNOWN) and now - client.heard_at <= PATIENCE_S
