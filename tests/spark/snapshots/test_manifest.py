"""A manifest equals its written form, or is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corrupted, InvalidRequest
from kvstore.spark.snapshots.manifest import DataFile, Manifest, PartitionPosition, SnapshotKind, decode, encode

FILE = DataFile(
    path="data/p1-00000.parquet",
    partition="p1",
    rows=2,
    deletes=0,
    size_bytes=900,
    sha256="ab" * 32,
    min_key=b"a\xff",
    max_key=b"b",
    min_version=1,
    max_version=9,
)
PLACE = PartitionPosition(
    partition="p1", ledger=3, entry=4, sequence=9, time_ms=1_700_000_000_000, ranges=((0, 2**32 - 1),)
)
GOLDEN = Manifest(
    id="20231114T221320Z-full-0a1b",
    kind=SnapshotKind.FULL,
    parent=None,
    cluster="8d5e2f52",
    started_ms=1_700_000_000_000,
    ended_ms=1_700_000_001_000,
    ring_version=7,
    rows=2,
    size_bytes=900,
    partitions=(PLACE,),
    files=(FILE,),
    hash="murmur3",
)
TEXT = b"""{
 "format": 1,
 "id": "20231114T221320Z-full-0a1b",
 "kind": "full",
 "parent": null,
 "cluster": "8d5e2f52",
 "started_ms": 1700000000000,
 "ended_ms": 1700000001000,
 "ring_version": 7,
 "rows": 2,
 "size_bytes": 900,
 "partitions": [
  {
   "partition": "p1",
   "ledger": 3,
   "entry": 4,
   "sequence": 9,
   "time_ms": 1700000000000,
   "ranges": [
    [
     0,
     4294967295
    ]
   ]
  }
 ],
 "files": [
  {
   "path": "data/p1-00000.parquet",
   "partition": "p1",
   "rows": 2,
   "deletes": 0,
   "size_bytes": 900,
   "sha256": "abababababababababababababababababababababababababababababababab",
   "min_key": "Yf8=",
   "max_key": "Yg==",
   "min_version": 1,
   "max_version": 9
  }
 ],
 "sha256": "%s"
}
"""


def test_bytes_are_those_of_the_first_version() -> None:
    seal = encode(GOLDEN).split(b'"sha256": "')[-1][:64]
    assert encode(GOLDEN) == TEXT % seal
    assert decode(encode(GOLDEN), what="m") == GOLDEN


@given(place=st.integers(min_value=0), flip=st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(place: int, flip: int) -> None:
    data = bytearray(encode(GOLDEN))
    data[place % len(data)] ^= flip
    with pytest.raises((Corrupted, InvalidRequest)):
        decode(bytes(data), what="m")


@given(length=st.integers(min_value=0))
def test_beginning_is_no_manifest(length: int) -> None:
    data = encode(GOLDEN)
    with pytest.raises(Corrupted):
        decode(data[: length % len(data)], what="m")


def test_manifest_of_slots_has_a_later_format() -> None:
    hashed = replace(GOLDEN, hash="slots")
    data = encode(hashed)
    assert data.startswith(b'{\n "format": 2,\n')
    assert data.split(b'"sha256": ')[-2].endswith(b' "hash": "slots",\n ')
    assert decode(data, what="m") == hashed
    with pytest.raises(Corrupted, match="unknown key hash 'md5'"):
        decode(encode(replace(GOLDEN, hash="md5")), what="m")


def test_manifest_of_a_later_version_is_refused_by_number() -> None:
    later = encode(GOLDEN).replace(b'"format": 1', b'"format": 3')
    with pytest.raises(InvalidRequest, match=r"expected format 2 or lower, got 3.*; upgrade kvstore"):
        decode(later, what="m")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"id": "../etc"}, "is not a valid snapshot id"),
        ({"parent": "x"}, "parent"),
        ({"kind": SnapshotKind.INCREMENTAL}, "parent"),
        ({"rows": 3}, "rows"),
        ({"partitions": ()}, "are empty or not sorted"),
        ({"partitions": (replace(PLACE, ranges=((0, 5),)),)}, "have no owner"),
        ({"partitions": (replace(PLACE, ranges=((0, 2**32 - 1), (7, 7))),)}, "or two owners"),
        ({"partitions": (replace(PLACE, partition="p9"),)}, "without a position"),
        ({"files": (replace(FILE, path="data/../../x.parquet"),)}, "file names are invalid or not sorted"),
        ({"files": (replace(FILE, path="/data/x.parquet"),)}, "file names are invalid or not sorted"),
        ({"files": (FILE, FILE)}, "file names are invalid or not sorted"),
    ],
)
def test_file_that_no_correct_writer_writes_is_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(Corrupted, match=what):
        decode(encode(replace(GOLDEN, **change)), what="m")  # type: ignore[arg-type]
