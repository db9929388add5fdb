"""The manifest: a snapshot's description (docs/reference/formats.md, Snapshots) with its files, log positions and
parent. Decides only.

It is written last, so a folder without a manifest is not a snapshot. Its own checksum prevents a damaged manifest from
being taken for a smaller snapshot.
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
from kvstore.spark.snapshots.signing import KEY_FILE, Keys, is_signed, signature
from kvstore.types import EntryId, LedgerId, Position

FORMAT = 1
NAME = "manifest.json"
DATA = "data"
"""The folder of a snapshot's files."""
REMEDY = "restore it from a copy, or remove its folder and take a new snapshot"
TOKEN_MAX = (1 << 32) - 1

_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")
_FILE = re.compile(rf"{DATA}/[0-9A-Za-z][0-9A-Za-z._-]*\.parquet")
_SIGNATURE = re.compile(rb',\n "hmac_sha256": "([0-9a-f]{64})"\Z')
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')


class SnapshotKind(StrEnum):
    FULL = "full"
    """Every record at the positions."""
    INCREMENTAL = "incremental"
    """Every change from the parent's positions to these, in log order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPosition:
    """The position in one partition's log, and the ranges that the partition owned there."""

    partition: str
    ledger: int
    entry: int
    sequence: int
    """Sequence of the last mutation before the position."""
    time_ms: int
    """Record time at the position, in milliseconds since 1970."""
    ranges: tuple[tuple[int, int], ...]
    """Owned tokens: first and last of each range."""

    @property
    def position(self) -> Position:
        return Position(LedgerId(self.ledger), EntryId(self.entry))

    @property
    def has_left(self) -> bool:
        """True if the partition had left the ring. Then `sequence` is its last, and no position is known. A partition
        in the ring may also own nothing, if it has just joined."""
        return self.ledger < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """The manifest entry of one Parquet file of a snapshot."""

    path: str
    """Path relative to the snapshot's folder."""
    partition: str
    rows: int
    deletes: int
    """Number of rows that record a deletion."""
    size_bytes: int
    """Size of the file."""
    sha256: str
    min_key: bytes | None
    """None if the file has no rows."""
    max_key: bytes | None
    min_version: int
    max_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a finished snapshot, stored next to its files."""

    id: str
    kind: SnapshotKind
    parent: str | None
    """The snapshot that an incremental one continues."""
    cluster: str
    """The cluster's instance id. An incremental snapshot never continues one of another cluster."""
    started_ms: int
    ended_ms: int
    ring_version: int
    rows: int
    size_bytes: int
    partitions: tuple[PartitionPosition, ...]
    """Sorted by partition."""
    files: tuple[DataFile, ...]
    """Sorted by path."""

    @property
    def time_ms(self) -> int:
        """The time of the latest position."""
        return max((each.time_ms for each in self.partitions), default=0)

    def places(self) -> Mapping[str, PartitionPosition]:
        return {each.partition: each for each in self.partitions}

    def starts(self, partitions: Iterable[str]) -> dict[str, int]:
        """Return the sequence after which the logs of these partitions continue; 0 for partitions that joined since."""
        places = self.places()
        return {each: places[each].sequence if each in places else 0 for each in partitions}


def encode(manifest: Manifest, keys: Keys = ()) -> bytes:
    """Return JSON for people and programs. Its last field is the checksum of everything before it. With keys, the field
    before that is a signature of everything before it."""
    body = msgspec.json.format(codec.encode(manifest, format=FORMAT), indent=1)
    assert body.endswith(b"\n}")
    body = body.removesuffix(b"\n}")
    if keys:
        body += b',\n "hmac_sha256": "%s"' % signature(body, keys[0])
    return body + b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def decode(data: bytes, *, what: str, keys: Keys = ()) -> Manifest:
    """Decode a manifest; `what` names it in errors. With keys, one of them must have signed it. Raises InvalidRequest
    for a manifest of a later version, Corrupted for anything else that is not an unchanged manifest."""
    _check_format(data, what)
    seal = _SEAL.search(data)
    if seal is None or hashlib.sha256(data[: seal.start()]).hexdigest().encode() != seal[1]:
        raise Corrupted(f"{what} is damaged: its checksum does not match; {REMEDY}")
    if keys:
        _check_signature(data[: seal.start()], keys, what)
    manifest = codec.decode(Manifest, data, what=what, format=FORMAT)
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


def _check_format(data: bytes, what: str) -> None:
    try:
        found = msgspec.json.decode(data, type=_ManifestHeader).format
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupted(f"{what} is not the manifest of a snapshot ({error}); {REMEDY}") from None
    if found > FORMAT:
        raise InvalidRequest(
            f"{what}: expected format {FORMAT} or lower, got {found}, written by a later version; upgrade kvstore"
        )


def problem_or_none(manifest: Manifest) -> str | None:
    """Return why the manifest cannot come from a correct writer, or None."""
    if not is_id(manifest.id):
        return f"{manifest.id!r} is not a valid snapshot id"
    if (manifest.kind is SnapshotKind.INCREMENTAL) != (manifest.parent is not None):
        return f"{manifest.kind} with parent {manifest.parent}"
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
    """Return why the partitions do not own every token exactly once, so that a key could be missing or duplicated; else
    None."""
    owned = sorted((first, last, each.partition) for each in places for first, last in each.ranges)
    expected = 0
    for first, last, partition in owned:
        if first != expected or last < first:
            return f"tokens from {min(first, expected)} have no owner or two owners, among them {partition}"
        expected = last + 1
    return None if expected == TOKEN_MAX + 1 else f"tokens from {expected} have no owner"


def is_id(text: str) -> bool:
    """Return True if a snapshot may have this id: not a path and not hidden."""
    return _ID.fullmatch(text) is not None
