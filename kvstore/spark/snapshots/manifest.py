"""The manifest, a snapshot's description of itself (docs/reference/formats.md, Snapshots): its files, where in the logs
it stands, what it stands on. Decides only.

It is written last: what has no manifest is no snapshot. It carries its own checksum, so that a damaged one is never
taken for a smaller snapshot.
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
REMEDY = "take it from a copy, or remove its folder and take a new snapshot"
TOKEN_MAX = (1 << 32) - 1

_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")
_FILE = re.compile(rf"{DATA}/[0-9A-Za-z][0-9A-Za-z._-]*\.parquet")
_SIGNATURE = re.compile(rb',\n "hmac_sha256": "([0-9a-f]{64})"\Z')
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')


class Kind(StrEnum):
    FULL = "full"
    """Every record, as it was at the positions."""
    INCREMENTAL = "incremental"
    """Every change from the parent's positions up to these, in the order of the logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one partition's log was, and what the partition owned there."""

    partition: str
    ledger: int
    entry: int
    sequence: int
    """Of the last mutation up to there."""
    time_ms: int
    """Record time there, in milliseconds since 1970."""
    ranges: tuple[tuple[int, int], ...]
    """Tokens, first and last of each range."""

    @property
    def position(self) -> Position:
        return Position(LedgerId(self.ledger), EntryId(self.entry))

    @property
    def has_left(self) -> bool:
        """The partition had left the ring, and `sequence` is its last; no position is known then. One that is in the
        ring may own nothing, too: it may just have joined."""
        return self.ledger < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One Parquet file."""

    path: str
    """Below the snapshot's folder."""
    partition: str
    rows: int
    deletes: int
    """Those among the rows that say that a key was deleted."""
    size_bytes: int
    """Of the file."""
    sha256: str
    min_key: bytes | None
    """None: the file has no rows."""
    max_key: bytes | None
    min_version: int
    max_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A finished snapshot."""

    id: str
    kind: Kind
    parent: str | None
    """What an incremental continues."""
    cluster: str
    """The cluster's instance id: an increment of one cluster never continues a snapshot of another."""
    started_ms: int
    ended_ms: int
    ring_version: int
    rows: int
    size_bytes: int
    partitions: tuple[Place, ...]
    """Sorted by partition."""
    files: tuple[DataFile, ...]
    """Sorted by path."""

    @property
    def time_ms(self) -> int:
        """The latest moment that is in it."""
        return max((each.time_ms for each in self.partitions), default=0)

    def places(self) -> Mapping[str, Place]:
        return {each.partition: each for each in self.partitions}

    def starts(self, partitions: Iterable[str]) -> dict[str, int]:
        """Behind which sequences the logs of these partitions go on from here; one that is not named has joined
        since."""
        places = self.places()
        return {each: places[each].sequence if each in places else 0 for each in partitions}


def encode(manifest: Manifest, keys: Keys = ()) -> bytes:
    """Return JSON for people and programs. Its last field is the checksum of everything before it; with keys, the field
    before that is a signature of everything before it."""
    body = msgspec.json.format(codec.encode(manifest, format=FORMAT), indent=1)
    assert body.endswith(b"\n}")
    body = body.removesuffix(b"\n}")
    if keys:
        body += b',\n "hmac_sha256": "%s"' % signature(body, keys[0])
    return body + b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def decode(data: bytes, *, what: str, keys: Keys = ()) -> Manifest:
    """`what` names it in errors. With keys, it must be signed by one of them. Raises InvalidRequest for a manifest of a
    later version, Corrupted for anything else that is not a manifest as it was written."""
    _check_format(data, what)
    seal = _SEAL.search(data)
    if seal is None or hashlib.sha256(data[: seal.start()]).hexdigest().encode() != seal[1]:
        raise Corrupted(f"{what} is damaged: its checksum does not fit; {REMEDY}")
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
        raise Corrupted(f"{what}: expected a signature by the key of {KEY_FILE}, got none: somebody else wrote it")
    if not is_signed(sealed[: found.start()], found[1], keys):
        raise Corrupted(
            f"{what}: expected a signature by the key of {KEY_FILE}, got one by another key or of other text"
        )


class _Envelope(msgspec.Struct):
    format: int


def _check_format(data: bytes, what: str) -> None:
    try:
        found = msgspec.json.decode(data, type=_Envelope).format
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupted(f"{what} is no manifest of a snapshot ({error}); {REMEDY}") from None
    if found > FORMAT:
        raise InvalidRequest(
            f"{what} has format {found}, written by a later version; this one reads up to {FORMAT}: upgrade kvstore"
        )


def problem_or_none(manifest: Manifest) -> str | None:
    """Why no correct writer has written this."""
    if not is_id(manifest.id):
        return f"{manifest.id!r} is no id of a snapshot"
    if (manifest.kind is Kind.INCREMENTAL) != (manifest.parent is not None):
        return f"{manifest.kind} with parent {manifest.parent}"
    names = [each.partition for each in manifest.partitions]
    if not names or names != sorted(set(names)):
        return f"partitions {names} are not sorted, or there are none"
    paths = [each.path for each in manifest.files]
    if paths != sorted(set(paths)) or not all(map(_FILE.fullmatch, paths)):
        return "names of files are not sorted, or not what a file may be called"
    strangers = sorted({each.partition for each in manifest.files} - set(names))
    if strangers:
        return f"files of partitions {strangers} without a position"
    sums = (sum(each.rows for each in manifest.files), sum(each.size_bytes for each in manifest.files))
    if sums != (manifest.rows, manifest.size_bytes):
        return f"its files have {sums[0]} rows in {sums[1]} bytes, it says {manifest.rows} in {manifest.size_bytes}"
    return tiling_problem_or_none(manifest.partitions)


def tiling_problem_or_none(places: tuple[Place, ...]) -> str | None:
    """Why the partitions do not own every token exactly once: then a key could be missing, or be there twice."""
    owned = sorted((first, last, each.partition) for each in places for first, last in each.ranges)
    expected = 0
    for first, last, partition in owned:
        if first != expected or last < first:
            return f"tokens from {min(first, expected)} are owned by none or by two, {partition} among them"
        expected = last + 1
    return None if expected == TOKEN_MAX + 1 else f"tokens from {expected} are owned by none"


def is_id(text: str) -> bool:
    """Whether a snapshot may be called so: no path, nothing hidden."""
    return _ID.fullmatch(text) is not None
