"""Incomplete work never appears as a snapshot, and a resuming process uses only complete files."""

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from kvstore.client.core.config import ClientConfig
from kvstore.errors import ConfigError, Corrupted, InvalidRequest, Unavailable
from kvstore.spark.snapshots import directory as stores
from kvstore.spark.snapshots import tasks
from kvstore.spark.snapshots import work as works
from kvstore.spark.snapshots.create import resumed_or_none
from kvstore.spark.snapshots.directory import DirectoryStore, write_durably
from kvstore.spark.snapshots.manifest import NAME, DataFile, SnapshotKind
from kvstore.spark.snapshots.places import store_at
from kvstore.spark.snapshots.planning import SnapshotRequest
from kvstore.spark.snapshots.store import RESUMABLE_S
from kvstore.spark.snapshots.table import TableWriter
from kvstore.spark.snapshots.work import SnapshotPart, SnapshotPlan, Work, note_of
from tests.env.namespaces import need_mounts, run_mounted
from tests.spark.snapshots.made import full, incremental, places_of, some_log

PIECES = tuple(
    SnapshotPart(name=f"{name}-00000", partition=name, first=0, last=9, servers=("h:1",), rows=1)
    for name in ("p1", "p2")
)
PLAN = SnapshotPlan(
    id="s1",
    kind=SnapshotKind.FULL,
    parent=None,
    cluster="c",
    started_ms=1,
    ring_version=1,
    pin="snapshot-s1",
    partitions=places_of([]),
    pieces=PIECES,
    compression="zstd",
    hash="murmur3",
)

WANTED = SnapshotRequest(cluster=ClientConfig(endpoints=("127.0.0.1:1",)), instance="c")


def attempt(work: Work, piece: SnapshotPart, *, noted: bool = True) -> DataFile:
    """The output of a task: the file and, if it finished, the note beside it."""
    path = work.attempts / f"{piece.name}.{uuid4().hex}.parquet"
    file = TableWriter(path, piece.partition).close(path.name)
    if noted:
        write_durably(path.with_suffix(".json"), note_of(file))
    return file


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


def test_complete_snapshot_is_published_with_one_attempt_of_each_part(store: DirectoryStore) -> None:
    work = Work.begin(store, PLAN)
    winners = {piece.name: attempt(work, piece) for piece in PIECES}
    attempt(work, PIECES[0])  # of a speculative task
    attempt(work, PIECES[1], noted=False)  # of one that was killed
    assert store.ids() == []
    manifest = work.publish(PLAN, winners, 2)
    assert store.load("s1") == manifest
    assert sorted(os.listdir(store.folder("s1") / "data")) == ["p1-00000.parquet", "p2-00000.parquet"]
    assert os.listdir(store.root) == ["s1"]


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_work_that_a_full_disk_did_not_let_begin_leaves_nothing(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(works, "write_durably", full_disk)
    with pytest.raises(OSError, match="No space left"):
        Work.begin(store, PLAN)
    assert list(store.root.iterdir()) == []


def test_task_on_a_full_disk_gives_a_remedy(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = Work.begin(store, PLAN)
    job = tasks.JobContext(
        attempts=begun.attempts,
        kind=SnapshotKind.FULL,
        pin=PLAN.pin,
        positions={},
        compression="zstd",
        cluster=WANTED.cluster,
    )
    monkeypatch.setattr(tasks, "batches", lambda job, piece: iter(()))
    monkeypatch.setattr(tasks, "write_durably", full_disk)
    with pytest.raises(
        ConfigError, match=f"no space is left: {store.root}.*; free space there and run the same command"
    ):
        tasks.write_piece(job, PIECES[0])
    assert list(begun.attempts.iterdir()) == []


def test_work_does_not_begin_in_a_folder_of_another_process(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that searches for abandoned work sees it for a moment without a lock."""
    monkeypatch.setattr(stores, "lock_or_none", lambda folder: None)
    with pytest.raises(BlockingIOError, match="another snapshot is being started here; retry"):
        Work.begin(store, PLAN)


def test_work_that_another_user_has_left_is_passed_over(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    Work.begin(store, PLAN).release()

    def refuse(path: Path, *_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(stores.os, "open", refuse)
    assert resumed_or_none(store, WANTED) is None
    assert store.remove_remains(store.remains()) == []


def test_file_that_the_driver_does_not_see_makes_no_snapshot(store: DirectoryStore) -> None:
    work = Work.begin(store, PLAN)
    winners = {piece.name: attempt(work, piece) for piece in PIECES}
    (work.attempts / winners["p1-00000"].path).unlink()
    with pytest.raises(Corrupted, match="executors share"):
        work.publish(PLAN, winners, 2)
    assert store.ids() == []


@pytest.mark.parametrize("step", ["plan", "one piece", "moved", "manifest"])
def test_killed_at_any_step_no_snapshot_appears_and_the_next_resumes(
    store: DirectoryStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work.begin(store, PLAN)
    winners = {}
    if step != "plan":
        winners["p1-00000"] = attempt(work, PIECES[0])
    if step in ("moved", "manifest"):
        winners["p2-00000"] = attempt(work, PIECES[1])
        dies_at = {"moved": "sync_tree", "manifest": "write_durably"}[step]
        monkeypatch.setattr(stores, dies_at, died)
        with pytest.raises(Killed):
            work.publish(PLAN, winners, 2)
        monkeypatch.undo()
    work.release()
    assert store.ids() == []
    (found,) = store.remains()
    again = Work.abandoned_or_none(store, found)
    assert again is not None
    assert again.plan_or_none() == PLAN
    assert again.finished() == winners
    for piece in PIECES:
        if piece.name not in winners:
            winners[piece.name] = attempt(again, piece)
    again.publish(PLAN, winners, 3)
    assert store.ids() == ["s1"]


def test_killed_after_the_rename_the_snapshot_exists_and_is_not_repeated(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work.begin(store, PLAN)
    winners = {piece.name: attempt(work, piece) for piece in PIECES}
    monkeypatch.setattr(work, "remove", died)
    with pytest.raises(Killed):
        work.publish(PLAN, winners, 2)
    work.release()
    assert store.ids() == ["s1"]
    assert resumed_or_none(store, WANTED) is None
    assert store.remains() == []


class Killed(BaseException):
    """As by a signal."""


def died(*_: object) -> None:
    raise Killed


def test_finished_piece_that_was_damaged_is_made_again(store: DirectoryStore) -> None:
    work = Work.begin(store, PLAN)
    file = attempt(work, PIECES[0])
    path = work.attempts / file.path
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert work.finished() == {}
    assert list(work.attempts.iterdir()) == []


def test_note_that_was_torn_does_not_count(store: DirectoryStore) -> None:
    work = Work.begin(store, PLAN)
    file = attempt(work, PIECES[0], noted=False)
    (work.attempts / file.path).with_suffix(".json").write_bytes(note_of(file)[:50])
    assert work.finished() == {}


def test_work_of_a_running_driver_is_not_changed(store: DirectoryStore) -> None:
    Work.begin(store, PLAN)
    (folder,) = store.remains()
    assert Work.abandoned_or_none(store, folder) is None
    store.remove_remains([folder])
    assert folder.exists()


def test_only_work_that_cannot_be_resumed_is_stale(store: DirectoryStore) -> None:
    Work.begin(store, PLAN).release()
    (folder,) = store.remains()
    now_s = folder.stat().st_mtime
    assert store.stale_remains(now_s + RESUMABLE_S - 1) == []
    assert store.stale_remains(now_s + RESUMABLE_S + 1) == [folder]
    store.remove_remains([folder])
    assert store.remains() == []


def test_removing_withdraws_the_snapshot_before_its_files(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(store, "a", some_log(9))
    monkeypatch.setattr(
        stores.shutil, "rmtree", lambda path, ignore_errors=False, onerror=None: ignore_errors or died()
    )
    with pytest.raises(Killed):
        store.remove("a")
    assert store.ids() == []
    monkeypatch.undo()
    store.remove_remains(store.stale_remains(0))
    assert os.listdir(store.root) == [".lock"]


def test_snapshot_that_is_being_restored_stays(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The retention may not name it any more: it existed when a user chose it, and it is the only copy."""
    log = some_log(20)
    full(store, "a", log)
    full(store, "b", log)
    with store.reading(["a"]), store.reading(["a"]):
        assert not store.remove("a")
        assert store.remove("b")
    rename = os.rename

    def come_too_late(old: Path, new: Path) -> None:
        with pytest.raises(Unavailable, match="snapshot a is being removed"), store.reading(["a"]):
            pass
        rename(old, new)

    monkeypatch.setattr(os, "rename", come_too_late)
    assert store.remove("a")
    assert store.remains() == []


def test_reader_that_locks_a_removed_snapshot_is_refused(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(store, "a", some_log(20))
    flock, removed = fcntl.flock, list[bool]()

    def late(file: Any, how: int) -> None:
        if how == fcntl.LOCK_SH | fcntl.LOCK_NB and not removed:  # the reader has just opened the manifest
            removed.append(DirectoryStore(store.root).remove("a"))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(Unavailable, match="snapshot a is being removed"), store.reading(["a"]):
        pass
    assert removed == [True]


def test_two_may_remove_the_same_at_once(store: DirectoryStore) -> None:
    for number in range(20):
        full(store, f"a{number}", some_log(9))
        with ThreadPoolExecutor(2) as threads:
            assert all(threads.map(DirectoryStore.remove, (store, DirectoryStore(store.root)), [f"a{number}"] * 2))
        assert os.listdir(store.root) == [".lock"]


def test_removal_waits_for_a_process_that_adds_a_child(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was removed under a snapshot that was published meanwhile and that could not be restored."""
    parent = full(store, "a", some_log(9))
    monkeypatch.setattr(stores, "LOCK_S", 0.0)
    with store.coming_and_going():
        with pytest.raises(Unavailable, match="is locked by another `kvstore snapshot`; retry"):
            DirectoryStore(store.root).remove("a")
        incremental(store, "b", parent, some_log(12))
    assert not store.remove("a")
    assert store.ids() == ["a", "b"]


def test_snapshot_removed_during_the_listing_is_left_out(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(store, "a", some_log(9))
    monkeypatch.setattr(store, "ids", lambda: ["a", "b"])
    assert list(store.load_all()) == list(store.load_readable()[0]) == ["a"]
    assert store.load_readable()[1] == {}


def test_snapshot_whose_manifest_is_missing_is_damaged(store: DirectoryStore) -> None:
    full(store, "a", some_log(9))
    (store.folder("a") / "manifest.json").unlink()
    with pytest.raises(Corrupted, match=r"manifest\.json is missing; restore it from a copy"):
        store.load("a")


def test_remains_are_removed_without_a_new_file_in_them(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another `prune` that removes them too would fail at it."""
    gone = store.root / ".gone-a"
    gone.mkdir(parents=True)
    found: list[list[str]] = []
    monkeypatch.setattr(stores.shutil, "rmtree", lambda path, **_: found.append(os.listdir(path)))
    store.remove_remains([gone])
    assert found == [[]]


def test_directory_is_distinguished_from_one_snapshot(store: DirectoryStore) -> None:
    manifest = full(store, "a", some_log(9))
    incremental(store, "b", manifest, some_log(12))
    assert store_at(str(store.root))[1] is None
    found, name = store_at(str(store.root / "b"))
    assert (found.root, name) == (store.root, "b")


def test_directory_without_snapshots_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a directory of snapshots"):
        store_at(str(tmp_path / "absent"))
    (tmp_path / "something").touch()
    with pytest.raises(ConfigError, match=r"has no snapshots: none of its folders has a manifest.json"):
        store_at(str(tmp_path))


@pytest.mark.parametrize(
    ("place", "message"),
    [("file", "file is not a directory"), ("file/below/it", "file is not a directory"), ("new/one", "")],
)
def test_unusable_directory_is_detected_before_the_snapshot_begins(tmp_path: Path, place: str, message: str) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(ConfigError, match=message) if message else nullcontext()
    with refused:
        DirectoryStore(tmp_path / place).check_writable()
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


ASK = """
import sys
from pathlib import Path
from typing import Any
from kvstore.errors import ConfigError
from kvstore.spark.snapshots.directory import DirectoryStore
try:
    DirectoryStore(Path(sys.argv[1]) / "new").check_writable()
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("mount", "message"),
    [
        (
            'mount -t tmpfs -o nr_inodes=1 tmpfs "$1"',
            "no inodes are free, although bytes are: {place}; free",
        ),
        ('mount -t tmpfs tmpfs "$1"\nmount -o remount,ro "$1"', "{place}: expected to make a directory, got EROFS"),
    ],
)
def test_full_or_read_only_directory_is_refused_before_a_snapshot(tmp_path: Path, mount: str, message: str) -> None:
    need_mounts(tmp_path)
    found = run_mounted(mount, ASK, tmp_path)
    assert message.format(place=tmp_path) in found.stdout, found.stdout + found.stderr


def test_snapshot_that_is_not_there_is_named_with_those_that_are(store: DirectoryStore) -> None:
    full(store, "a", some_log(9))
    with pytest.raises(InvalidRequest, match=r"no snapshot b in .*; the latest are: a"):
        store.load("b")


def test_renamed_snapshot_is_refused(store: DirectoryStore) -> None:
    full(store, "a", some_log(9))
    (store.root / "a").rename(store.root / "b")
    with pytest.raises(Corrupted, match="belongs to snapshot a; snapshots cannot be renamed"):
        store.load("b")


def test_one_bad_manifest_hides_no_good_ones(store: DirectoryStore) -> None:
    full(store, "a", some_log(9))
    full(store, "b", some_log(9))
    path = store.root / "b" / NAME
    path.write_bytes(path.read_bytes().replace(b"cluster-1", b"cluster-2"))
    readable, problems = store.load_readable()
    assert list(readable) == ["a"]
    assert "checksum does not match" in problems["b"]
    with pytest.raises(Corrupted):
        store.load_all()


def test_plan_of_an_incremental_survives_too(store: DirectoryStore) -> None:
    plan = replace(PLAN, kind=SnapshotKind.INCREMENTAL, parent="s0")
    assert Work.begin(store, plan).plan_or_none() == plan
