"""A partition's state: the result of applying the partition's log to an engine. Decides only, and is deterministic: it
uses no clock and no randomness.

    state' = apply(state, entry)

An entry's effects are applied without reading, in one engine batch together with the entry's position. After a crash,
the engine therefore contains the state exactly as it was after some entry. Only acknowledged entries are applied
(docs/protocol.md, State).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from crc32c import crc32c

from kvstore import versions
from kvstore.errors import ClusterTooNew, Corrupted, StoreError
from kvstore.partition.config import PartitionConfig
from kvstore.partition.state import entry as entries
from kvstore.partition.state import move_records, rows
from kvstore.partition.state.checksum import (
    CHECKS_REMEMBERED,
    ENCODING,
    Doubt,
    decode_checks,
    encode_checks,
    fold_import,
)
from kvstore.partition.state.commands import Record
from kvstore.partition.state.decisions import Decisions
from kvstore.partition.state.digest import RangeDigest
from kvstore.partition.state.effects import (
    apply_record,
    change,
    check_transactions,
    index_transactions,
    load_transactions,
    transaction_row_keys,
)
from kvstore.partition.state.engine import Engine, EngineBatch
from kvstore.partition.state.entry import Entry, EntryKind
from kvstore.partition.state.intents import Intents
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.move_records import ImportRows, LogVersion, MoveRecord, Own, Release
from kvstore.partition.state.ownership import Ownership
from kvstore.partition.state.pinned_views import PinnedViews
from kvstore.partition.state.retry_table import FORGOTTEN_PER_ENTRY_MAX, RetryTable, decode_row
from kvstore.partition.state.rows import NOTHING_REPORTED, ReportedDifference, data_key, data_keys_of, retry_key
from kvstore.ring.hashing import KeyHash
from kvstore.types import PartitionId, Position, Seq, ServerId
from kvstore.wal.ports import LogEntry

CRCS_REMEMBERED = 64
"""Number of entries whose CRC a check record may still name. More than are ever in flight."""


class ReplicaState:
    """The state of one partition on one replica. Its attributes hold what can be known without reading the engine."""

    def __init__(
        self,
        partition: PartitionId,
        engine: Engine,
        config: PartitionConfig,
        hash: KeyHash,
        can: int = versions.LATEST,
    ) -> None:
        """`hash` is the cluster's key hash, and `can` the highest cluster version that this server supports. Raises
        WrittenByNewer if the engine's rows have an unknown format, and ClusterTooNew if the log was written under a
        higher cluster version."""
        self.can = can
        self.hash = hash
        self.log_version = versions.FIRST
        """The cluster version under which the log is written, according to the applied entries."""
        self.partition = partition
        self.engine = engine
        self._config = config
        self.position: Position | None = None
        """The last entry applied."""
        self.seq = Seq(0)
        """The last mutation applied."""
        self.durable_seq = Seq(0)
        """The last mutation that a crash cannot undo."""
        self.installed_bytes = 0
        """Bytes of another replica's state that have come since the last installation began."""
        self.epoch = 0
        self.record_time_ms = 0
        self.key_count = 0
        """Number of keys in the owned tokens. Keys past their expiry count until their delete is applied."""
        self.crc = 0
        """Checksum of all effects so far."""
        self.released = False
        """True if the last entry applied is a release record."""
        self.doubt: Doubt | None = None
        """The difference from the log writer's state at the last check; None if they agree."""
        self.on_doubt: Callable[[], None] = lambda: None
        self.is_suspect = False
        """True if this state may be damaged, so that no read may be answered from it (trials.py)."""
        self.checks: dict[Seq, int] = {}
        """This state's CRC at the last checked sequences."""
        self.origins: frozenset[ServerId] = frozenset()
        """The replicas through which this state came as a copy, until other replicas have confirmed it; empty if it
        comes from the log alone."""
        self.reported = NOTHING_REPORTED
        """A difference that another replica reported and that is not settled. Survives a restart."""
        self.replaced = 0
        """Number of times that the state started from nothing, for example before another replica's state was
        installed."""
        self.ownership = Ownership()
        """The tokens that are owned and the ranges that move."""
        self.intents = Intents()
        """The intents on owned keys (docs/protocol.md, Transactions)."""
        self.decisions = Decisions()
        """The decisions whose home keys are owned."""
        self.mark = 0
        """The highest number of a pin in the log (docs/protocol.md Tx13)."""
        self.pinned_views = PinnedViews(partition, engine, hash)
        """The views at pinned positions."""
        self._digests: list[RangeDigest] = []
        self.is_complete = True
        """False once the engine has refused a write: the attributes may be ahead of the engine until `recover`."""
        self.load()

    # ── the log's entries ─────────────────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md P1
    def apply(self, entry: LogEntry) -> None:
        """Apply the next entry of the log. An entry at or below `position` is ignored. If the entry carries a checksum
        and this state's checksum differs, `doubt` records the difference. Raises Corrupted if the entry does not
        continue this state."""
        if self.position is None or entry.position > self.position:
            self.apply_decoded(entry.position, entries.decode(entry.payload), None)

    # docs/protocol.md P3
    def apply_all(self, logged: Sequence[LogEntry]) -> None:
        """Apply the next entries of the log, in order. Adjacent entries that only change keys share one engine batch.
        If an entry is refused, all entries before it have been applied."""
        if len(logged) == 1 or self._digests:
            for each in logged:
                self.apply(each)
            return
        run: list[tuple[Position, Entry]] = []
        after = self.position
        try:
            for position, payload in logged:
                if after is not None and position <= after:
                    continue
                entry, after = entries.decode(payload), position
                if entry.keys and not (entry.control or entry.check_seq or entry.transactions):
                    run.append((position, entry))
                    continue
                before, run = run, []
                self._apply_some(before)
                self.apply_decoded(position, entry, None)
        except StoreError:
            self._apply_some(run)
            raise
        self._apply_some(run)

    def _apply_some(self, run: Sequence[tuple[Position, Entry]]) -> None:
        if len(run) > 1:
            self.apply_run(run)
        else:
            for position, entry in run:
                self.apply_decoded(position, entry, None)

    def apply_run(self, run: Sequence[tuple[Position, Entry]]) -> None:
        """Apply entries that only change keys, in one batch. If an entry is refused, either the entries before it have
        been applied or none has; the engine's position says which. No intermediate state is visible, because nothing
        reads the state during the call."""
        batch, count, crc = self.engine.batch(), self.key_count, self.crc
        position, seq, epoch, time_ms = self.position, int(self.seq), self.epoch, self.record_time_ms
        stood: list[tuple[int, int]] = []
        refused: Corrupted | None = None
        self.is_complete = False
        for at, entry in run:
            try:
                self._admit(at, entry, seq, epoch, time_ms)
            except Corrupted as error:
                refused = error
                break
            created, crc = change(batch, entry, self.hash, None, crc)
            position, seq, epoch, time_ms = at, seq + len(entry.keys), entry.epoch, entry.time_ms
            count += created
            stood.append((seq, crc))
            if entry.requests is not None or self.retries.idle:
                self._remember(batch, entry)
        if stood:
            assert position is not None
            batch.put(rows.META_KEY, rows.encode_meta(position, seq, epoch, time_ms, count, crc, False))
            self.engine.write(batch)
            self._crcs.extend(stood[:-1])
            self._set_progress(position, Seq(seq), epoch, time_ms, count, crc, False)
        self.is_complete = True
        if refused is not None:
            raise refused

    def apply_decoded(self, position: Position, entry: Entry, data_keys: list[bytes] | None) -> None:
        """Apply an entry that is already decoded. `data_keys` are the row keys of the entry's keys, if the caller has
        them."""
        self._admit(position, entry, self.seq, self.epoch, self.record_time_ms)
        checked = self._crc_at(entry.check_seq) if entry.check_seq and entry.check_encoding == ENCODING else None
        batch = self.engine.batch()
        count, crc, seq, ownership = self.key_count, self.crc, Seq(self.seq + len(entry.keys)), self.ownership
        record = None
        if entry.control:
            record = move_records.decode(entry.kinds[0], entry.control)
            changed = ownership.after(record, position, self.seq, entry.time_ms)
            ownership, last, more = apply_record(self.engine, batch, ownership, record, changed, seq)
            seq, count, data_keys = Seq(last), count + more, []
            if isinstance(record, LogVersion):
                self.admit_version(record.version, record.release)
                batch.put(rows.VERSION_KEY, rows.encode_version(max(record.version, self.log_version)))
            elif isinstance(record, MarkRecord):
                if record.number > self.mark:
                    batch.put(rows.MARK_KEY, rows.encode_mark(record.number))
            else:
                batch.put(rows.OWNERSHIP_KEY, ownership.encode())
            if isinstance(record, ImportRows):  # other records take no sequence by which a check could name their CRC
                data_keys, crc = record.keys, fold_import(crc, entry.control)
        elif entry.keys:
            if data_keys is None and (self._digests or entry.transactions):
                data_keys = data_keys_of(self.hash, entry.keys)
            if entry.transactions:
                check_transactions(entry, self.intents, self.decisions)
            created, crc = change(batch, entry, self.hash, data_keys, crc)
            count += created
        self.is_complete = False
        if entry.requests is not None or self.retries.idle:
            self._remember(batch, entry)
        released = entry.kinds == _RELEASE_LEAD
        epoch, time_ms = entry.epoch, entry.time_ms
        batch.put(rows.META_KEY, rows.encode_meta(position, seq, epoch, time_ms, count, crc, released))
        if checked is not None:
            self._compare(batch, entry, checked)
        if self._digests and data_keys:
            self._write_counting(batch, data_keys + transaction_row_keys(entry, data_keys))
        else:
            self.engine.write(batch)
        if entry.transactions or record is not None:
            self._follow_transactions(entry, record)
        self.ownership = ownership
        self._set_progress(position, seq, epoch, time_ms, count, crc, released)
        self.is_complete = True
        if checked is not None and self.doubt is not None:
            self.on_doubt()  # docs/protocol.md, P5 and P35
        if record is not None:
            self._follow_record(position, entry)

    def _follow_record(self, position: Position, entry: Entry) -> None:
        """Carry out what a record about the log itself changes outside of the engine."""
        if entry.kinds == _LOG_VERSION:
            self.log_version = rows.version_of(self.engine.get(rows.VERSION_KEY))
        elif entry.kinds == _MARK:
            self._mark(position, entry)

    # docs/protocol.md Tx14
    def _follow_transactions(self, entry: Entry, record: MoveRecord | None) -> None:
        """Carry out in the indexes what the entry, which may be a record of a move, has changed in the rows of intents
        and decisions. `ownership` is the ownership before the entry."""
        if entry.transactions:
            index_transactions(entry, self.intents, self.decisions)
        elif isinstance(record, Own):
            imported = self.ownership.import_of(record.move)
            assert imported is not None
            load_transactions(self.engine, [imported.span], self.intents, self.decisions)
        elif isinstance(record, Release):
            frozen = self.ownership.frozen_by(record.move)
            assert frozen is not None
            for intent in self.intents.within(self.hash, frozen.span):
                self.intents.remove(*intent.name)
            for decision in self.decisions.within(self.hash, frozen.span):
                self.decisions.remove(decision.attempt)

    def _mark(self, position: Position, entry: Entry) -> None:
        mark = move_records.decode(EntryKind.MARK, entry.control)
        assert isinstance(mark, MarkRecord)
        self.mark = max(self.mark, mark.number)
        self.pinned_views.apply(
            mark,
            position=position,
            seq=self.seq,
            time_ms=entry.time_ms,
            owned=self.ownership.owned,
            records=self.key_count,
            intents=[each for each in self.intents.exclusive.values() if each.record.effect],
            decisions=list(self.decisions),
        )

    # docs/protocol.md V4
    def admit_version(self, version: int, release: str = "") -> None:
        """Raise ClusterTooNew if this build cannot read logs of cluster version `version`. `release` is the oldest
        release that can, for the message."""
        if version > self.can:
            raise ClusterTooNew(
                f"{self.partition}: its log is written by cluster version {version}, this server supports {self.can}: "
                f"install {versions.build_for(version, release)}"
            )

    def _write_counting(self, batch: EngineBatch, data_keys: list[bytes]) -> None:
        concerned = [(digest, digest.concerned(data_keys)) for digest in self._digests]
        before = [self.engine.multi_get(keys) for _, keys in concerned]
        self.engine.write(batch)
        for (digest, keys), old in zip(concerned, before, strict=True):
            digest.change(keys, old, self.engine.multi_get(keys))

    # docs/protocol.md P3
    def _admit(self, position: Position, entry: Entry, seq: int, epoch: int, time_ms: int) -> None:
        """Raise Corrupted unless `entry` continues a state at this sequence, epoch and record time."""
        if entry.partition != self.partition:
            raise Corrupted(f"the log of {self.partition} contains entry {position} of {entry.partition}")
        if entry.first_seq != seq + 1:
            raise Corrupted(f"{self.partition}: entry {position} begins at {entry.first_seq}, the state is at {seq}")
        if entry.epoch < epoch or entry.time_ms < time_ms:
            raise Corrupted(
                f"{self.partition}: entry {position} goes back from epoch {epoch}, time {time_ms} "
                f"to epoch {entry.epoch}, time {entry.time_ms}"
            )

    # docs/protocol.md P5
    def _crc_at(self, seq: int) -> int | None:
        """Return the CRC after the entry that ended at `seq`; None if that is too long ago. Raises Corrupted if no
        entry ended there."""
        for known_seq, known_crc in reversed(self._crcs):
            if known_seq == seq:
                return known_crc
            if known_seq < seq:
                raise Corrupted(f"{self.partition}: the log has a check at {seq}, where no entry ended")
        return None

    def _compare(self, batch: EngineBatch, entry: Entry, mine: int) -> None:
        """Record this state's checksum at a check of the log, and whether it differs (docs/protocol.md, P5)."""
        seq = Seq(entry.check_seq)
        self.doubt = Doubt(seq, mine, entry.check_crc) if mine != entry.check_crc else None
        self.checks[seq] = mine
        while len(self.checks) > CHECKS_REMEMBERED:
            del self.checks[next(iter(self.checks))]
        batch.put(rows.CHECKS_KEY, encode_checks(self.doubt, self.checks))

    def clear_doubt(self) -> None:
        """Clear the doubt, because a majority agrees with this state and not with the log's check."""
        self.doubt = None
        batch = self.engine.batch()
        batch.put(rows.CHECKS_KEY, encode_checks(None, self.checks))
        with suppress(OSError):  # doubted again after a restart, and cleared again
            self.engine.write(batch)

    def mark_confirmed(self) -> None:
        """Mark the state as confirmed, because replicas whose states were not copied from one another agree with it
        (docs/protocol.md, P35)."""
        self.origins = frozenset()
        batch = self.engine.batch()
        batch.delete(rows.ORIGINS_KEY)
        with suppress(OSError):  # confirmed again after a restart
            self.engine.write(batch)

    def keep_reported(self, reported: ReportedDifference) -> None:
        """Store a difference that another replica has reported, so that it survives a restart. It becomes durable with
        the next flush. If the write fails, the attribute keeps its old value and the caller retries."""
        if reported == self.reported:
            return
        batch = self.engine.batch()
        if reported.since:
            batch.put(rows.REPORTED_KEY, rows.encode_reported(reported))
        else:
            batch.delete(rows.REPORTED_KEY)
        with suppress(OSError):
            self.engine.write(batch)
            self.reported = reported
            self.submit_flush(lambda _: None)  # the next flush, due in seconds, finds what fails here

    def _remember(self, batch: EngineBatch, entry: Entry) -> None:
        """Store the entry's request ids in the retry table and its rows."""
        retries = self.retries
        dropped = self._forget(batch, entry.time_ms)
        if entry.requests is not None:
            # Imported request ids keep their own times, which they carry. With the time of the import, clients would
            # never be forgotten while moves follow one another (docs/protocol.md, M4).
            asked_ms = 0 if entry.control else entry.time_ms
            dropped += retries.apply(entry.first_seq, asked_ms, entry.requests)
            batch.put(retry_key(entry.first_seq), retries.row(asked_ms, entry.requests))
        for row in dropped:
            batch.delete(retry_key(row))

    # docs/protocol.md P15
    def _forget(self, batch: EngineBatch, time_ms: int, most: int = FORGOTTEN_PER_ENTRY_MAX) -> list[int]:
        """Forget idle clients, and return the rows of the retry table that are no longer needed."""
        retries, before_ms = self.retries, self.retries.forgotten_ms
        dropped = retries.forget(time_ms, most) if retries.idle else []
        if retries.forgotten_ms != before_ms:
            batch.put(rows.FORGOTTEN_KEY, rows.encode_forgotten(retries.forgotten_ms))
        return dropped

    def _set_progress(
        self,
        position: Position | None,
        seq: Seq,
        epoch: int,
        record_time_ms: int,
        key_count: int,
        crc: int,
        released: bool,
    ) -> None:
        self.position, self.seq, self.epoch, self.record_time_ms = position, seq, epoch, record_time_ms
        self.key_count, self.crc, self.released = key_count, crc, released
        self._crcs.append((seq, crc))

    # ── durability ────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit_flush(self, done: Callable[[OSError | None], None]) -> None:
        """Make all applied entries durable, without blocking the event loop. Calls `done` on the event loop after
        `durable_seq` has advanced, or with the error."""
        seq, life = self.seq, self._life

        def flushed(error: OSError | None) -> None:
            if error is None and life == self._life:
                self.durable_seq = max(self.durable_seq, seq)
            done(error)

        self.engine.flush(flushed)

    def load(self) -> None:
        """Set the attributes from the engine. If the engine has no meta row, its rows are left over from an unfinished
        import and are removed."""
        self._life = getattr(self, "_life", 0) + 1
        self._digests.clear()
        self.pinned_views.close()
        self._crcs: deque[tuple[int, int]] = deque(maxlen=CRCS_REMEMBERED)
        config = self._config
        self.retries = RetryTable(
            window_ms=config.retry_window_ms,
            bytes_max=config.retry_bytes_max,
            results_max=config.retry_results_max,
            forgotten_ms=rows.forgotten_of(self.engine.get(rows.FORGOTTEN_KEY)),
        )
        row = self.engine.get(rows.META_KEY)
        if row is None:
            if next(self.engine.iterate(*rows.EVERYTHING), None) is not None:
                self.engine.clear()
            self.replaced += 1
            self._set_progress(None, Seq(0), 0, 0, 0, 0, False)
            self.ownership = Ownership()
            self.intents, self.decisions = Intents(), Decisions()
        else:
            ownership = self.engine.get(rows.OWNERSHIP_KEY)
            self.ownership = Ownership() if ownership is None else Ownership.decode(ownership)
            self._set_progress(*rows.meta_of(row))
            self._load_retries()
            self.intents, self.decisions = Intents(), Decisions()
            load_transactions(self.engine, self.ownership.owned.spans, self.intents, self.decisions)
        self.mark = rows.mark_of(self.engine.get(rows.MARK_KEY))
        self.log_version = rows.version_of(self.engine.get(rows.VERSION_KEY))
        self.admit_version(self.log_version)
        self.doubt, self.checks = decode_checks(self.engine.get(rows.CHECKS_KEY))
        self.origins = rows.origins_of(self.engine.get(rows.ORIGINS_KEY))
        self.reported = rows.reported_of(self.engine.get(rows.REPORTED_KEY))
        self.durable_seq = self.seq
        self.is_complete = True

    def recover(self) -> None:
        """Set the attributes from the engine after it has refused a write. An engine that has stopped accepts writes
        again. The position may then be an earlier one, because the log still has the entries that were lost.
        `durable_seq` does not advance. Raises OSError."""
        durable_seq = self.durable_seq
        self.engine.resume()
        self.load()
        self.durable_seq = min(durable_seq, self.seq)

    def _load_retries(self) -> None:
        dropped: list[int] = []
        for key, row in self.engine.iterate(*rows.ALL_RETRY):
            time_ms, requests = decode_row(row)
            dropped += self.retries.apply(int.from_bytes(key[1:], "big"), time_ms, requests, is_reload=True)
        batch = self.engine.batch()
        dropped += self._forget(batch, self.record_time_ms, most=len(self.retries))
        for each in dropped:
            batch.delete(retry_key(each))
        self.engine.write(batch)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, key: bytes) -> Record | None:
        """Return the record of a key. Returns None if the key is absent or if its expiry is at or before this state's
        record time."""
        row = self.engine.get(data_key(self.hash, key))
        if row is None:
            return None
        record = rows.record_of(row)
        return None if 0 < record.expires_ms <= self.record_time_ms else record

    def watch(self, digest: RangeDigest) -> None:
        """Report every change to the digest, in the same step as the change, until `unwatch` is called or the state is
        replaced or emptied."""
        self._digests.append(digest)

    def unwatch(self, digest: RangeDigest) -> None:
        """Stop reporting changes to the digest. Does nothing if it is not watched."""
        if digest in self._digests:
            self._digests.remove(digest)

    def fingerprint(self) -> int:
        """Return the CRC32C of all rows except the meta row and request ids, to compare replicas at the same position.
        Reads the whole engine, so use it only in tests and checks."""
        crc = 0
        its_own = ((rows.OWNERSHIP_KEY, b"u"), (rows.VERSION_KEY, b"w"), (rows.MARK_KEY, b"q"))
        transactions = rows.ALL_INTENTS, rows.ALL_DECISIONS
        for begin, end in (rows.ALL_DATA, rows.ALL_ORDER, rows.ALL_EXPIRY, *its_own, *transactions):
            for key, value in self.engine.iterate(begin, end):
                crc = crc32c(value, crc32c(key, crc))
        return crc


_RELEASE_LEAD = bytes((EntryKind.RELEASE_LEAD,))
_MARK = bytes((EntryKind.MARK,))
_LOG_VERSION = bytes((EntryKind.LOG_VERSION,))
