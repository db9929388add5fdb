"""Coordination on asyncio: sessions, and on them locks, elections, groups, barriers, rendezvous, queues.

async with AsyncSession(client, b"reports") as session:
    async with AsyncLock(session, b"nightly") as token:
        await publish(report, token)        # what is protected refuses a lower token than it has seen
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import inf
from types import TracebackType
from typing import Self, TypeVar

from kvstore.client.aio.client import AsyncClient
from kvstore.client.aio.watch import AsyncWatch
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
from kvstore.client.coordination.tasks import RecipeCaller, SessionRunner
from kvstore.client.coordination.work_queue import Taken
from kvstore.client.core.fanout import PAGE_LIMIT_MAX
from kvstore.client.core.values import Item
from kvstore.env.library_env import LibraryEnv, library_env
from kvstore.errors import ConditionFailed, InvalidRequest, Refused, StoreError

T = TypeVar("T")


class AsyncSession(SessionRunner):
    """A lease on keys of one `{tag}`, kept alive in a third of its `ttl_s` for as long as this process runs and reaches
    the store. `lost` is set once it is over.

    When it ends, so do its keys: at once by `close`, else no sooner than `ttl_s` and, by a leader's date, `grace_s`
    after the last renewal (docs/protocol.md, Q1 to Q3).
    """

    def __init__(
        self,
        client: AsyncClient,
        tag: bytes,
        *,
        ttl_s: float = TTL_S,
        grace_s: float = GRACE_S,
        name: bytes = b"",
        env: LibraryEnv | None = None,
    ) -> None:
        """`name`: of the owner, for people who read the session's key. `env`: the time to go by, if it is not this
        machine's. Raises InvalidRequest."""
        env = env or library_env("kvstore session")
        super().__init__(env, SessionLease(tag, env.random.randbytes(12).hex().encode(), ttl_s, grace_s))
        self._client, self._name = client, name

    async def open(self) -> Self:
        """Make the session in the store. A session is opened once: raises InvalidRequest if it was opened before, and
        SessionEnded if it is over; or what the store answers, and after a Refused it may be tried again."""
        return await self._run_step_or_undo(self._open, self._close)

    async def _open(self) -> Self:
        sent, opening = self.now(), self.lease.opening(self._name)
        try:
            results = await self._client.batch(opening, timeout_s=self.lease.ttl_s)
        except Refused:
            self.lease.not_opened()
            raise
        self.lease.opened(results, sent)
        if self.lost.is_set():
            raise self.lease.ended()  # it was closed meanwhile
        self._start(self._renew)
        return self

    async def close(self) -> None:
        """End the session and its keys. If the store is not reached they end by themselves."""
        await self._run_step(self._close)

    async def _close(self) -> None:
        was_alive = self.is_alive
        closing = await self._end()
        if was_alive:
            try:
                await self._client.batch(closing, timeout_s=min(CLOSE_S, self.lease.ttl_s))
            except StoreError:
                return  # nothing renews them any more

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_alive(self) -> bool:
        """Whether the owner may count on the session's keys now, by this machine's monotonic clock."""
        return self.lease.is_alive(self.now())

    def now(self) -> float:
        """The clock that `lease` counts by, in seconds."""
        return self._env.clock.now()

    async def put(self, name: bytes, value: bytes, *, waits: bool = False, timeout_s: float | None = None) -> int:
        """Write the key `{tag}/name`, which ends with the session, and return its version. Again: with another value.
        Raises NameTaken if it is there and not this session's, or with `waits` waits until it has gone; SessionEnded;
        SessionFull. After OutcomeUnknown it may be there, and taken, for ttl and grace."""
        return await self.run(session_keys.put(self.lease, name, value, waits=waits), timeout_s=timeout_s)

    async def delete(self, name: bytes, *, timeout_s: float | None = None) -> None:
        """Delete a key of `put`, if it is this session's. Raises SessionEnded."""
        await self.run(session_keys.delete(self.lease, self.lease.path(name)), timeout_s=timeout_s)

    async def run(self, recipe: Recipe[T], *, timeout_s: float | None = None) -> T:
        """Carry out a recipe of this package. Raises NotInTime if it takes longer."""
        until = inf if timeout_s is None else self.now() + timeout_s
        caller = RecipeCaller()
        try:
            step = next(recipe)
            while True:
                try:
                    answer = await self._run_step(partial(self._do, step, until, caller))
                except StoreError as error:
                    step = recipe.throw(error)
                else:
                    step = recipe.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            caller.leave(recipe)
            if self.lease.has_discarded:
                self._drop_discarded()

    # ── steps ──

    async def _do(self, step: Step, until: float, caller: RecipeCaller) -> object:
        try:
            match step:
                case WriteStep():
                    return await self._write(step, until, caller)
                case FindStep():
                    return await self._find(step, until)
                case AwaitStep():
                    return await self._await(step, until, caller)
        except StoreError as error:
            if self.now() < until or not is_late(error, step):
                raise
            raise NotInTime(f"the time was over: {error}") from error

    async def _write(self, write: WriteStep, until: float, caller: RecipeCaller | None = None) -> object:
        lease = self.lease
        async with self._turn(self._left_s(until), caller):
            sent = self.now()
            batch = lease.batch(write, sent)
            try:
                results = await self._client.batch(batch, timeout_s=lease.call_s(batch, sent, until))
            except ConditionFailed:
                if await self._client.meta(lease.key, timeout_s=lease.call_s(batch, self.now(), until)) is None:
                    self._over()
                    raise SessionEnded(f"the session {lease.key!r} has ended") from None
                raise
            return lease.wrote(write, batch, results, sent)

    async def _find(self, find: FindStep, until: float) -> Found:
        found: dict[bytes, Item] = {}
        token: str | None = None
        while True:
            limit = min(PAGE_LIMIT_MAX, find.limit - len(found) if find.limit else PAGE_LIMIT_MAX)
            page = await self._client.page(
                token, prefix=find.prefix, limit=limit, keys_only=find.keys_only, timeout_s=self._left_s(until)
            )
            found.update(page.items)
            token = page.token
            if token is None or len(found) == find.limit:
                return found

    async def _await(self, step: AwaitStep, until: float, caller: RecipeCaller) -> Found:
        """Wait until the time or the session is over, which `_over` tells."""
        find = step.find
        key, prefix = (find.prefix, b"") if step.is_key else (None, find.prefix)
        changes = self._client.watch(key, prefix=prefix, keys_only=find.keys_only)
        found = await self._watched(changes, partial(self._wait_until_met, step, until), self._left_s(until), caller)
        if found is not None:
            return found
        if not self.is_alive:
            raise self.lease.ended()
        raise NotInTime(f"nothing came in time below {find.prefix!r}")

    async def _wait_until_met(self, step: AwaitStep, until: float, changes: AsyncWatch) -> Found | None:
        """Return the keys once they are as the caller wants them, or None if the watch was closed before. The watch has
        begun before the first read, so each change between two reads wakes the caller."""
        while not step.is_met(found := await self._find(step.find, until)):
            while (change := await anext(changes, None)) is not None and not step.wakes(step.find, found, change):
                pass
            if change is None:
                return None
        return found

    def _left_s(self, until: float) -> float | None:
        return None if until == inf else max(CALL_S_MIN, until - self.now())

    # ── keeping alive ──

    async def _renew(self) -> None:
        lease = self.lease
        while lease.is_alive(now := self.now()):
            await self._pause(lease.pause_s(now))
            try:
                await self._write(WriteStep(renews=lease.is_due(self.now())), inf)
            except SessionEnded:
                break
            except StoreError:
                await self._pause_before_retry(min(lease.renew_after_s, AGAIN_S))
                self._wake.set()
            else:
                if lease.has_discarded:
                    self._wake.set()


class AsyncLock:
    """A lock, or with `shared` the reading side of one: any number hold that side together, none beside the other. Each
    instance is held once at a time. Locks of one name and one tag are one lock.

    Nobody else holds it while `is_held`, whatever clocks, leaders and pauses do, as far as a process can know; one that
    was stopped between asking and acting cannot. So hand `token` to what is protected, to refuse lower ones than it has
    seen (docs/protocol.md, Q5)."""

    _kind = b"lock"
    """The part of its keys that tells locks from elections."""
    _value = b""
    """The value of its keys: what the holder says."""

    def __init__(self, session: AsyncSession, name: bytes, *, shared: bool = False) -> None:
        self._session, self._lease = session, session.lease
        self._prefix = session.lease.path(self._kind, name, b"")
        self._mode = SHARED if shared else EXCLUSIVE
        self._place: LockKey | None = None

    async def acquire(self, *, timeout_s: float | None = None) -> int:
        """Wait for one's turn, in the order of asking, and return the fencing token. Raises NotInTime, SessionEnded, or
        what the store answers; then nothing is held."""
        return await self._session.run(self._acquiring(), timeout_s=timeout_s)

    def _acquiring(self) -> Recipe[int]:
        if self.is_held:
            raise InvalidRequest("this lock is held already; make one for each that waits")
        place = yield from locking.acquire(self._lease, self._prefix, self._mode, self._value)
        if not self._lease.holds(place.key, self._session.now()):
            self._lease.discard(place.key)
            raise self._lease.ended()
        self._place = place
        return place.token

    async def release(self) -> bool:
        """Give it up. True if it was held until now; False: it was lost before, and another may have held it."""
        return await self._session.run(self._releasing())

    def _releasing(self) -> Recipe[bool]:
        place, self._place = self._place, None
        if place is None:
            return False
        return (yield from locking.release(self._lease, self._prefix, place, self._mode))

    @property
    def is_held(self) -> bool:
        """Whether it is held now, by this machine's monotonic clock."""
        return self._place is not None and self._lease.holds(self._place.key, self._session.now())

    @property
    def token(self) -> int:
        """The fencing token of the last acquisition; 0 without one. Each that is later, by whomever, has a higher."""
        return 0 if self._place is None else self._place.token

    async def __aenter__(self) -> int:
        return await self.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


class AsyncElection(AsyncLock):
    """A lock whose holder leads, and says by `value` who it is: `acquire` stands for election and returns once elected,
    `release` resigns."""

    _kind = b"leader"

    def __init__(self, session: AsyncSession, name: bytes, value: bytes = b"") -> None:
        super().__init__(session, name)
        self._value = value

    async def leader(self) -> tuple[bytes, int] | None:
        """The leader's value and token; None if nobody leads. A leader that has died is told until its session ends."""
        return await self._session.run(locking.leader(self._prefix))

    async def next_leader(self, known: int = 0, *, timeout_s: float | None = None) -> tuple[bytes, int] | None:
        """Wait until another one leads than that of the token `known` (0: nobody), and tell it as `leader` does. Raises
        NotInTime."""
        return await self._session.run(locking.next_leader(self._prefix, known), timeout_s=timeout_s)


class AsyncGroup:
    """Members of one name, each for as long as its session lives."""

    def __init__(self, session: AsyncSession, name: bytes) -> None:
        self._session = session
        self._prefix = session.lease.path(b"member", name, b"")

    async def join(self, value: bytes = b"") -> None:
        """Be a member, under the session's id. Again: with another value."""
        await self._session.run(session_keys.join(self._session.lease, self._prefix, value))

    async def leave(self) -> None:
        """Be none any more."""
        lease = self._session.lease
        await self._session.run(session_keys.delete(lease, self._prefix + lease.id))

    async def members(self) -> Mapping[bytes, bytes]:
        """Session ids and values of those who are members now."""
        return await self._session.run(session_keys.members(self._prefix))

    async def changed(self, known: Mapping[bytes, bytes], *, timeout_s: float | None = None) -> Mapping[bytes, bytes]:
        """Wait until the members are others than `known`, and tell them. Raises NotInTime."""
        return await self._session.run(session_keys.changed(self._prefix, known), timeout_s=timeout_s)


class AsyncBarrier:
    """A point that `parties` processes pass together. For one meeting: each has a name of its own. `party` is what this
    one is called, after a restart too: then it counts once, though its former session may not have ended yet."""

    def __init__(self, session: AsyncSession, name: bytes, parties: int, *, party: bytes) -> None:
        self._session, self._parties, self._party = session, parties, party
        self._prefix = session.lease.path(b"barrier", name, b"")

    async def wait(self, *, timeout_s: float | None = None) -> None:
        """Return once all parties have come here. Who comes within an hour of that passes at once. Raises NotInTime."""
        recipe = session_keys.pass_barrier(self._session.lease, self._prefix, self._parties, self._party)
        await self._session.run(recipe, timeout_s=timeout_s)


class AsyncRendezvous:
    """A place where sessions find what one of them has to say, as long as that one lives."""

    def __init__(self, session: AsyncSession, name: bytes) -> None:
        self._session = session
        self._prefix = session.lease.path(b"rendezvous", name, b"")

    async def publish(self, value: bytes) -> None:
        """Say it, until the session ends. Again: say something else."""
        await self._session.run(session_keys.join(self._session.lease, self._prefix, value))

    async def meet(self, *, timeout_s: float | None = None) -> bytes:
        """Wait for what was published; of several that which was first. Raises NotInTime."""
        return await self._session.run(session_keys.meet(self._prefix), timeout_s=timeout_s)


class AsyncQueue:
    """Items in order, handed out at least once, and to one session at a time. They outlive the session that put them;
    what one has taken and not `done` when its session ends is handed out again."""

    def __init__(self, session: AsyncSession, name: bytes) -> None:
        self._session = session
        self._prefix = session.lease.path(b"queue", name, b"")

    async def put(self, value: bytes) -> None:
        """Put an item at the end. After OutcomeUnknown it may be there."""
        await self._session.run(work_queue.put(self._prefix, value))

    async def take(self, *, timeout_s: float | None = None) -> Taken:
        """Take the first item that nobody has, waiting for one. Its `token` rises each time that it is taken; `times`
        says how often that was. Raises NotInTime; after OutcomeUnknown one may be taken for ttl and grace by nobody."""
        return await self._session.run(work_queue.take(self._prefix), timeout_s=timeout_s)

    async def done(self, taken: Taken) -> None:
        """Take it out of the queue for good. Raises SessionEnded if it may have been handed out again."""
        await self._session.run(work_queue.done(self._session.lease, self._prefix, taken))

    async def give_back(self, taken: Taken) -> None:
        """Let another one take it, in its old place."""
        await self._session.run(work_queue.give_back(self._session.lease, self._prefix, taken))
