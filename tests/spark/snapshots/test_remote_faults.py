"""Faults of object stores: lost answers, paused drivers, wrong clocks, failing servers."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from s3fs import S3FileSystem

from kvstore.errors import Unavailable
from kvstore.spark.snapshots import create, objects, remote, verify
from kvstore.spark.snapshots.create import resumed_or_none
from kvstore.spark.snapshots.manifest import NAME, SnapshotKind
from kvstore.spark.snapshots.objects import RemoteStore
from kvstore.spark.snapshots.remote import RemotePath, local_copy_of
from kvstore.spark.snapshots.store import RESUMABLE_S
from kvstore.spark.snapshots.work import Work
from tests.spark.snapshots.object_store import s3_server
from tests.spark.snapshots.test_remote import attempt, killed, published
from tests.spark.snapshots.test_work import PIECES, PLAN, WANTED
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> RemoteStore:
    """In memory; drivers are presumed dead after a short time."""
    monkeypatch.setattr(objects, "COUNT_S", 0.05)
    monkeypatch.setattr(objects, "LEASE_S", 0.5)
    return RemoteStore(RemotePath(f"memory://{uuid4().hex}/x"))


# ── lost answers ──


def test_manifest_whose_answer_was_lost_is_published_and_keeps_its_files(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client repeats a request that has already arrived, and is refused because of its own manifest."""
    store = RemoteStore(RemotePath(f"{bucket}/{uuid4().hex}"))
    send = AIOHTTPSession.send
    lost: list[str] = []

    async def lose_answer(self: AIOHTTPSession, request: Any) -> Any:
        answer = await send(self, request)
        if request.method == "PUT" and request.url.endswith(NAME) and not lost:
            assert answer.status_code == 200
            lost.append(request.url)
            raise ConnectionClosedError(endpoint_url=request.url)
        return answer

    work = Work.begin(store, PLAN)
    winners = {piece.name: attempt(work, piece) for piece in PIECES}
    monkeypatch.setattr(AIOHTTPSession, "send", lose_answer)
    manifest = work.publish(PLAN, winners, 2)
    assert len(lost) == 1
    assert store.load("s1") == manifest
    assert list(verify.problems_of(store, [manifest])) == []
    assert store.remains() == []


@pytest.mark.parametrize("fails", [FileExistsError("refused"), OSError(22, "PreconditionFailed")])
def test_file_stored_despite_an_error_counts_as_stored(monkeypatch: pytest.MonkeyPatch, fails: OSError) -> None:
    """Not all stores report that the condition was the reason of the failure."""
    place = RemotePath(f"memory://{uuid4().hex}/x")
    put = MemoryFileSystem.pipe_file

    def put_and_fail(self: MemoryFileSystem, path: str, value: bytes, **more: Any) -> None:
        put(self, path, value, **more)
        raise fails

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", put_and_fail)
    assert place.create(b"mine")
    assert place.create(b"mine"), "who asks twice is not refused by itself"
    assert not place.create(b"another's")
    assert place.read_bytes() == b"mine"
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda *_, **__: (_ for _ in ()).throw(fails))
    with pytest.raises(OSError, match=str(fails.args[-1])):
        RemotePath(f"memory://{uuid4().hex}/x").create(b"mine")


# ── paused drivers ──


def test_driver_that_slept_takes_no_file_that_the_other_has_published(store: RemoteStore) -> None:
    """The other continued with its parts: the manifest names the files of both."""
    stopped = Work.begin(store, PLAN)
    winners = {PIECES[0].name: attempt(stopped, PIECES[0])}
    own = {**winners, PIECES[1].name: attempt(stopped, PIECES[1], noted=False)}
    killed(stopped)
    other = Work.abandoned_or_none(store, stopped.folder)
    assert other is not None
    found = other.finished()
    assert found == winners
    (stopped.folder / "attempts" / own[PIECES[1].name].path).write(b"")  # it wakes up, and writes its own manifest
    manifest = other.publish(PLAN, {**found, PIECES[1].name: attempt(other, PIECES[1])}, 3)

    late = Work(store, stopped.folder)  # after its check of the lock
    own[PIECES[1].name] = attempt(late, PIECES[1])
    with pytest.raises(Unavailable, match="was published by another driver"):
        late.publish(PLAN, own, 4)
    assert store.load("s1") == manifest
    assert list(verify.problems_of(store, [manifest])) == [], "and none of its own files is left"


def test_driver_that_slept_and_gives_up_leaves_the_work_to_the_other(store: RemoteStore) -> None:
    stopped = Work.begin(store, PLAN)
    killed(stopped)
    other = Work.abandoned_or_none(store, stopped.folder)
    assert other is not None
    winners = {piece.name: attempt(other, piece) for piece in PIECES}
    stopped.remove()  # as when its pin has expired
    manifest = other.publish(PLAN, winners, 3)
    assert list(verify.problems_of(store, [manifest])) == []


def test_driver_paused_before_its_manifest_publishes_no_removed_files(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pin has expired meanwhile: the other removes its work instead of resuming it."""
    stopped = Work.begin(store, PLAN)
    winners = {piece.name: attempt(stopped, piece) for piece in PIECES}
    put, slept = RemotePath.create, []

    def sleep_and_put(self: RemotePath, data: bytes) -> bool:
        if self.name == NAME and not slept:
            slept.append(self)
            killed(stopped)
            assert resumed_or_none(store, WANTED) is None
        return put(self, data)

    monkeypatch.setattr(create, "_renewed", lambda *_: False)
    monkeypatch.setattr(RemotePath, "create", sleep_and_put)
    with pytest.raises(Unavailable, match="another driver considered this driver dead and removed its work"):
        stopped.publish(PLAN, winners, 2)
    assert len(slept) == 1
    assert store.load_all() == {}
    assert store.remains() == []


def test_publisher_whose_work_is_about_to_be_removed_gives_way(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has stored its mark, and may not see the manifest."""
    work = Work.begin(store, PLAN)
    winners = {piece.name: attempt(work, piece) for piece in PIECES}
    mark = store._mark("s1")
    with pytest.raises(Unavailable, match="removed its work"):
        work.publish(PLAN, winners, 2)
    assert store.ids() == []
    mark.unlink()
    work.release()
    again = Work.abandoned_or_none(store, work.folder)
    assert again is not None
    manifest = again.publish(PLAN, again.finished(), 3)
    assert list(verify.problems_of(store, [manifest])) == []


def test_work_that_is_published_just_as_another_removes_it_stays(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work.begin(store, PLAN)
    winners = {piece.name: attempt(work, piece) for piece in PIECES}
    manifest = work.publish(PLAN, winners, 2)
    looks, is_published = [False], RemoteStore._is_published  # the manifest is stored right after the first check
    monkeypatch.setattr(RemoteStore, "_is_published", lambda *args: looks.pop() if looks else is_published(*args))
    store.remove_work(work.folder)
    assert looks == []
    assert list(verify.problems_of(store, [manifest])) == []
    assert store.load_all() == {"s1": manifest}
    assert store.remains() == []


# ── several threads ──


def test_listing_that_another_thread_has_begun_before_hides_no_file(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer came in between: drivers cache listings, and a file that had been sent was missing."""
    folder = RemotePath(f"{bucket}/{uuid4().hex}")
    (folder / "a").write(b"a")
    _, path = remote._opened(str(folder))

    def remember(self: S3FileSystem, _: str | None = None) -> None:
        self.dircache[path] = [{"name": f"{path}/a", "Key": f"{path}/a", "size": 1, "type": "file"}]

    monkeypatch.setattr(S3FileSystem, "invalidate_cache", remember)
    (folder / "b").write(b"bb")
    assert (folder / "b").size() == 2
    assert (folder / "b").is_file()
    assert [each.name for each in folder.iterdir()] == ["a", "b"]


# ── clocks, and remains ──


def test_work_ages_even_if_other_processes_inspect_it_daily(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that wants another snapshot takes its lock and releases it: that makes it no younger."""
    killed(Work.begin(store, PLAN))
    (folder,) = store.remains()
    later_s = time.time() + RESUMABLE_S - 60
    monkeypatch.setattr(
        MemoryFileSystem, "modified", lambda fs, path: _moved(fs.store[path], "000002" in path, RESUMABLE_S)
    )
    again = Work.abandoned_or_none(store, folder)
    assert again is not None
    again.release()
    assert store.stale_remains(later_s) == []
    assert store.stale_remains(later_s + 120) == [folder]


def _moved(file: MemoryFile, later: bool, seconds: float) -> Any:
    from datetime import timedelta

    return file.modified + timedelta(seconds=seconds * later)


def test_prune_with_a_wrong_clock_takes_nothing_from_a_driver_that_lives(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "LEASE_S", PATIENCE_S)  # another process sees it alive long before
    work = Work.begin(store, PLAN)
    winners = {piece.name: attempt(work, piece) for piece in PIECES}
    stale = store.stale_remains(time.time() + 2 * RESUMABLE_S)
    assert stale == [work.folder]
    assert store.remove_remains(stale) == []
    manifest = work.publish(PLAN, winners, 3)
    assert list(verify.problems_of(store, [manifest])) == []


def test_copies_of_processes_that_were_killed_go_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old, new, other = (tmp_path / name for name in ("kvstore-piece-old", "kvstore-piece-new", "another"))
    for folder in (old, new, other):
        folder.mkdir()
        (folder / "x.parquet").touch()
    before_s = time.time() - RESUMABLE_S - 60
    for path in (old / "x.parquet", old, new, other / "x.parquet", other):
        os.utime(path, (before_s, before_s))
    with local_copy_of(RemotePath(f"memory://{uuid4().hex}/y")) as path:
        path.touch()
        assert path.is_relative_to(tmp_path)
        assert sorted(each.name for each in tmp_path.iterdir() if each != path.parent) == ["another", new.name]


# ── names ──


def test_any_name_of_a_place_will_do(bucket: str) -> None:
    store = RemoteStore(RemotePath(f"{bucket}/{uuid4().hex}/a b%20ü+&#*[x]//"))
    published(store, "a")
    published(store, "b", "a")
    assert store.ids() == ["a", "b"]
    assert list(verify.problems_of(store, list(store.load_all().values()))) == []
    assert store.remove("b")
    assert store.ids() == ["a"]
    assert store.remains() == []


def test_password_in_a_url_is_not_shown() -> None:
    place = RemotePath("sftp://backup:s%40cret@host:22/x y/") / "20260101T000000Z-full-0000"
    assert str(place) == "sftp://backup:***@host:22/x y/20260101T000000Z-full-0000"
    assert "s%40cret" not in f"{place} {place!r} {place.parent}"
    assert place.parent == RemotePath("sftp://backup:s%40cret@host:22/x y")
    assert str(RemotePath("s3://bucket/a:b@c")) == "s3://bucket/a:b@c"


# ── failing servers ──


def asks_as_most_drivers_do(monkeypatch: pytest.MonkeyPatch, unanswered: str, fails: Exception) -> list[str]:
    """One request for a path whose name ends so is not answered: the list receives it."""
    info, asked = MemoryFileSystem.info, list[str]()

    def fail_once(self: MemoryFileSystem, path: str, **more: Any) -> Any:
        if path.endswith(unanswered) and not asked:
            asked.append(path)
            raise fails
        return info(self, path, **more)

    monkeypatch.setattr(MemoryFileSystem, "exists", AbstractFileSystem.exists)
    monkeypatch.setattr(MemoryFileSystem, "info", fail_once)
    return asked


CUT = [OSError("reset"), TimeoutError(), RuntimeError("StandbyException")]


@pytest.mark.parametrize("fails", CUT)
def test_question_without_an_answer_is_no_no(monkeypatch: pytest.MonkeyPatch, fails: Exception) -> None:
    place = RemotePath(f"memory://{uuid4().hex}/x")
    place.write(b"there")
    for ask in (place.exists, place.is_file, place.is_dir, place.remove_all):
        with monkeypatch.context() as patched:
            asks_as_most_drivers_do(patched, "/x", fails)
            with pytest.raises((OSError, Unavailable)):
                ask()
    assert place.is_file()


@pytest.mark.parametrize("fails", CUT)
def test_published_snapshot_stays_when_the_next_request_is_unanswered(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch, fails: Exception
) -> None:
    work = Work.begin(store, PLAN)
    winners = {piece.name: attempt(work, piece) for piece in PIECES}
    removed = store.remove_work

    def cut(folder: RemotePath) -> None:
        with monkeypatch.context() as patched:
            assert asks_as_most_drivers_do(patched, NAME, fails) == []
            removed(folder)

    monkeypatch.setattr(store, "remove_work", cut)
    manifest = work.publish(PLAN, winners, 2)
    assert store.load_all() == {"s1": manifest}
    assert list(verify.problems_of(store, [manifest])) == []
    assert store.remains() == [work.folder], "it is left to the next one"


@pytest.mark.parametrize("fails", CUT)
def test_newest_snapshot_is_not_skipped_if_the_store_does_not_answer(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch, fails: Exception
) -> None:
    published(store, "a")
    published(store, "b")
    asked = asks_as_most_drivers_do(monkeypatch, f"b/{NAME}", fails)
    with pytest.raises((OSError, Unavailable)):
        store.ids()
    assert len(asked) == 1
    assert store.ids() == ["a", "b"]


def test_file_is_replaced_though_the_driver_cannot_rename_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of HDFS, which reports it in an answer that fsspec drops: a driver's count stopped."""

    def move(self: MemoryFileSystem, old: str, new: str, **_: Any) -> None:
        if not self.exists(new):
            self.store[new] = self.store.pop(old)

    monkeypatch.setattr(MemoryFileSystem, "mv", move)
    place = RemotePath(f"memory://{uuid4().hex}/folder") / "lock"
    place.write(b"1")
    place.write(b"2")
    assert place.read_bytes() == b"2"
    assert [each.name for each in place.parent.iterdir()] == ["lock"]
    monkeypatch.setattr(MemoryFileSystem, "mv", lambda *_, **__: None)
    with pytest.raises(OSError, match="could not be written"):
        place.write(b"3")


def test_refusal_of_the_store_is_reported_with_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refused)
    with pytest.raises(PermissionError, match="memory://somewhere/x: Access Denied"):
        RemotePath("memory://somewhere/x").read_bytes()


class RequestsError(OSError):
    """As those of the package requests, which have no errno."""


@pytest.mark.parametrize("fails", [RequestsError("refused"), OSError(errno.ECONNREFUSED, "refused"), TimeoutError()])
def test_place_that_does_not_answer_is_not_called_wrong(monkeypatch: pytest.MonkeyPatch, fails: OSError) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise fails

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refused)
    with pytest.raises(Unavailable, match="memory://somewhere/x"):
        RemoteStore(RemotePath("memory://somewhere/x")).check_writable()


@pytest.mark.parametrize("fails", [ReadTimeoutError(endpoint_url="http://s3"), OSError("reset"), TimeoutError()])
def test_server_that_fails_while_a_file_is_read_is_no_damage(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch, fails: Exception
) -> None:
    published(store, "a")
    manifest = store.load("a")
    opened = MemoryFileSystem._open

    def fail(*_: Any) -> None:
        raise fails

    def broken(*args: Any, **more: Any) -> Any:
        file = opened(*args, **more)
        monkeypatch.setattr(file, "read", fail, raising=False)
        return file

    monkeypatch.setattr(MemoryFileSystem, "_open", broken)
    with pytest.raises(Unavailable, match=r"memory://.*parquet"):
        list(verify.problems_of(store, [manifest]))


def test_plan_that_cannot_be_put_leaves_nothing(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise Unavailable("no answer")

    monkeypatch.setattr(RemotePath, "write", refused)
    with pytest.raises(Unavailable, match="no answer"):
        Work.begin(store, replace(PLAN, kind=SnapshotKind.FULL))
    assert store.remains() == []
