"""Evaluates operations for a leader: turns a batch of operations into one log entry of effects, and the replies to
deliver once the entry is acknowledged. Decides only.

Operations are evaluated in order. Each operation sees the state with the effects of the entries in flight and of the
earlier operations in its batch. All keys of a batch are looked up in one call, and a plain put allocates no object but
a tuple.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from kvstore.errors import Moved, NotYetRaised, Overloaded, RequestExpired, StoreError, Unavailable
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.namespaces import Meter
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.lock_table import LockTable
from kvstore.partition.leading.plain_puts import evaluate_batched, put_all
from kvstore.partition.leading.prepare import TransactionRules
from kvstore.partition.leading.range_delete import (
    RANGE_KEYS_MAX,
    RangeId,
    RangeSink,
    Reap,
    RestOfRange,
    cut,
    written_between,
)
from kvstore.partition.leading.range_reads import keys_in
from kvstore.partition.leading.reading import ENTRY_READ_MAX, LOOKUP_BYTES, ReadBudget
from kvstore.partition.leading.serving_ranges import ServingRanges
from kvstore.partition.leading.usage import Usage
from kvstore.partition.state import entry as entries
from kvstore.partition.state.commands import Code, DeleteRange, Op, Prepare, Put, Reply, RequestId, Result, Transact
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.entry import CREATE, OVERWRITE, Entry, EntryKind, Requests
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.move_records import KIND_OF, MoveRecord, Own
from kvstore.partition.state.move_records import encode as encode_record
from kvstore.partition.state.operations import MUTATIONS, check_request, check_sizes
from kvstore.partition.state.overlay import UNTOUCHED, Layer, Overlay, Row, TransactionChanges, Untouched
from kvstore.partition.state.results import decode_result, fits, misused
from kvstore.partition.state.retry_table import (
    BYTES_PER_CLIENT,
    BYTES_PER_RESULT,
    PART_OF_A_RANGE,
    hash_at_hand,
    touched_tokens,
)
from kvstore.partition.state.rows import EXPIRES, created_of, data_key, data_keys_of, record_of
from kvstore.partition.state.scope import ELSEWHERE, bound
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import NOTHING, PART, WHOLE
from kvstore.partition.state.traits import SINCE
from kvstore.partition.transactions.attempts import Decide
from kvstore.versions import build_for

Item = tuple[Op, Any, int]
"""Operation, sink, token."""

BATCHED_MIN = 4
"""From this number of plain puts on, evaluating them batched costs less than one by one."""

_CREATED, _OVERWRITTEN = bytes((CREATE,)), bytes((OVERWRITE,))


class NextEntry(msgspec.Struct, frozen=True):
    """A log entry that is ready to be sent."""

    entry: Entry
    payload: bytes
    data_keys: list[bytes]


class Decided(msgspec.Struct, frozen=True):
    """The result of evaluating a batch: the entry to append, the replies to deliver, and the operations that could not
    be decided."""

    entry: NextEntry | None
    """None if the batch changes nothing."""
    replies: list[Reply]
    """Replies to deliver once the entry is acknowledged. If there is no entry, they are delivered once all entries in
    flight are acknowledged and the lease holds."""
    rest: list[Item]
    """Operations that continue at the front of the next batch: DELETE_RANGEs that are not finished, and operations that
    did not fit into the entry."""
    frozen: list[Item]
    """Operations on a frozen range, which accepts no writes at the moment."""
    moved: list[tuple[Item, Moved]]
    """Operations on keys that another partition owns, each with its Moved error."""
    locked: Sequence[Item] = ()
    """Writes on keys that a transaction holds. They wait until it has ended."""
    awaiting_mark: Sequence[Item] = ()
    """Records of transactions that wait for a pin that this partition has not taken yet."""
    distributed: Sequence[Item] = ()
    """Transactions that begin here and have keys of other partitions."""
    needs_proof: bool = False
    """True if the replies may be delivered only behind an append that is sent from now on, even if the batch changes
    nothing."""


class Evaluator:
    """Evaluates operations against the state as it will be after all entries in flight have been applied."""

    def __init__(self, state: ReplicaState, epoch: int, config: PartitionConfig, serving_ranges: ServingRanges) -> None:
        self._serving_ranges = serving_ranges
        self._frozen: list[Item] = []
        self._moved: list[tuple[Item, Moved]] = []
        self._locked: list[Item] = []
        self._distributed: list[Item] = []
        self._awaiting_mark: list[Item] = []
        self.needs_proof = False
        self.lock_table = LockTable(state)
        self.transactions = TransactionRules(self, state, serving_ranges, self.lock_table)
        self._state, self._epoch, self._config, self._hash = state, epoch, config, state.hash
        self._overlay = Overlay()
        self.usage = Usage(state, epoch, self._overlay, self.lock_table)
        self._next_seq = state.seq + 1
        self.mark = state.mark
        """The highest number of a pin in the log, with entries in flight."""
        self._time_ms = state.record_time_ms
        self.draft = Draft(self._next_seq, self._time_ms, state.hash)
        """The draft of the entry under construction."""
        self._stored: dict[bytes, bytes | None] = {}
        self._reading = ReadBudget(state.engine, state.hash)
        self._ranges: set[RangeId] = set()
        """DELETE_RANGEs that have begun and not ended."""
        self._begun: list[RangeSink] = []
        """DELETE_RANGEs that have begun in the entry under construction."""
        self._unchecked = 0
        self._prefixes: tuple[bytes, ...] = ()
        """The prefixes of namespaces. Writes to their keys are metered, so they are evaluated one by one."""
        self._meter: Meter | None = None

    # docs/protocol.md P4
    @property
    def time_ms(self) -> int:
        """Record time of the last entry."""
        return self._time_ms

    def control(self, kind: EntryKind, date_ms: int) -> NextEntry:
        """Return the next entry as a control record that changes no key."""
        self._time_ms = max(self._time_ms, date_ms)
        made = entries.control(self._state.partition, self._epoch, self._next_seq, self._time_ms, kind)
        self._overlay.layers.append(Layer())
        self._check(made, now=kind is EntryKind.EPOCH_START)
        return NextEntry(made, made.encode(), [])

    def record(self, record: MoveRecord, date_ms: int, requests: Requests | None = None) -> NextEntry:
        """Return the next entry as a record about a range of tokens. From this call on, the record counts as sent.
        Raises Unavailable if the record contradicts the records before it."""
        if isinstance(record, MarkRecord):
            self._send_mark(record)
        self._serving_ranges.send(record)
        kind = KIND_OF[type(record)]
        seq, time_ms = (record.seq, record.time_ms) if isinstance(record, Own) else (0, 0)
        self._time_ms = max(self._time_ms, date_ms, time_ms)
        payload = encode_record(record)
        made = entries.control(self._state.partition, self._epoch, self._next_seq, self._time_ms, kind, payload)
        made.requests = requests
        self._check(made, now=kind is EntryKind.EPOCH_START)
        payload = made.encode()
        self._next_seq = max(self._next_seq + len(made.keys), seq + 1)
        self._overlay.layers.append(Layer())
        return NextEntry(made, payload, [])

    # docs/protocol.md Tx13
    def _send_mark(self, record: MarkRecord) -> None:
        """Note the number of a MARK. Raises Unavailable if a MARK that keeps a state has no higher number than the
        MARKs before it: it would keep what has happened after a later pin."""
        if record.takes and 0 < record.number <= self.mark:
            raise Unavailable(
                f"partition {self._state.partition}: expected a pin with a number above {self.mark}, "
                f"got {record.number}; take it again"
            )
        self.mark = max(self.mark, record.number)

    def applied(self) -> TransactionChanges | None:
        """Drop the overlay of the oldest entry in flight, because the state now contains that entry. Return the
        entry's changes of intents and decisions."""
        return self._overlay.layers.popleft().transactions

    def rebuild_lock_table(self) -> None:
        """Take the intents and decisions from the state again, because a record about tokens has been applied. The
        writes that wait at intents must be evaluated again."""
        self.lock_table.release()
        self.lock_table.rebuild(self._overlay.layers)

    # docs/protocol.md P7
    def evaluate(self, items: list[Item], date_ms: int) -> Decided:
        """Evaluate `items` as the next entry. `date_ms` is the time that a record created now gets, in ms."""
        time_ms = max(self._time_ms, date_ms)
        self._prefixes = self.usage.book.prefixes.all
        if len(items) == 1 and (single := self._evaluate_single(items[0], time_ms)) is not None:
            return single
        draft = self.draft = Draft(self._next_seq, time_ms, self._hash)
        draft.meter = self._meter = self.usage.meter() if self._prefixes else None
        replies: list[Reply] = []
        rest: list[Item] = []
        self._frozen, self._moved, self._begun = [], [], []
        self._locked, self._distributed, self._awaiting_mark, self.needs_proof = [], [], [], False
        try:
            decided, self._reading.left = 0, ENTRY_READ_MAX
            while decided < len(items):
                some = items[decided : decided + self._reading.at_once]
                decided += self._evaluate_some(draft, some, replies, rest)
                if draft.size >= self._config.entry_bytes_max or self._reading.left <= 0:
                    rest += items[decided:]
                    break
            entry = self._finish(draft)
        except Exception:
            for sink in self._begun:  # it has not begun: it is evaluated again
                sink.forget()
            self.lock_table.undo(draft.layer.transactions)
            for op, _, _ in self._locked:
                self.lock_table.stop_waiting(op)
            for op, _, _ in self._distributed:
                self.lock_table.unclaim(op)
            for op, _, _ in items:
                if isinstance(op, Decide) and op.running is not None:
                    op.running.is_sent = False
            raise
        self._stored = {}
        return Decided(
            entry,
            replies,
            rest,
            self._frozen,
            self._moved,
            locked=self._locked,
            awaiting_mark=self._awaiting_mark,
            distributed=self._distributed,
            needs_proof=self.needs_proof,
        )

    def _evaluate_single(self, item: Item, time_ms: int) -> Decided | None:
        """Evaluate a batch of exactly one plain put to a key that no entry in flight touches, without a draft. This
        saves 22 calls. Return None, with nothing decided, for any other batch."""
        op, sink, token = item
        if op.__class__ is not Put or op.expires_ms or op.flags or self._serving_ranges.blocked_keys:
            return None
        key, value, request = op.key, op.value, op.request
        if not 0 < len(key) <= KEY_BYTES_MAX or len(value) > VALUE_BYTES_MAX:
            return None
        if self._prefixes and key.startswith(self._prefixes):
            return None  # it is metered
        if self.lock_table.locks and key in self.lock_table.locks:
            return None
        if self._overlay.layers and self._overlay.touched_of([key]):
            return None
        row_key = data_key(self._hash, key)
        if self._serving_ranges.writable.slices[row_key[1]] != WHOLE:
            return None
        row = self._state.engine.get(row_key)
        if row is not None and row[0] >= EXPIRES:
            return None
        seq = self._next_seq
        created = seq if row is None else created_of(row)
        made = Entry(self._state.partition, self._epoch, seq, time_ms, _CREATED if row is None else _OVERWRITTEN)
        made.keys, made.values, made.ages = [key], [value], [] if row is None else [seq - created]
        layer = Layer({key: (value, seq, created, time_ms, 0)})
        if request is not None:
            made.requests = self._single_request(request, hash_at_hand(key, row_key), seq, time_ms, layer)
            if made.requests is None:
                return None
        self._check(made, now=False)
        payload = made.encode()
        self._time_ms, self._next_seq = time_ms, seq + 1
        self._overlay.layers.append(layer)
        return Decided(NextEntry(made, payload, [row_key]), [(sink, token, seq)], [], [], [])

    def _single_request(
        self, request: RequestId, hash_of_key: int, seq: int, time_ms: int, layer: Layer
    ) -> Requests | None:
        """Return the request columns of a single new request whose result is `seq`, and record the request in `layer`.
        Return None if the request is not new or is refused."""
        try:
            if self._known(request, hash_of_key, layer, time_ms) is not UNTOUCHED:
                return None
        except StoreError:
            return None
        client, sequence, first_unacked, seen_ms = request
        layer.requests[client, sequence, hash_of_key] = seq
        layer.first_unacked[client], layer.counts[client] = first_unacked, 1
        layer.results_bytes = BYTES_PER_CLIENT + BYTES_PER_RESULT
        return Requests([client], [first_unacked], [seen_ms], [0], [sequence], [hash_of_key], [0], [], [])

    def _evaluate_some(self, draft: Draft, items: list[Item], replies: list[Reply], rest: list[Item]) -> int:
        """Evaluate `items` until the entry is full. Return how many were evaluated."""
        keys = [item[0].key for item in items]
        data_keys = data_keys_of(self._hash, keys)
        reading = self._reading
        rows = reading.multi_get(data_keys)
        size = reading.size  # subtracted at the end: records that were read together are evaluated together
        touched = self._overlay.touched_of(keys) if self._overlay.layers else set[bytes]()
        metered = [key for key in keys if key.startswith(self._prefixes)] if self._prefixes else []
        written = draft.layer.rows
        bytes_max = self._config.entry_bytes_max
        writable = (
            NOTHING if self._serving_ranges.blocked_keys else self._serving_ranges.writable
        )  # NOTHING: each operation is evaluated on its own
        slices, holds_row = writable.slices, writable.holds_row
        locks = self.lock_table.locks
        is_locked = bool(locks) and not locks.keys().isdisjoint(keys)
        if len(items) >= BATCHED_MIN and not metered and not is_locked and writable.holds_rows(data_keys):
            ops, sinks, tokens = zip(*items, strict=True)
            versions = evaluate_batched(draft, ops, keys, data_keys, rows, self._overlay, touched, self._state.retries)
            if versions is not None:
                replies += zip(sinks, tokens, versions, strict=True)
                reading.left -= size
                return len(items)
        touched.update(metered)
        self._stored = dict(zip(keys, rows, strict=True))
        decided = 0
        for item, key, row_key, row in zip(items, keys, data_keys, rows, strict=True):
            decided += 1
            op, sink, token = item
            result: Result
            if (
                op.__class__ is Put
                and not (op.expires_ms or op.flags)
                and key not in touched
                and key not in written
                and not (locks and key in locks)
                and (row is None or row[0] < EXPIRES)
                and (slices[row_key[1]] == WHOLE or (slices[row_key[1]] == PART and holds_row(row_key)))
            ):
                if op.request is None:
                    result = self._put(draft, key, row_key, op.value, row)
                else:
                    result = self._put_once(draft, key, row_key, op.value, row, op.request)
                replies.append((sink, token, result))
                continue
            if isinstance(op, DeleteRange):
                result = self._reap(op.keys, item, rest) if isinstance(op, Reap) else self._delete_range(op, item, rest)
            else:
                result = self._evaluate_one(op, item, row_key)
            if result is not UNTOUCHED:
                if op.__class__ is Prepare and self.transactions.prepared is not None:
                    sink = self.transactions.prepared.sink(sink)
                replies.append((sink, token, result))
            elif self._serving_ranges.blocked_keys:
                slices = NOTHING.slices
            if draft.size >= bytes_max or reading.left <= 0:
                break
        reading.left -= size
        if decided < len(items):
            reading.note_full(decided)
        return decided

    def _finish(self, draft: Draft) -> NextEntry | None:
        """Turn the draft into the next entry. Return None if the draft is empty."""
        if not draft.keys:
            return None
        made = draft.entry(self._state.partition, self._epoch)
        self._check(made, now=False)
        payload = made.encode()
        # Up to here this evaluator is unchanged, so that a failure leaves it as if the batch had never been.
        self._time_ms = draft.time_ms
        self._next_seq += len(draft.keys)
        self._overlay.layers.append(draft.layer)
        if self._meter is not None:
            self.usage.admit(self._meter)
        return NextEntry(made, payload, draft.data_keys)

    def _check(self, entry: Entry, *, now: bool) -> None:
        """Add a checksum of the state to an entry every `check_every` entries, so that replicas can compare their
        states."""
        self._unchecked += 1
        if self._unchecked >= self._config.check_every or now:
            self._unchecked = 0
            entry.check_seq, entry.check_crc = self._state.seq, self._state.crc

    # ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────

    def live(self, key: bytes) -> Row | None:
        """Return the key's record as the preceding operations leave it. If the record has expired, first add its delete
        to the draft, then return None."""
        row = self.latest(key)
        if row is not None and 0 < row[4] <= self.draft.time_ms:
            self.draft.delete(key, row)
            return None
        return row

    def latest(self, key: bytes) -> Row | None:
        """Return the key's record as the preceding operations leave it, even if it has expired."""
        row: Row | Untouched | None = self.draft.layer.rows.get(key, UNTOUCHED)
        if row is UNTOUCHED:
            row = self._overlay.find(key)
        if row is UNTOUCHED:
            stored = self._stored[key] if key in self._stored else self._reading.get(data_key(self._hash, key))
            return None if stored is None else record_of(stored)
        return row

    def _put(self, draft: Draft, key: bytes, row_key: bytes, value: bytes, row: bytes | None) -> Result:
        """Evaluate a put without flags, expiry or request id, to a key that no entry in flight touches."""
        if not 0 < len(key) <= KEY_BYTES_MAX or len(value) > VALUE_BYTES_MAX:
            return self._refusal(key, value)
        seq = draft.first_seq + len(draft.keys)
        if row is None:
            created = seq
            draft.kinds.append(CREATE)
        else:
            created = created_of(row)
            draft.kinds.append(OVERWRITE)
            draft.ages.append(seq - created)
        draft.keys.append(key)
        draft.data_keys.append(row_key)
        draft.values.append(value)
        draft.layer.rows[key] = (value, seq, created, draft.time_ms, 0)
        return seq

    def _put_once(
        self, draft: Draft, key: bytes, row_key: bytes, value: bytes, row: bytes | None, request: RequestId
    ) -> Result:
        """Evaluate such a put with a request id."""
        hash_of_key = hash_at_hand(key, row_key)
        try:
            known = self._known(request, hash_of_key, draft.layer, draft.time_ms)
        except StoreError as error:
            return error
        if known is not UNTOUCHED:
            return known if known.__class__ is int else misused(request)
        result = self._put(draft, key, row_key, value, row)
        if result.__class__ is int:
            draft.answer(request, hash_of_key, result)
        return result

    def _refusal(self, key: bytes, value: bytes) -> StoreError:
        try:
            check_sizes(key, value)
        except StoreError as error:
            return error
        raise AssertionError("refused without a reason")

    def _reap(self, keys: list[bytes], item: Item, rest: list[Item]) -> Result:
        """Delete the keys that are past their expiry. If a key may not be written now, a note in the entry advances
        record time past the expiry instead. Return UNTOUCHED if the operation continues in the next batch."""
        may_write = self._serving_ranges.may_write
        by_key = self.lock_table.intents.by_key
        for place, key in enumerate(keys):
            if self._reading.left <= 0 and place:
                rest.append((Reap(keys=keys[place:]), *item[1:]))
                return UNTOUCHED
            if by_key and key in by_key:  # docs/protocol.md Tx9: whoever asked for the delete waits for the transaction
                continue
            if may_write(data_key(self._hash, key)):
                self.live(key)
            elif not self.draft.keys:
                self.draft.note(key)
        return None

    def is_owned(self, item: Item, row_key: bytes) -> bool:
        """Return True if the record is owned. Otherwise put the operation aside and return False."""
        if self._serving_ranges.may_read(row_key):
            return True
        self._moved.append((item, self._serving_ranges.moved(row_key)))
        return False

    # docs/protocol.md Tx13
    def is_behind(self, item: Item, mark: int) -> bool:
        """Return True if the log has a MARK of at least this number. Otherwise put the operation aside and return
        False."""
        if mark <= self.mark:
            return True
        self._awaiting_mark.append(item)
        return False

    # docs/protocol.md Tx9
    def _is_free(self, item: Item) -> bool:
        """Return True if no transaction holds a key of the write. Otherwise put the write aside and return False."""
        locks, op = self.lock_table.locks, item[0]
        keys = [each.key for each in op.ops] or [op.key]
        if locks.keys().isdisjoint(keys):
            return True
        self.wait(item, keys)
        return False

    def wait(self, item: Item, keys: Collection[bytes]) -> None:
        """Put an operation aside until a transaction has ended, and lock these keys meanwhile."""
        if keys:
            self.lock_table.wait(item[0], keys)
        else:
            self.lock_table.wait_without_place()
        self._locked.append(item)

    def is_writable(self, item: Item, keys: list[bytes]) -> bool:
        """Return True if all records at `keys` are owned and take writes. Otherwise put the operation aside and return
        False."""
        op, serving_ranges = item[0], self._serving_ranges
        if serving_ranges.takes_writes(keys):
            return True
        for each in keys:
            if not serving_ranges.may_read(each):
                self._moved.append((item, serving_ranges.moved(each)))
                return False
        if op.ops:  # later operations on its keys wait behind the batch
            serving_ranges.blocked_keys.update(keys)
        self._frozen.append(item)
        return False

    def _evaluate_one(self, op: Op, item: Item, row_key: bytes) -> Result | StoreError:
        """Return the result of any operation but DELETE_RANGE and REAP, or the error that refuses it; UNTOUCHED if the
        operation is put aside."""
        request, batch = op.request, op if op.ops else None
        try:
            hash_of_key = hash_at_hand(op.key, row_key)
            if request is not None and op.__class__ is not Decide:
                known = self._known(request, hash_of_key, self.draft.layer, self.draft.time_ms)
                if known is not UNTOUCHED:
                    return known if fits(op, known) else misused(request)
            if op.code in SINCE:
                self._check_version(op)
            if (rule := self.transactions.by_class.get(op.__class__)) is not None:
                return rule(op, item, row_key)
            row_keys = [row_key] if batch is None else [data_key(self._hash, each.key) for each in batch.ops]
            if op.__class__ is Transact and self._is_distributed(op, item, row_key, row_keys):
                return UNTOUCHED
            if not self.is_writable(item, row_keys) or (self.lock_table.locks and not self._is_free(item)):
                return UNTOUCHED
            if batch is not None:
                self._reading.left -= LOOKUP_BYTES * len(row_keys)
            before = self.draft.last_seq
            result: Result = None
            if batch is not None and not (
                self._prefixes and any(each.key.startswith(self._prefixes) for each in batch.ops)
            ):
                result = put_all(self.draft, batch.ops, row_keys, self._reading, self._overlay)
            if result is None:
                result = MUTATIONS[op.code](self, op)
            if op.__class__ is Transact:
                result = (result, [(self._state.partition, self.draft.last_seq)])
            if request is not None:
                if self.draft.last_seq == before:
                    self.draft.note(op.key)  # otherwise a late duplicate could still change something
                self.draft.answer(request, hash_of_key, result, b"" if batch is None else touched_tokens(row_keys))
        except StoreError as error:
            return error
        return result

    # docs/protocol.md Tx2
    def _is_distributed(self, op: Op, item: Item, row_key: bytes, row_keys: list[bytes]) -> bool:
        """Return True, and put the transaction aside, if its home key is owned here and other keys of it are not."""
        assert isinstance(op, Transact)
        serving_ranges = self._serving_ranges
        may_read = serving_ranges.may_read
        if not may_read(row_key) or all(map(may_read, row_keys)):
            return False
        if not serving_ranges.may_write(row_key):
            self._frozen.append(item)
        elif self.transactions.begin(op, item):
            self._distributed.append(item)
        return True

    def known(self, request: RequestId, hash_of_key: int) -> Result:
        """Return the result of a request that was carried out before; UNTOUCHED if it is new. Raises Refused,
        Overloaded."""
        return self._known(request, hash_of_key, self.draft.layer, self.draft.time_ms)

    # docs/protocol.md V4
    def _check_version(self, op: Op) -> None:
        """Raise NotYetRaised if the log's version does not allow the records of this write."""
        since = SINCE[op.code]
        if self._state.log_version < since:
            raise NotYetRaised(
                f"partition {self._state.partition}: expected log version {since} or higher for {Code(op.code).name}, "
                f"got {self._state.log_version}; upgrade all servers to {build_for(since)}"
            )

    def _known(self, request: RequestId, hash_of_key: int, layer: Layer, time_ms: int) -> Result:
        """Return the result of a request that is remembered, in flight or in `layer`; UNTOUCHED if the request is new.
        `layer` is the layer of the draft and `time_ms` the draft's record time. Raises Refused, Overloaded."""
        check_request(request)
        client, sequence, _, _ = request
        acknowledged = layer.first_unacked.get(client)
        if acknowledged is not None:
            result = layer.requests.get((client, sequence, hash_of_key), UNTOUCHED)
            if result is not UNTOUCHED:
                return result
            if sequence < acknowledged:
                raise RequestExpired(f"request {sequence} was answered, and its client has acknowledged it")
        result = self._overlay.find_request(request, hash_of_key)
        if result is not UNTOUCHED:
            return result
        remembered = self._state.retries.find(request, hash_of_key, time_ms)
        if remembered is None:
            self._state.retries.admit(request, time_ms, *self._overlay.results_in_flight(client, layer))
            return UNTOUCHED
        return remembered if isinstance(remembered, int) else decode_result(remembered)

    def _delete_range(self, op: DeleteRange, item: Item, rest: list[Item]) -> Result | StoreError:
        """Return how many keys were deleted; UNTOUCHED if the operation continues in the next batch.

        Keys are deleted one by one, as effects: a large range is not deleted atomically, and the request id goes with
        its last key.
        """
        start, end, request, assigned = op.key, op.end, op.request, op.assigned
        so_far = op if isinstance(op, RestOfRange) else None
        count = 0 if so_far is None else so_far.count
        hash_of_key = hash_at_hand(start, data_key(self._hash, start)) if so_far is None else so_far.hash_of_key
        try:
            known = UNTOUCHED if request is None or so_far is not None else self._known_range(request, hash_of_key)
        except StoreError as error:
            return error
        if known is not UNTOUCHED:
            return known if request is None or fits(op, known) else misused(request)
        serving_ranges = self._serving_ranges
        if serving_ranges.is_freezing:
            self._frozen.append(item)
            return UNTOUCHED
        if assigned is not None and not serving_ranges.readable.covers_all(assigned):
            if so_far is not None:
                return ELSEWHERE
            self._moved.append((item, ELSEWHERE))
            return UNTOUCHED
        tokens = assigned or serving_ranges.writable
        if self.lock_table.locks and (locked := self.lock_table.locked_between(start, end, tokens)):
            self.wait(item, locked)
            return UNTOUCHED
        stored, following = keys_in(self._state, start, end, RANGE_KEYS_MAX, tokens)
        in_flight = written_between(self._overlay, self.draft, start, following or end or None, tokens)
        keys, following = cut(sorted({*stored, *in_flight}), following, self.draft.size)
        found = self._reading.read(keys)
        if len(found) < len(keys):
            keys, following = keys[: len(found)], keys[len(found)]
        self._stored.update(found)
        for key in keys:
            row = self.live(key)
            if row is not None:
                self.draft.delete(key, row)
                count += 1
        if following is not None:
            sink = item[1]
            if so_far is None:
                sink = RangeSink(sink, self._ranges, request, hash_of_key)
                self._begun.append(sink)
            following_op = RestOfRange(following, end, request, count, hash_of_key)
            rest.append((following_op if assigned is None else bound(following_op, assigned), sink, item[2]))
            return UNTOUCHED
        if request is not None:
            self.draft.note(start)
            self.draft.answer(request, hash_of_key, count, PART_OF_A_RANGE)
        return count

    def _known_range(self, request: RequestId, hash_of_key: int) -> Result:
        """Like `_known`, but raise Overloaded while the same request is in flight: the attempt that ends later could
        delete what the client wrote after the other attempt had ended."""
        if (request[0], request[1], hash_of_key) in self._ranges:
            raise Overloaded(f"request {request[1]} is in flight; retry later")
        return self._known(request, hash_of_key, self.draft.layer, self.draft.time_ms)
