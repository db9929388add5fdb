"""The manifest of a snapshot, which lists its files, log positions and parent (docs/reference/formats.md, Snapshots).
Decides only.

The manifest is written last, so a folder without a manifest is not a snapshot. The manifest contains its own checksum,
so a damaged manifest is never taken for that of a smaller snapshot.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvstore.errors import Corrupted, InvalidRequest
from kvstore.meta import codec
from kvstore.ring.hashing import HASHES, MURMUR3
from kvstore.spark.snapshots.signing import KEY_FILE, Keys, is_signed, signature
from kvstore.types import EntryId, LedgerId, Position

FORMAT = 2
"""The highest format that can be read. Snapshots of clusters with the key hash murmur3 are written in format 1, because
releases before 0.2.0 can verify them."""
NAME = "manifest.json"
DATA = "data"
"""Name of the folder that contains a snapshot's files."""
REMEDY = "restore it from a copy, or remove its folder and take a new snapshot"
TOKEN_MAX = (1 << 32) - 1
INTENTS = "intents"
"""Second part of the name of a file that has what committed intents write (docs/protocol.md Tx13)."""

_LAST_FIELD = b',"hash":"%b"}' % MURMUR3.name.encode()
"""The end that a document in format 1 lacks, because its clusters had no other key hash."""
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")
_FILE = re.compile(rf"{DATA}/[0-9A-Za-z][0-9A-Za-z._-]*\.parquet")
_OF_INTENTS = re.compile(rf"{DATA}/[^/]*-{INTENTS}(\.[^/.]*)?\.parquet")
_SIGNATURE = re.compile(rb',\n "hmac_sha256": "([0-9a-f]{64})"\Z')
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')


class SnapshotKind(StrEnum):
    FULL = "full"
    """The snapshot contains every record at its positions."""
    INCREMENTAL = "incremental"
    """The snapshot contains every change from the parent's positions to its own positions, in log order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPosition:
    """The position in one partition's log at which the snapshot was taken, and the token ranges that the partition
    owned there."""

    partition: str
    ledger: int
    entry: int
    sequence: int
    """Sequence of the last mutation before the position."""
    time_ms: int
    """Record time at the position, in milliseconds since 1970."""
    ranges: tuple[tuple[int, int], ...]
    """Owned tokens: the first and the last token of each range, both included."""

    @property
    def position(self) -> Position:
        return Position(LedgerId(self.ledger), EntryId(self.entry))

    @property
    def has_left(self) -> bool:
        """True if the partition had left the ring. Then `sequence` is the partition's last sequence, and no position
        is known. A partition that has just joined the ring may also own no tokens, but it has a position."""
        return self.ledger < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """The manifest's entry for one Parquet file: its path, size, checksum, and what its rows contain."""

    path: str
    """Path relative to the snapshot's folder."""
    partition: str
    rows: int
    deletes: int
    """Number of rows that record a deletion."""
    size_bytes: int
    """Size of the file in bytes."""
    sha256: str
    min_key: bytes | None
    """Smallest key in the file; None if the file has no rows. The same holds for `max_key`."""
    max_key: bytes | None
    min_version: int
    max_version: int

    @property
    def is_of_intents(self) -> bool:
        """True if the rows are what committed intents write at the position, in the order of (token, key), and not
        changes in the order of the log."""
        return _OF_INTENTS.fullmatch(self.path) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a finished snapshot, stored next to its files."""

    id: str
    kind: SnapshotKind
    parent: str | None
    """Id of the snapshot that an incremental snapshot continues; None for a full snapshot."""
    cluster: str
    """Instance id of the cluster. An incremental snapshot never continues a snapshot of another cluster."""
    started_ms: int
    ended_ms: int
    ring_version: int
    rows: int
    size_bytes: int
    partitions: tuple[PartitionPosition, ...]
    """Sorted by partition."""
    files: tuple[DataFile, ...]
    """Sorted by path."""
    hash: str
    """Name of the cluster's key hash, by which the rows of full snapshots are sorted."""

    @property
    def time_ms(self) -> int:
        """Time of the latest position, in milliseconds since 1970."""
        return max((each.time_ms for each in self.partitions), default=0)

    def places(self) -> Mapping[str, PartitionPosition]:
        return {each.partition: each for each in self.partitions}

    def starts(self, partitions: Iterable[str]) -> dict[str, int]:
        """Return, for each of these partitions, the sequence after which its log continues this snapshot; 0 for
        partitions that joined after the snapshot."""
        places = self.places()
        return {each: places[each].sequence if each in places else 0 for each in partitions}


def encode(manifest: Manifest, keys: Keys = ()) -> bytes:
    """Encode a manifest as JSON for people and programs. The last field is the checksum of everything before it. If
    `keys` are given, the field before the checksum is a signature of everything before it, by the first key."""
    plain = codec.encode(manifest, format=_format_of(manifest))
    if manifest.hash == MURMUR3.name:
        plain = plain.removesuffix(_LAST_FIELD) + b"}"
    body = msgspec.json.format(plain, indent=1)
    assert body.endswith(b"\n}")
    body = body.removesuffix(b"\n}")
    if keys:
        body += b',\n "hmac_sha256": "%s"' % signature(body, keys[0])
    return body + b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def decode(data: bytes, *, what: str, keys: Keys = ()) -> Manifest:
    """Decode and check a manifest; `what` names it in errors. If `keys` are given, one of them must have signed the
    manifest.

    Raises InvalidRequest for a manifest of a later version, and Corrupted for anything else that is not an unchanged
    manifest.
    """
    format = _check_format(data, what)
    seal = _SEAL.search(data)
    if seal is None or hashlib.sha256(data[: seal.start()]).hexdigest().encode() != seal[1]:
        raise Corrupted(f"{what} is damaged: its checksum does not match; {REMEDY}")
    if keys:
        _check_signature(data[: seal.start()], keys, what)
    whole = data if format == FORMAT else data[: seal.start()] + _LAST_FIELD
    manifest = codec.decode(Manifest, whole, what=what, format=format)
    problem = problem_or_none(manifest)
    if problem is not None:
        raise Corrupted(f"{what} contradicts itself: {problem}")
    return manifest


def _check_signature(sealed: bytes, keys: Keys, what: str) -> None:
    found = _SIGNATURE.search(sealed)
    if found is None:
        raise Corrupted(f"{what}: expected a signature by the key of {KEY_FILE}, got none; another writer created it")
    if not is_signed(sealed[: found.start()], found[1], keys):
        raise Corrupted(
            f"{what}: expected a signature by the key of {KEY_FILE}, got one by another key or for other content"
        )


class _ManifestHeader(msgspec.Struct):
    format: int


def _format_of(manifest: Manifest) -> int:
    return 1 if manifest.hash == MURMUR3.name else FORMAT


def _check_format(data: bytes, what: str) -> int:
    try:
        found = msgspec.json.decode(data, type=_ManifestHeader).format
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupted(f"{what} is not the manifest of a snapshot ({error}); {REMEDY}") from None
    if found > FORMAT:
        raise InvalidRequest(
            f"{what}: expected format {FORMAT} or lower, got {found}, written by a later version; upgrade kvstore"
        )
    return found


def problem_or_none(manifest: Manifest) -> str | None:
    """Return the reason why no correct writer can have written this manifest, or None if the manifest is consistent."""
    if not is_id(manifest.id):
        return f"{manifest.id!r} is not a valid snapshot id"
    if (manifest.kind is SnapshotKind.INCREMENTAL) != (manifest.parent is not None):
        return f"{manifest.kind} with parent {manifest.parent}"
    if manifest.hash not in HASHES:
        return f"unknown key hash {manifest.hash!r}"
    names = [each.partition for each in manifest.partitions]
    if not names or names != sorted(set(names)):
        return f"partitions {names} are empty or not sorted"
    paths = [each.path for each in manifest.files]
    if paths != sorted(set(paths)) or not all(map(_FILE.fullmatch, paths)):
        return "file names are invalid or not sorted"
    unknown = sorted({each.partition for each in manifest.files} - set(names))
    if unknown:
        return f"files of partitions {unknown} without a position"
    sums = (sum(each.rows for each in manifest.files), sum(each.size_bytes for each in manifest.files))
    if sums != (manifest.rows, manifest.size_bytes):
        return (
            f"its files have {sums[0]} rows in {sums[1]} bytes, but it states {manifest.rows} in {manifest.size_bytes}"
        )
    return tiling_problem_or_none(manifest.partitions)


def tiling_problem_or_none(places: tuple[PartitionPosition, ...]) -> str | None:
    """Return the problem if the partitions do not own every token exactly once, because a key could then be missing
    or duplicated; otherwise None."""
    owned = sorted((first, last, each.partition) for each in places for first, last in each.ranges)
    expected = 0
    for first, last, partition in owned:
        if first != expected or last < first:
            return f"tokens from {min(first, expected)} have no owner or two owners, among them {partition}"
        expected = last + 1
    return None if expected == TOKEN_MAX + 1 else f"tokens from {expected} have no owner"


def is_id(text: str) -> bool:
    """Return True if the text can be the id of a snapshot. An id is not a path and not a hidden name."""
    return _ID.fullmatch(text) is not None
