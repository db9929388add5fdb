"""Transfers a replica's complete state to another replica, in chunks of rows as they were at one position.

The ownership comes first. Records, intents, decisions and request ids are transferred as they are in the engine; the
receiver rebuilds the indexes from the records. The meta row comes last. An engine without a meta row counts as empty,
so an interrupted import leaves nothing that could be taken for a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from crc32c import crc32c
from google.protobuf.message import DecodeError

from kvstore.errors import Corrupted, WrittenByNewer
from kvstore.partition.state import rows
from kvstore.partition.state.engine import ViewCursor
from kvstore.partition.state.ownership import Ownership
from kvstore.partition.state.rows import (
    META_KEY,
    ORDER,
    OWNERSHIP_KEY,
    StateMeta,
    expiry_key,
    expiry_of,
    key_of_data,
    meta_of,
)
from kvstore.partition.state.state import ReplicaState
from kvstore.proto import entry_pb2
from kvstore.types import Seq, ServerId

FORMAT = 1
_SINGLE = (rows.VERSION_KEY, OWNERSHIP_KEY, rows.MARK_KEY, rows.FORGOTTEN_KEY)
"""Rows that a state has once and that are transferred as they are."""
STEP_ROWS, STEP_BYTES = 64, 64 << 10
"""Limits of an export's rows in memory at a time."""


class StateExport:
    """A replica's state in chunks, as it is when the export is created. Later writes are not included. The engine keeps
    the exported rows on disk until `close`."""

    def __init__(self, state: ReplicaState) -> None:
        assert state.position is not None, "an empty state needs no export"
        engine = state.engine
        meta = engine.get(META_KEY)
        assert meta is not None
        self.meta: StateMeta = meta_of(meta)
        single = [(key, engine.get(key)) for key in _SINGLE]
        self._view = engine.view((rows.ALL_DATA, rows.ALL_INTENTS, rows.ALL_DECISIONS, rows.ALL_RETRY))
        self._rows: Iterator[tuple[bytes, bytes]] = chain(
            [(key, row) for key, row in single if row is not None],
            _taken(self._view.cursor(*rows.ALL_DATA)),
            _taken(self._view.cursor(*rows.ALL_INTENTS)),
            _taken(self._view.cursor(*rows.ALL_DECISIONS)),
            _taken(self._view.cursor(*rows.ALL_RETRY)),
            [(META_KEY, meta)],
        )
        self._crc = 0
        self.has_ended = False
        """True if the last chunk has been returned."""

    def next_chunk(self, limit_bytes: int) -> bytes | None:
        """Return the next rows, encoded, in a chunk of about `limit_bytes` bytes; a single row may be larger. Returns
        None after the last chunk. Raises ViewClosed if the state has been replaced in the meantime."""
        if self.has_ended:
            return None
        chunk = entry_pb2.Chunk(format=FORMAT)
        size = 0
        while size < limit_bytes:
            key, value = next(self._rows)
            chunk.keys.append(key)
            chunk.values.append(value)
            self._crc = crc32c(value, crc32c(key, self._crc))
            size += len(key) + len(value)
            if key == META_KEY:
                self.has_ended = chunk.last = True
                break
        chunk.crc = self._crc
        return chunk.SerializeToString()

    def close(self) -> None:
        """Release the disk space that the export holds."""
        self.has_ended = True
        self._rows = iter(())
        self._view.close()


def _taken(cursor: ViewCursor) -> Iterator[tuple[bytes, bytes]]:
    while (found := cursor.take(STEP_ROWS, STEP_BYTES))[0]:
        yield from zip(*found, strict=True)


class StateImport:
    """Replaces a replica's state by another replica's. The first chunk empties the state, unless this server cannot
    read the log that the chunk comes from (docs/protocol.md V4). `origins` are the donor and the replicas from which
    the donor's own state was copied."""

    def __init__(self, state: ReplicaState, origins: frozenset[ServerId]) -> None:
        self._origins = origins
        self._state = state
        self._engine = state.engine
        self._crc = 0
        self._records = 0
        self._owned = Ownership().owned
        self._is_begun = False

    def add(self, chunk: bytes) -> bool:
        """Add the next chunk. Returns True if it was the last one; the state is then at the exporter's position, but
        not yet durable. Raises Corrupted if the chunk does not continue the previous ones, WrittenByNewer if its format
        is unknown, and ClusterTooNew if this server cannot read the log. After an error, the state is empty or as it
        was before the first chunk."""
        message = _parse(chunk)
        self._check_crc(message)  # before anything in the chunk is used, since the first chunk replaces the state
        if not self._is_begun:
            self._begin(message)
        batch = self._engine.batch()
        for key, value in zip(message.keys, message.values, strict=True):
            batch.put(key, value)
            if key == OWNERSHIP_KEY:
                self._owned = Ownership.decode(value).owned
            elif key.startswith(rows.ALL_DATA[0]):
                self._records += self._owned.holds_row(key)
                name, expires_ms = key_of_data(key), expiry_of(value)
                batch.put(ORDER + name, b"")
                if expires_ms:
                    batch.put(expiry_key(expires_ms, name), b"")
        if message.last:
            self._check_count(meta_of(message.values[-1]))
            batch.put(rows.ORIGINS_KEY, rows.encode_origins(self._origins))
        self._engine.write(batch)
        self._state.installed_bytes += len(chunk)
        if message.last:
            try:
                self._state.load()
            except BaseException:  # a state that cannot be loaded must not be read or applied to
                self._empty()
                raise
            self._state.durable_seq = Seq(0)
        return message.last

    def _check_crc(self, message: entry_pb2.Chunk) -> None:
        crc = self._crc
        for key, value in zip(message.keys, message.values, strict=True):
            crc = crc32c(value, crc32c(key, crc))
        if message.crc != crc:
            raise Corrupted(f"expected a state chunk with CRC {message.crc:08x}, got CRC {crc:08x}")
        if message.last != (message.keys[-1:] == [META_KEY]):
            raise Corrupted("a state chunk's last-chunk flag contradicts its last row")
        self._crc = crc

    def _begin(self, message: entry_pb2.Chunk) -> None:
        version = dict(zip(message.keys, message.values, strict=True)).get(rows.VERSION_KEY)
        self._state.admit_version(rows.version_of(version))
        self._empty()
        self._state.installed_bytes = 0
        self._is_begun = True

    def _empty(self) -> None:
        # First, because the disk may have lost any part of the state if the engine fails here.
        self._state.durable_seq = Seq(0)
        self._engine.clear()
        self._state.load()

    def _check_count(self, meta: StateMeta) -> None:
        if meta.key_count != self._records:
            raise Corrupted(f"expected a state of {meta.key_count} keys, got {self._records}")


def _parse(chunk: bytes) -> entry_pb2.Chunk:
    try:
        message = entry_pb2.Chunk.FromString(chunk)
    except DecodeError as error:
        raise Corrupted(f"cannot read a state chunk: {error}") from error
    if message.format != FORMAT:
        raise WrittenByNewer(f"expected a state chunk in format {FORMAT}, got format {message.format}")
    if len(message.keys) != len(message.values):
        raise Corrupted(f"a state chunk has {len(message.keys)} keys, but {len(message.values)} values")
    return message
