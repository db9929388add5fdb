"""A log entry under construction: its effects in columns, and the overlay layer that shows these effects until the
entry is applied. Decides only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import sub
from typing import NamedTuple

from msgspec import Struct, field

from kvstore.namespaces import Meter
from kvstore.partition.state import intents
from kvstore.partition.state.commands import RequestId, Result
from kvstore.partition.state.decisions import Decision, DecisionRecord, EndRecord
from kvstore.partition.state.entry import (
    CREATE,
    DECISION,
    DELETE,
    END,
    EXPIRES,
    INTENT,
    NOTE,
    OVERWRITE,
    REPLACES,
    RESOLVED,
    Entry,
    Requests,
)
from kvstore.partition.state.intents import Intent, IntentEffect, IntentName, IntentRecord, ResolvedRecord
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.overlay import UNTOUCHED, Layer, Row, TransactionChanges, Untouched
from kvstore.partition.state.results import encode_result
from kvstore.partition.state.retry_table import BYTES_PER_CLIENT, BYTES_PER_RESULT
from kvstore.partition.state.rows import data_key
from kvstore.ring.hashing import KeyHash
from kvstore.types import PartitionId

_CREATED, _OVERWRITTEN = bytes((CREATE,)), bytes((OVERWRITE,))
_UNCHANGED = (0, 0, 0, 0)


class DraftSavepoint(NamedTuple):
    """The state of a draft when a batch began: everything needed to undo the batch."""

    mutations: int
    values: int
    ages: int
    expires: int
    replaced: int
    size: int
    metered: int
    transactions: tuple[int, int, int, int]


class RequestColumns(NamedTuple):
    """The request ids of puts, stored in columns, in the order of the puts."""

    clients: Sequence[bytes]
    places: Sequence[int]
    """Index of the put that has the request id."""
    sequences: Sequence[int]
    first_unacked: Sequence[int]
    seen_ms: Sequence[int]
    hashes: Sequence[int]
    """Hashes of the keys."""

    @property
    def is_of_one(self) -> bool:
        """True if all requests come from one client."""
        return self.clients.count(self.clients[0]) == len(self.clients)


class Draft(Struct, eq=False):
    """A log entry under construction. Mutations are added in order, and each takes the next sequence."""

    first_seq: int
    time_ms: int
    hash: KeyHash
    size: int = 0
    """Approximate size of the entry in bytes: of the mutations and the remembered results that have been added."""
    kinds: bytearray = field(default_factory=bytearray)
    keys: list[bytes] = []
    data_keys: list[bytes] = []
    values: list[bytes] = []
    ages: list[int] = []
    expires_ms: list[int] = []
    replaced_ms: list[int] = []
    transactions: list[bytes] = []
    layer: Layer = field(default_factory=Layer)
    meter: Meter | None = None
    """None unless the leader has namespaces."""
    _requests: Requests | None = None
    _clients: dict[bytes, int] = {}
    _undo: list[tuple[bytes, Row | Untouched | None]] | None = None

    @property
    def last_seq(self) -> int:
        """The sequence of the last mutation added. If the draft is empty, the sequence before its first one."""
        return self.first_seq + len(self.keys) - 1

    # ── mutations ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, key: bytes, value: bytes, old: Row | None, expires_ms: int) -> int:
        """Write a key whose current record is `old`, None if it is absent. Returns the mutation's sequence, which is
        the record's new version. Raises QuotaExceeded."""
        if self.meter is not None:
            self.meter.put(key, len(value), None if old is None else len(old[0]))
        seq = self.first_seq + len(self.keys)
        created = seq if old is None else old[2]
        kind = CREATE if old is None else OVERWRITE
        if old is not None:
            self.ages.append(seq - created)
        if expires_ms:
            kind |= EXPIRES
            self.expires_ms.append(expires_ms)
        self._add(kind, key, old)
        self.values.append(value)
        self.size += len(value)
        self._set(key, (value, seq, created, self.time_ms, expires_ms))
        return seq

    def put_all(
        self, keys: list[bytes], row_keys: list[bytes], values: Sequence[bytes], created: list[int], size: int
    ) -> Sequence[int]:
        """Write many keys without expiries, and return the new versions. `size` is the number of bytes of keys and
        values. `created` contains the sequence that created each key, or 0 if the key is absent. The writes cannot be
        undone and are not metered."""
        first, count = self.last_seq + 1, len(keys)
        versions = range(first, first + count)
        if not any(created):
            self.kinds += _CREATED * count
            begins: Sequence[int] = versions
        elif all(created):
            self.kinds += _OVERWRITTEN * count
            self.ages += map(sub, versions, created)
            begins = created
        else:
            self.kinds += bytes([OVERWRITE if each else CREATE for each in created])
            self.ages += [version - each for version, each in zip(versions, created, strict=True) if each]
            begins = [each or version for version, each in zip(versions, created, strict=True)]
        self.keys += keys
        self.data_keys += row_keys
        self.values += values
        self.size += size
        self.layer.rows.update(zip(keys, zip(values, versions, begins, repeat(self.time_ms), repeat(0)), strict=True))
        return versions

    def delete(self, key: bytes, old: Row) -> int:
        """Delete a key whose current record is `old`. Returns the mutation's sequence."""
        if self.meter is not None:
            self.meter.delete(key, len(old[0]))
        self._add(DELETE, key, old)
        self._set(key, None)
        return self.last_seq

    # docs/protocol.md P13
    def note(self, key: bytes) -> int:
        """Take the next sequence without changing any key, so that a request's result can be remembered. Returns the
        sequence."""
        self._add(NOTE, key, None)
        return self.last_seq

    # ── transactions over several partitions ──────────────────────────────────────────────────────────────────────────

    # docs/protocol.md Tx4
    def intent(self, key: bytes, record: IntentRecord) -> Intent:
        """Add an intent on a key, and return it. `record.written_ms` must be the draft's time. No key changes."""
        intent = Intent(key, self._add_of_transaction(INTENT, key, intents.encode(record)), record)
        self._changes().intents.append(intent)
        return intent

    # docs/protocol.md Tx5
    def decision(
        self,
        home: bytes,
        attempt: Attempt,
        of: Sequence[IntentName],
        *,
        part: int = 0,
        parts: int = 0,
        since: int | None = None,
    ) -> Decision:
        """Commit a transaction with home key `home`, and return its decision. `of` are the intents that it commits in
        other partitions. It writes `parts` different keys, `part` of them at home, by the mutations that were added
        after sequence `since`; None: by no mutation."""
        count = 0 if since is None else self.last_seq - since
        record = DecisionRecord(attempt, tuple(of), self.time_ms, part, parts, count)
        decision = Decision(home, self._add_of_transaction(DECISION, home, intents.encode(record)), record)
        self._changes().decisions.append(decision)
        return decision

    # docs/protocol.md Tx7
    def resolved(self, intent: Intent, *, is_committed: bool) -> int:
        """Remove an intent, and carry out its effect if it is committed. Returns the sequence of the last mutation that
        this adds. The quotas of namespaces were charged with the intent, so this charges nothing."""
        key, _, asked = intent
        is_part = is_committed and asked.is_exclusive
        count = IntentEffect(asked.effect).mutations if is_committed else 0
        record = ResolvedRecord(asked.attempt, intent.seq, is_committed, asked.parts if is_part else 0, count)
        self._add_of_transaction(RESOLVED, key, intents.encode(record))
        self._changes().resolved.append(intent)
        if count:
            self._take_effect(intent)
        return self.last_seq

    def _take_effect(self, intent: Intent) -> None:
        """Add the mutations that the intent asks for. The key's record is the one for which the intent was made."""
        key, asked = intent.key, intent.record
        replaced: Row = (b"", 0, asked.created, 0, asked.replaced_ms)
        is_put = asked.effect == IntentEffect.PUT
        meter, self.meter = self.meter, None
        try:
            if not is_put:
                self.delete(key, replaced)
            if asked.effect != IntentEffect.DELETE:
                self.put(key, asked.value, replaced if is_put and asked.created else None, asked.expires_ms)
        finally:
            self.meter = meter

    # docs/protocol.md Tx8
    def end(self, decision: Decision) -> int:
        """Remove a decision. Returns the mutation's sequence."""
        seq = self._add_of_transaction(END, decision.home, intents.encode(EndRecord(decision.attempt, decision.seq)))
        self._changes().ended.append(decision)
        return seq

    def _add_of_transaction(self, kind: int, key: bytes, contents: bytes) -> int:
        self._add(kind, key, None)
        self.transactions.append(contents)
        self.size += len(contents)
        return self.last_seq

    def _changes(self) -> TransactionChanges:
        if self.layer.transactions is None:
            self.layer.transactions = TransactionChanges()
        return self.layer.transactions

    def _add(self, kind: int, key: bytes, old: Row | None) -> None:
        if old is not None and old[4]:
            kind |= REPLACES
            self.replaced_ms.append(old[4])
        self.kinds.append(kind)
        self.keys.append(key)
        self.size += len(key)
        self.data_keys.append(data_key(self.hash, key))

    def _set(self, key: bytes, row: Row | None) -> None:
        if self._undo is not None:
            self._undo.append((key, self.layer.rows.get(key, UNTOUCHED)))
        self.layer.rows[key] = row

    # ── request ids ───────────────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, request: RequestId, hash_of_key: int, result: Result, touched: bytes = b"") -> None:
        """Record that the last mutation added completes the request with `result`."""
        client, sequence, first_unacked, seen_ms = request
        columns = self._columns()
        number = self._number_of(columns, client, first_unacked, seen_ms)
        mutation = len(self.keys) - 1
        count = len(columns.sequences)
        columns.client.append(number)
        columns.sequences.append(sequence)
        columns.hashes.append(hash_of_key)
        columns.mutations.append(mutation)
        if result.__class__ is not int or result != self.first_seq + mutation:
            encoded = encode_result(result)
            self.size += len(encoded)
            self.layer.results_bytes += len(encoded)
            _set_at(columns.results, count, encoded)
        if touched:
            _set_at(columns.touched, count, touched)
        layer = self.layer
        layer.requests[client, sequence, hash_of_key] = result
        layer.counts[client] = layer.counts.get(client, 0) + 1
        layer.results_bytes += BYTES_PER_RESULT + len(touched)

    def answer_all(self, asked: RequestColumns, versions: Sequence[int]) -> None:
        """Record new request ids of puts that were just added as `versions`. The versions are the requests' results."""
        clients, places, sequences, first_unacked, seen_ms, hashes = asked
        columns, layer, count = self._columns(), self.layer, len(clients)
        if asked.is_of_one:
            client = clients[0]
            columns.client += repeat(self._number_of(columns, client, max(first_unacked), max(seen_ms)), count)
            layer.counts[client] = layer.counts.get(client, 0) + count
        else:
            columns.client += map(self._number_of, repeat(columns), clients, first_unacked, seen_ms)
            for client in clients:
                layer.counts[client] = layer.counts.get(client, 0) + 1
        if count < len(versions):
            versions = [versions[place] for place in places]
        columns.sequences += sequences
        columns.hashes += hashes
        columns.mutations += [version - self.first_seq for version in versions]
        layer.requests.update(zip(zip(clients, sequences, hashes, strict=True), versions, strict=True))
        layer.results_bytes += BYTES_PER_RESULT * count

    def _columns(self) -> Requests:
        if self._requests is None:
            self._requests = Requests([], [], [], [], [], [], [], [], [])
        return self._requests

    def _number_of(self, columns: Requests, client: bytes, first_unacked: int, seen_ms: int) -> int:
        """Return the client's number in the columns, and raise the client's values there to the largest that its
        requests carry."""
        number = self._clients.get(client)
        if number is None:
            number = self._clients[client] = len(self._clients)
            columns.clients.append(client)
            columns.first_unacked.append(first_unacked)
            columns.seen_ms.append(seen_ms)
            self.layer.first_unacked[client] = first_unacked
            self.layer.results_bytes += BYTES_PER_CLIENT
        else:
            if first_unacked > columns.first_unacked[number]:
                columns.first_unacked[number] = self.layer.first_unacked[client] = first_unacked
            if seen_ms > columns.seen_ms[number]:
                columns.seen_ms[number] = seen_ms
        return number

    # ── atomic batches ────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, *, is_atomic: bool = True) -> DraftSavepoint:
        """Begin a batch and return its savepoint for `keep` and `undo`. Batches do not nest. If `is_atomic`, quotas
        are checked once for the whole batch, in `keep`, rather than for each write."""
        assert self._undo is None, "a batch within a batch"
        self._undo = []
        expires, replaced = len(self.expires_ms), len(self.replaced_ms)
        metered = 0 if self.meter is None else self.meter.begin(is_atomic=is_atomic)
        changes = self.layer.transactions
        return DraftSavepoint(
            len(self.keys),
            len(self.values),
            len(self.ages),
            expires,
            replaced,
            self.size,
            metered,
            _UNCHANGED if changes is None else changes.counts,
        )

    def keep(self, mark: DraftSavepoint) -> None:
        """Finish the batch that began at `mark`. Raises QuotaExceeded if the batch as a whole exceeds a quota; the
        caller must then undo it."""
        if self.meter is not None:
            self.meter.end(mark.metered)
        self._undo = None

    def undo(self, mark: DraftSavepoint) -> None:
        """Undo everything that was added since `mark`."""
        assert self._undo is not None, "undone without a beginning"
        for key, row in reversed(self._undo):
            if row is UNTOUCHED:
                del self.layer.rows[key]
            else:
                self.layer.rows[key] = row
        self._undo = None
        del self.kinds[mark.mutations :], self.keys[mark.mutations :], self.data_keys[mark.mutations :]
        del self.values[mark.values :], self.ages[mark.ages :]
        del self.expires_ms[mark.expires :], self.replaced_ms[mark.replaced :]
        self.size = mark.size
        if self.layer.transactions is not None:
            self.layer.transactions.cut(mark.transactions)
            del self.transactions[sum(mark.transactions) :]
        if self.meter is not None:
            self.meter.undo(mark.metered)

    # ── the entry ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def entry(self, partition: PartitionId, epoch: int) -> Entry:
        """Return the finished entry. The draft must not be empty."""
        assert self.keys, "an entry without mutations"
        made = Entry(partition, epoch, self.first_seq, self.time_ms, bytes(self.kinds))
        made.keys, made.values, made.ages = self.keys, self.values, self.ages
        made.expires_ms, made.replaced_ms = self.expires_ms, self.replaced_ms
        made.transactions = self.transactions
        columns = self._requests
        if columns is not None:
            for column in (columns.results, columns.touched):
                if column:
                    column += [b""] * (len(columns.sequences) - len(column))
            made.requests = columns
        return made


def _set_at(column: list[bytes], index: int, value: bytes) -> None:
    """Append `value` as element `index`, filling the column with empty values up to there."""
    column += [b""] * (index - len(column))
    column.append(value)
