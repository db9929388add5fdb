"""Evaluates the operations of transactions over several partitions: PREPARE, RESOLVE and INQUIRE of other leaders, and
the home leader's own DECIDE and END (docs/protocol.md, Transactions). Decides only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol

from kvstore.errors import Conflict, InvalidRequest, NotCaughtUp, OutcomeUnknown, Overloaded, Unavailable
from kvstore.namespaces import Meter
from kvstore.partition.leading.lock_table import LockTable
from kvstore.partition.leading.prepared_answers import PreparedAnswers
from kvstore.partition.leading.serving_ranges import ServingRanges
from kvstore.partition.state.commands import Flag, Inquire, Op, Prepare, RequestId, Resolve, Result, Transact
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.intents import Intent, IntentEffect, IntentRecord
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.operations import carry_out_batch
from kvstore.partition.state.overlay import UNTOUCHED, Row, Untouched
from kvstore.partition.state.retry_table import hash_at_hand, touched_tokens
from kvstore.partition.state.rows import data_key
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.transactions.attempts import Decide, End, written_keys

_HELD = "another transaction has locked a key of this transaction; nothing was done; retry after a pause"


class Evaluating(Protocol):
    """The part of the evaluator that these rules use."""

    draft: Draft
    needs_proof: bool

    def live(self, key: bytes) -> Row | None: ...

    def latest(self, key: bytes) -> Row | None: ...

    mark: int

    def wait(self, item: Any, keys: Collection[bytes]) -> None: ...

    def is_behind(self, item: Any, mark: int) -> bool: ...

    def is_owned(self, item: Any, row_key: bytes) -> bool: ...

    def is_writable(self, item: Any, row_keys: list[bytes]) -> bool: ...

    def known(self, request: RequestId, hash_of_key: int) -> Result: ...


class TransactionRules:
    """The rules of one leadership. `is_under_way` is True for attempts that the leader has in memory."""

    def __init__(
        self, evaluator: Evaluating, state: ReplicaState, serving_ranges: ServingRanges, lock_table: LockTable
    ) -> None:
        self._evaluator, self._state, self._hash = evaluator, state, state.hash
        self._serving_ranges, self._lock_table = serving_ranges, lock_table
        self.is_under_way: Callable[[Attempt], bool] = lambda attempt: False
        self.prepared: PreparedAnswers | None = None
        """Delivers the answers to PREPARE. None if nobody prepares here."""
        self.is_running: Callable[[Transact], bool] = lambda op: False
        """True for transactions whose request has an attempt in the leader's memory."""
        self.is_home_last: Callable[[Transact], bool] = lambda op: False
        """True for transactions whose other keys belong to partitions before this one in the order of Tx16."""
        self.by_class: dict[type[Op], Callable[[Any, Any, bytes], Result]] = {
            Prepare: self._prepare,
            Resolve: self._resolve,
            Inquire: self._inquire,
            Decide: self._decide,
            End: self._end,
        }

    # ── participants ──────────────────────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md Tx4
    def _prepare(self, op: Prepare, item: Any, row_key: bytes) -> Result:
        row_keys = [data_key(self._hash, each.key) for each in op.ops]
        may_read = self._serving_ranges.may_read
        if not row_keys or data_key(self._hash, op.key) not in row_keys:
            raise InvalidRequest("expected one or more operations in PREPARE, among them one on its key")
        if may_read(row_key) and not all(map(may_read, row_keys)):
            raise Unavailable(f"partition {self._state.partition}: some keys of the transaction have moved; retry")
        if not self._evaluator.is_writable(item, row_keys):
            return UNTOUCHED
        intents = self._lock_table.intents
        keys = list(dict.fromkeys(each.key for each in op.ops))
        written = written_keys(op.ops)
        if (results := self._prepared_before(op, keys, written)) is not None:
            names = [(each.key, each.seq) for key in keys for each in intents.at(key) if each.attempt == op.attempt]
            return self._state.partition, names, results, self._mark()
        if self._is_taken(keys, written) and self._waits(item, keys, may_wait=op.waits and not _names_versions(op.ops)):
            return UNTOUCHED
        if intents.is_full:
            raise Overloaded(f"partition {self._state.partition}: {len(intents)} intents of transactions; retry later")
        draft = self._evaluator.draft
        before = {key: self._evaluator.live(key) for key in keys}  # expired records are deleted first
        seqs = {key: draft.last_seq + 1 + place for place, key in enumerate(keys)}
        effects = _Effects(draft.meter, draft.time_ms, seqs)
        results = carry_out_batch(_Part(effects, self._evaluator.live), Transact(op.key, op.ops, op.flags))
        names = []
        for key in keys:
            asked = _record(op, draft.time_ms, key in written, before[key], effects.rows.get(key, UNTOUCHED))
            intent = draft.intent(key, asked)
            assert intent.seq == seqs[key], "an intent has another sequence than the operations got"
            self._lock_table.add(intent)
            names.append((key, intent.seq))
        if self.prepared is not None:
            self.prepared.note(names, (op.begun_ms, op.attempt))
        return self._state.partition, names, results, self._mark()

    def _prepared_before(self, op: Prepare, keys: list[bytes], written: set[bytes]) -> Result | None:
        """Return the results of the attempt's first PREPARE if its intents are on all of these keys, else None. The
        intents have kept every record as it was, so the operations are evaluated again, at the time of the first
        PREPARE and without a charge to a namespace."""
        own = {each.key: each for each in self._lock_table.intents.of(op.attempt)}
        if not all(key in own and own[key].is_exclusive == (key in written) for key in keys):
            return None
        effects = _Effects(None, own[keys[0]].record.written_ms, {key: own[key].seq for key in keys})
        return carry_out_batch(_Part(effects, self._evaluator.latest), Transact(op.key, op.ops, op.flags))

    # docs/protocol.md Tx16
    def _waits(self, item: Any, keys: list[bytes], *, may_wait: bool) -> bool:
        """Let an operation of a transaction wait for these keys, and return True. Raises Conflict if it may not
        wait."""
        lock_table = self._lock_table
        if not may_wait or lock_table.is_line_full(keys):
            lock_table.conflicting += (intent for key in keys for intent in lock_table.intents.at(key))
            raise Conflict(_HELD)
        self._evaluator.wait(item, keys)
        return True

    def _is_taken(
        self, keys: Iterable[bytes], written: set[bytes], *, shares: bool = False, has_begun: bool = False
    ) -> bool:
        """Return True if a transaction may not lock these keys now: another one holds them, or somebody waits for them.
        With `shares`, no claims count. With `has_begun`, waiting operations do not count either, because the
        transaction came before them. Raises OSError."""
        lock_table, time_ms = self._lock_table, self._evaluator.draft.time_ms
        if not lock_table.locks:
            return False
        for key in keys:
            if (not has_begun and lock_table.is_waited_for(key)) or (not shares and key in lock_table.claims):
                return True
            standing = lock_table.intents.at(key)
            if not standing:
                continue
            if key in written or any(intent.is_exclusive for intent in standing):
                return True
            row = self._evaluator.latest(key)
            if row is not None and 0 < row[4] <= time_ms:  # its delete waits for the other transaction
                return True
        return False

    # docs/protocol.md Tx7, Tx8
    def _resolve(self, op: Resolve, item: Any, row_key: bytes) -> Result:
        intent = self._lock_table.intents.find(op.key, op.intent_seq)
        if not self._evaluator.is_writable(item, [row_key]) or not self._evaluator.is_behind(item, mark_of(op)):
            return UNTOUCHED
        if intent is not None and intent.attempt == op.attempt:
            self._evaluator.draft.resolved(intent, is_committed=op.commit)
            self._lock_table.remove(intent)
            if not op.commit:
                self._give_back(intent)
        elif self._state.seq < op.intent_seq:
            raise NotCaughtUp(
                f"partition {self._state.partition}: expected sequence {op.intent_seq} applied, got {self._state.seq}"
            )
        return self._mark()

    def _give_back(self, intent: Intent) -> None:
        """Give back what PREPARE has charged to the key's namespace, because the transaction is aborted."""
        meter, asked = self._evaluator.draft.meter, intent.record
        if meter is not None and asked.effect != IntentEffect.NONE:
            row = self._evaluator.latest(intent.key)
            value_bytes = None if asked.effect == IntentEffect.DELETE else len(asked.value)
            meter.give_back(intent.key, value_bytes, None if row is None else len(row[0]))

    # ── home ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md Tx2, Tx16
    def begin(self, op: Transact, item: Any) -> bool:
        """Claim home's own keys for an attempt and return True, or let the transaction wait and return False. Raises
        the error with which home's conditions refuse it, because then no participant need be asked."""
        if self.is_running(op):
            return True  # it joins the running attempt
        lock_table, may_read = self._lock_table, self._serving_ranges.may_read
        own = tuple(each for each in op.ops if may_read(data_key(self._hash, each.key)))
        keys, written = list(dict.fromkeys(each.key for each in own)), written_keys(own)
        is_alone = _names_versions(own)
        is_last, is_taken = self.is_home_last(op), self._is_taken(keys, written, shares=not is_alone)
        if is_last and is_alone and lock_table.is_another_last(written):
            if lock_table.is_line_full(()):
                raise Conflict(_HELD)
            self._evaluator.wait(item, ())
            return False
        if is_taken and not is_last and self._waits(item, keys, may_wait=True):
            return False
        is_free = not is_taken and self._serving_ranges.takes_writes([data_key(self._hash, key) for key in keys])
        if is_free and any(getattr(each, "flags", 0) for each in own):
            effects = _Effects(None, self._evaluator.draft.time_ms, dict.fromkeys(keys, 0))
            carry_out_batch(_Part(effects, self._evaluator.live), Transact(op.key, own, op.flags))
        if is_alone or not is_last:
            lock_table.claim(op, written, is_last=is_last)
        return True

    # docs/protocol.md Tx5
    def _decide(self, op: Decide, item: Any, row_key: bytes) -> Result:
        running, lock_table, draft = op.running, self._lock_table, self._evaluator.draft
        assert running is not None
        if not running.is_alive:
            raise Unavailable(f"partition {self._state.partition}: the attempt at the transaction has ended")
        row_keys = [data_key(self._hash, each.key) for each in op.ops]
        if not all(map(self._serving_ranges.may_read, row_keys)):
            raise Unavailable(f"partition {self._state.partition}: keys of the transaction have moved; retry")
        if not self._evaluator.is_writable(item, row_keys) or not self._evaluator.is_behind(item, mark_of(op)):
            return UNTOUCHED
        hash_of_key = hash_at_hand(op.key, row_key)
        if op.request is not None:
            known = self._evaluator.known(op.request, hash_of_key)
            if known is not UNTOUCHED:
                raise OutcomeUnknown("the request has been carried out by another attempt; retry with its request id")
        keys = list(dict.fromkeys(each.key for each in op.ops))
        written = written_keys(op.ops)
        is_first = not running.is_home_last
        is_taken = self._is_taken(keys, written, shares=is_first, has_begun=is_first)
        may_wait = running.is_home_last and not _names_versions(op.ops)
        if is_taken and self._waits(item, keys, may_wait=may_wait):
            return UNTOUCHED
        if lock_table.decisions.is_full:
            raise Overloaded(f"partition {self._state.partition}: {len(lock_table.decisions)} decisions; retry later")
        since = draft.last_seq
        own = Transact(op.key, op.ops, op.flags, op.request)
        results = carry_out_batch(self._evaluator, own, running.results_bytes)
        of = running.intents
        decision = draft.decision(op.key, running.name, of, part=len(written), parts=running.written, since=since)
        lock_table.decide(decision)
        result = running.result(results, decision.seq)
        if op.request is not None:
            draft.answer(op.request, hash_of_key, result, touched_tokens([row_key]))
        running.is_sent = True
        lock_table.unclaim(running.op)
        return result

    # docs/protocol.md Tx8
    def _end(self, op: End, item: Any, row_key: bytes) -> Result:
        if not self._serving_ranges.may_read(row_key):
            raise Unavailable(f"partition {self._state.partition}: the home key has moved")  # or it is coming back
        if not self._evaluator.is_writable(item, [row_key]) or not self._evaluator.is_behind(item, mark_of(op)):
            return UNTOUCHED
        decision = self._lock_table.decisions.find(op.attempt)
        if decision is not None:
            self._evaluator.draft.end(decision)
            self._lock_table.end(decision)
        return self._mark()

    # docs/protocol.md Tx6
    def _inquire(self, op: Inquire, item: Any, row_key: bytes) -> Result:
        """Return (is_committed, mark). If the attempt is aborted, an append that begins now must complete before the
        answer is sent, so that no deposed leader sends it."""
        if not self._evaluator.is_owned(item, row_key):
            return UNTOUCHED
        if self._state.decisions.commits(op.attempt, op.intent_key, op.intent_seq):
            return True, self._mark()
        is_sent = self._lock_table.decisions.commits(op.attempt, op.intent_key, op.intent_seq)
        if is_sent or self.is_under_way(op.attempt):
            raise Unavailable(f"partition {self._state.partition}: attempt {op.attempt} is under way; ask again")
        self._evaluator.needs_proof = True
        return False, self._mark()

    def _mark(self) -> int:
        return self._evaluator.mark


def _names_versions(ops: Iterable[Op]) -> bool:
    """Return True if one of the operations needs the present version of its key, which another transaction that holds
    the key most likely changes."""
    return any(getattr(op, "flags", 0) & (Flag.IF_VERSION | Flag.IF_ABSENT) for op in ops)


def mark_of(op: Op) -> int:
    """Return the number of the pin that a record of a transaction must follow in the log (docs/protocol.md Tx13)."""
    if isinstance(op, Decide):
        return 0 if op.running is None else op.running.mark
    return op.mark if isinstance(op, Resolve) else 0


# ── a participant's operations as effects ─────────────────────────────────────────────────────────────────────────────


class _EffectsSavepoint(NamedTuple):
    size: int
    metered: int


class _Effects:
    """Collects the effects of a participant's operations without writing anything. It takes the place of the draft
    while the operations are evaluated. A write of a key gets the sequence of the key's intent."""

    def __init__(self, meter: Meter | None, time_ms: int, seqs: dict[bytes, int]) -> None:
        self.meter, self.time_ms, self._seqs = meter, time_ms, seqs
        self.size = 0
        self.rows: dict[bytes, Row | None] = {}

    def put(self, key: bytes, value: bytes, old: Row | None, expires_ms: int) -> int:
        if self.meter is not None:
            self.meter.put(key, len(value), None if old is None else len(old[0]))
        seq = self._seqs[key]
        self.rows[key] = (value, seq, seq if old is None else old[2], self.time_ms, expires_ms)
        self.size += len(key) + len(value)
        return seq

    def delete(self, key: bytes, old: Row) -> int:
        if self.meter is not None:
            self.meter.delete(key, len(old[0]))
        self.rows[key] = None
        self.size += len(key)
        return self._seqs[key]

    def note(self, key: bytes) -> int:
        return self._seqs[key]

    def begin(self, *, is_atomic: bool) -> _EffectsSavepoint:
        return _EffectsSavepoint(self.size, 0 if self.meter is None else self.meter.begin(is_atomic=is_atomic))

    def keep(self, mark: _EffectsSavepoint) -> None:
        if self.meter is not None:
            self.meter.end(mark.metered)

    def undo(self, mark: _EffectsSavepoint) -> None:
        """Forget all effects. The caller then refuses the whole PREPARE."""
        self.rows.clear()
        if self.meter is not None:
            self.meter.undo(mark.metered)


class _Part:
    """A participant's operations while they are evaluated: they see the effects of the operations before them."""

    def __init__(self, effects: _Effects, before: Callable[[bytes], Row | None]) -> None:
        self.draft: Any = effects
        self._rows, self._before = effects.rows, before

    def live(self, key: bytes) -> Row | None:
        row: Row | Untouched | None = self._rows.get(key, UNTOUCHED)
        return self._before(key) if row is UNTOUCHED else row


def _record(
    op: Prepare, time_ms: int, is_exclusive: bool, before: Row | None, after: Row | Untouched | None
) -> IntentRecord:
    """Return the intent on a key whose record is `before`, and `after` once the transaction is committed."""
    effect, value, created, expires_ms = IntentEffect.NONE, b"", 0, 0
    if after is None:
        effect = IntentEffect.NONE if before is None else IntentEffect.DELETE
    elif after is not UNTOUCHED:
        is_again = before is not None and after[2] != before[2]
        effect, value, expires_ms = IntentEffect.RECREATE if is_again else IntentEffect.PUT, after[0], after[4]
    if before is not None and effect != IntentEffect.NONE:
        created = before[2]
    replaced_ms = before[4] if created and before is not None else 0
    return IntentRecord(
        op.attempt, op.home, is_exclusive, time_ms, op.parts, int(effect), value, created, expires_ms, replaced_ms
    )
