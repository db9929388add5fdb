"""Builds the entries of a log, and the plain dict that a state must equal after them."""

from random import Random

from kvstore.partition.config import PartitionConfig
from kvstore.partition.state import rows
from kvstore.partition.state.commands import Record, RequestId
from kvstore.partition.state.engine import Engine
from kvstore.partition.state.entry import (
    CREATE,
    DELETE,
    EXPIRES,
    NOTE,
    OVERWRITE,
    REPLACES,
    Entry,
    EntryKind,
    Requests,
    control,
)
from kvstore.partition.state.retry_table import key_hash
from kvstore.partition.state.state import ReplicaState
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from kvstore.wal.ports import LogEntry
from tests.ring import rings

P1 = PartitionId("p1")
TIME_MS = 1_700_000_000_000
CONFIG = PartitionConfig(retry_window_ms=5_000)


def state_over(engine: Engine, config: PartitionConfig = CONFIG) -> ReplicaState:
    return ReplicaState(P1, engine, config, rings.key_hash)


def all_records(state: ReplicaState) -> dict[bytes, Record]:
    """Return all records, including expired ones."""
    return {rows.key_of_data(key): rows.record_of(row) for key, row in state.engine.iterate(*rows.ALL_DATA)}


def check_indexes(state: ReplicaState) -> None:
    """Assert that the state's indexes and counts agree with its records, and its request ids with the retry table."""
    records = all_records(state)
    assert state.key_count == len(records)
    assert [key[1:] for key, _ in state.engine.iterate(*rows.ALL_ORDER)] == sorted(records)
    expiries = sorted(rows.expiry_key(record.expires_ms, key) for key, record in records.items() if record.expires_ms)
    assert [key for key, _ in state.engine.iterate(*rows.ALL_EXPIRY)] == expiries
    assert [int.from_bytes(key[1:], "big") for key, _ in state.engine.iterate(*rows.ALL_RETRY)] == state.retries.rows()
    state.retries.check()


class Writer:
    """Writes the entries that a leader would write, from a seed. `log` has the entries, `model` the resulting state."""

    def __init__(self, seed: int, keys: int = 20, *, remembers_models: bool = True) -> None:
        self.random = Random(seed)
        self.log: list[LogEntry] = []
        self.model: dict[bytes, Record] = {}
        self.models: list[dict[bytes, Record]] = [{}]
        """The model after each entry."""
        self.epoch, self.seq, self.time_ms = 1, 0, TIME_MS
        self.clients = [bytes((number,)) * 16 for number in range(3)]
        self.sent = [1, 1, 1]
        self.unacked = [1, 1, 1]
        self.keys = keys
        self.remembers_models = remembers_models
        self.requests: list[tuple[RequestId, int, int | bytes]] = []
        """Every request id ever logged, with the hash of its key and its result."""

    def add(self, entry: Entry) -> LogEntry:
        logged = LogEntry(Position(LedgerId(1 + self.epoch), EntryId(len(self.log))), entry.encode())
        self.log.append(logged)
        if self.remembers_models:
            self.models.append(dict(self.model))
        return logged

    def control(self, kind: EntryKind) -> LogEntry:
        return self.add(control(P1, self.epoch, self.seq + 1, self.time_ms, kind))

    def put(self, **values: str) -> LogEntry:
        entry = self._begin()
        for key, value in values.items():
            self._put(entry, key.encode(), value.encode(), 0)
        return self.add(entry)

    def delete(self, *keys: str) -> LogEntry:
        entry = self._begin()
        for key in keys:
            self._delete(entry, key.encode())
        return self.add(entry)

    def any(self) -> LogEntry:
        """Write an entry of random mutations, some with request ids; sometimes a control record or a new epoch."""
        self.time_ms += self.random.choice((0, 1, 300, 2_000))
        roll = self.random.random()
        if roll < 0.1:
            self.epoch += self.random.randrange(2)
            return self.control(self.random.choice((EntryKind.EPOCH_START, EntryKind.EMPTY, EntryKind.RELEASE_LEAD)))
        entry = self._begin()
        requests = Requests([], [], [], [], [], [], [], [], [])
        for _ in range(self.random.randint(1, 6)):
            key = b"k%d" % self.random.randrange(self.keys)
            roll = self.random.random()
            if roll < 0.2 and key in self.model:
                self._delete(entry, key)
            elif roll < 0.25:
                self._add_kind(entry, NOTE, key)
            else:
                expires_ms = self.time_ms + self.random.randrange(1, 5000) if self.random.random() < 0.3 else 0
                self._put(entry, key, self.random.randbytes(self.random.randrange(20)), expires_ms)
            if self.random.random() < 0.5:
                self._request(entry, requests, key)
        if requests.sequences:
            if not any(requests.results):
                requests.results = []
            entry.requests = requests
        return self.add(entry)

    def _begin(self) -> Entry:
        return Entry(P1, self.epoch, self.seq + 1, self.time_ms, b"")

    def _add_kind(self, entry: Entry, kind: int, key: bytes) -> None:
        self.seq += 1
        entry.kinds += bytes((kind,))
        entry.keys.append(key)

    def _replaced(self, entry: Entry, key: bytes) -> int:
        old = self.model.get(key)
        if old is None or not old.expires_ms:
            return 0
        entry.replaced_ms.append(old.expires_ms)
        return REPLACES

    def _put(self, entry: Entry, key: bytes, value: bytes, expires_ms: int) -> None:
        old = self.model.get(key)
        flags = (EXPIRES if expires_ms else 0) | self._replaced(entry, key)
        self._add_kind(entry, (OVERWRITE if old else CREATE) | flags, key)
        entry.values.append(value)
        created = old.created if old else self.seq
        if old:
            entry.ages.append(self.seq - created)
        if expires_ms:
            entry.expires_ms.append(expires_ms)
        self.model[key] = Record(value, self.seq, created, entry.time_ms, expires_ms)

    def _delete(self, entry: Entry, key: bytes) -> None:
        self._add_kind(entry, DELETE | self._replaced(entry, key), key)
        del self.model[key]

    def _request(self, entry: Entry, requests: Requests, key: bytes) -> None:
        who = self.random.randrange(3)
        self.unacked[who] = self.random.randint(self.unacked[who], self.sent[who])
        if self.clients[who] not in requests.clients:
            requests.clients.append(self.clients[who])
            requests.first_unacked.append(0)
            requests.seen_ms.append(0)
        at = requests.clients.index(self.clients[who])
        # A client's requests arrive out of order: they may carry older values than earlier ones.
        said = max(1, self.unacked[who] - self.random.randrange(3))
        requests.first_unacked[at] = max(requests.first_unacked[at], said)
        carried_ms = self.time_ms + self.random.randrange(-3000, 3000)
        requests.seen_ms[at] = max(requests.seen_ms[at], carried_ms)
        requests.client.append(at)
        requests.sequences.append(self.sent[who])
        requests.hashes.append(key_hash(rings.key_hash, key))
        requests.mutations.append(len(entry.keys) - 1)
        result = self.random.choice((b"", b"result"))
        requests.results.append(result)
        request = RequestId(self.clients[who], self.sent[who], said, carried_ms)
        self.requests.append((request, key_hash(rings.key_hash, key), result or self.seq))
        self.sent[who] += 1
