# Written by `make generate` from kvstore/client/coordination/aio.py. Edit that file.
"""Coordination for threads, scripts and gevent: sessions, each with one thread of its own, and on them locks,
elections, groups, barriers, rendezvous and queues.

with Session(client, b"reports") as session:
    with Lock(session, b"nightly") as token:
        publish(report, token)  # the protected resource refuses a lower token than it has seen
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import inf
from types import TracebackType
from typing import Self, TypeVar

from kvstore.client.blocking.client import Client
from kvstore.client.blocking.watch import Watch
from kvstore.client.coordination import locking, session_keys, work_queue
from kvstore.client.coordination.lease import AGAIN_S, CALL_S_MIN, CLOSE_S, GRACE_S, TTL_S, SessionLease
from kvstore.client.coordination.locking import EXCLUSIVE, SHARED, LockKey
from kvstore.client.coordination.steps import (
    AwaitStep,
    FindStep,
    Found,
    NotInTime,
    Recipe,
    SessionEnded,
    Step,
    WriteStep,
    is_late,
)
from kvstore.client.coordination.threads import RecipeCaller, SessionRunner
from kvstore.client.coordination.work_queue import Taken
from kvstore.client.core.batch import Batch
from kvstore.client.core.fanout import PAGE_LIMIT_MAX
from kvstore.client.core.values import Item
from kvstore.coordination_keys import BARRIER, LEADER, LOCK, MEMBER, QUEUE, RENDEZVOUS
from kvstore.env.library_env import LibraryEnv, library_env
from kvstore.errors import ConditionFailed, InvalidRequest, Refused, StoreError

T = TypeVar("T")


class Session(SessionRunner):
    """A lease on keys of one `{tag}` that the client renews while the process runs and reaches the store.

    The client renews the lease after a third of `ttl_s`. When the session ends, its keys are deleted: at once by
    `close`, otherwise at the earliest `ttl_s` and then `grace_s` after the last renewal, measured by a leader's clock
    (docs/protocol.md, Q1 to Q3). A session has at most 256 keys and 768 KiB of keys and values.

    `lost` is an event that is set once the session has ended.

    Args:
        client: An open client.
        tag: The hash tag of all keys of the session, without braces. Processes that coordinate use the same tag.
        ttl_s: Time after which a session that is not renewed ends, 0.5 to 86,400 seconds.
        grace_s: Time for which keys outlive the session, 0 to 3,600 seconds. Covers the difference between clocks of
            servers.
        name: The owner, for people who read the session's key.
        env: Ports of the process, for tests.

    Raises:
        InvalidRequest: If the tag, `ttl_s` or `grace_s` is out of range.

    Examples:
        >>> with Session(client, b"reports") as session:
        ...     version = session.put(b"worker", b"host-1")
        ...     session.is_alive
        True
    """

    def __init__(
        self,
        client: Client,
        tag: bytes,
        *,
        ttl_s: float = TTL_S,
        grace_s: float = GRACE_S,
        name: bytes = b"",
        env: LibraryEnv | None = None,
    ) -> None:
        env = env or library_env("kvstore session")
        super().__init__(env, SessionLease(tag, env.random.randbytes(12).hex().encode(), ttl_s, grace_s))
        self._client, self._name = client, name

    def open(self) -> Self:
        """Create the session in the store. Entering the session does the same. Costs one round trip.

        Returns:
            The session itself.

        Raises:
            InvalidRequest: If the session was opened before.
            SessionEnded: If the session has ended.
            Refused: If the store refused the session; it may be opened again then.
        """
        return self._run_step_or_undo(self._open, self._close)

    def _open(self) -> Self:
        sent, opening = self.now(), self.lease.opening(self._name)
        try:
            results = self._client.batch(opening, timeout_s=self.lease.ttl_s)
        except Refused:
            self.lease.not_opened()
            raise
        self.lease.opened(results, sent)
        if not self._start(self._renew):  # the session was closed meanwhile, when its key may not have existed yet
            self._end_in_store(self.lease.closing())
            raise self.lease.ended()
        return self

    def close(self) -> None:
        """End the session and delete its keys. Costs one round trip.

        If the store cannot be reached within 2 s, the keys expire by themselves.
        """
        self._run_step(self._close)

    def _close(self) -> None:
        was_over = self.lost.is_set()
        closing = self._end()
        if not was_over and self.now() < self.lease.deadline:
            self._end_in_store(closing)

    def _end_in_store(self, closing: Batch) -> None:
        try:
            self._client.batch(closing, timeout_s=min(CLOSE_S, self.lease.ttl_s))
        except StoreError:
            return  # nothing renews the keys any more

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """True if the owner may rely on the session's keys now, by this machine's monotonic clock."""
        return self.lease.is_alive(self.now())

    def now(self) -> float:
        """Return the time of the clock that the lease uses, in seconds."""
        return self._env.clock.now()

    def put(self, name: bytes, value: bytes, *, waits: bool = False, timeout_s: float | None = None) -> int:
        """Write the key `{tag}/name`, which is deleted when the session ends, and return its version.

        A second call replaces the value. Costs one round trip.

        Args:
            name: The name of the key below the tag, without a slash.
            value: The value.
            waits: Wait until the key is absent instead of raising NameTaken.
            timeout_s: Maximum time for the call, in seconds. None: no limit.

        Raises:
            NameTaken: If the key exists and does not belong to this session.
            NotInTime: If the timeout expires.
            SessionEnded: If the session has ended.
            SessionFull: If the session has too many keys or bytes.
            OutcomeUnknown: If the key may have been written. It then exists until `ttl_s` and `grace_s` have passed.
        """
        return self.run(session_keys.put(self.lease, name, value, waits=waits), timeout_s=timeout_s)

    def delete(self, name: bytes, *, timeout_s: float | None = None) -> None:
        """Delete a key that `put` has written, if it belongs to this session. Costs one round trip.

        Args:
            name: The name of the key below the tag.
            timeout_s: Maximum time for the call, in seconds. None: no limit.

        Raises:
            SessionEnded: If the session has ended.
        """
        self.run(session_keys.delete(self.lease, self.lease.path(name)), timeout_s=timeout_s)

    def run(self, recipe: Recipe[T], *, timeout_s: float | None = None) -> T:
        """Carry out a recipe of this package. Raises NotInTime if it takes longer than `timeout_s`."""
        until = inf if timeout_s is None else self.now() + timeout_s
        caller = RecipeCaller(self.lease)
        try:
            step = next(recipe)
            while True:
                try:
                    answer = self._run_step(partial(self._do, step, until, caller))
                except StoreError as error:
                    step = recipe.throw(error)
                else:
                    caller.received()
                    step = recipe.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            caller.leave(recipe)
            if self.lease.has_discarded:
                self._drop_discarded()

    # ── steps ──

    def _do(self, step: Step, until: float, caller: RecipeCaller) -> object:
        try:
            match step:
                case WriteStep():
                    return self._write(step, until, caller)
                case FindStep():
                    return self._find(step, until)
                case AwaitStep():
                    return self._await(step, until, caller)
        except StoreError as error:
            if self.now() < until or not is_late(error, step):
                raise
            raise NotInTime(f"the call did not end in time: {error}") from error

    def _write(self, write: WriteStep, until: float, caller: RecipeCaller | None = None) -> object:
        lease = self.lease
        with self._turn(self._left_s(until), caller):
            sent = self.now()
            batch = lease.batch(write, sent)
            try:
                results = self._client.batch(batch, timeout_s=lease.call_s(batch, sent, until))
            except ConditionFailed:
                if self._client.meta(lease.key, timeout_s=lease.call_s(batch, self.now(), until)) is None:
                    self._over()
                    raise SessionEnded(f"the session {lease.key!r} has ended") from None
                raise
            answer = lease.wrote(write, batch, results, sent)
            if caller is not None and write.needs_receipt:
                caller.wrote([*write.puts])
            return answer

    def _find(self, find: FindStep, until: float) -> Found:
        found: dict[bytes, Item] = {}
        token: str | None = None
        while True:
            limit = min(PAGE_LIMIT_MAX, find.limit - len(found) if find.limit else PAGE_LIMIT_MAX)
            page = self._client.page(
                token, prefix=find.prefix, limit=limit, keys_only=find.keys_only, timeout_s=self._left_s(until)
            )
            found.update(page.items)
            token = page.token
            if token is None or len(found) == find.limit:
                return found

    def _await(self, step: AwaitStep, until: float, caller: RecipeCaller) -> Found:
        """Wait until the condition is met. Raises NotInTime at the deadline, SessionEnded once `_over` was called."""
        find = step.find
        key, prefix = (find.prefix, b"") if step.is_key else (None, find.prefix)
        changes = self._client.watch(key, prefix=prefix, keys_only=find.keys_only)
        found = self._watched(changes, partial(self._wait_until_met, step, until), self._left_s(until), caller)
        if found is not None:
            return found
        if not self.is_alive:
            raise self.lease.ended()
        raise NotInTime(f"timed out while waiting for a change below {find.prefix!r}")

    def _wait_until_met(self, step: AwaitStep, until: float, changes: Watch) -> Found | None:
        """Return the keys once the step's condition is met, or None if the watch was closed before. The watch begins
        before the first read, so each change between two reads wakes the caller."""
        while not step.is_met(found := self._find(step.find, until)):
            while (change := next(changes, None)) is not None and not step.wakes(step.find, found, change):
                pass
            if change is None:
                return None
        return found

    def _left_s(self, until: float) -> float | None:
        return None if until == inf else max(CALL_S_MIN, until - self.now())

    # ── keeping alive ──

    def _renew(self) -> None:
        lease = self.lease
        while lease.is_alive(now := self.now()):
            self._pause(lease.pause_s(now))
            try:
                self._write(WriteStep(renews=lease.is_due(self.now())), inf)
            except SessionEnded:
                break
            except StoreError:
                self._pause_before_retry(min(lease.renew_after_s, AGAIN_S))
                self._wake.set()
            else:
                if lease.has_discarded:
                    self._wake.set()


class Lock:
    """A lock that one session holds at a time, or with `shared` the read side of a read/write lock.

    Locks with the same name and tag are one lock. Any number of sessions can hold the shared side together, but not
    beside an exclusive holder. One instance can be held once at a time.

    While `is_held` is true nobody else holds the lock, as far as a process can know it: a process that was stopped
    between the check and its action cannot. Therefore pass `token` to the protected resource, which must refuse lower
    tokens than it has seen (docs/protocol.md, Q5).

    Args:
        session: An open session.
        name: The name of the lock, without a slash.
        shared: Acquire the read side.

    Examples:
        >>> with Session(client, b"reports") as session:
        ...     with Lock(session, b"nightly") as token:
        ...         token > 0
        True
    """

    _kind = LOCK
    """Part of the keys that distinguishes locks from elections."""
    _value = b""
    """Value of the keys, which the holder can choose."""

    def __init__(self, session: Session, name: bytes, *, shared: bool = False) -> None:
        self._session, self._lease = session, session.lease
        self._prefix = session.lease.path(self._kind, name, b"")
        self._mode = SHARED if shared else EXCLUSIVE
        self._place: LockKey | None = None

    def acquire(self, *, timeout_s: float | None = None) -> int:
        """Wait for the lock, in order of the requests, and return the fencing token.

        Costs two round trips if the lock is free. A waiting caller watches one key and polls nothing.

        Args:
            timeout_s: Maximum wait, in seconds. None: no limit.

        Raises:
            NotInTime: If the lock was not acquired in time. Nothing is held.
            SessionEnded: If the session has ended. Nothing is held.
            InvalidRequest: If this instance holds the lock already.
        """
        return self._session.run(self._acquiring(), timeout_s=timeout_s)

    def _acquiring(self) -> Recipe[int]:
        self._check_not_held()
        place = yield from locking.acquire(self._lease, self._prefix, self._mode, self._value)
        try:
            self._check_not_held()  # another caller of this instance may have acquired it meanwhile
        except InvalidRequest:
            self._lease.discard(place.key)
            raise
        if not self._lease.holds(place.key, self._session.now()):
            self._lease.discard(place.key)
            raise self._lease.ended()
        self._place = place
        return place.token

    def _check_not_held(self) -> None:
        if self.is_held:
            raise InvalidRequest("this lock is held already; use one instance for each caller that waits")

    def release(self) -> bool:
        """Release the lock. Costs one round trip.

        Returns:
            True if the lock was held until now. False if it was lost before, so that another session may have held it.
        """
        return self._session.run(self._releasing())

    def _releasing(self) -> Recipe[bool]:
        place, self._place = self._place, None
        if place is None:
            return False
        return (yield from locking.release(self._lease, self._prefix, place, self._mode))

    @property
    def is_held(self) -> bool:
        """True if the lock is held now, by this machine's monotonic clock."""
        return self._place is not None and self._lease.holds(self._place.key, self._session.now())

    @property
    def token(self) -> int:
        """Fencing token of the last acquisition, or 0. Every later acquisition, of any session, has a higher token."""
        return 0 if self._place is None else self._place.token

    def __enter__(self) -> int:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Election(Lock):
    """An election. `acquire` returns once this session is elected, `release` resigns.

    Args:
        session: An open session.
        name: The name of the election, without a slash.
        value: The value that the leader shows to others, for example its address.

    Examples:
        >>> with Session(client, b"reports") as session:
        ...     with Election(session, b"scheduler", b"host-1") as token:
        ...         value, leader_token = Election(session, b"scheduler").leader()
        ...         value, leader_token == token
        (b'host-1', True)
    """

    _kind = LEADER

    def __init__(self, session: Session, name: bytes, value: bytes = b"") -> None:
        super().__init__(session, name)
        self._value = value

    def leader(self) -> tuple[bytes, int] | None:
        """Return the leader's value and token, or None if there is no leader. Costs one round trip.

        A leader that has died is returned until its session ends.
        """
        return self._session.run(locking.leader(self._prefix))

    def next_leader(self, known: int = 0, *, timeout_s: float | None = None) -> tuple[bytes, int] | None:
        """Wait for another leader than the one with the token `known`, and return its value and token, or None.

        Args:
            known: The token of the leader that is known. 0: none.
            timeout_s: Maximum wait, in seconds. None: no limit.

        Raises:
            NotInTime: If the leader did not change in time.
        """
        return self._session.run(locking.next_leader(self._prefix, known), timeout_s=timeout_s)


class Group:
    """A group of sessions. A member belongs to it until it leaves or its session ends.

    Args:
        session: An open session.
        name: The name of the group, without a slash.

    Examples:
        >>> with Session(client, b"reports") as session:
        ...     group = Group(session, b"workers")
        ...     group.join(b"host-1")
        ...     list((group.members()).values())
        [b'host-1']
    """

    def __init__(self, session: Session, name: bytes) -> None:
        self._session = session
        self._prefix = session.lease.path(MEMBER, name, b"")

    def join(self, value: bytes = b"") -> None:
        """Join the group under the session's id, with a value that members see. A second call replaces the value.
        Costs one round trip."""
        self._session.run(session_keys.join(self._session.lease, self._prefix, value))

    def leave(self) -> None:
        """Leave the group. Costs one round trip."""
        lease = self._session.lease
        self._session.run(session_keys.delete(lease, self._prefix + lease.id))

    def members(self) -> Mapping[bytes, bytes]:
        """Return the values of the current members by session id. Costs one round trip."""
        return self._session.run(session_keys.members(self._prefix))

    def changed(self, known: Mapping[bytes, bytes], *, timeout_s: float | None = None) -> Mapping[bytes, bytes]:
        """Wait until the members differ from `known`, and return them.

        Args:
            known: Members as `members` or `changed` has returned them.
            timeout_s: Maximum wait, in seconds. None: no limit.

        Raises:
            NotInTime: If the members did not change in time.
        """
        return self._session.run(session_keys.changed(self._prefix, known), timeout_s=timeout_s)


class Barrier:
    """A barrier that `parties` processes pass together, once.

    Args:
        session: An open session.
        name: The name of this meeting, without a slash. Use another name for each meeting.
        parties: Number of processes that must arrive.
        party: The name of this process. After a restart it counts once, although its former session may not have ended.

    Examples:
        >>> with Session(client, b"reports") as session:  # doctest: +SKIP
        ...     Barrier(session, b"start-1", 1, party=b"host-1").wait()
    """

    def __init__(self, session: Session, name: bytes, parties: int, *, party: bytes) -> None:
        self._session, self._parties, self._party = session, parties, party
        self._prefix = session.lease.path(BARRIER, name, b"")

    def wait(self, *, timeout_s: float | None = None) -> None:
        """Wait until all parties have arrived. A party that arrives within an hour after that passes at once.

        Args:
            timeout_s: Maximum wait, in seconds. None: no limit.

        Raises:
            NotInTime: If not all parties have arrived in time.
        """
        recipe = session_keys.pass_barrier(self._session.lease, self._prefix, self._parties, self._party)
        self._session.run(recipe, timeout_s=timeout_s)


class Rendezvous:
    """A name under which a session publishes a value for others, until the session ends.

    Args:
        session: An open session.
        name: The name of the rendezvous, without a slash.

    Examples:
        >>> with Session(client, b"reports") as session:  # doctest: +SKIP
        ...     rendezvous = Rendezvous(session, b"address")
        ...     rendezvous.publish(b"10.0.0.1:80")
        ...     rendezvous.meet()
        b'10.0.0.1:80'
    """

    def __init__(self, session: Session, name: bytes) -> None:
        self._session = session
        self._prefix = session.lease.path(RENDEZVOUS, name, b"")

    def publish(self, value: bytes) -> None:
        """Publish a value until the session ends. A second call replaces the value. Costs one round trip."""
        self._session.run(session_keys.join(self._session.lease, self._prefix, value))

    def meet(self, *, timeout_s: float | None = None) -> bytes:
        """Wait for a published value, and return it. If several sessions publish, the first one counts.

        Args:
            timeout_s: Maximum wait, in seconds. None: no limit.

        Raises:
            NotInTime: If nothing was published in time.
        """
        return self._session.run(session_keys.meet(self._prefix), timeout_s=timeout_s)


class Queue:
    """A queue whose items are delivered at least once, and to one session at a time.

    Items outlive the session that put them. An item that a session took but has not finished is delivered again after
    that session has ended.

    Args:
        session: An open session.
        name: The name of the queue, without a slash.

    Examples:
        >>> with Session(client, b"reports") as session:
        ...     queue = Queue(session, b"jobs")
        ...     queue.put(b"report 7")
        ...     taken = queue.take()
        ...     queue.done(taken)
        ...     taken.value
        b'report 7'
    """

    def __init__(self, session: Session, name: bytes) -> None:
        self._session = session
        self._prefix = session.lease.path(QUEUE, name, b"")

    def put(self, value: bytes) -> None:
        """Append an item to the queue. Costs two round trips.

        Raises:
            OutcomeUnknown: If the item may have been added.
        """
        self._session.run(work_queue.put(self._prefix, value))

    def take(self, *, timeout_s: float | None = None) -> Taken:
        """Take the first free item, and wait for one if there is none.

        Costs two round trips if an item is free. A waiting caller watches the queue and polls nothing.

        Returns:
            The item. Its `token` rises each time the item is taken, and `times` counts how often it was taken.

        Args:
            timeout_s: Maximum wait, in seconds. None: no limit.

        Raises:
            NotInTime: If there was no free item in time.
            OutcomeUnknown: If an item may have been taken. It is free again after `ttl_s` and `grace_s`.
        """
        return self._session.run(work_queue.take(self._prefix), timeout_s=timeout_s)

    def done(self, taken: Taken) -> None:
        """Remove an item from the queue. Costs one round trip. Raises SessionEnded if the item may have been delivered
        again."""
        self._session.run(work_queue.done(self._session.lease, self._prefix, taken))

    def give_back(self, taken: Taken) -> None:
        """Return an item to its old place in the queue, so that another session can take it. Costs one round trip."""
        self._session.run(work_queue.give_back(self._session.lease, self._prefix, taken))
