"""Snapshots on stores without atomic renames: each step at which a driver may die, two drivers at once, and a parent
that is removed while it gets a child. On S3 over HTTP, on fsspec's memory, and on a file system that renames."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from kvstore.cli.main import build
from kvstore.errors import ConfigError, Corrupted, InvalidRequest, Unavailable
from kvstore.spark.snapshots import chains, objects, remote, verify
from kvstore.spark.snapshots.create import resumed_or_none
from kvstore.spark.snapshots.directory import write_durably
from kvstore.spark.snapshots.inventory import USABLE, inventory_of
from kvstore.spark.snapshots.legal_holds import LegalHold
from kvstore.spark.snapshots.manifest import NAME, DataFile, SnapshotKind
from kvstore.spark.snapshots.objects import LockHeartbeat, RemoteStore
from kvstore.spark.snapshots.places import store_at
from kvstore.spark.snapshots.remote import RemotePath, local_copy_of, location
from kvstore.spark.snapshots.store import READ, RESUMABLE_S
from kvstore.spark.snapshots.table import TableWriter
from kvstore.spark.snapshots.work import SnapshotPart, Work, note_of
from tests.spark.snapshots.object_store import s3_server
from tests.spark.snapshots.test_work import PIECES, PLAN, WANTED, Killed, died
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(params=["s3", "memory", "renaming"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> RemotePath:
    match request.param:
        case "s3":
            return RemotePath(f"{request.getfixturevalue('s3')}/{uuid4().hex}")
        case "memory":
            return RemotePath(f"memory://{uuid4().hex}/x")
        case _:
            return RemotePath(f"file://{tmp_path}/x")


@pytest.fixture
def store(root: RemotePath, monkeypatch: pytest.MonkeyPatch) -> RemoteStore:
    """Drivers are presumed dead after a short time."""
    monkeypatch.setattr(objects, "COUNT_S", 0.05)
    monkeypatch.setattr(objects, "LEASE_S", 0.5)
    return RemoteStore(root)


def attempt(work: Work, piece: SnapshotPart, *, noted: bool = True) -> DataFile:
    """The output of a task: the file and, if it finished, the note beside it."""
    name = f"{piece.name}.{uuid4().hex}"
    with local_copy_of(work.attempts / f"{name}.parquet") as path:
        file = TableWriter(path, piece.partition).close(path.name)
    if noted:
        write_durably(work.attempts / f"{name}.json", note_of(file))
    return file


def published(store: RemoteStore, name: str, parent: str | None = None) -> None:
    kind = SnapshotKind.FULL if parent is None else SnapshotKind.INCREMENTAL
    plan = replace(PLAN, id=name, kind=kind, parent=parent)
    work = Work.begin(store, plan)
    work.publish(plan, {piece.name: attempt(work, piece) for piece in PIECES}, 2)


def killed(work: Work) -> None:
    """As by a signal: its lock remains, and expires."""
    assert work._lock is not None
    work._lock.stop()


# ── publishing ──


def test_complete_snapshot_is_published_with_one_attempt_of_each_part(store: RemoteStore) -> None:
    work = Work.begin(store, PLAN)
    winners = {piece.name: attempt(work, piece) for piece in PIECES}
    attempt(work, PIECES[0])  # of a speculative task
    attempt(work, PIECES[1], noted=False)  # of one that was killed
    assert store.ids() == []
    manifest = work.publish(PLAN, winners, 2)
    assert store.load("s1") == manifest
    assert [each.path for each in manifest.files] == sorted(f"data/{file.path}" for file in winners.values())
    assert store.folder("s1").files_below() == sorted([NAME, *(each.path for each in manifest.files)])
    assert [each.name for each in store.root.iterdir()] == ["s1"]
    assert list(verify.problems_of(store, [manifest])) == []


@pytest.mark.parametrize("root", ["memory", "renaming"], indirect=True)
@pytest.mark.parametrize("step", ["plan", "one piece", "moved", "manifest"])
def test_killed_at_any_step_no_snapshot_appears_and_the_next_resumes(
    store: RemoteStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work.begin(store, PLAN)
    winners = {}
    if step != "plan":
        winners["p1-00000"] = attempt(work, PIECES[0])
    if step in ("moved", "manifest"):
        winners["p2-00000"] = attempt(work, PIECES[1])
        with monkeypatch.context() as patched:
            if step == "moved":
                patched.setattr(objects, "_check_size", died)
            else:
                patched.setattr(RemotePath, "create", died)
            with pytest.raises(Killed):
                work.publish(PLAN, winners, 2)
    killed(work)
    assert store.ids() == []
    (found,) = store.remains()
    again = Work.abandoned_or_none(store, found)
    assert again is not None
    assert again.plan_or_none() == PLAN
    assert again.finished() == winners
    for piece in PIECES:
        if piece.name not in winners:
            winners[piece.name] = attempt(again, piece)
    manifest = again.publish(PLAN, winners, 3)
    assert store.ids() == ["s1"]
    assert list(verify.problems_of(store, [manifest])) == []


def test_moved_attempt_wins_over_another_one_of_its_piece(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose result was lost ran twice. The driver was killed after it had moved the files."""
    work = Work.begin(store, PLAN)
    winners = {piece.name: attempt(work, piece) for piece in PIECES}
    others = [attempt(work, PIECES[0]) for _ in range(8)]
    last = max((*others, winners[PIECES[0].name]), key=lambda file: file.path)
    with monkeypatch.context() as patched:
        patched.setattr(RemotePath, "create", died)
        with pytest.raises(Killed):
            work.publish(PLAN, winners | {PIECES[0].name: last}, 2)
    killed(work)
    again = Work.abandoned_or_none(store, work.folder)
    assert again is not None
    manifest = again.publish(PLAN, again.finished(), 2)
    assert list(verify.problems_of(store, [manifest])) == []


def test_killed_after_the_manifest_the_snapshot_exists_and_is_not_repeated(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work.begin(store, PLAN)
    winners = {piece.name: attempt(work, piece) for piece in PIECES}
    monkeypatch.setattr(work, "remove", died)
    with pytest.raises(Killed):
        work.publish(PLAN, winners, 2)
    killed(work)
    assert store.ids() == ["s1"]
    assert resumed_or_none(store, WANTED) is None
    assert store.remains() == []
    assert list(verify.problems_of(store, [store.load("s1")])) == []


def test_abandoned_work_is_removed_with_its_moved_files(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work.begin(store, PLAN)
    winners = {piece.name: attempt(work, piece) for piece in PIECES}
    with monkeypatch.context() as patched:
        patched.setattr(RemotePath, "create", died)
        with pytest.raises(Killed):
            work.publish(PLAN, winners, 2)
    killed(work)
    assert store.stale_remains(time.time() + RESUMABLE_S - 60) == []
    stale = store.stale_remains(time.time() + RESUMABLE_S + 60)
    assert stale == [store.work("s1")]
    assert store.remove_remains(stale) == stale
    assert not store.root.exists() or list(store.root.iterdir()) == []


def test_finished_piece_that_was_damaged_and_a_torn_note_do_not_count(store: RemoteStore) -> None:
    work = Work.begin(store, PLAN)
    damaged, torn = attempt(work, PIECES[0]), attempt(work, PIECES[1], noted=False)
    path = work.attempts / damaged.path
    path.write(path.read_bytes()[:-1] + b"\0")
    (work.attempts / torn.path.replace(".parquet", ".json")).write(note_of(torn)[:50])
    assert work.finished() == {}
    assert work.notes() == []
    work.release()


# ── two drivers ──


def test_work_of_a_running_driver_is_not_changed(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "LEASE_S", PATIENCE_S)  # another process sees it alive long before
    work = Work.begin(store, PLAN)
    (folder,) = store.remains()
    assert Work.abandoned_or_none(store, folder) is None
    work.release()
    again = Work.abandoned_or_none(store, folder)
    assert again is not None, "at once, since the one before gave it back"
    again.release()


@pytest.mark.parametrize("root", ["s3", "memory"], indirect=True)
def test_of_several_that_find_a_driver_dead_one_resumes(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(Work.begin(store, PLAN))
    (folder,) = store.remains()
    create, all_found = RemotePath.create, threading.Barrier(4)

    def create_together(place: RemotePath, data: bytes) -> bool:
        all_found.wait(PATIENCE_S)
        return create(place, data)

    monkeypatch.setattr(RemotePath, "create", create_together)
    with ThreadPoolExecutor(4) as threads:
        found = [each for each in threads.map(lambda _: Work.abandoned_or_none(store, folder), range(4)) if each]
    assert len(found) == 1
    found[0].release()


def test_paused_driver_gives_way_and_leaves_the_other_snapshot_intact(store: RemoteStore) -> None:
    stopped = Work.begin(store, PLAN)
    winners = {piece.name: attempt(stopped, piece) for piece in PIECES}
    killed(stopped)
    other = Work.abandoned_or_none(store, stopped.folder)
    assert other is not None
    with pytest.raises(Unavailable, match="another driver considered this driver dead and continues its work"):
        stopped.publish(PLAN, winners, 2)
    manifest = other.publish(PLAN, {piece.name: attempt(other, piece) for piece in PIECES}, 3)

    # After its check of the lock, at the last moment: only one manifest is stored, and the files differ.
    late = Work(store, stopped.folder)
    mine = {piece.name: attempt(late, piece) for piece in PIECES}
    with pytest.raises(Unavailable, match="snapshot s1 was published by another driver"):
        late.publish(PLAN, mine, 4)
    assert store.load("s1") == manifest
    assert list(verify.problems_of(store, [manifest])) == []


# ── removing ──


def test_work_that_another_process_continues_stays(store: RemoteStore) -> None:
    published(store, "a")
    published(store, "b", "a")
    assert not store.remove("a")
    assert store.may_continue("a")
    assert store.remove("b")
    assert store.remove("a")
    assert store.ids() == []
    assert store.remains() == []
    with pytest.raises(InvalidRequest, match="no snapshot a in"):
        store.load("a")


def test_planned_parent_is_not_removed_and_a_removed_one_gets_no_child(store: RemoteStore) -> None:
    published(store, "a")
    plan = replace(PLAN, id="b", kind=SnapshotKind.INCREMENTAL, parent="a")
    work = Work.begin(store, plan)
    assert not store.remove("a")
    assert store.ids() == ["a"]
    work.remove()
    (store._marks("a") / "mark-x").write(b"")  # the removing process has come so far
    assert not store.may_continue("a")
    assert store.remove("a")


def test_legal_hold_and_removal_see_each_other(store: RemoteStore) -> None:
    """Each announces itself before it looks for the other."""
    published(store, "a")
    store.hold("a", LegalHold(reason="case 17", placed_ms=1))
    assert store.holds()["a"].reason == "case 17"
    assert not store.remove("a")
    assert store.release_hold("a")
    (store._marks("a") / "mark-x").write(b"")  # the removing process has come so far
    with pytest.raises(Unavailable, match="is being removed"):
        store.hold("a", LegalHold(reason="case 18", placed_ms=2))
    assert store.holds() == {}
    assert store.remove("a")


def test_legal_hold_that_was_not_completed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was killed before the rename, on a store that writes in place."""
    store = RemoteStore(RemotePath(f"file://{tmp_path}/x"))
    published(store, "a")
    with monkeypatch.context() as patched:
        patched.setattr(remote, "_move_over", died)
        with pytest.raises(Killed):
            store.hold("a", LegalHold(reason="case 17", placed_ms=1))
    assert store.holds() == {}
    assert [each.state for each in inventory_of(store).snapshots] == [USABLE]


def test_refused_legal_hold_leaves_an_earlier_one(store: RemoteStore) -> None:
    published(store, "a")
    store.hold("a", LegalHold(reason="case 17", placed_ms=1))
    (store._marks("a") / "mark-x").write(b"")  # a removal that began before the hold, or was killed
    with pytest.raises(Unavailable, match="is being removed"):
        store.hold("a", LegalHold(reason="case 18", placed_ms=2))
    assert store.holds()["a"].reason == "case 17"
    assert not store.remove("a")


def test_process_that_gives_way_keeps_the_removal_mark_of_another(store: RemoteStore) -> None:
    """Two prune commands at once: the first has checked before there was a plan, the second finds it."""
    published(store, "a")
    (store._marks("a") / "mark-of-the-first").write(b"")
    work = Work.begin(store, replace(PLAN, id="b", kind=SnapshotKind.INCREMENTAL, parent="a"))
    assert not store.remove("a")
    assert not store.may_continue("a"), "it would lose its parent"
    work.remove()


def test_removal_presumed_dead_meanwhile_gives_way(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mark is removed, so a process that checks since then would not see it."""
    published(store, "a")

    def stands_still(self: RemoteStore, snapshot: str) -> bool:
        assert store.remove_remains([store._marks(snapshot)])
        return False

    monkeypatch.setattr(RemoteStore, "_is_continued", stands_still)
    assert not store.remove("a")
    assert store.ids() == ["a"]


def test_killed_removal_is_finished_or_undone(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    published(store, "a")
    published(store, "b")
    (store._marks("b") / "mark-x").write(b"")  # killed after the mark
    with monkeypatch.context() as patched:
        patched.setattr(RemotePath, "remove_all", died)
        with pytest.raises(Killed):
            store.remove("a")
    assert store.ids() == ["b"]
    assert sorted(store.load_all()) == ["b"], "files without a manifest are known to be going"
    now_s = time.time()
    assert store.stale_remains(now_s) == [], "somebody may still be at it"
    stale = store.stale_remains(now_s + objects.MARK_S + 60)
    assert sorted(store.remove_remains(stale)) == sorted(stale)
    assert [each.name for each in store.root.iterdir()] == ["b"]
    assert store.may_continue("b")


def test_snapshot_that_is_being_restored_stays(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    published(store, "a")
    published(store, "b")
    with monkeypatch.context() as patched:
        patched.setattr(objects, "LEASE_S", PATIENCE_S)  # another process sees it alive long before
        with store.reading(["a"]):
            assert not store.remove("a")
            assert store.ids() == ["a", "b"]
            assert store.remove("b")
            assert resumed_or_none(store, WANTED) is None
    assert not [each for each in store.root.iterdir() if each.name.startswith(READ)]
    killed_one = store.root / f"{READ}x"
    (killed_one / objects.READS).write(b'["a"]')
    (killed_one / "lock-000001").write(b'{"owner": "x", "count": 3}')
    assert store.remove("a")
    assert not store.root.exists() or list(store.root.iterdir()) == []


def test_reader_that_a_removal_takes_for_dead_is_refused(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal comes between the two files of the reader's announcement."""
    published(store, "a")
    begun, found, waits, gone = (threading.Event() for _ in range(4))
    lock, stop, sleep = LockHeartbeat.or_none.__func__, LockHeartbeat.stop, time.sleep  # type: ignore[attr-defined]
    reader = threading.current_thread()

    def locked(kind: type[LockHeartbeat], folder: RemotePath) -> LockHeartbeat | None:
        if threading.current_thread() is reader:
            begun.set()
            assert found.wait(PATIENCE_S)
        return lock(kind, folder)

    def stopped(lease: LockHeartbeat) -> None:
        stop(lease)
        if threading.current_thread() is not reader:  # the removal has taken the reader's lock
            found.set()
            waits.wait(PATIENCE_S)

    def slept(seconds: float) -> None:
        if threading.current_thread() is reader:
            waits.set()
            assert gone.wait(PATIENCE_S)
        sleep(seconds)

    def remove() -> bool:
        assert begun.wait(PATIENCE_S)
        is_removed = RemoteStore(store.root).remove("a")
        gone.set()
        found.set()
        return is_removed

    monkeypatch.setattr(LockHeartbeat, "or_none", classmethod(locked))
    monkeypatch.setattr(LockHeartbeat, "stop", stopped)
    monkeypatch.setattr(time, "sleep", slept)
    with ThreadPoolExecutor(1) as threads:
        removal = threads.submit(remove)
        with pytest.raises(Unavailable, match="is being removed"), store.reading(["a"]):
            pass
        assert removal.result()


def test_readers_of_a_vanishing_or_read_only_directory_get_an_error(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    published(store, "a")
    mark = store._mark("a")
    with pytest.raises(Unavailable, match="snapshot a is being removed"), store.reading(["a"]):
        pass
    mark.parent.remove_all()
    assert [each.name for each in store.root.iterdir()] == ["a"]

    def refused(*_: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(RemotePath, "write", refused)
    with store.reading(["a"]):
        assert "a prune may remove snapshots that are being read" in caplog.text


def test_manifest_that_is_missing_or_torn_is_damage(store: RemoteStore) -> None:
    published(store, "a")
    path = store.folder("a") / NAME
    whole = path.read_bytes()
    path.write(whole[:-20])
    with pytest.raises(Corrupted, match=r"its checksum does not match|is not the manifest"):
        store.load("a")
    path.unlink()
    with pytest.raises(Corrupted, match=r"manifest\.json is missing"):
        store.load("a")


# ── paths ──


def run(*words: object) -> tuple[int, str]:
    answer = CliRunner().invoke(build(), ["snapshot", *map(str, words)], env={"COLUMNS": "300"})
    return answer.exit_code, answer.output


@pytest.mark.parametrize("root", ["s3"], indirect=True)
def test_commands_take_a_url(store: RemoteStore) -> None:
    published(store, "a")
    published(store, "b", "a")
    assert store_at(f"{store.root}/b")[1] == "b"
    assert run("verify", store.root) == (0, "intact: a, b; 0 rows\n")
    code, output = run("list", store.root)
    assert (code, output.count("usable")) == (0, 2)
    path = store.folder("b") / store.load("b").files[0].path
    path.write(path.read_bytes() + b"\0")
    assert "as in the manifest" in run("verify", store.root)[1]
    published(store, "c")
    code, output = run("prune", store.root, "--keep", "1")
    assert (code, sorted(output.split())[:1]) == (0, ["a"]) or "removed" in output
    assert store.ids() == [chains.newest_or_none(store.load_all()).id]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nothing://host/x", "nothing://host/x: Protocol not known: nothing"),
        ("memory://nowhere/at/all", "memory://nowhere/at/all is not a directory of snapshots"),
    ],
)
def test_urls_that_name_nothing_are_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        store_at(url)


def test_without_fsspec_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"a URL needs fsspec: run `"):
        location("s3://bucket/x")


def test_missing_bucket_is_reported_before_any_work_begins(s3: str) -> None:
    with pytest.raises(ConfigError, match="s3://elsewhere/x cannot be written to"):
        RemoteStore(RemotePath("s3://elsewhere/x")).check_writable()
    with pytest.raises(Unavailable, match="expected 1 bytes as sent, got 0"):
        _upload_that_is_cut(RemotePath(f"{s3}/cut"))


def _upload_that_is_cut(place: RemotePath) -> None:
    class Cut(RemotePath):
        def size(self) -> int:
            return 0

    path = Path(os.environ.get("TMPDIR", "/tmp")) / uuid4().hex
    path.write_bytes(b"x")
    try:
        Cut(str(place)).upload(path)
    finally:
        path.unlink()


def test_file_url_is_its_path(tmp_path: Path) -> None:
    assert location(f"file://{tmp_path}") == tmp_path
