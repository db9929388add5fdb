"""Runs one leadership of a partition: it receives operations, appends entries to the log, and returns the answers. The
decisions are in read_lease.py, evaluate.py and state.py.

    submit → queue → [evaluate] → log.append → acknowledged → [apply] → answer

Up to `entries_in_flight_max` entries are in flight. Operations that arrive in the meantime are collected for the next
entry, and for longer while processors are busy (batch_delay.py). The leader applies an entry after it is acknowledged
and before it answers any client. The first append that fails ends the leadership. Operations in flight then have an
unknown outcome; queued operations have definitely not been done.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from kvstore.env import Env
from kvstore.env.events import Alarm
from kvstore.env.slow_log import hash_of
from kvstore.errors import (
    Conflict,
    InvalidRequest,
    NotEnoughBookies,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    StoreError,
    Unavailable,
)
from kvstore.os_errors import is_passing
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.answers import (
    PositionSink,
    Redirect,
    ResultDelivery,
    SingleResultSink,
    lost,
    malformed,
)
from kvstore.partition.leading.batch_delay import BatchDelay
from kvstore.partition.leading.entry_in_flight import ALL_IN_FLIGHT_MAX, EntryInFlight, check_capacity, note_slow
from kvstore.partition.leading.evaluate import Decided, Evaluator, NextEntry
from kvstore.partition.leading.leader_reads import LeaderReads
from kvstore.partition.leading.prepare import mark_of
from kvstore.partition.leading.prepared_answers import PreparedAnswers
from kvstore.partition.leading.queue import Arrived, QueuedBatch
from kvstore.partition.leading.range_delete import Reap
from kvstore.partition.leading.read_lease import ReadLease
from kvstore.partition.leading.record_time import LeaderClock
from kvstore.partition.leading.serving_ranges import ServingRanges
from kvstore.partition.leading.sweeping import Sweeper
from kvstore.partition.leading.traced import trace_entry, traced_step
from kvstore.partition.leading.unlogged_answers import UnloggedAnswers
from kvstore.partition.leading.waiting import WaitingWrites
from kvstore.partition.state.commands import Get, Op, Reply, Resolve, Result, Sink, Transact
from kvstore.partition.state.engine import BEHIND_S
from kvstore.partition.state.entry import EntryKind, Requests
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.move_records import Founded, LogVersion, MoveRecord, Release
from kvstore.partition.state.overlay import TransactionChanges
from kvstore.partition.state.rows import data_key
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.traits import READS
from kvstore.partition.transactions.ports import Participants
from kvstore.partition.transactions.transactor import PREPARE_S, Transactor
from kvstore.types import Position, Seq
from kvstore.wal.leading.leader_log import LeaderLog

log = logging.getLogger(__name__)

MARK_S = 1.0
"""Seconds for which records of transactions wait for a pin that another partition has taken. Then the leader logs a
MARK that keeps nothing."""


class Leader:
    """One leadership of a partition, from the opened log to its end. `on_stopped` is called once if the leadership is
    lost while it serves."""

    def __init__(
        self,
        env: Env,
        config: PartitionConfig,
        state: ReplicaState,
        log: LeaderLog,
        on_stopped: Callable[[StoreError], None],
    ) -> None:
        """`state` must have applied the log up to its recovered end."""
        self.serving = False
        self.epoch = log.epoch
        env = replace(env, clock=LeaderClock(env.clock, state))
        self._env, self._config, self._state, self._log = env, config, state, log
        self._on_stopped = on_stopped
        self._slow, self._slow_s = env.slow, env.slow.limit_s
        self._traces = env.traces
        self._loop = asyncio.get_running_loop()
        self._read_lease = ReadLease(config.lease_ms / 1000)
        self._answers, self.serving_ranges = ResultDelivery(), ServingRanges(state)
        self.reads = LeaderReads(
            state,
            self.serving_ranges,
            config,
            self._read_lease,
            env,
            self._answers,
            self._reap,
            self._wake,
            self._cannot_read,
        )
        self._waiting = WaitingWrites(config)
        self._queue = self._waiting.queue
        self._evaluator = Evaluator(state, log.epoch, config, self.serving_ranges)
        self.usage = self._evaluator.usage
        self._sweeper = Sweeper(
            state,
            self.serving_ranges,
            config,
            env.clock,
            env.beat,
            lambda: self.serving,
            self._reap,
            self._cannot_read,
        )
        self.transactor: Transactor | None = None
        """Carries out transactions over several partitions. None if there is no other partition."""
        self._in_flight: deque[EntryInFlight] = deque()
        self._is_releasing = False
        """True once the release record has been sent."""
        self._unlogged = UnloggedAnswers(config)
        self._batch_delay = BatchDelay()
        self._operations_in_flight = 0
        """Number of operations in flight."""
        self._idle: asyncio.Future[None] | None = None
        """Done when nothing is queued, in flight or waiting. Exists only while a release waits for that."""
        self._stopped: StoreError | None = None
        self.is_broken = False
        """True if this leadership ended because the engine failed."""
        self._turn_is_due = False
        self._deadlines, self._next_turn = Alarm(self._loop, self._expire), Alarm(self._loop, self._wake)
        self._mark_due = Alarm(self._loop, self._log_mark)
        self._withheld = Alarm(self._loop, lambda: self._prepared.expire())
        self._prepared = PreparedAnswers(env.clock.now, self._deliver_later, self._withheld.set)
        self._entries = self._mutations = self._pauses = 0

    def statistics(self) -> dict[str, Any]:
        """Return this leadership's statistics, for an operator."""
        return {
            "epoch": self.epoch,
            "entries": self._entries,
            "mutations": self._mutations,
            "answers": self._answers.delivered,
            "refused": self._answers.refused,
            "pauses": self._pauses,
            "queued": len(self._queue),
            "queued_bytes": self._queue.bytes,
            "frozen": len(self._waiting.frozen),
            "locked": len(self._waiting.locked),
            "reads_held": self.reads.held.count,
            "intents": len(self._state.intents),
            "decisions": len(self._state.decisions),
            "oldest_intent_s": self._age_s(each.record.written_ms for each in self._state.intents),
            "oldest_decision_s": self._age_s(each.record.written_ms for each in self._state.decisions),
            "transactions": self.transactor.statistics() if self.transactor is not None else {},
            "in_flight": len(self._in_flight),
            "reads_waiting": len(self.reads),
            "lease_left_s": max(0.0, self._read_lease.lease_until - self._env.clock.now()),
            "retry_clients": len(self._state.retries),
            "retry_bytes": self._state.retries.bytes,
        }

    def _age_s(self, dates_ms: Iterable[int]) -> float:
        """Return the seconds since the oldest of these record times; 0 if there is none."""
        now_ms = self._env.clock.date_ms()
        return max(0, now_ms - min(dates_ms, default=now_ms)) / 1000

    # ── beginning and end ─────────────────────────────────────────────────────────────────────────────────────────────

    async def start(
        self,
        founded: Founded | None = None,
        redirect: Redirect | None = None,
        participants: Participants | None = None,
        version: LogVersion | None = None,
    ) -> None:
        """Begin to serve once a record of this epoch has been acknowledged and applied. `founded` is what the partition
        owns, if its log does not record that yet. `version` raises the version of the log before any operation is
        accepted. `redirect` receives operations on keys that the partition does not own. `participants` reaches the
        leaders of other partitions, for transactions. Raises StoreError if the log was lost."""
        self._answers.redirect_by = redirect
        if participants is not None:
            self._use_participants(participants)
        self._log.on_lost(self.lose)
        if founded is None:
            await self._append_control(EntryKind.EPOCH_START)
        else:
            await self.append_record(founded)
        if version is not None:
            await self.append_record(version)
        if self._stopped is not None:  # the log was lost after the acknowledgement, in the same turn
            raise self._stopped
        self.serving = True
        self._sweeper.start()
        if self.transactor is not None:
            self.transactor.resume()

    def _use_participants(self, participants: Participants) -> None:
        self.transactor = Transactor(
            self._state,
            self.epoch,
            participants,
            self._env.clock.now,
            self._owns,
            self._queue_own,
            self._deliver_later,
            self._unclaim,
            self._slow,
            traced_step,
        )
        rules, transactor = self._evaluator.transactions, self.transactor
        rules.is_under_way, rules.is_running = transactor.is_under_way, transactor.attempts.is_running
        rules.is_home_last = transactor.is_home_last
        self.reads.held.wait_for = self.transactor.wait_for
        self.reads.held.prepared = self._evaluator.transactions.prepared = self._prepared

    async def release(self, drain_max_s: float | None = None) -> None:
        """Answer all operations that have arrived, accept no more, and log a release record, so that the next leader
        does not have to wait for the lease. With `drain_max_s`, the leader continues to lead if it cannot answer
        everything within that many seconds. Raises StoreError if the release failed; without `drain_max_s`, the leader
        has then stopped."""
        if not self.serving:
            self.stop(NotLeader(self._state.partition))
            raise Unavailable(f"partition {self._state.partition}: this replica holds no lead to release")
        self.serving = False
        if self.transactor is not None:
            self.transactor.drop_all(NotLeader(self._state.partition))
        if drain_max_s is not None:
            try:
                async with asyncio.timeout(drain_max_s):
                    await self._drained()
            except BaseException as error:
                self._idle = None
                self.serving = self._stopped is None
                if not isinstance(error, TimeoutError):
                    raise  # cancelled: nothing is released, so the leader continues
                busy = f"partition {self._state.partition}: {len(self._queue)} operations wait, so the lead is kept"
                raise Unavailable(busy) from None
        try:
            async with asyncio.timeout(2 * self._config.queue_wait_max_s):
                await self._drained()
                self._read_lease.close()
                self._is_releasing = True
                await self._append_control(EntryKind.RELEASE_LEAD)
                await self._log.seal()
        except TimeoutError as error:
            raise Unavailable(f"partition {self._state.partition}: the lead was not released in time") from error
        finally:
            self.stop(NotLeader(self._state.partition))

    def stop(self, reason: StoreError) -> None:
        """Stop at once. Operations in flight have an unknown outcome. Queued operations have definitely not been
        done."""
        if self._stopped is not None:
            return
        self._stopped = reason
        self.serving = False
        self._read_lease.close()
        self._log.close_for_good()
        self._sweeper.stop()
        self.usage.leave()
        if self.transactor is not None:
            self.transactor.stop(NotLeader(self._state.partition))
        self._deadlines.cancel()
        self._next_turn.cancel()
        self._mark_due.cancel()
        self._withheld.cancel()
        while self._in_flight:
            self._answers.deliver_all(lost(self._in_flight.popleft().replies, self._state.partition))
        self._answers.deliver_all(lost(self._unlogged.take_all(), self._state.partition))
        self._answers.fail_all(self._waiting.take_all(), NotLeader(self._state.partition))
        self.reads.stop(NotLeader(self._state.partition))
        if self._idle is not None and not self._idle.done():
            self._idle.set_exception(reason)
        self._answers.deliver_refusals()
        self._answers.flush()

    # docs/protocol.md P9
    def lose(self, reason: StoreError) -> None:
        """End the leadership, and call `on_stopped` if this leader was serving."""
        if self._stopped is None:
            served = self.serving
            self.stop(reason)
            if served:
                self._on_stopped(reason)

    async def _append_control(self, kind: EntryKind) -> None:
        """Append a control record. Return once it is acknowledged and applied."""
        check_capacity(self._in_flight)
        once = SingleResultSink()
        self._append(self._evaluator.control(kind, self._env.clock.date_ms()), [(once, 0, None)])
        await once.done

    async def append_record(self, record: MoveRecord, requests: Requests | None = None) -> Position:
        """Append a record about tokens, and return its position once it is acknowledged and applied. As soon as the
        record is sent, the leader stops answering for tokens that the record gives away. Raises StoreError:
        OutcomeUnknown if the leadership was lost in the meantime, Overloaded if too many entries are in flight."""
        if self._is_releasing:
            raise NotLeader(self._state.partition)
        check_capacity(self._in_flight)
        logged = PositionSink(self._state)
        self._append(self._evaluator.record(record, self._env.clock.date_ms(), requests), [(logged, 0, None)])
        if isinstance(record, MarkRecord):
            if record.number:  # what still waits, waits for a later pin
                self._mark_due.cancel()
            self._waiting.requeue_awaiting_mark()
            self._wake()
        if isinstance(record, Release):
            self._waiting.unfreeze()
            self._ownership_changed()
            self._wake()
        return await logged.done

    async def prove(self) -> None:
        """Append an empty record, and return once it is acknowledged. The acknowledgement proves that this replica was
        the leader when `prove` was called. Raises StoreError."""
        await self._append_control(EntryKind.EMPTY)

    def redirect_moved(self) -> None:
        """Redirect the waiting operations whose keys now belong to another partition."""
        self._evaluator.lock_table.release()
        self._answers.redirect_all(self._waiting.redirect_moved(self.serving_ranges, self._env.clock.now()))
        self._answers.flush()

    async def _drained(self) -> None:
        """Wait until nothing is queued, in flight or waiting. Raises StoreError if the leadership is lost."""
        if self._stopped is not None:
            raise self._stopped
        self._idle = self._loop.create_future()
        self._wake()
        await self._idle

    # ── arriving ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, ops: Sequence[Op], sink: Sink, tokens: Sequence[int]) -> None:
        """Carry out the operations of one sink in order. `tokens` identifies the operations to the sink, which receives
        each result on a later turn of the event loop."""
        if not (ops[1:] and self.serving and self._queue.offer_puts(ops, sink, tokens)):
            for op, token in zip(ops, tokens, strict=True):
                if not self.serving:
                    self._answers.refuse(sink, token, NotLeader(self._state.partition))
                elif op.__class__ is Get or op.code in READS:
                    if not self.reads.arrive((op, sink, token)):
                        self._answers.refuse(sink, token, Overloaded(f"{len(self.reads)} reads wait; retry later"))
                elif not self._queue.offer((op, sink, token)):
                    error = Overloaded(f"{len(self._queue)} writes wait, {self._queue.bytes} bytes; retry later")
                    self._answers.refuse(sink, token, error)
        if not self._turn_is_due:
            self._wake()

    def _wake(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Process everything that has arrived in this turn of the event loop."""
        self._turn_is_due = False
        if self._answers.refusals:
            self._answers.deliver_refusals()
        if self._stopped is None:
            now = self._env.clock.now()
            try:
                if self.reads.arrived or self.reads.lines.count:
                    self.reads.turn()
                self._fill(now)
            except OSError as error:
                self._cannot_read(error)
        else:
            self.reads.stop(NotLeader(self._state.partition))
        if self._answers.sinks:
            self._answers.flush()

    # docs/protocol.md P6
    def _fill(self, now: float) -> None:
        """Send as many entries as may be in flight. Nothing may follow the release record."""
        if self._is_releasing:
            return
        entries_max, sent, reads, queue = (
            self._config.entries_in_flight_max,
            self._read_lease.sent,
            self.reads,
            self._queue,
        )
        unlogged = self._unlogged
        if self._evaluator.lock_table.is_freed:  # by an attempt that has ended
            self._unlock()
        has_capacity = len(self._in_flight) < entries_max and self._stopped is None
        is_wanted = has_capacity and reads.may_want_append and reads.wants_append()
        while queue.bytes and len(self._in_flight) < entries_max and self._stopped is None and not unlogged.is_full:
            if self._state.engine.is_behind():
                self._pause()
                break
            if now < self._batch_delay.ends and self._idle is None and not is_wanted:
                left = self._batch_delay.left(now, len(queue), queue.bytes, self._operations_in_flight)
                if left and not self._is_awaited():
                    self._next_turn.set(left)
                    break
            entries = self._entries
            self._send(queue.take(now))
            if self._entries == entries and queue.bytes:  # nothing is logged, so only this check bounds the turn
                self._wake()
                break
        if reads.may_want_append or is_wanted:
            is_wanted = is_wanted and self._read_lease.sent == sent
            has_capacity = len(self._in_flight) < entries_max and self._stopped is None
            if has_capacity and (reads.wants_append() or is_wanted):
                self._append(self._evaluator.control(EntryKind.EMPTY, self._env.clock.date_ms()), [])
        waiting = self._waiting
        is_any_waiting = queue.bytes or waiting.frozen.bytes or waiting.locked.bytes or waiting.awaiting_mark.bytes
        is_any_waiting = is_any_waiting or unlogged.count or reads.expired.count or reads.held.count
        if (is_any_waiting or reads.may_want_append) and self._stopped is None:
            queue.stamp(now)
            self._deadlines.set(self._config.queue_wait_max_s / 4)
        if self._idle is not None and not (self._queue or self._in_flight or self.reads or self._idle.done()):
            self._idle.set_result(None)

    def _is_awaited(self) -> bool:
        """Return True if the end of a transaction is queued, and somebody may wait for it."""
        return bool(self._waiting.locked or self.reads.held.count) and self._queue.holds(Resolve)

    def _pause(self) -> None:
        """Send nothing more until the engine has caught up, because entries in flight must be applied on the event
        loop. A leader that is about to release does not wait: the queued operations are the next leader's."""
        if self._idle is not None:
            self._answers.fail_all((item for _, item in self._queue.take_all(0.0)), NotLeader(self._state.partition))
        else:
            self._pauses += self._next_turn.set(BEHIND_S)

    def _send(self, taken: QueuedBatch) -> None:
        """Evaluate a batch, append its effects, and let the writes that have waited for its transactions continue."""
        self._evaluate(taken)
        lock_table = self._evaluator.lock_table
        if lock_table.is_freed and self._stopped is None:
            self._unlock()

    def _evaluate(self, taken: QueuedBatch) -> None:
        """Evaluate a batch, and append its effects."""
        try:
            decided = self._evaluator.evaluate(taken.items, self._env.clock.date_ms())
        except OSError:
            self._queue.put_back(taken.arrived(taken.items, self._env.clock.now()))  # nothing was done; `stop` says so
            raise
        # an operation that no endpoint should have accepted must not fail the others
        except Exception as error:  # noqa: BLE001
            self._send_one_by_one(taken, error)
            return
        now = self._env.clock.now()
        if decided.rest or decided.frozen or decided.moved:  # operations wait again, or go to another partition
            self._queue.put_back(taken.arrived(decided.rest, now))
            refused = self._waiting.put_aside(taken.arrived(decided.frozen, now))
            self._answers.fail_all(refused, Overloaded(f"{len(self._waiting.frozen)} writes wait for a frozen range"))
            self._answers.redirect_all(decided.moved)
        lock_table = self._evaluator.lock_table
        if decided.awaiting_mark:
            self._await_mark(taken.arrived([*decided.awaiting_mark], now))
        if decided.locked or decided.distributed or lock_table.conflicting:
            self._settle_transactions(taken, decided)
        if decided.entry is not None:
            starved = 0.0 if decided.rest else self._env.starved()
            self._batch_delay.begin(
                now,
                len(decided.replies),
                self._operations_in_flight,
                starved,
                is_pinned=bool(self._state.pinned_views.by_pin),
            )
            self._append(decided.entry, decided.replies, taken.arrivals[0][0])
        elif decided.needs_proof:
            self._append(self._evaluator.control(EntryKind.EMPTY, self._env.clock.date_ms()), decided.replies)
        elif self._in_flight:
            self._unlogged.add(self._entries, taken, decided.replies)
        else:
            self.reads.deliver_unlogged(decided.replies)

    def _settle_transactions(self, taken: QueuedBatch, decided: Decided) -> None:
        """Let writes wait for transactions, ask about transactions that are in the way, and begin transactions."""
        now, lock_table = self._env.clock.now(), self._evaluator.lock_table
        refused = self._waiting.lock(taken.arrived([*decided.locked], now))
        for op, _, _ in refused:
            lock_table.stop_waiting(op)
        self._answers.fail_all(refused, Overloaded(f"{len(self._waiting.locked)} writes wait for transactions"))
        if self.transactor is not None:
            for op, _, _ in decided.locked:
                self.transactor.wait_for(lock_table.blocking_intents(op))
            self.transactor.wait_for(lock_table.conflicting)
        lock_table.conflicting.clear()
        for op, sink, token in decided.distributed:
            assert isinstance(op, Transact)
            if self.transactor is None:
                lock_table.unclaim(op)
                error = InvalidRequest(f"partition {self._state.partition} reaches no other partition")
                self._answers.deliver(sink, token, error)
            else:
                self.transactor.begin(op, sink, token)

    def _unlock(self) -> None:
        """Evaluate the operations that wait for transactions again."""
        self._evaluator.lock_table.release()
        late = self._waiting.unlock(self._env.clock.now() - PREPARE_S)
        self._answers.fail_all(late, Conflict("another transaction held a key for too long; retry after a pause"))
        self._batch_delay.end()  # an operation that has waited for a transaction does not wait for more operations
        self._wake()

    # docs/protocol.md Tx16
    def _unclaim(self, op: Transact) -> None:
        """Free home's own keys, because an attempt has ended."""
        self._evaluator.lock_table.unclaim(op)
        self._wake()

    # docs/protocol.md Tx13
    def _await_mark(self, arrived: list[Arrived]) -> None:
        """Let records of transactions wait until this partition has taken a pin that another one has taken."""
        refused = self._waiting.await_mark(arrived)
        self._answers.fail_all(refused, Overloaded("too many records of transactions wait for a pin"))
        self._mark_due.set(MARK_S)

    def _log_mark(self) -> None:
        """Log a MARK that keeps nothing, because the pin for which records wait has not come: its pinner may be dead.
        If the pin comes later, it is refused, and taken again under a higher number."""
        number = max(map(mark_of, self._waiting.awaiting_mark.operations), default=0)
        if self._stopped is not None or self._is_releasing or number <= self._evaluator.mark:
            return
        if len(self._in_flight) >= ALL_IN_FLIGHT_MAX:
            self._mark_due.set(MARK_S)
            return
        record = MarkRecord("", 0, takes=False, number=number)
        self._append(self._evaluator.record(record, self._env.clock.date_ms()), [])
        self._waiting.requeue_awaiting_mark()
        self._wake()

    def _send_one_by_one(self, taken: QueuedBatch, error: Exception) -> None:
        """Find the operation that makes a batch fail, by evaluating one operation at a time. Nothing of the batch was
        done. Writes that have waited for a transaction stay locked until the end of the batch, so that no operation of
        the batch on their keys passes them (docs/protocol.md M15)."""
        if len(taken.items) > 1:
            every = taken.each()
            for number, each in enumerate(every):
                if self._stopped is not None:
                    self._answers.fail_all(each.items, NotLeader(self._state.partition))
                elif len(self._in_flight) < ALL_IN_FLIGHT_MAX:
                    try:
                        self._evaluate(each)
                    except OSError:
                        self._put_back(every[number + 1 :])
                        raise
                # otherwise the log would refuse an entry that counts as sent, and a later entry would be taken for it
                else:
                    self._put_back(every[number:])
                    break
        else:
            op, sink, token = taken.items[0]
            what = (self._state.partition, op.code, hash_of(op.key) if isinstance(op.key, bytes) else "")
            hidden = RuntimeError(type(error).__name__)  # the original message may contain the key or the value
            log.error(
                "partition=%s operation=%d key=%s cannot be evaluated",
                *what,
                exc_info=(RuntimeError, hidden, error.__traceback__),
            )
            self._answers.deliver(sink, token, malformed(op, error))

    def _put_back(self, single: list[QueuedBatch]) -> None:
        """Put batches of one operation each to the front of the queue."""
        self._queue.put_back([(each.arrivals[0][0], each.items[0]) for each in single])

    def _append(self, made: NextEntry, replies: list[Reply], arrived: float = inf) -> None:
        if self._stopped is not None:
            raise NotLeader(self._state.partition)
        self._in_flight.append(EntryInFlight(made, replies, arrived))
        self._operations_in_flight += len(replies)
        self._read_lease.send()
        self._entries += 1
        self._mutations += len(made.entry.keys)
        self._log.append(made.payload, Seq(made.entry.first_seq), self._done)

    # docs/protocol.md P2, P8
    def _done(self, position: Position | None, sent_at: float, error: StoreError | None) -> None:
        """Handle the acknowledgement, or the failure, of the oldest entry in flight."""
        if self._stopped is not None or not self._in_flight:
            return  # answered already
        if error is not None or position is None:
            self._fail(error or OutcomeUnknown("the entry was not acknowledged"))
            return
        oldest = self._in_flight.popleft()
        try:
            self._state.apply_decoded(position, oldest.made.entry, oldest.made.data_keys)
        except (StoreError, OSError) as failure:
            # The entry is acknowledged, so it is in the log for good, and this leader cannot continue after it.
            self._in_flight.appendleft(oldest)
            self._break(f"cannot apply entry {position}: {failure}", failure)
            return
        self._operations_in_flight -= len(oldest.replies)
        changes = self._evaluator.applied()
        if oldest.made.entry.control and self.serving_ranges.applied():
            self._waiting.unfreeze()
            self._ownership_changed()
            self._wake()
        self._read_lease.acknowledge(sent_at)
        now = self._env.clock.now()
        self._batch_delay.last_took = now - sent_at
        if now - oldest.arrived > self._slow_s:
            note_slow(self._slow, self._state.partition, oldest, sent_at, now)
        if self._traces.live:
            trace_entry(self._traces, self._state.partition, oldest, position, sent_at, now)
        self._answers.deliver_all(oldest.replies)
        try:
            if changes is not None:
                self._note_transactions(changes)
            if self._unlogged.count:
                self.reads.deliver_unlogged(self._unlogged.take(self._entries - len(self._in_flight)))
            if self.reads.expired.count:
                self.reads.expired.rise(self._state.record_time_ms)
            if self.reads.may_want_append:
                self.reads.acknowledged()
        except OSError as failure:
            return self._cannot_read(failure)
        self._answers.flush()
        if self._queue.bytes or self._idle is not None or self.reads.may_want_append:
            self._wake()

    def _note_transactions(self, changes: TransactionChanges) -> None:
        """Handle the intents and decisions of an entry that has been applied."""
        if changes.resolved and self.reads.held.count:
            self.reads.held.resolved(intent.key for intent in changes.resolved)
        if self.transactor is not None:
            self._prepared.forget(changes.resolved)
            self.transactor.applied(changes)

    # docs/protocol.md Tx14
    def _ownership_changed(self) -> None:
        """Let everything that waits for transactions be evaluated again, and drop the attempts whose home key is gone,
        because the partition owns other tokens."""
        self._evaluator.rebuild_lock_table()
        self._unlock()
        self.reads.held.release()
        if self.transactor is not None:
            self.transactor.drop_foreign(Unavailable(f"partition {self._state.partition}: the home key has moved"))
            self.transactor.resume()

    def _cannot_read(self, error: OSError) -> None:
        self._break(f"cannot read the engine: {error}", error)

    def _break(self, why: str, error: Exception) -> None:
        """End the process, because its state can no longer be trusted. After a transient error, end only the
        leadership."""
        if not is_passing(error):
            self._env.fatal(f"partition {self._state.partition}: {why}")
        self.is_broken = True
        self.lose(OutcomeUnknown(why))

    def _fail(self, error: StoreError) -> None:
        """Fail the oldest entry in flight and all entries behind it. Clients never receive LedgerFenced or other
        internal errors."""
        if isinstance(error, NotEnoughBookies):
            # Nothing of this entry was sent, so it is definitely not done.
            oldest = self._in_flight.popleft()
            unlogged = self._unlogged.take(self._entries - len(self._in_flight))
            self._answers.deliver_all([(sink, token, error) for sink, token, _ in oldest.replies + unlogged])
        self.lose(self._log.lost or error)

    def _expire(self) -> None:
        """Refuse operations that have waited too long. They were not appended, and will not be."""
        now = self._env.clock.now()
        before = now - self._config.queue_wait_max_s
        self.reads.expire(before)
        why = f"partition {self._state.partition}: the write waited longer than queue_wait_max_s"
        late = self._waiting.take_older(before)
        lock_table, locked = self._evaluator.lock_table, self._waiting.locked.take_older(before)
        for op, _, _ in locked:
            lock_table.stop_waiting(op)
        if lock_table.is_freed:
            self._unlock()
        late += locked
        if late:
            took = self._config.queue_wait_max_s
            op, many = late[0][0], len(late)
            self._slow.note(
                "leader", "refused", took, key=op.key, partition=self._state.partition, operations=many, queue=took
            )
        self._answers.fail_all(late, Unavailable(why))
        self._answers.deliver_all(self._unlogged.take_older(before, Unavailable(why)))
        self._answers.flush()
        self._wake()

    def _owns(self, key: bytes) -> bool:
        return self.serving_ranges.may_read(data_key(self._state.hash, key))

    def _queue_own(self, op: Op, sink: Sink, token: int) -> None:
        """Queue an operation of this leader's transactions in front of all others."""
        if self._stopped is not None or self._is_releasing:  # nothing may follow the release record
            return self._deliver_later(sink, token, NotLeader(self._state.partition))
        self._queue.put_back([(self._env.clock.now(), (op, sink, token))])
        self._batch_delay.end()
        self._wake()

    def _deliver_later(self, sink: Sink, token: int, result: Result | StoreError) -> None:
        """Deliver a result, and flush its sink at the latest in the next turn."""
        self._answers.deliver(sink, token, result)
        self._wake()

    def _reap(self, keys: list[bytes], sink: Sink) -> None:
        """Log the deletes of keys that are past their expiry."""
        if self._stopped is not None:  # a scan continues for some turns after that
            return sink.complete(0, NotLeader(self._state.partition))
        self._queue.put_back([(self._env.clock.now(), (Reap(keys=keys), sink, 0))])
        self._batch_delay.end()
        self._wake()
