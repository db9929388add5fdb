"""Every kind of damage is found and named without a cluster."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.errors import Corrupted
from kvstore.ring.hashing import MURMUR3
from kvstore.spark.snapshots import verify
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.manifest import INTENTS, NAME, Manifest, encode
from kvstore.spark.snapshots.usable import stored_files
from tests.spark.snapshots.made import Change, file_of, full, incremental, some_log

LOG = some_log(300)
OWN = [change for change in LOG if change.partition == "p1" and change.value is not None]
VALUES = (b"1", None, b"2")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


def found(store: DirectoryStore, *chain: Manifest) -> list[str]:
    return [f"{each.snapshot}/{each.path} {each.what}" for each in verify.problems_of(store, chain)]


def with_file(store: DirectoryStore, manifest: Manifest, changes: list[Change]) -> Manifest:
    """Return the snapshot with other rows in p1's file, described as correctly as its writer would."""
    folder = store.folder(manifest.id)
    (folder / "data/p1-00000.parquet").unlink()
    file = file_of(folder, "p1", changes)
    files = (file, *manifest.files[1:])
    return replace(manifest, files=files, rows=sum(f.rows for f in files), size_bytes=sum(f.size_bytes for f in files))


def test_complete_snapshots_have_no_problem(store: DirectoryStore) -> None:
    first = full(store, "a", LOG[:200])
    second = incremental(store, "b", first, LOG)
    rows = []
    assert list(verify.problems_of(store, [first, second], rows.append)) == []
    assert sum(rows) == first.rows + second.rows
    verify.check_files(store, [first, second], rows.append)


# docs/protocol.md Tx13
def test_rows_of_intents_are_checked_as_records(store: DirectoryStore) -> None:
    """They are in the order of keys, and a key's row may come before the parent's position or be a delete."""
    first = full(store, "a", LOG[:200])
    second = incremental(store, "b", first, LOG)
    keys = sorted({change.key for change in OWN}, key=lambda key: (MURMUR3.token_of(key), key))[:3]
    rows = [Change(key, value, 90 - number, 1) for number, (key, value) in enumerate(zip(keys, VALUES, strict=True))]

    def with_intents(rows: list[Change]) -> Manifest:
        file = file_of(store.folder("b"), "p1", rows, INTENTS)
        files = tuple(sorted((*second.files, file), key=lambda each: each.path))
        assert [each.is_of_intents for each in files] == [False, True, False]
        count, size = second.rows + file.rows, second.size_bytes + file.size_bytes
        return replace(second, files=files, rows=count, size_bytes=size)

    manifest = with_intents(rows)
    assert found(store, first, manifest) == []
    span = verify._file_problems(store, manifest, manifest.files[1], lambda _: None)[1]
    assert span is None, "its tokens are not compared with sequences of other files"
    for wrong in (rows[::-1], [*rows, rows[-1]]):
        (store.folder("b") / f"data/p1-{INTENTS}.parquet").unlink()
        assert found(store, with_intents(wrong)) == [
            f"b/data/p1-{INTENTS}.parquet has records out of order or duplicated"
        ]


@pytest.mark.parametrize("at", [0, 100, -1])
@pytest.mark.parametrize("number", [0, 1])
def test_any_changed_byte_of_any_file_is_found(store: DirectoryStore, number: int, at: int) -> None:
    manifest = full(store, "a", LOG)
    path = store.folder("a") / manifest.files[number].path
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert found(store, manifest) == [
        f"a/{manifest.files[number].path} its checksum differs from the manifest's: it was changed or is damaged"
    ]
    with pytest.raises(Corrupted, match=f"{re.escape(str(path))} is damaged"):
        verify.check_files(store, [manifest], lambda _: None)


def test_missing_file_and_an_unknown_file_are_found(store: DirectoryStore) -> None:
    manifest = full(store, "a", LOG)
    os.rename(store.folder("a") / "data/p1-00000.parquet", store.folder("a") / "data/p1-00001.parquet")
    assert found(store, manifest) == [
        "a/data/p1-00000.parquet is missing; restore the file from a copy",
        "a/data/p1-00001.parquet is not in the manifest",
    ]
    for check in (
        lambda: verify.check_files(store, [manifest], lambda _: None),
        lambda: stored_files(store, manifest),
    ):
        with pytest.raises(Corrupted, match="is missing"):
            check()


def test_shortened_file_is_found(store: DirectoryStore) -> None:
    manifest = full(store, "a", LOG)
    path = store.folder("a") / manifest.files[0].path
    size = path.stat().st_size
    os.truncate(path, size - 1)
    assert found(store, manifest) == [
        (
            f"a/{manifest.files[0].path} expected {size} bytes as in the manifest, got {size - 1}; "
            "restore the file from a copy"
        )
    ]


def test_tokens_are_those_of_the_snapshots_key_hash(store: DirectoryStore) -> None:
    manifest = full(store, "a", LOG)
    assert found(store, manifest) == []
    assert "out of order" in found(store, replace(manifest, hash="slots"))[0]


def test_record_of_another_partition_is_found(store: DirectoryStore) -> None:
    manifest = full(store, "a", LOG)
    foreign = next(c for c in LOG if c.partition == "p2" and c.value is not None)
    (message,) = found(store, with_file(store, manifest, [foreign]))
    assert "has records that the partition did not own" in message


def test_records_twice_or_out_of_order_are_found(store: DirectoryStore) -> None:
    manifest = full(store, "a", LOG)
    assert "duplicated" in found(store, with_file(store, manifest, [OWN[0], OWN[0]]))[0]


def test_same_record_in_two_files_is_found(store: DirectoryStore) -> None:
    manifest = full(store, "a", LOG)
    single = with_file(store, manifest, [OWN[0]])
    double = file_of(store.folder("a"), "p1", [OWN[0]], "00001")
    files = tuple(sorted([*single.files, double], key=lambda file: file.path))
    whole = replace(single, files=files, rows=single.rows + 1, size_bytes=single.size_bytes + double.size_bytes)
    assert found(store, whole) == ["a/p1 two files of the partition have the same rows"]


def test_version_behind_the_position_is_found(store: DirectoryStore) -> None:
    manifest = full(store, "a", LOG)
    late = with_file(store, manifest, [replace(OWN[0], sequence=1000)])
    assert "has versions from 1000 to 1000, but its position is" in found(store, late)[0]


def test_changes_out_of_order_are_found(store: DirectoryStore) -> None:
    first = full(store, "a", LOG[:1])
    second = incremental(store, "b", first, LOG)
    assert "changes out of order" in found(store, with_file(store, second, [OWN[2], OWN[1]]))[0]


def test_manifest_that_lies_about_rows_is_found(store: DirectoryStore) -> None:
    manifest = full(store, "a", LOG)
    file = replace(manifest.files[0], rows=manifest.files[0].rows + 1, deletes=1)
    lying = replace(manifest, files=(file, *manifest.files[1:]), rows=manifest.rows + 1)
    (store.folder("a") / NAME).write_bytes(encode(lying))
    (message,) = found(store, store.load("a"))
    assert re.search(r"expected \d+ rows as in the manifest, got \d+", message)
    deletes = replace(manifest.files[0], deletes=1)
    (message,) = found(store, replace(manifest, files=(deletes, *manifest.files[1:])))
    assert re.search(r"has \d+ rows with 0 deletes, but the manifest states \d+ and 1", message)
