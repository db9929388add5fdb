"""Answers a leader's reads, or holds them until a proof or a lease allows an answer.

After a read has arrived, the lease check and the read of the state are one step. The decision is in read_lease.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

from kvstore.env import Env
from kvstore.errors import InvalidRequest, Moved, NotCaughtUp, StoreError, Unavailable
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading import queries
from kvstore.partition.leading.answers import ResultDelivery, lost
from kvstore.partition.leading.expired_reads import ExpiredReads
from kvstore.partition.leading.held import HeldReads
from kvstore.partition.leading.range_reads import Expired, Steps
from kvstore.partition.leading.read_lease import ReadLease
from kvstore.partition.leading.read_lines import Proved, Read, ReadLines
from kvstore.partition.leading.serving_ranges import ServingRanges
from kvstore.partition.state.commands import NOT_NOW, Code, Level, NotNow, Record, Reply, Result, Sink
from kvstore.partition.state.rows import EXPIRES, data_keys_at, pack_data_key
from kvstore.partition.state.scope import ELSEWHERE, scope
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import WHOLE
from kvstore.partition.state.traits import POINT_READS

AT_ONCE, AT_ONCE_LARGE = 32, 8
"""Number of reads between two checks of their size. The second number applies while values are large."""
STEPPING_MAX = 8
"""Maximum number of multi-turn reads in progress. Each takes one step per turn; further ones wait."""
TURN_BYTES = 4 << 20
"""Maximum number of bytes read in one turn of the event loop, once values have proved to be large."""
NOW_BYTES = 2 << 10
"""Size in bytes of the largest record that is read without waiting for its turn. The turn bounds larger ones."""
_GONE = "the client has disconnected"
_flags_of = itemgetter(0)
"""Takes the flags byte of a record's row."""
_LINEARIZABLE, _STRICT, _SESSION = int(Level.LINEARIZABLE), int(Level.STRICT), int(Level.SESSION)


class _UnprovedRead(NamedTuple):
    """A read, or answers found already, waiting for a proof."""

    ticket: int
    since: float
    read: Read | None
    replies: list[Reply]


class LeaderReads:
    """The reads of one leadership. `reap(keys, sink)` asks the leader to log the deletes of expired keys and completes
    `sink` afterwards. `wake` requests another turn. Methods raise OSError if the engine cannot be read, and
    `cannot_read` receives such an error if it occurs between two turns. The caller must then call `stop`, which answers
    what has not been answered."""

    def __init__(
        self,
        state: ReplicaState,
        serving_ranges: ServingRanges,
        config: PartitionConfig,
        read_lease: ReadLease,
        env: Env,
        answers: ResultDelivery,
        reap: Callable[[list[bytes], Sink], None],
        wake: Callable[[], None],
        cannot_read: Callable[[OSError], None],
    ) -> None:
        self._read_lease = read_lease
        self._serving_ranges = serving_ranges
        self._most = config.queue_items_max
        self._state, self._clock, self._answers = state, env.clock, answers
        self._slow, self._slow_s = env.slow, env.slow.limit_s
        self._wake, self._cannot_read = wake, cannot_read
        self.arrived: list[Read] = []
        """Reads for the next `turn`."""
        self.lines = ReadLines()
        """Reads of earlier turns that had no place in them because values are large."""
        self.may_want_append = False
        """If False, no read waits for an append, and `wants_append` would return False."""
        self._strict: deque[_UnprovedRead] = deque()
        self._leaseless: deque[_UnprovedRead] = deque()
        self.held = HeldReads(state, answers, self._read_again, config.queue_items_max)
        self.expired = ExpiredReads(state.partition, answers, reap, self._read_again)
        self._stepping: dict[Steps, Read] = {}
        """Multi-turn reads in progress. Each holds an iterator of the engine."""
        self._later: deque[tuple[Read, int]] = deque()
        """Multi-turn reads that may be answered but have not begun, with the time in milliseconds that each sees."""
        self._is_begin_due = False
        self._kept = 0
        """Number of waiting reads, without this turn's, when they were last counted."""
        self._renew = False
        self._at_once = AT_ONCE
        self._lines_per_turn = AT_ONCE_LARGE
        """Number of lines that the next turn reads from."""

    def __bool__(self) -> bool:
        waiting = self.lines.count or self._strict or self._leaseless or self._later
        return bool(self.arrived or waiting or self._stepping or self.expired.count)

    def __len__(self) -> int:
        return self._count_kept() + self.held.count

    def _count_kept(self) -> int:
        """Count the reads that wait or are in progress, with this turn's arrivals. Reads that wait for transactions
        have their own limit."""
        in_flight = len(self._stepping) + self.expired.count
        self._kept = self.lines.count + len(self._strict) + len(self._leaseless) + len(self._later) + in_flight
        return self._kept + len(self.arrived)

    # docs/protocol.md P18
    def now(
        self, keys: list[bytes], tokens: list[int], now: float, *, in_turn: bool = False
    ) -> list[bytes | None] | NotNow:
        """Return the rows that linearizable GETs of these keys find at `now`, under the lease.

        `tokens` are the tokens of the keys. Returns NOT_NOW if any of the reads takes more than a lookup: if the lease
        is not fresh, a record has an expiry or a large value, or another partition owns the key. Several reads never
        overtake a read that waits here, because one client may have sent all of them. With `in_turn`, a single read
        does not overtake waiting reads either.
        """
        if now >= self._read_lease.fresh_until:
            return NOT_NOW
        if (in_turn or keys[1:]) and (
            self.arrived or self.lines.count or self._strict or self._leaseless or self.expired.by_key
        ):
            return NOT_NOW
        readable, engine = self._serving_ranges.readable, self._state.engine
        if (locks := self._state.intents.by_key) and not locks.keys().isdisjoint(keys):
            return NOT_NOW
        try:
            if keys[1:]:
                row_keys = data_keys_at(tokens, keys)
                if not readable.holds_rows(row_keys):
                    return NOT_NOW
                rows = engine.multi_get(row_keys)
                found = list(filter(None, rows))
                if found and (max(map(_flags_of, found)) >= EXPIRES or max(map(len, found)) > NOW_BYTES):
                    return NOT_NOW
                self._answers.delivered += len(rows)
            else:  # a single GET takes 1.0 us here, and 2.8 us as one of many
                row_key = pack_data_key(b"d", tokens[0]) + keys[0]
                if readable.slices[row_key[1]] != WHOLE and not readable.holds(tokens[0]):
                    return NOT_NOW
                row = engine.get(row_key)
                if row is not None and (row[0] >= EXPIRES or len(row) > NOW_BYTES):
                    return NOT_NOW
                rows = [row]
                self._answers.delivered += 1
        except OSError:
            return NOT_NOW  # a submitted read ends the leadership
        return rows

    # docs/protocol.md P22
    def arrive(self, read: Read) -> bool:
        """Accept a read, to be answered in this turn if possible. Returns False if too many reads are waiting."""
        if len(self.arrived) + self._kept >= self._most and self._count_kept() >= self._most:
            return False
        self.arrived.append(read)
        return True

    def turn(self) -> None:
        """Answer the reads that have arrived, or let them wait for a lease or a proof."""
        arrived, self.arrived = self.arrived, []
        if self.lines.count:
            self.lines.add(arrived)
            arrived = self.lines.take(self._lines_per_turn)
            for _, sink, token in self.lines.dropped:
                self._answers.deliver(sink, token, Unavailable(_GONE))
            self._lines_per_turn = min(2 * self._lines_per_turn, self._most)  # until values prove to be large again
        now = self._clock.now()
        leased = self._read_lease.has_lease(now)
        ready: list[Read] = []
        local: list[Read] = []
        for read in arrived:
            op = read[0]
            level, seq = op.level, op.seq
            try:
                malformed = op.key.__class__ is not bytes or seq < 0 or level < 0
            except TypeError:
                malformed = True
            if malformed:
                self._answers.deliver(read[1], read[2], InvalidRequest(f"malformed operation {op.code}"))
                continue
            if read.__class__ is Proved:
                ready.append(read)
            elif seq > self._state.seq:
                behind = f"partition {self._state.partition} is at {self._state.seq}, the client has seen {seq}"
                self._answers.deliver(read[1], read[2], NotCaughtUp(behind))
            elif leased and level != _STRICT and level <= _SESSION:
                ready.append(read)
            elif level > _SESSION:
                local.append(read)
            else:
                waiting = self._strict if level == _STRICT else self._leaseless
                waiting.append(_UnprovedRead(self._read_lease.sent, now, read, []))
                self.may_want_append = True
        if ready:
            self._renew = self.may_want_append = True
            try:
                self._answer(ready, self._now_ms())
            except OSError:
                self.arrived += local
                raise
        self._answer(local, self._state.record_time_ms, is_stale=True)
        if self.lines.count:
            self._wake()
        self._count_kept()

    def deliver_unlogged(self, replies: list[Reply]) -> None:
        """Deliver answers that were found in acknowledged state, as soon as a lease or a proof allows it."""
        now = self._clock.now()
        if self._read_lease.has_lease(now):
            self._answers.deliver_all(replies)
        else:
            self._leaseless.append(_UnprovedRead(self._read_lease.sent, now, None, replies))
            self.may_want_append = True

    def acknowledged(self) -> None:
        """Handle an acknowledged append. If it has renewed the lease, answer all reads; otherwise answer the reads for
        which it is the proof."""
        now, slow_s = self._clock.now(), self._slow_s
        leased = self._read_lease.has_lease(now)
        strict: list[Read] = []
        ready: list[Read] = []
        for waiting, all_of_it, into in ((self._strict, False, strict), (self._leaseless, leased, ready)):
            while waiting and (all_of_it or self._read_lease.proves(waiting[0].ticket)):
                _, since, read, replies = waiting.popleft()
                if now - since > slow_s:
                    self._note_slow(now - since, read, len(replies))
                if read is not None:
                    into.append(read)
                self._answers.deliver_all(replies)
        if self.lines.count:  # earlier reads may be among them
            self.lines.add_proved([*strict, *ready])
            self._wake()
        else:
            self._answer([*map(Proved, (*strict, *ready))], self._now_ms())

    def _note_slow(self, waited: float, read: Read | None, replies: int) -> None:
        name, key = ("refusals", None) if read is None else (Code(read[0].code).name, read[0].key)
        partition = self._state.partition
        self._slow.note("leader", name, waited, key=key, partition=partition, operations=replies or 1, proof=waited)

    def wants_append(self) -> bool:
        """Return True if the leader should send an append, as a proof for waiting reads or to renew the lease."""
        is_any_waiting = self.may_want_append = bool(self._strict or self._leaseless)
        if not (self._renew or is_any_waiting) or self._read_lease.is_closed:
            return False
        now, sent = self._clock.now(), self._read_lease.sent
        renew, self._renew = self._renew and self._read_lease.wants_renewal(now), False
        unproved = bool(self._strict) and self._strict[-1].ticket == sent
        leaseless = bool(self._leaseless) and self._leaseless[-1].ticket == sent and self._read_lease.expects_no_lease
        return renew or unproved or leaseless

    def expire(self, before: float) -> None:
        """Refuse the reads that have waited since before `before`."""
        for waiting in (self._strict, self._leaseless):
            while waiting and waiting[0].since < before:
                late = waiting.popleft()
                error = Unavailable(f"partition {self._state.partition}: no append was acknowledged in time")
                if late.read is not None:
                    self._answers.deliver(late.read[1], late.read[2], error)
                self._answers.deliver_all(lost(late.replies, self._state.partition))
        if self.expired.count:
            self.expired.expire(before)
        if self.held.count:
            self.held.expire(before)

    def stop(self, error: StoreError) -> None:
        """Refuse all reads with this error."""
        arrived, self.arrived = self.arrived, []
        self.held.stop(error)
        later, self._later = self._later, deque()
        stepping, self._stepping = self._stepping, {}
        for steps in stepping:
            steps.close()  # the engine may be closed in this turn
        for _, sink, token in (*arrived, *self.lines.clear(), *(read for read, _ in later), *stepping.values()):
            self._answers.deliver(sink, token, error)
        for waiting in (self._strict, self._leaseless):
            while waiting:
                _, _, read, replies = waiting.popleft()
                if read is not None:
                    self._answers.deliver(read[1], read[2], error)
                self._answers.deliver_all(lost(replies, self._state.partition))

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _now_ms(self) -> int:
        return max(self._state.record_time_ms, self._clock.date_ms())

    def _answer(self, reads: list[Read], now_ms: int, *, is_stale: bool = False) -> None:
        """Read the state as it is now. Reads of keys that a transaction holds wait, unless they are stale reads."""
        if not reads:
            return
        self._later.extend((read, now_ms) for read in reads if read[0].code not in POINT_READS)
        points = [read for read in reads if read[0].code in POINT_READS]
        readable = self._serving_ranges.readable
        at = size = 0
        try:
            if self._state.intents.by_key and not is_stale:
                points = self.held.sift(points, self._clock.now(), now_ms, readable)
            if self.held.prepared is not None and self.held.prepared.reads:
                for read in points:
                    self.held.passed(read)
            while at < len(points):
                some = points[at : at + self._at_once]
                found = queries.find(self._state, [read[0] for read in some], now_ms, readable)
                at += len(some)
                size += self._deliver(some, found)
                if size > TURN_BYTES:
                    # Endpoints send or drop what they have before the next turn; thousands of large values at once
                    # would fill the memory. The remaining reads wait in a line per connection, so that a client which
                    # asks for many large values delays only its own reads.
                    self.lines.put_back(points[at:])
                    self._lines_per_turn = AT_ONCE_LARGE
                    self._wake()
                    break
        except OSError:
            self.arrived += points[at:]
            raise
        self._at_once = AT_ONCE_LARGE if size > TURN_BYTES else min(2 * self._at_once, AT_ONCE)
        if not self._is_begin_due:
            self._begin()

    def _begin(self) -> None:
        """Start multi-turn reads, up to STEPPING_MAX in progress. A read that has waited sees the state of this moment,
        which contains everything that was acknowledged when it arrived; its range is checked again."""
        # set first, because a read that ends in its first step must not schedule another turn
        self._is_begin_due = True
        for _ in range(min(STEPPING_MAX - len(self._stepping), len(self._later))):
            read, now_ms = self._later.popleft()
            tokens = scope(read[0], self._serving_ranges.readable)
            if read[1].is_gone:
                self._answers.deliver(read[1], read[2], Unavailable(_GONE))
                self._wake()
            elif tokens is None:
                self._answers.redirect(*read, ELSEWHERE)
                self._wake()
            else:
                now_ms = max(now_ms, self._state.record_time_ms)
                if self._state.intents.by_key and read[0].level <= _SESSION:
                    try:
                        is_held = self.held.hold_range(read, self._clock.now(), now_ms, tokens)
                    except OSError:
                        self._later.appendleft((read, now_ms))
                        raise
                    if is_held:
                        self._wake()  # it may have been refused
                        continue
                steps = queries.steps(self._state, read[0], now_ms, tokens)
                self._stepping[steps] = read
                self._step(steps)
            if read.__class__ is Proved:
                self.held.passed(read)
        self._is_begin_due = False
        if len(self._stepping) < STEPPING_MAX:
            self._begin_soon()

    def _begin_soon(self) -> None:
        if self._later and not self._is_begin_due:
            self._is_begin_due = True
            asyncio.get_running_loop().call_soon(self._run, self._begin)

    def _run(self, work: Callable[..., None], *of: Steps) -> None:
        """Continue multi-turn reads between two turns."""
        try:
            work(*of)
        except OSError as error:
            self._cannot_read(error)

    def _deliver(self, reads: list[Read], found: list[Result | Expired]) -> int:
        """Deliver the results of point reads. Return the total size of their values in bytes."""
        deliver, reaping, size = self._answers.deliver, self.expired.by_key, 0
        for read, result in zip(reads, found, strict=True):
            if result.__class__ is Expired or (reaping and read[0].key in reaping and read[0].level <= _SESSION):
                self.expired.add(read, self._clock.now(), self._now_ms())
            elif result.__class__ is Record:
                size += len(result[0])
                deliver(read[1], read[2], result)
            elif result.__class__ is Moved:
                self._answers.redirect(*read, result)
            else:
                deliver(read[1], read[2], result)
        return size

    def _step(self, steps: Steps) -> None:
        """Run one step of a read, and schedule the next step in another turn of the event loop. The read sees an
        unchanging view."""
        read = self._stepping.get(steps)
        if read is None:
            return  # the leader has stopped
        result: Result | Expired
        try:
            if read[1].is_gone:
                steps.close()
                raise Unavailable(_GONE)
            next(steps)
        except StopIteration as end:
            result = end.value
        except StoreError as error:
            result = error
        except (LookupError, TypeError) as error:
            result = InvalidRequest(f"malformed operation {read[0].code}: {error}")
        else:
            asyncio.get_running_loop().call_soon(self._run, self._step, steps)
            return
        del self._stepping[steps]
        self._begin_soon()
        if isinstance(result, Expired):
            self.expired.add_range(read, result.keys, self._clock.now(), self._now_ms())
        else:
            self._answers.deliver(read[1], read[2], result)
            self._wake()

    def _read_again(self, reads: list[Read]) -> None:
        """Take back reads whose wait for deletes or for transactions is over."""
        points = [read for read in reads if read[0].code in POINT_READS]
        # they arrived before everything that waits there
        self.lines.put_back([read if isinstance(read, Proved) else Proved(read) for read in points])
        self.arrived += [read for read in reads if read[0].code not in POINT_READS]
        self._wake()
