"""Coordination on asyncio: sessions, and on them locks, elections, groups, barriers, rendezvous, queues.

async with AsyncSession(client, b"reports") as session:
    async with AsyncLock(session, b"nightly") as token:
        await publish(report, token)        # what is protected refuses a lower token than it has seen
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from math import inf
from types import TracebackType
from typing import Self, TypeVar

from kvstore.client.aio.client import AsyncClient
from kvstore.client.coordination import gathering, handing_out, queueing
from kvstore.client.coordination.handing_out import Taken
from kvstore.client.coordination.lease import CLOSE_S, GRACE_S, TTL_S, Lease
from kvstore.client.coordination.queueing import EXCLUSIVE, SHARED, Place
from kvstore.client.coordination.steps import Await, Find, Found, NotInTime, Recipe, SessionEnded, Step, Write
from kvstore.client.core.batch import Batch
from kvstore.env.library_env import LibraryEnv, library_env
from kvstore.errors import ConditionFailed, InvalidRequest, StoreError

T = TypeVar("T")
CALL_S_MIN = 0.05
"""A renewal that begins just before the deadline has so long at least."""


class AsyncSession:
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
        self._env = env or library_env("kvstore session")
        self._client, self._name = client, name
        self.lease = Lease(tag, self._env.random.randbytes(12).hex().encode(), ttl_s, grace_s)
        self.lost = asyncio.Event()
        self._mutex, self._wake = asyncio.Lock(), asyncio.Event()
        self._is_closing = False

    async def open(self) -> Self:
        """Make the session in the store. Raises what the store answers; a session is opened once."""
        sent = self.now()
        await self._client.batch(self.lease.opening(self._name), timeout_s=self.lease.ttl_s)
        self.lease.opened(sent)
        self._env.nursery.spawn(self._keep_alive(), name="keep alive")
        return self

    async def close(self) -> None:
        """End the session and its keys. If the store is not reached they end by themselves."""
        was_alive = self.is_alive
        self._is_closing = True
        await self._env.nursery.close()
        try:
            async with asyncio.timeout(CLOSE_S), self._mutex:  # what is being written is to end, too
                closing = self._end()
        except TimeoutError:
            closing = self._end()
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

    async def put(self, name: bytes, value: bytes) -> int:
        """Write the key `{tag}/name`, which ends with the session, and return its version. No other session may write
        it. Raises SessionEnded."""
        return await self.run(gathering.put(self.lease, name, value))

    async def delete(self, name: bytes) -> None:
        """Delete a key of `put`. Raises SessionEnded."""
        await self.run(gathering.delete(self.lease, name))

    async def run(self, recipe: Recipe[T]) -> T:
        """Carry out a recipe of this package."""
        try:
            step = next(recipe)
            while True:
                try:
                    answer = await self._do(step)
                except StoreError as error:
                    step = recipe.throw(error)
                else:
                    step = recipe.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            recipe.close()
            if self.lease.has_discarded:
                self._wake.set()

    # ── steps ──

    async def _do(self, step: Step) -> object:
        match step:
            case Write():
                return await self._write(step)
            case Find():
                return await self._find(step)
            case Await():
                return await self._await(step)

    async def _write(self, write: Write) -> object:
        lease = self.lease
        async with self._mutex:
            sent = self.now()
            batch = lease.batch(write, sent)
            try:
                results = await self._client.batch(batch, timeout_s=max(CALL_S_MIN, lease.deadline - sent))
            except ConditionFailed:
                if await self._client.meta(lease.key) is None:
                    self._over()
                    raise SessionEnded(f"the session {lease.key!r} has ended") from None
                raise
            return lease.wrote(write, batch, results, sent)

    async def _find(self, find: Find) -> Found:
        found = self._client.scan(prefix=find.prefix, limit=find.limit, keys_only=find.keys_only)
        return {key: item async for key, item in found}

    async def _await(self, step: Await) -> Found:
        """The watch is on before the first look: what changes between two looks wakes."""
        while True:
            try:
                async with asyncio.timeout(max(0.0, min(step.until, self.lease.deadline) - self.now())):
                    return await self._look(step)
            except TimeoutError:
                if not self.is_alive:
                    raise SessionEnded(f"the session {self.lease.key!r} is over") from None
                if self.now() >= step.until:
                    raise NotInTime(f"nothing came in time below {step.find.prefix!r}") from None

    async def _look(self, step: Await) -> Found:
        key, prefix = (step.find.prefix, b"") if step.is_key else (None, step.find.prefix)
        async with self._client.watch(key, prefix=prefix, keys_only=True) as changes:
            while not step.is_met(found := await self._find(step.find)):
                await anext(changes)
        return found

    async def _keep_alive(self) -> None:
        try:
            await self._renew()
        finally:
            if not self._is_closing:
                self._over()

    async def _renew(self) -> None:
        lease = self.lease
        while lease.is_alive(self.now()):
            try:
                async with asyncio.timeout(min(lease.renew_after_s, lease.deadline - self.now())):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self._write(Write())
            except SessionEnded:
                break
            except StoreError:
                # Again soon: the store may be between two leaders.
                self._wake.clear()
                await asyncio.sleep(min(lease.renew_after_s, 0.2))
                self._wake.set()

    def _end(self) -> Batch:
        """End the session here; returns what ends it in the store."""
        closing = self.lease.closing()
        self._over()
        return closing

    def _over(self) -> None:
        self.lease.end()
        self.lost.set()


class AsyncLock:
    """A lock, or with `shared` the reading side of one: any number hold that side together, none beside the other. Each
    instance is held once at a time. Locks of one name and one tag are one lock.

    Nobody else holds it while `is_held`, whatever clocks, leaders and pauses do, as far as a process can know; one that
    was stopped between asking and acting cannot. So hand `token` to what is protected, to refuse lower ones than it has
    seen (docs/protocol.md, Q5)."""

    def __init__(self, session: AsyncSession, name: bytes, *, shared: bool = False) -> None:
        self._session = session
        self._prefix = session.lease.path(b"lock", name, b"")
        self._mode = SHARED if shared else EXCLUSIVE
        self._value = b""
        self._place: Place | None = None

    async def acquire(self, *, timeout_s: float | None = None) -> int:
        """Wait for one's turn, in the order of asking, and return the fencing token. Raises NotInTime, SessionEnded, or
        what the store answers; then nothing is held."""
        session = self._session
        until = inf if timeout_s is None else session.now() + timeout_s
        if self.is_held:
            raise InvalidRequest("this lock is held already; make one for each that waits")
        place = await session.run(queueing.acquire(session.lease, self._prefix, self._mode, self._value, until))
        if not session.lease.holds(place.key, session.now()):
            session.lease.discard(place.key)
            raise SessionEnded(f"the session {session.lease.key!r} has ended meanwhile")
        self._place = place
        return place.token

    async def release(self) -> bool:
        """Give it up. True if it was held until now; False: it was lost before, and another may have held it."""
        place, self._place = self._place, None
        return False if place is None else await self._session.run(queueing.release(self._session.lease, place))

    @property
    def is_held(self) -> bool:
        """Whether it is held now, by this machine's monotonic clock."""
        place, session = self._place, self._session
        return place is not None and session.lease.holds(place.key, session.now())

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

    def __init__(self, session: AsyncSession, name: bytes, value: bytes = b"") -> None:
        super().__init__(session, name)
        self._prefix = session.lease.path(b"leader", name, b"")
        self._value = value

    async def leader(self) -> tuple[bytes, int] | None:
        """The leader's value and token; None if nobody leads. A leader that has died is told until its session ends."""
        return await self._session.run(queueing.leader(self._prefix))

    async def next_leader(self, known: int = 0, *, timeout_s: float | None = None) -> tuple[bytes, int] | None:
        """Wait until another one leads than that of the token `known` (0: nobody), and tell it as `leader` does. Raises
        NotInTime."""
        until = inf if timeout_s is None else self._session.now() + timeout_s
        return await self._session.run(queueing.next_leader(self._prefix, known, until))


class AsyncGroup:
    """Members of one name, each for as long as its session lives."""

    def __init__(self, session: AsyncSession, name: bytes) -> None:
        self._session = session
        self._prefix = session.lease.path(b"member", name, b"")

    async def join(self, value: bytes = b"") -> None:
        """Be a member, under the session's id. Again: with another value."""
        await self._session.run(gathering.join(self._session.lease, self._prefix, value))

    async def leave(self) -> None:
        """Be none any more."""
        await self._session.run(gathering.leave(self._session.lease, self._prefix))

    async def members(self) -> Mapping[bytes, bytes]:
        """Session ids and values of those who are members now."""
        return await self._session.run(gathering.members(self._prefix))

    async def changed(self, known: Mapping[bytes, bytes], *, timeout_s: float | None = None) -> Mapping[bytes, bytes]:
        """Wait until the members are others than `known`, and tell them. Raises NotInTime."""
        until = inf if timeout_s is None else self._session.now() + timeout_s
        return await self._session.run(gathering.changed(self._prefix, known, until))


class AsyncBarrier:
    """A point that `parties` sessions pass together. For one meeting: each has a name of its own."""

    def __init__(self, session: AsyncSession, name: bytes, parties: int) -> None:
        self._session, self._parties = session, parties
        self._prefix = session.lease.path(b"barrier", name, b"")

    async def wait(self, *, timeout_s: float | None = None) -> None:
        """Return once all parties have come here. Who comes within an hour of that passes at once. Raises NotInTime."""
        until = inf if timeout_s is None else self._session.now() + timeout_s
        recipe = gathering.pass_barrier(self._session.lease, self._prefix, self._parties, until)
        await self._session.run(recipe)


class AsyncRendezvous:
    """A place where sessions find what one of them has to say, as long as that one lives."""

    def __init__(self, session: AsyncSession, name: bytes) -> None:
        self._session = session
        self._prefix = session.lease.path(b"rendezvous", name, b"")

    async def publish(self, value: bytes) -> None:
        """Say it, until the session ends. Again: say something else."""
        await self._session.run(gathering.join(self._session.lease, self._prefix, value))

    async def meet(self, *, timeout_s: float | None = None) -> bytes:
        """Wait for what was published; of several that which was first. Raises NotInTime."""
        until = inf if timeout_s is None else self._session.now() + timeout_s
        return await self._session.run(gathering.meet(self._prefix, until))


class AsyncQueue:
    """Items in order, handed out at least once, and to one session at a time. They outlive the session that put them;
    what one has taken and not `done` when its session ends is handed out again."""

    def __init__(self, session: AsyncSession, name: bytes) -> None:
        self._session = session
        self._prefix = session.lease.path(b"queue", name, b"")

    async def put(self, value: bytes) -> None:
        """Put an item at the end. After OutcomeUnknown it may be there."""
        await self._session.run(handing_out.put(self._prefix, value))

    async def take(self, *, timeout_s: float | None = None) -> Taken:
        """Take the first item that nobody has, waiting for one. Its `token` rises each time that it is taken. Raises
        NotInTime."""
        until = inf if timeout_s is None else self._session.now() + timeout_s
        return await self._session.run(handing_out.take(self._prefix, until))

    async def done(self, taken: Taken) -> None:
        """Take it out of the queue for good. Raises SessionEnded if it may have been handed out again."""
        await self._session.run(handing_out.done(self._session.lease, self._prefix, taken))

    async def give_back(self, taken: Taken) -> None:
        """Let another one take it, in its old place."""
        await self._session.run(handing_out.give_back(self._session.lease, self._prefix, taken))
