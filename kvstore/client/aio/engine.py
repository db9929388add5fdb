"""Carries operations to servers, with retries: the state that AsyncClient's methods share."""

from __future__ import annotations

import asyncio
import logging
from asyncio import get_running_loop
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore.client.aio.connections import AnyAnswers
from kvstore.client.aio.link import LATE, AsyncLink, LinkState
from kvstore.client.aio.links import AsyncLinks
from kvstore.client.aio.loops import check_loop
from kvstore.client.core import forks
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.fanout import Answers
from kvstore.client.core.operation import ClientOperation, Numbering
from kvstore.client.core.operations import as_seconds, decode
from kvstore.client.core.retries import NoServerReachable, deadline_error, final_error_or_none, pause_s, pauses
from kvstore.client.core.session import ClientState
from kvstore.client.core.values import Item, Token
from kvstore.env.certificates import CallingContext
from kvstore.env.events import wait_within
from kvstore.env.library_env import LibraryEnv
from kvstore.env.nursery import TaskNursery
from kvstore.env.transport import TcpTransport
from kvstore.errors import InvalidRequest, Moved, NotAuthenticated, NotLeader, OtherCluster, StoreError, Unavailable
from kvstore.proto import kv_pb2

logger = logging.getLogger(__name__)
TICK_S = 0.02
FOLLOW_WAIT_MS, FOLLOW_PAUSE_S = 10_000, 1.0
MANY_MAX = 512
"""Maximum number of operations of one get_many or put_many in flight."""


class AsyncEngine:
    """The state of one client. Everything runs on the event loop on which the client was opened."""

    def __init__(self, env: LibraryEnv, config: ClientConfig) -> None:
        self.env = env
        self._now, self._loop = env.clock.now, get_running_loop()
        self._config = config
        self.seen = ClientState(env.random, config.cluster)
        self.routing, self._numberings = self.seen.routing, self.seen.numberings
        self.check = self.routing.check
        transport = TcpTransport(newest=None if config.tls is None else CallingContext(config.tls).newest)
        self.links = AsyncLinks(
            env,
            config,
            self.routing,
            transport,
            changed=self._on_change,
            on_answers=self._on_answers,
            tokens=self.seen.tokens,
        )
        self._waiting: dict[Numbering, OrderedDict[asyncio.Future[None], ClientOperation]] = {}
        """Operations that wait until others end, in order of arrival."""
        self._changed = asyncio.Event()
        """Set, and replaced, when another server may be worth asking."""
        self._refreshing: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._closed = self.is_forked = False
        forks.watch(self)

    async def open(self) -> None:
        """Read the topology from the first endpoint that returns one. Raises Unavailable (OtherCluster
        if only servers of another cluster answer) and NotAuthenticated."""
        deadline = self.env.clock.now() + self._config.timeout_s
        waits = pauses(self.env.random)
        failure: StoreError = NoServerReachable()
        while not self.routing.is_known:
            found = await self._ask_anybody()
            if isinstance(found, NotAuthenticated):
                raise found
            if found is not None:
                failure = failure if isinstance(found, NoServerReachable) else found
                left = deadline - self.env.clock.now()
                if left <= 0:
                    raise failure if isinstance(failure, OtherCluster) else Unavailable(str(failure))
                await asyncio.sleep(min(next(waits), left))
        self.env.nursery.spawn(self._tick(), name="deadlines")
        self.env.nursery.spawn(self._follow(), name="topology")

    async def close(self) -> None:
        if self.is_forked:
            return  # the connections and tasks belong to the parent process
        if self._loop.is_closed():
            self._closed = True  # its connections and tasks ended with it
            return
        self._closed = True
        self.links.close()
        await self.env.nursery.close()

    def after_fork_in_child(self) -> None:
        """See kvstore.client.core.forks."""
        self._closed = self.is_forked = True
        self.links.after_fork_in_child()

    def check_caller(self) -> None:
        """Raise InvalidRequest on another event loop than the client's, and in the child of a fork."""
        forks.check(self)
        check_loop(self._loop)

    def check_closing(self) -> None:
        """Raise InvalidRequest on another event loop than the client's, unless that loop has ended."""
        if not self._loop.is_closed():
            check_loop(self._loop)

    def time_ms(self) -> int:
        return self.seen.time_ms

    def absorb(self, token: Token) -> None:
        self.seen.absorb(token)

    def watchers_of(self, key: bytes | None) -> list[str]:
        """Return the addresses of the servers to ask for a watch, the best first."""
        return self.routing.watchers_of(key, self.env.random, self._config.endpoints)

    def statistics(self) -> dict[str, float]:
        links = self.links.all()
        return {
            **self._counts,
            "frames": self.links.frames,
            "links_up": sum(link.state is LinkState.UP for link in links),
            "streams_up": sum(link.is_stream for link in links),
            "link_breaks": self.links.breaks,
            "operations_under_way": sum(link.operations_pending for link in links),
            "ring_version": self.routing.ring_version,
        }

    # ── one operation ──

    async def run(self, operation: ClientOperation, timeout_s: float | None) -> Any:
        """Return the result of an operation. Raises StoreError."""
        if get_running_loop() is not self._loop:
            self.check_caller()
        timeout_s = self._config.timeout_s if timeout_s is None else as_seconds(timeout_s)
        operation.deadline = self._now() + timeout_s
        if not operation.partition:
            operation.partition = self.routing.partition_of(operation.key)
        numbering = self._numberings[operation.partition]
        if not numbering.begin(operation):
            await self._wait_admission(numbering, operation, timeout_s)
        try:
            link = None if operation.level else self.links.direct.get(operation.partition)
            if link is None:
                answer = await self._attempt(operation)
            else:  # the common case
                operation.waiter = waiter = self._loop.create_future()
                link.send(operation)
                answer = await waiter
            kind = answer.__class__
            if kind is Item or kind is int or answer is None:
                return answer
            if isinstance(answer, StoreError):
                answer = await self._retry(operation, answer, timeout_s)
            return decode(operation, answer)
        finally:
            numbering.end(operation)
            if self._waiting:
                self._admit_waiting(numbering)

    async def run_all(self, wanted: Sequence[ClientOperation], timeout_s: float | None) -> list[Any]:
        """Return the results in order, with MANY_MAX operations in flight. The first error is raised after all have
        ended."""
        results: list[Any] = [None] * len(wanted)
        places = iter(range(len(wanted)))
        mine = TaskNursery("many")  # the client's nursery would cancel them when it closes, and lose their outcomes
        workers = [
            mine.spawn(self._work(wanted, results, places, timeout_s), name="worker")
            for _ in range(min(MANY_MAX, len(wanted)))
        ]
        try:
            for worker in workers:
                await worker
        finally:
            await mine.close()
        for result in results:
            if isinstance(result, StoreError):
                raise result
        return results

    async def run_whole(self, wanted: Sequence[ClientOperation], timeout_s: float | None) -> Answers:
        """Return the results of a call on all partitions, or Moved if a range has moved, so that the call
        starts over."""
        try:
            return await self.run_all(wanted, timeout_s)
        except Moved as moved:
            return moved

    async def _work(
        self, wanted: Sequence[ClientOperation], results: list[Any], places: Iterator[int], timeout_s: float | None
    ) -> None:
        for place in places:
            try:
                results[place] = await self.run(wanted[place], timeout_s)
            except StoreError as error:
                results[place] = error

    def _attempt(self, operation: ClientOperation) -> asyncio.Future[Any]:
        """Send an operation. Its future receives an answer or a StoreError."""
        waiter = operation.waiter = self._loop.create_future()
        operation.is_sent = False
        if operation.level:
            self.routing.strengthen(operation)
        link = None if operation.level else self.links.direct.get(operation.partition)
        if link is None:
            link = self.links.choose(operation)
        if link is None or self._closed:
            waiter.set_result(self._why_closed() if self._closed else NoServerReachable())
        else:
            link.send(operation)
        return waiter

    def _why_closed(self) -> StoreError:
        return InvalidRequest(forks.FORKED) if self.is_forked else Unavailable("the client is closed")

    async def _retry(self, operation: ClientOperation, error: StoreError, timeout_s: float) -> Any:
        """Retry until there is an answer that is not an error, or a final error, which is raised."""
        waits = pauses(self.env.random)
        last: StoreError | None = None
        while True:
            self._counts[f"failed_{type(error).__name__}"] += 1
            left = operation.deadline - self.env.clock.now()
            if error is not LATE and isinstance(error, Unavailable):
                error = self.links.login_error_or_none(is_late=left <= 0) or error
            final = None if error is LATE else final_error_or_none(operation, error)
            if final is not None or self._closed:
                raise final or deadline_error(operation, error, timeout_s)
            if error is LATE or left <= 0:
                raise deadline_error(operation, last if error is LATE else error, timeout_s)
            last = error
            self._learn_from(error)
            await self._wait_change(min(pause_s(error, waits), left))
            self._counts["retries"] += 1
            self.routing.redirect(operation)
            answer = await self._attempt(operation)
            if not isinstance(answer, StoreError):
                return answer
            error = answer

    def _learn_from(self, error: StoreError) -> None:
        if self.routing.learn_from(error):
            self.links.forget_routes()
        if isinstance(error, NotLeader | Moved):
            self._refresh()

    async def _wait_change(self, pause_s: float) -> None:
        """Return after the pause, or as soon as another server may be worth asking."""
        if pause_s > 0:
            await wait_within(self._changed, pause_s)

    async def pause(self, seconds: float) -> None:
        """Sleep before the next attempt of a transaction."""
        await asyncio.sleep(seconds)

    # ── room ──

    async def _wait_admission(self, numbering: Numbering, operation: ClientOperation, timeout_s: float) -> None:
        """Wait until the operation may begin because another one has ended. Raises Unavailable."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        waiting = self._waiting.setdefault(numbering, OrderedDict())
        waiting[waiter] = operation
        try:
            async with asyncio.timeout(operation.deadline - self.env.clock.now()):
                await waiter
        except BaseException as error:
            waiting.pop(waiter, None)
            if waiter.done() and not waiter.cancelled():  # it has begun just now
                numbering.end(operation)
            self._admit_waiting(numbering)
            if isinstance(error, TimeoutError):
                raise Unavailable(f"too many operations in flight; nothing was sent within {timeout_s:g} s") from None
            raise

    def _admit_waiting(self, numbering: Numbering) -> None:
        """Begin the operations that have waited longest, as many as fit. Wake nobody else: with many waiters most
        wake-ups would be useless."""
        waiting = self._waiting.get(numbering)
        if waiting is None:
            return
        while waiting:
            waiter, operation = next(iter(waiting.items()))
            if not waiter.done():  # else it was cancelled just now
                if not numbering.begin(operation):
                    return
                waiter.set_result(None)
            del waiting[waiter]
        del self._waiting[numbering]

    # ── answers ──

    def _on_answers(self, answers: AnyAnswers) -> None:
        if self.seen.absorb_answers(answers):
            self._refresh()

    def _on_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _learn(self, message: kv_pb2.TopologyResponse) -> None:
        if self.seen.learn(message):
            self.links.forget_routes()
            self._on_change()

    # ── the topology, followed ──

    async def _follow(self) -> None:
        """Wait at some server for each change of the topology."""
        while True:
            link = next((each for each in self.links.all() if each.state is LinkState.UP), None)
            try:
                if link is None:
                    await self._ask_anybody()
                    await asyncio.sleep(TICK_S)
                    continue
                self._learn(
                    await link.topology(
                        known=link.known, wait_ms=FOLLOW_WAIT_MS, timeout_s=self._config.connect_timeout_s
                    )
                )
            except (Unavailable, NotAuthenticated):
                await asyncio.sleep(TICK_S)
            except Exception:  # keep the known topology; the next one may be readable
                logger.exception("cannot use a topology that a server has sent")
                await asyncio.sleep(FOLLOW_PAUSE_S)

    async def _ask_anybody(self) -> StoreError | None:
        """Read the topology from the first server that answers. Return None, or the error: NotAuthenticated if a server
        rejected the login."""
        failure: StoreError = NoServerReachable()
        for address in self.links.addresses():
            link = self.links.open(address)
            if link is None:
                continue
            try:
                await link.wait_up()
                message = await link.topology(known=0, wait_ms=0, timeout_s=self._config.connect_timeout_s)
            except (
                NotAuthenticated
            ) as error:  # another server may accept the login: this one's table may be old or unreadable
                failure = error
                continue
            except Unavailable as error:
                failure = failure if isinstance(failure, NotAuthenticated) else error
                continue
            self._learn(message)
            return None
        return failure

    def _refresh(self) -> None:
        """Request the topology of every connected server, one request to each at a time."""
        for link in self.links.all():
            if link.state is LinkState.UP and link.address not in self._refreshing:
                self._refreshing.add(link.address)
                self.env.nursery.spawn(self._refresh_from(link), name="refresh")

    async def _refresh_from(self, link: AsyncLink) -> None:
        try:
            self._learn(await link.topology(known=0, wait_ms=0, timeout_s=self._config.connect_timeout_s))
        except (Unavailable, NotAuthenticated) as error:
            logger.debug("no topology address=%s why=%s", link.address, error)
        finally:
            self._refreshing.discard(link.address)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self.env.clock.now()
            for link in self.links.all():
                try:
                    link.tick(now)
                except Exception:  # without this task no call would end at its deadline
                    logger.exception("cannot check the deadlines of a link address=%s", link.address)
