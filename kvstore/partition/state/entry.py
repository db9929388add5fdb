"""Converts log entries to and from their payload bytes. Decides only.

An entry carries effects, never requests: it contains what each mutation changed, so that a replica can apply it without
reading. The message (kvstore/proto/entry.proto) stores mutations in columns; docs/reference/formats.md (Entry payload)
describes every byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from msgspec import Struct

from kvstore.errors import Corrupted, WrittenByNewer
from kvstore.partition.state.checksum import ENCODING
from kvstore.proto import entry_pb2
from kvstore.types import PartitionId, Seq

FORMAT = 1
FIRST_ENCODING = 1
"""The checksum encoding of an entry that names none."""


class EntryKind(IntEnum):
    """Kinds of mutations and records. DO NOT CHANGE: these numbers are in the log. Kinds below 16 are mutations; kinds
    from 16 on are records, each alone in its entry."""

    CREATE = 1
    """A put of a key that was absent."""
    OVERWRITE = 2
    DELETE = 3
    """A delete of a key that was present, live or past its expiry."""
    NOTE = 4
    """Changes nothing. Gives a sequence to a request whose result must be remembered."""

    # Mutations of transactions over several partitions: intents.py, decisions.py. Log version 3 and later.
    INTENT = 5
    """Adds an intent on the key."""
    DECISION = 6
    """Commits the transaction whose home key this is."""
    RESOLVED = 7
    """Removes an intent on the key."""
    END = 8
    """Removes the decision of a transaction whose home key this is."""

    EPOCH_START = 16
    RELEASE_LEAD = 17
    """The leader has answered its last read. As the end of the log this record spares the next leader the wait."""
    EMPTY = 18
    """Renews the lease."""

    # Records of moves of key ranges: move_records.py.
    IMPORT_BEGIN = 20
    IMPORT = 21
    """The only record that takes a sequence, because request ids may come with it."""
    IMPORT_END = 22
    FREEZE = 23
    UNFREEZE = 24
    RELEASE_RANGE = 25
    OWN = 26
    DROP = 27

    MARK = 28
    """A record of pins: marks.py."""

    LOG_VERSION = 29
    """From this record on, the log is written by another cluster version (move_records.py). Version 1 does not know
    this kind."""


EXPIRES = 0x20
"""Flag on a put's kind: the record has an expiry."""
REPLACES = 0x40
"""Flag on a mutation's kind: the record that it replaces or deletes had an expiry."""
KIND = 0x1F

CREATE, OVERWRITE, DELETE, NOTE = (
    int(EntryKind.CREATE),
    int(EntryKind.OVERWRITE),
    int(EntryKind.DELETE),
    int(EntryKind.NOTE),
)
INTENT, DECISION, RESOLVED, END = (
    int(EntryKind.INTENT),
    int(EntryKind.DECISION),
    int(EntryKind.RESOLVED),
    int(EntryKind.END),
)
OF_TRANSACTIONS = frozenset((INTENT, DECISION, RESOLVED, END))
"""Kinds of mutations that change intents or decisions, and no record."""
_MUTATIONS = frozenset((CREATE, OVERWRITE, DELETE, NOTE)) | OF_TRANSACTIONS
_PLAIN = bytes((CREATE, OVERWRITE))
SINGLE = {bytes((CREATE,)): 0, bytes((OVERWRITE,)): 1}
"""Kinds of an entry that is one put without expiries, with the number of ages that it has."""
_CONTROL = frozenset(kind for kind in EntryKind if kind >= EntryKind.EPOCH_START and kind is not EntryKind.IMPORT)
_IMPORT = bytes((EntryKind.IMPORT,))


class Mutation(NamedTuple):
    """One mutation of an entry, for code that need not be fast."""

    kind: int
    seq: Seq
    key: bytes
    value: bytes
    """The value of a put; the contents of a mutation of a transaction; empty for other mutations."""
    created: int
    expires_ms: int
    replaced_ms: int


@dataclass(slots=True)
class Requests:
    """The request ids of an entry, in columns. The columns `clients` to `seen_ms` have one element per client; the
    others have one element per request."""

    clients: list[bytes]
    first_unacked: list[int]
    seen_ms: list[int]
    client: list[int]
    """Index into `clients`."""
    sequences: list[int]
    hashes: list[int]
    mutations: list[int]
    """Index of the mutation that completes the request."""
    results: list[bytes]
    """The encoded results. An empty element means that the result is the mutation's sequence. The list itself is empty
    if all its elements would be."""
    touched: list[bytes]
    """The tokens of a batch's keys. The list itself is empty if all its elements would be."""
    message: entry_pb2.Requests | None = field(default=None, compare=False, repr=False)
    """The encoded columns, cached after the first encoding."""


class Entry(Struct, eq=False):
    """One decoded entry of the log."""

    partition: PartitionId
    epoch: int
    first_seq: int
    time_ms: int
    kinds: bytes
    """One byte per mutation (kind and flags), or a single byte for a control record."""
    keys: list[bytes] = []
    values: list[bytes] = []
    """Values of the puts."""
    ages: list[int] = []
    """For each put that overwrites a key: the put's sequence minus the sequence that created the key."""
    expires_ms: list[int] = []
    replaced_ms: list[int] = []
    transactions: list[bytes] = []
    """The contents of each INTENT, DECISION, RESOLVED and END (intents.py, decisions.py)."""
    requests: Requests | None = None
    check_seq: int = 0
    check_crc: int = 0
    """The writer's rolling CRC at `check_seq`; meaningless if `check_seq` is 0."""
    check_encoding: int = ENCODING
    """The encoding by which the CRC was computed."""
    control: bytes = b""
    """The contents of a control record (move_records.py)."""

    @property
    def is_control(self) -> bool:
        """True if the entry is a control record."""
        return len(self.kinds) == 1 and self.kinds[0] & KIND >= 16

    @property
    def last_seq(self) -> Seq:
        """The sequence of the last mutation. For a control record, the sequence before the record."""
        return Seq(self.first_seq + len(self.keys) - 1)

    @property
    def is_plain(self) -> bool:
        """True if all mutations are puts without expiries."""
        return not self.kinds.translate(None, _PLAIN)

    def mutations(self) -> Iterator[Mutation]:
        """Yield the mutations one by one."""
        values, ages = iter(self.values), iter(self.ages)
        expires, replaced = iter(self.expires_ms), iter(self.replaced_ms)
        transactions = iter(self.transactions)
        for seq, (flags, key) in enumerate(zip(self.kinds, self.keys, strict=True), self.first_seq):
            kind = flags & KIND
            is_put = kind in (CREATE, OVERWRITE)
            yield Mutation(
                kind,
                Seq(seq),
                key,
                next(values) if is_put else next(transactions) if kind in OF_TRANSACTIONS else b"",
                seq - next(ages) if kind == OVERWRITE else seq,
                next(expires) if flags & EXPIRES else 0,
                next(replaced) if flags & REPLACES else 0,
            )

    def encode(self) -> bytes:
        """Return the payload of the entry."""
        message = entry_pb2.Entry(
            format=FORMAT,
            partition=self.partition,
            epoch=self.epoch,
            first_seq=self.first_seq,
            time_ms=self.time_ms,
            kinds=self.kinds,
            keys=self.keys,
            values=self.values,
            ages=self.ages,
        )
        if self.expires_ms:
            message.expires_ms.extend(self.expires_ms)
        if self.replaced_ms:
            message.replaced_ms.extend(self.replaced_ms)
        if self.transactions:
            message.transactions.extend(self.transactions)
        if self.requests is not None:
            self.requests.message = requests_message(self.requests)
            message.requests.CopyFrom(self.requests.message)
        if self.check_seq:
            message.check.seq, message.check.crc = self.check_seq, self.check_crc
            if self.check_encoding != FIRST_ENCODING:
                message.check.encoding = self.check_encoding
        if self.control:
            message.control = self.control
        return message.SerializeToString()


def control(
    partition: PartitionId, epoch: int, next_seq: int, time_ms: int, kind: EntryKind, record: bytes = b""
) -> Entry:
    """Return an entry that consists of one control record."""
    entry = Entry(partition, epoch, next_seq, time_ms, bytes((kind,)))
    entry.control = record
    if kind is EntryKind.IMPORT:
        entry.keys = [b""]
    return entry


def decode(payload: bytes) -> Entry:
    """Decode an entry. Fields that this release does not know are ignored (docs/protocol.md V5). Raises Corrupted if
    the payload is malformed, and WrittenByNewer if its format, or a kind or flag in it, is unknown."""
    message = _parse(payload)
    if message.format != FORMAT:
        raise WrittenByNewer(f"entry payload of format {message.format}, this program reads format {FORMAT}")
    entry = Entry(PartitionId(message.partition), message.epoch, message.first_seq, message.time_ms, message.kinds)
    entry.keys, entry.values, entry.ages = list(message.keys), list(message.values), list(message.ages)
    if message.expires_ms or message.replaced_ms:
        entry.expires_ms, entry.replaced_ms = list(message.expires_ms), list(message.replaced_ms)
    if message.HasField("requests"):
        entry.requests = requests_of(message.requests)
    entry.control = message.control
    if message.HasField("check"):
        entry.check_seq, entry.check_crc = message.check.seq, message.check.crc
        entry.check_encoding = message.check.encoding or FIRST_ENCODING
    _check_columns(entry, message)
    return entry


def is_release(payload: bytes) -> bool:
    """Return True if the payload is a leader's release record. Returns False if the payload is unreadable, so that the
    next leader waits out the lease."""
    try:
        message = _parse(payload)
    except Corrupted:
        return False
    return message.format == FORMAT and message.kinds == bytes((EntryKind.RELEASE_LEAD,))


def _parse(payload: bytes) -> entry_pb2.Entry:
    try:
        return entry_pb2.Entry.FromString(payload)
    except DecodeError as error:
        raise Corrupted(f"entry payload of {len(payload)} bytes cannot be decoded: {error}") from error


def _check_columns(entry: Entry, message: entry_pb2.Entry) -> None:
    """Raise Corrupted unless the columns are consistent. Sets the column of transactions, which few entries have."""
    kinds = entry.kinds
    is_bare = not (entry.expires_ms or entry.replaced_ms or entry.control or entry.requests)
    ages = entry.ages
    is_single = is_bare and kinds in SINGLE and len(entry.keys) == len(entry.values) == 1 and len(ages) == SINGLE[kinds]
    if is_single and not (ages and ages[0] >= entry.first_seq):
        return  # the common case
    if entry.is_plain:
        mutations = puts = len(kinds)
        overwrites = kinds.count(OVERWRITE)
        expiring = replacing = 0
    elif entry.is_control and kinds[0] in _CONTROL:
        puts = overwrites = expiring = replacing = mutations = 0
    elif kinds == _IMPORT:
        puts = overwrites = expiring = replacing = 0
        mutations = 1
    else:
        plain = [flags & KIND for flags in kinds]
        unknown = any(flags & ~(KIND | EXPIRES | REPLACES) for flags in kinds)
        if unknown or not set(plain) <= _MUTATIONS:
            raise WrittenByNewer(
                f"entry at sequence {entry.first_seq} has kinds {kinds.hex()}, which this program does not know"
            )
        mutations, overwrites = len(kinds), plain.count(OVERWRITE)
        puts = overwrites + plain.count(CREATE)
        expiring = sum(flags & EXPIRES != 0 for flags in kinds)
        replacing = sum(flags & REPLACES != 0 for flags in kinds)
        if not OF_TRANSACTIONS.isdisjoint(plain):
            entry.transactions = list(message.transactions)
            _check_transactions(entry, plain)
    want = (mutations, puts, overwrites, expiring, replacing)
    columns: tuple[list[Any], ...] = (entry.keys, entry.values, entry.ages, entry.expires_ms, entry.replaced_ms)
    got = tuple(map(len, columns))
    if entry.control and not entry.is_control:
        raise Corrupted(f"entry at sequence {entry.first_seq}: it has mutations and the contents of a control record")
    if entry.requests is not None and max(entry.requests.mutations, default=0) >= mutations:
        raise Corrupted(f"entry at sequence {entry.first_seq}: it has a request id of an absent mutation")
    if want != got:
        raise Corrupted(f"entry at sequence {entry.first_seq}: expected columns of {want} elements, got {got}")
    if ages and max(ages) >= entry.first_seq:
        _check_ages(entry)


def _check_transactions(entry: Entry, plain: list[int]) -> None:
    """Raise Corrupted unless each mutation of a transaction has contents and no flag."""
    wanted = sum(kind in OF_TRANSACTIONS for kind in plain)
    if len(entry.transactions) != wanted:
        raise Corrupted(
            f"entry at sequence {entry.first_seq}: expected the contents of {wanted} mutations of transactions, "
            f"got {len(entry.transactions)}"
        )
    if any(flags != kind and kind in OF_TRANSACTIONS for flags, kind in zip(entry.kinds, plain, strict=True)):
        raise Corrupted(f"entry at sequence {entry.first_seq}: a mutation of a transaction has flags")


def _check_ages(entry: Entry) -> None:
    """Raise Corrupted for a record that was created before the log's first sequence, which no row could express."""
    kept = (seq for seq, flags in enumerate(entry.kinds, entry.first_seq) if flags & KIND == OVERWRITE)
    for seq, age in zip(kept, entry.ages, strict=True):
        if age >= seq:
            raise Corrupted(f"entry at sequence {entry.first_seq}: the record at {seq} was created {age} before")


# ── request ids ───────────────────────────────────────────────────────────────────────────────────────────────────────


def requests_message(requests: Requests) -> entry_pb2.Requests:
    """Encode the columns as a message. Fields that can be derived from others are omitted."""
    count = len(requests.sequences)
    message = entry_pb2.Requests(
        clients=requests.clients,
        first_unacked=requests.first_unacked,
        seen_ms=requests.seen_ms,
        sequences=requests.sequences,
        hashes=requests.hashes,
        results=requests.results,
        touched=requests.touched,
    )
    if len(requests.clients) > 1:
        message.client.extend(requests.client)
    if requests.mutations != list(range(count)):
        message.mutations.extend(requests.mutations)
    return message


def requests_of(message: entry_pb2.Requests) -> Requests:
    """Decode the columns of a message. Raises Corrupted if they are inconsistent."""
    sequences = list(message.sequences)
    count = len(sequences)
    requests = Requests(
        list(message.clients),
        list(message.first_unacked),
        list(message.seen_ms),
        list(message.client) or [0] * count,
        sequences,
        list(message.hashes),
        list(message.mutations) or list(range(count)),
        list(message.results),
        list(message.touched),
        message,
    )
    clients = len(requests.clients)
    fits = clients == len(requests.first_unacked) == len(requests.seen_ms)
    fits &= count == len(requests.client) == len(requests.hashes) == len(requests.mutations)
    fits &= len(requests.results) in (0, count) and len(requests.touched) in (0, count)
    if not fits or (count and max(requests.client) >= clients):
        raise Corrupted(f"expected request ids in columns of equal length, got {count} requests of {clients} clients")
    return requests
