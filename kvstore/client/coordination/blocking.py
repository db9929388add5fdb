"""Coordination for threads, scripts and gevent: the same as on asyncio, blocking. A session has one thread of its own.

with Session(client, b"reports") as session:
    with Lock(session, b"nightly") as token:
        publish(report, token)        # what is protected refuses a lower token than it has seen
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from math import inf
from types import TracebackType
from typing import Self, TypeVar

from kvstore.client.blocking.client import Client
from kvstore.client.coordination import gathering, handing_out, queueing
from kvstore.client.coordination.handing_out import Taken
from kvstore.client.coordination.lease import CLOSE_S, GRACE_S, TTL_S, Lease
from kvstore.client.coordination.queueing import EXCLUSIVE, SHARED, Place
from kvstore.client.coordination.steps import Await, Find, Found, NotInTime, Recipe, SessionEnded, Step, Write
from kvstore.env.library_env import LibraryEnv, library_env
from kvstore.errors import ConditionFailed, InvalidRequest, StoreError

T = TypeVar("T")
CALL_S_MIN = 0.05
"""A renewal that begins just before the deadline has so long at least."""


class Session:
    """A lease on keys of one `{tag}`, kept alive in a third of its `ttl_s` for as long as this process runs and reaches
    the store. `lost` is set once it is over.

    When it ends, so do its keys: at once by `close`, else no sooner than `ttl_s` and, by a leader's date, `grace_s`
    after the last renewal (docs/protocol.md, Q1 to Q3).
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
        """`name`: of the owner, for people who read the session's key. `env`: the time to go by, if it is not this
        machine's. Raises InvalidRequest."""
        self._env = env or library_env("kvstore session")
        self._client, self._name = client, name
        self.lease = Lease(tag, self._env.random.randbytes(12).hex().encode(), ttl_s, grace_s)
        self.lost = threading.Event()
        self._mutex, self._wake = threading.Lock(), threading.Event()
        self._keeper: threading.Thread | None = None

    def open(self) -> Self:
        """Make the session in the store. Raises what the store answers; a session is opened once."""
        sent = self.now()
        self._client.batch(self.lease.opening(self._name), timeout_s=self.lease.ttl_s)
        self.lease.opened(sent)
        self._keeper = threading.Thread(target=self._keep_alive, name="kvstore session", daemon=True)
        self._keeper.start()
        return self

    def close(self) -> None:
        """End the session and its keys. If the store is not reached they end by themselves."""
        was_alive = self.is_alive
        is_free = self._mutex.acquire(timeout=CLOSE_S)  # what is being written is to end, too
        closing = self.lease.closing()
        self._over()
        if is_free:
            self._mutex.release()
        self._wake.set()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join(CLOSE_S)
        if was_alive:
            try:
                self._client.batch(closing, timeout_s=min(CLOSE_S, self.lease.ttl_s))
            except StoreError:
                return  # nothing renews them any more

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether the owner may count on the session's keys now, by this machine's monotonic clock."""
        return self.lease.is_alive(self.now())

    def now(self) -> float:
        """The clock that `lease` counts by, in seconds."""
        return self._env.clock.now()

    def put(self, name: bytes, value: bytes) -> int:
        """Write the key `{tag}/name`, which ends with the session, and return its version. No other session may write
        it. Raises SessionEnded."""
        return self.run(gathering.put(self.lease, name, value))

    def delete(self, name: bytes) -> None:
        """Delete a key of `put`. Raises SessionEnded."""
        self.run(gathering.delete(self.lease, name))

    def run(self, recipe: Recipe[T]) -> T:
        """Carry out a recipe of this package."""
        try:
            step = next(recipe)
            while True:
                try:
                    answer = self._do(step)
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

    def _do(self, step: Step) -> object:
        match step:
            case Write():
                return self._write(step)
            case Find():
                return self._find(step)
            case Await():
                return self._await(step)

    def _write(self, write: Write) -> object:
        lease = self.lease
        with self._mutex:
            sent = self.now()
            batch = lease.batch(write, sent)
            try:
                results = self._client.batch(batch, timeout_s=max(CALL_S_MIN, lease.deadline - sent))
            except ConditionFailed:
                if self._client.meta(lease.key) is None:
                    self._over()
                    raise SessionEnded(f"the session {lease.key!r} has ended") from None
                raise
            return lease.wrote(write, batch, results, sent)

    def _find(self, find: Find) -> Found:
        return dict(self._client.scan(prefix=find.prefix, limit=find.limit, keys_only=find.keys_only))

    def _await(self, step: Await) -> Found:
        """The watch is on before the first look: what changes between two looks wakes."""
        while True:
            limit = min(step.until, self.lease.deadline)
            found = self._look(step, limit)
            if found is not None:
                return found
            if not self.is_alive:
                raise SessionEnded(f"the session {self.lease.key!r} is over")
            if self.now() >= step.until:
                raise NotInTime(f"nothing came in time below {step.find.prefix!r}")

    def _look(self, step: Await, limit: float) -> Found | None:
        """The keys once they are as was waited for; None if the time was over first."""
        key, prefix = (step.find.prefix, b"") if step.is_key else (None, step.find.prefix)
        changes = self._client.watch(key, prefix=prefix, keys_only=True)
        timer = threading.Timer(max(0.0, limit - self.now()), changes.close)
        timer.daemon = True
        timer.start()
        try:
            changes.ready()
            while self.now() < limit:
                if step.is_met(found := self._find(step.find)):
                    return found
                if next(changes, None) is None:
                    return None
            return None
        finally:
            timer.cancel()
            changes.close()

    def _keep_alive(self) -> None:
        try:
            self._renew()
        finally:
            self._over()

    def _renew(self) -> None:
        lease = self.lease
        while lease.is_alive(self.now()):
            self._wake.wait(max(0.0, min(lease.renew_after_s, lease.deadline - self.now())))
            self._wake.clear()
            if not lease.is_alive(self.now()):
                break
            try:
                self._write(Write())
            except SessionEnded:
                break
            except StoreError:
                # Again soon: the store may be between two leaders.
                self.lost.wait(min(lease.renew_after_s, 0.2))
                self._wake.set()

    def _over(self) -> None:
        self.lease.end()
        self.lost.set()


class Lock:
    """A lock, or with `shared` the reading side of one: any number hold that side together, none beside the other. Each
    instance is held once at a time. Locks of one name and one tag are one lock.

    Nobody else holds it while `is_held`, whatever clocks, leaders and pauses do, as far as a process can know; one that
    was stopped between asking and acting cannot. So hand `token` to what is protected, to refuse lower ones than it has
    seen (docs/protocol.md, Q5)."""

    def __init__(self, session: Session, name: bytes, *, shared: bool = False) -> None:
        self._session = session
        self._prefix = session.lease.path(b"lock", name, b"")
        self._mode = SHARED if shared else EXCLUSIVE
        self._value = b""
        self._place: Place | None = None

    def acquire(self, *, timeout_s: float | None = None) -> int:
        """Wait for one's turn, in the order of asking, and return the fencing token. Raises NotInTime, SessionEnded, or
        what the store answers; then nothing is held."""
        session = self._session
        until = inf if timeout_s is None else session.now() + timeout_s
        if self.is_held:
            raise InvalidRequest("this lock is held already; make one for each that waits")
        place = session.run(queueing.acquire(session.lease, self._prefix, self._mode, self._value, until))
        if not session.lease.holds(place.key, session.now()):
            session.lease.discard(place.key)
            raise SessionEnded(f"the session {session.lease.key!r} has ended meanwhile")
        self._place = place
        return place.token

    def release(self) -> bool:
        """Give it up. True if it was held until now; False: it was lost before, and another may have held it."""
        place, self._place = self._place, None
        return False if place is None else self._session.run(queueing.release(self._session.lease, place))

    @property
    def is_held(self) -> bool:
        """Whether it is held now, by this machine's monotonic clock."""
        place, session = self._place, self._session
        return place is not None and session.lease.holds(place.key, session.now())

    @property
    def token(self) -> int:
        """The fencing token of the last acquisition; 0 without one. Each that is later, by whomever, has a higher."""
        return 0 if self._place is None else self._place.token

    def __enter__(self) -> int:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Election(Lock):
    """A lock whose holder leads, and says by `value` who it is: `acquire` stands for election and returns once elected,
    `release` resigns."""

    def __init__(self, session: Session, name: bytes, value: bytes = b"") -> None:
        super().__init__(session, name)
        self._prefix = session.lease.path(b"leader", name, b"")
        self._value = value

    def leader(self) -> tuple[bytes, int] | None:
        """The leader's value and token; None if nobody leads. A leader that has died is told until its session ends."""
        return self._session.run(queueing.leader(self._prefix))

    def next_leader(self, known: int = 0, *, timeout_s: float | None = None) -> tuple[bytes, int] | None:
        """Wait until another one leads than that of the token `known` (0: nobody), and tell it as `leader` does. Raises
        NotInTime."""
        until = inf if timeout_s is None else self._session.now() + timeout_s
        return self._session.run(queueing.next_leader(self._prefix, known, until))


class Group:
    """Members of one name, each for as long as its session lives."""

    def __init__(self, session: Session, name: bytes) -> None:
        self._session = session
        self._prefix = session.lease.path(b"member", name, b"")

    def join(self, value: bytes = b"") -> None:
        """Be a member, under the session's id. Again: with another value."""
        self._session.run(gathering.join(self._session.lease, self._prefix, value))

    def leave(self) -> None:
        """Be none any more."""
        self._session.run(gathering.leave(self._session.lease, self._prefix))

    def members(self) -> Mapping[bytes, bytes]:
        """Session ids and values of those who are members now."""
        return self._session.run(gathering.members(self._prefix))

    def changed(self, known: Mapping[bytes, bytes], *, timeout_s: float | None = None) -> Mapping[bytes, bytes]:
        """Wait until the members are others than `known`, and tell them. Raises NotInTime."""
        until = inf if timeout_s is None else self._session.now() + timeout_s
        return self._session.run(gathering.changed(self._prefix, known, until))


class Barrier:
    """A point that `parties` sessions pass together. For one meeting: each has a name of its own."""

    def __init__(self, session: Session, name: bytes, parties: int) -> None:
        self._session, self._parties = session, parties
        self._prefix = session.lease.path(b"barrier", name, b"")

    def wait(self, *, timeout_s: float | None = None) -> None:
        """Return once all parties have come here. Who comes within an hour of that passes at once. Raises NotInTime."""
        until = inf if timeout_s is None else self._session.now() + timeout_s
        recipe = gathering.pass_barrier(self._session.lease, self._prefix, self._parties, until)
        self._session.run(recipe)


class Rendezvous:
    """A place where sessions find what one of them has to say, as long as that one lives."""

    def __init__(self, session: Session, name: bytes) -> None:
        self._session = session
        self._prefix = session.lease.path(b"rendezvous", name, b"")

    def publish(self, value: bytes) -> None:
        """Say it, until the session ends. Again: say something else."""
        self._session.run(gathering.join(self._session.lease, self._prefix, value))

    def meet(self, *, timeout_s: float | None = None) -> bytes:
        """Wait for what was published; of several that which was first. Raises NotInTime."""
        until = inf if timeout_s is None else self._session.now() + timeout_s
        return self._session.run(gathering.meet(self._prefix, until))


class Queue:
    """Items in order, handed out at least once, and to one session at a time. They outlive the session that put them;
    what one has taken and not `done` when its session ends is handed out again."""

    def __init__(self, session: Session, name: bytes) -> None:
        self._session = session
        self._prefix = session.lease.path(b"queue", name, b"")

    def put(self, value: bytes) -> None:
        """Put an item at the end. After OutcomeUnknown it may be there."""
        self._session.run(handing_out.put(self._prefix, value))

    def take(self, *, timeout_s: float | None = None) -> Taken:
        """Take the first item that nobody has, waiting for one. Its `token` rises each time that it is taken. Raises
        NotInTime."""
        until = inf if timeout_s is None else self._session.now() + timeout_s
        return self._session.run(handing_out.take(self._prefix, until))

    def done(self, taken: Taken) -> None:
        """Take it out of the queue for good. Raises SessionEnded if it may have been handed out again."""
        self._session.run(handing_out.done(self._session.lease, self._prefix, taken))

    def give_back(self, taken: Taken) -> None:
        """Let another one take it, in its old place."""
        self._session.run(handing_out.give_back(self._session.lease, self._prefix, taken))
