"""How the asyncio and the blocking session carry out recipes: no call outlasts its caller's timeout, and waiting
callers learn at once that the session is over."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from math import inf
from typing import Any, Self

import pytest

from kvstore.client.coordination import (
    AsyncLock,
    AsyncQueue,
    AsyncSession,
    Lock,
    NotInTime,
    Queue,
    Session,
    SessionEnded,
)
from kvstore.client.coordination.lease import CALL_S_MIN
from kvstore.client.core.batch import Batch
from kvstore.client.core.operation import DELETE, GET, PUT
from kvstore.client.core.values import Item, Page
from kvstore.client.core.watching import Change
from kvstore.env.library_env import LibraryEnv, library_env
from kvstore.env.nursery import TaskNursery
from kvstore.errors import InvalidRequest, OutcomeUnknown, Unavailable
from kvstore.rpc import workers
from tests.client.serving import HandClock
from tests.waiting import PATIENCE_S, wait_until_blocking

OTHER = b"{t}/lock/l/other"


class Store:
    """Answers a session's calls as if another session were first in every line. A slow call takes all the time that it
    gets."""

    def __init__(self, clock: HandClock | None = None) -> None:
        self.clock, self.slow = clock, frozenset[str]()
        self.given: list[float] = []
        self.created: dict[bytes, int] = {OTHER: 1}
        self.values: dict[bytes, bytes] = {OTHER: b"w"}
        self.watched = threading.Event()
        self.told: list[Change] = []
        """Changes that watches return."""
        self.looks = 0

    def batch(self, batch: Batch, *, timeout_s: float) -> list[Any]:
        self._take("batch", timeout_s, OutcomeUnknown("no answer in time"))
        for each in batch.operations:
            if each.code == PUT:
                self.created.setdefault(each.key, len(self.created) + 1)
                self.values[each.key] = each.value
            elif each.code == DELETE:
                self.created.pop(each.key, None)
        return [Item(b"", 5, 5, 0, 99) if each.code == GET else 7 for each in batch.operations]

    def meta(self, key: bytes, *, timeout_s: float) -> object:
        self._take("meta", timeout_s, Unavailable("no answer in time"))
        return object()

    def page(self, token: str | None, *, prefix: bytes, limit: int, keys_only: bool, timeout_s: float | None) -> Page:
        assert timeout_s is not None or not self.slow
        self._take("page", timeout_s or 0.0, Unavailable("no answer in time"))
        self.looks += 1
        found = {key: at for key, at in self.created.items() if key.startswith(prefix)}
        return Page([(key, Item(self.values.get(key, b"w"), at, at, 0, 0)) for key, at in found.items()], None)

    def _take(self, call: str, timeout_s: float, error: Exception) -> None:
        if call in self.slow:
            self.given.append(timeout_s)
            assert self.clock is not None
            self.clock.at += timeout_s
            raise error

    def next_told(self) -> Change | None:
        """Return a change of a key."""
        if not self.told:
            return None
        change = self.told.pop(0)
        if change.item is None:
            del self.created[change.key]
        return change


class BlockingChanges:
    """A watch that returns the store's changes, and then nothing."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._until, self._env = 0.0, library_env("test")

    def ready(self) -> Self:
        return self

    def __iter__(self) -> Iterator[Change]:
        return self

    def __next__(self) -> Change:
        if (change := self._store.next_told()) is not None:
            return change
        self._news.get()
        raise StopIteration

    def close(self) -> None:
        self._news.put(None)


class AsyncChanges:
    """The same watch on asyncio."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *ended: object) -> None:
        """Do nothing, because nothing is open."""

    async def __anext__(self) -> Change:
        if (change := self._store.next_told()) is not None:
            return change
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


class BlockingClient(Store):
    def watch(self, key: bytes | None, *, prefix: bytes, keys_only: bool) -> BlockingChanges:
        self.watched.set()
        return BlockingChanges(self)


class AsyncClient:
    """The store with coroutines."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            return getattr(self.store, name)(*args, **options)

        return call

    def watch(self, key: bytes | None, *, prefix: bytes, keys_only: bool) -> AsyncChanges:
        self.store.watched.set()
        return AsyncChanges(self.store)


def by_hand(clock: HandClock) -> LibraryEnv:
    env = library_env("test")
    return LibraryEnv(clock, env.random, TaskNursery("test"))


SLOW = [("batch", 1), ("page", 1)]


@pytest.mark.parametrize(("call", "count"), SLOW)
def test_call_takes_no_longer_than_its_caller_waits(call: str, count: int) -> None:
    clock = HandClock()
    store = BlockingClient(clock)
    session = Session(store, b"t", env=by_hand(clock)).open()  # type: ignore[arg-type]
    store.slow = frozenset({call})
    wake, session._wake = session._wake, threading.Event()  # the session's thread, which deletes discarded keys, sleeps
    with pytest.raises(NotInTime, match="the call did not end in time: no answer in time"):
        Lock(session, b"l").acquire(timeout_s=2.0)
    assert store.given == [2.0] * count
    assert clock.at == 1002.0
    store.slow, session._wake = frozenset(), wake
    session.close()


@pytest.mark.parametrize(("call", "count"), SLOW)
async def test_asyncio_call_takes_no_longer_than_its_caller_waits(call: str, count: int) -> None:
    clock = HandClock()
    store = Store(clock)
    session = await AsyncSession(AsyncClient(store), b"t", env=by_hand(clock)).open()  # type: ignore[arg-type]
    store.slow = frozenset({call})
    with pytest.raises(NotInTime, match="the call did not end in time: no answer in time"):
        await AsyncLock(session, b"l").acquire(timeout_s=2.0)
    assert store.given == [2.0] * count
    assert clock.at == 1002.0
    store.slow = frozenset()
    await session.close()


def test_write_of_unknown_outcome_is_not_reported_as_late() -> None:
    clock = HandClock()
    store = BlockingClient(clock)
    session = Session(store, b"t", env=by_hand(clock)).open()  # type: ignore[arg-type]
    store.slow = frozenset({"batch"})
    with pytest.raises(OutcomeUnknown):
        session.put(b"worker", b"1", timeout_s=2.0)
    assert store.given == [2.0]
    store.slow = frozenset()
    session.close()


def test_caller_does_not_outwait_its_timeout_behind_writes_of_the_session() -> None:
    session = Session(BlockingClient(), b"t").open()  # type: ignore[arg-type]
    with session._mutex, pytest.raises(NotInTime, match="busy with other writes"):
        Lock(session, b"l").acquire(timeout_s=CALL_S_MIN)
    session.close()


async def test_asyncio_caller_does_not_outwait_its_timeout_behind_other_writes() -> None:
    session = await AsyncSession(AsyncClient(Store()), b"t").open()  # type: ignore[arg-type]
    async with session._mutex:
        with pytest.raises(NotInTime, match="busy with other writes"):
            await AsyncLock(session, b"l").acquire(timeout_s=CALL_S_MIN)
    await session.close()


@pytest.mark.parametrize("ends", [Session.close, Session._over])
def test_waiting_caller_is_notified_at_once_when_the_session_ends(ends: Callable[[Session], None]) -> None:
    """Its ttl is a day, so a caller that learned of the end by it would wait that long."""
    store = BlockingClient()
    session = Session(store, b"t", ttl_s=86_400.0).open()  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(Lock(session, b"l").acquire)
        store.watched.wait()
        timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
        assert not timers, "a thread for each wait"
        ends(session)
        with pytest.raises(SessionEnded):
            waiting.result()
    assert session._waits == {}
    session.close()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_waiting_asyncio_caller_is_notified_at_once_when_the_session_ends(is_lost: bool) -> None:
    store = Store()
    session = await AsyncSession(AsyncClient(store), b"t", ttl_s=86_400.0).open()  # type: ignore[arg-type]
    waiting = [asyncio.create_task(AsyncLock(session, b"l").acquire()) for _ in range(3)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(session._waits) == 3
    if is_lost:
        session._over()
    else:
        await session.close()
    heard = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in heard] == [SessionEnded] * 3
    assert session._waits == set()
    await session.close()


async def test_waiting_caller_is_notified_of_the_end_when_close_is_cancelled() -> None:
    session = await AsyncSession(AsyncClient(Store()), b"t", ttl_s=86_400.0).open()  # type: ignore[arg-type]
    waiting = asyncio.create_task(AsyncLock(session, b"l").acquire())
    for _ in range(100):
        await asyncio.sleep(0)
    assert session._waits
    async with session._mutex:  # a write that hangs
        closing = asyncio.create_task(session.close())
        for _ in range(100):
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    assert session.lost.is_set()
    assert not session.is_alive
    with pytest.raises(SessionEnded):
        await asyncio.wait_for(waiting, PATIENCE_S)


def renewals_and_an_end() -> list[Change]:
    renewals = [Change(OTHER, Item(b"w", at, 1, 0, 0), at, 0, "p1", False) for at in range(10, 20)]
    return [*renewals, Change(OTHER, None, 20, 0, "p1", False)]


# docs/protocol.md Q4
def test_renewals_of_the_key_in_front_wake_no_waiter() -> None:
    store = BlockingClient()
    store.told = renewals_and_an_end()
    with Session(store, b"t") as session:  # type: ignore[arg-type]
        Lock(session, b"l").acquire()
    assert store.looks == 5, "the line, the key in front twice, the release note, and the line again"


async def test_renewals_of_the_key_in_front_wake_no_asyncio_waiter() -> None:
    store = Store()
    store.told = renewals_and_an_end()
    async with AsyncSession(AsyncClient(store), b"t") as session:  # type: ignore[arg-type]
        await AsyncLock(session, b"l").acquire()
    assert store.looks == 5


def claimed_item(store: Store) -> None:
    """Is given back when something else has been counted."""
    claim, counted = (b"{t}/queue/q/" + name for name in (b"claim-01", b"times-01"))
    store.created |= {claim: 2, b"{t}/queue/q/item-01": 1}
    store.told = [Change(counted, Item(b"1", 3, 3, 0, 0), 3, 0, "p1", False), Change(claim, None, 4, 0, "p1", False)]


# docs/protocol.md Q6
def test_changes_that_wake_no_item_waiter_cost_no_read() -> None:
    store = BlockingClient()
    claimed_item(store)
    with Session(store, b"t") as session:  # type: ignore[arg-type]
        assert Queue(session, b"q").take().name == b"01"
    assert store.looks == 3, "the first keys, all, and those without the claim"


async def test_changes_that_wake_no_asyncio_item_waiter_cost_no_read() -> None:
    store = Store()
    claimed_item(store)
    async with AsyncSession(AsyncClient(store), b"t") as session:  # type: ignore[arg-type]
        assert (await AsyncQueue(session, b"q").take()).name == b"01"
    assert store.looks == 3


@pytest.mark.parametrize("is_answered", [False, True])
def test_session_closed_while_it_opens_leaves_no_key(monkeypatch: pytest.MonkeyPatch, is_answered: bool) -> None:
    store = BlockingClient()
    session = Session(store, b"t")  # type: ignore[arg-type]
    opened = session.lease.opened

    def closed(*given: Any) -> None:
        if is_answered:
            opened(*given)
        session.close()
        if not is_answered:
            opened(*given)

    monkeypatch.setattr(type(session.lease), "opened", lambda _, *given: closed(*given))
    with pytest.raises(SessionEnded, match="has ended"):
        session.open()
    assert session.lease.key not in store.created
    assert not session.is_alive


@pytest.mark.parametrize("is_ended", [False, True])
async def test_asyncio_session_closed_while_it_opens_leaves_no_key(
    monkeypatch: pytest.MonkeyPatch, is_ended: bool
) -> None:
    store = Store()
    client: Any = AsyncClient(store)
    session = AsyncSession(client, b"t")
    closing: list[asyncio.Future[None]] = []

    async def batch(*given: Any, **options: Any) -> list[Any]:
        results = store.batch(*given, **options)
        if not closing:
            closing.append(asyncio.ensure_future(session.close()))
            await asyncio.sleep(0)
            if is_ended:
                await closing[0]
        return results

    client.batch = batch
    async with session._mutex if not is_ended else nullcontext():
        with pytest.raises(SessionEnded, match="has ended"):
            await session.open()
    await closing[0]
    assert session.lease.key not in store.created
    assert not session.is_alive


def test_closed_session_is_not_opened_again() -> None:
    session = Session(BlockingClient(), b"t")  # type: ignore[arg-type]
    with session:
        with pytest.raises(InvalidRequest, match="opened before"):
            session.open()
        assert session.is_alive
    with pytest.raises(SessionEnded, match="has ended"):
        session.open()


async def test_lock_that_two_tasks_acquire_at_once_keeps_one_place() -> None:
    """Both tasks acquired the read side. `release` knew only the later place, so the session kept the other one alive,
    and no writer got the lock."""
    store = Store()
    store.created.clear()
    async with AsyncSession(AsyncClient(store), b"t") as session:  # type: ignore[arg-type]
        lock = AsyncLock(session, b"l", shared=True)
        async with session._mutex:  # both tasks wait to write their places
            acquiring = [asyncio.ensure_future(lock.acquire()) for _ in range(2)]
            await asyncio.sleep(0)
        found = await asyncio.gather(*acquiring, return_exceptions=True)
        assert [type(each) for each in found] == [int, InvalidRequest]
        assert await lock.release()
        assert [key for key in session.lease.keys if b"/lock/" in key] == []


async def test_closed_asyncio_session_is_not_opened_again() -> None:
    session = AsyncSession(AsyncClient(Store()), b"t")  # type: ignore[arg-type]
    async with session:
        with pytest.raises(InvalidRequest, match="opened before"):
            await session.open()
        assert session.is_alive
    with pytest.raises(SessionEnded, match="has ended"):
        await session.open()


def test_worker_of_an_interrupted_caller_stops_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker kept its thread and a watch until the lock was free or the session was over."""
    wait = workers.Job.wait

    def struck(job: workers.Job[Any], wait_s: float = inf) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return wait(job, wait_s)
        while not job.join(0.01):
            if session._waits:
                raise KeyboardInterrupt
        return wait(job, wait_s)

    with Session(BlockingClient(), b"t") as session:  # type: ignore[arg-type]
        with monkeypatch.context() as patched:
            patched.setattr(workers.Job, "wait", struck)
            with pytest.raises(KeyboardInterrupt):
                Lock(session, b"l").acquire()
        wait_until_blocking(lambda: not session._waits)
        assert session.is_alive
