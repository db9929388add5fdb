"""The metadata store's driver for etcd's v3 API, version 3.4 and later. See session.py for the session, plan.py for
writes.

All reads are linearizable. A write reads what it touches, and commits on condition that it has not changed; otherwise
it is repeated. Each call has a deadline. After it the outcome is unknown, and the connection is abandoned. A write that
etcd refuses for lack of space has an unknown outcome, too, unless the nodes that it would change are seen unchanged. A
call whose caller is cancelled may take effect, but not after a later call: later calls wait until its outcome is known.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from typing import TypeVar

from kvstore.env.events import end_task
from kvstore.env.liveness.port import UNWATCHED, Liveness
from kvstore.env.tls import Tls
from kvstore.errors import MetadataDenied, MetadataError, MetadataUnavailable, MetadataUnknown, NodeExists, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.etcd import values
from kvstore.meta.etcd.keys import EtcdKeys
from kvstore.meta.etcd.link import EtcdLink, Outdated
from kvstore.meta.etcd.listing import Listing
from kvstore.meta.etcd.plan import TransactionPlan, first_or_none, unchanged
from kvstore.meta.etcd.session import EtcdSession
from kvstore.meta.etcd.watches import EtcdWatches
from kvstore.meta.login import MetadataLogin
from kvstore.meta.memory_tree import TreeNode
from kvstore.meta.store import (
    Change,
    Create,
    Delete,
    MetadataHistory,
    SessionState,
    SetData,
    Stat,
    Watch,
    check_change_sizes,
)
from kvstore.proto.etcd_pb2 import Compare, RangeRequest, RequestOp, TxnRequest

SESSION_TIMEOUT_S = 6
CALL_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 15.0
CALLS_MAX = 1000
"""Maximum number of calls in flight; more are refused."""
ATTEMPTS_MAX = 200
"""Maximum number of attempts of one write that other writers overtake. This many concurrent writers all succeed."""

T = TypeVar("T")


class EtcdStore:
    """A MetadataStore in etcd, below a prefix. Create it with `connect`."""

    def __init__(
        self,
        address: str,
        *,
        session_timeout_s: int,
        call_timeout_s: float,
        tls: Tls | None,
        login: MetadataLogin | None,
        liveness: Liveness,
    ) -> None:
        endpoints, _, prefix = address.partition("/")
        self._call_timeout_s = call_timeout_s
        self._loop = asyncio.get_running_loop()
        self._calls = 0
        self._numbering = asyncio.Lock()
        """Held by the call of this process that creates a sequential node. Each number depends on the one before, so
        concurrent calls would conflict many times."""
        self._listeners: list[tuple[Callable[[SessionState], None], contextvars.Context]] = []
        self._keys = EtcdKeys(prefix)
        self._watches = EtcdWatches(self._keys)
        self._session = EtcdSession(
            endpoints.split(","),
            session_timeout_s,
            tls=tls,
            login=login,
            liveness=liveness,
            keys=self._keys,
            watches=self._watches,
            changed=self._state_changed,
        )
        self.history: MetadataHistory = self._session

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        session_timeout_s: int = SESSION_TIMEOUT_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        tls: Tls | None = None,
        login: MetadataLogin | None = None,
        liveness: Liveness = UNWATCHED,
    ) -> EtcdStore:
        """Return a connected store at `host:port,host:port/prefix`, with its root. Raises MetadataUnavailable after
        `connect_timeout_s`, MetadataDenied if the login or its user is refused, OSError for unusable TLS files. It
        reconnects by itself from then on."""
        if tls is not None:
            tls.client_context()  # gRPC would take an unusable file for an endpoint that is down, and retry forever
        store = cls(
            address,
            session_timeout_s=session_timeout_s,
            call_timeout_s=call_timeout_s,
            tls=tls,
            login=login,
            liveness=liveness,
        )
        try:
            async with asyncio.timeout(connect_timeout_s):
                await store._first_connection()
        except BaseException as error:
            await store.close()
            if isinstance(error, TimeoutError):
                why = f": {store._session.trouble}" if store._session.trouble else ""
                raise MetadataUnavailable(f"no etcd answers at {address} within {connect_timeout_s} s{why}") from None
            raise
        return store

    async def _first_connection(self) -> None:
        """Wait for the first connection. Raises MetadataDenied."""
        settled, refused = asyncio.Event(), self._session.refused
        self.on_state(lambda state: settled.set() if state is SessionState.CONNECTED else None)
        refusal = self._loop.create_task(refused.wait(), name="metadata login refused")
        refusal.add_done_callback(lambda _: settled.set())
        try:
            await settled.wait()
        finally:
            await end_task(refusal)
        if refused.is_set() and self.state is not SessionState.CONNECTED:
            raise MetadataDenied(self._session.trouble)

    @property
    def state(self) -> SessionState:
        return self._session.state

    @property
    def session(self) -> int:
        return self._session.id

    async def get(self, path: str) -> tuple[bytes, Stat]:
        key = self._keys.key(path)
        answer = await self._call(path, lambda link: link.range(RangeRequest(key=key)))
        if not answer.kvs:
            raise NoSuchNode(path)
        node = values.decode(answer.kvs[0])
        return node.data, node.stat()

    async def children(self, path: str) -> list[str]:
        paths.check(path)
        listing = Listing(self._keys, path)
        while not listing.is_complete:
            await self._call(path, listing.read_page)
        return sorted(listing.names)

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        paths.check(path)
        check_change_sizes([Create(path, data)])
        if sequential:
            change = Create(path, data, ephemeral)
            return await self._call(path, lambda link: self._create_numbered(link, change), self._numbering)
        await self._call(path, lambda link: self._commit(link, [Create(path, data, ephemeral)]))
        return path

    async def set(self, path: str, data: bytes, version: int) -> int:
        change = SetData(path, data, version)
        check_change_sizes([change])
        node = (await self._call(path, lambda link: self._commit(link, [change])))[path]
        assert node is not None, "it was set"
        return node.version

    async def delete(self, path: str, version: int) -> None:
        await self._call(path, lambda link: self._commit(link, [Delete(path, version)]))

    async def multi(self, changes: Sequence[Change]) -> None:
        if changes:
            check_change_sizes(changes)
            await self._call(changes[0].path, lambda link: self._commit(link, changes))

    async def sync(self, path: str) -> None:
        """Check that etcd answers. All reads are of the latest state anyway."""
        key = self._keys.key(path)
        await self._call(path, lambda link: link.range(RangeRequest(key=key, keys_only=True)))

    def watch(self, path: str, changed: Callable[[], None]) -> Watch:
        return self._watches.add(path, changed)

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        self._listeners.append((listener, contextvars.copy_context()))

    async def close(self) -> None:
        await self._session.close()

    def break_connection(self) -> None:
        """Break the connection as a network would. For tests and drills."""
        if self._session.link is not None:
            self._session.break_connection(self._session.link, "on request")

    async def _call(self, path: str, work: Callable[[EtcdLink], Awaitable[T]], turn: asyncio.Lock | None = None) -> T:
        """Do the work, after acquiring `turn` if it is given."""
        if self._calls >= CALLS_MAX:
            raise MetadataUnavailable(f"{path}: {self._calls} metadata calls are in flight already")
        self._calls += 1
        try:
            async with turn or nullcontext():
                return await self._call_in_time(path, work)
        finally:
            self._calls -= 1

    async def _call_in_time(self, path: str, work: Callable[[EtcdLink], Awaitable[T]]) -> T:
        """Do the work within a deadline, and repeat it while what it had read is outdated."""
        link = self._session.link
        try:
            async with asyncio.timeout(self._call_timeout_s):
                if link is not None:
                    await link.settled()
                for _ in range(ATTEMPTS_MAX):
                    if link is None or link.broken.is_set():
                        raise MetadataUnavailable(f"{path}: etcd cannot be reached, the session is {self.state.name}")
                    with suppress(Outdated):
                        return await work(link)
        except TimeoutError:
            assert link is not None
            self._session.break_connection(link, f"no answer for {path} in {self._call_timeout_s} s")
            raise MetadataUnknown(f"{path}: no answer in {self._call_timeout_s} s") from None
        raise MetadataUnavailable(f"{path}: other writers were first {ATTEMPTS_MAX} times in a row")

    async def _commit(
        self, link: EtcdLink, changes: Sequence[Change], also: Sequence[Compare] = ()
    ) -> dict[str, TreeNode | None]:
        """Make the changes, and return the nodes that have changed. Raises Outdated if another writer was first."""
        plan = TransactionPlan(self._keys, changes, also)
        reads = [RequestOp(request_range=each) for each in plan.reads()]
        try:
            answer = await link.txn(TxnRequest(success=reads))
        except MetadataUnknown as error:
            raise MetadataUnavailable(f"{changes[0].path}: could not read first: {error}") from error
        found = [each.response_range for each in answer.responses]
        now_ms = int(time.time() * 1000)
        wanted = plan.commit(found, session=link.session, guard=link.guard, now_ms=now_ms)
        try:
            done = await link.write(wanted)
        except MetadataUnavailable as error:
            await self._check_not_done(link, wanted, error)
            raise
        if done.succeeded:
            return plan.outcome
        own = done.responses[0].response_range.kvs
        if not own or own[0].mod_revision != link.guard.mod_revision:
            link.give_up()
            raise MetadataUnavailable(
                f"{changes[0].path}: session {link.session:x} has ended, or continues on another connection"
            )
        raise Outdated(changes[0].path)

    async def _check_not_done(self, link: EtcdLink, wanted: TxnRequest, refusal: MetadataUnavailable) -> None:
        """Raise MetadataUnknown unless all that a transaction was to change is unchanged. An etcd that runs out of
        space reports that also for transactions that it has carried out, because it checks the space before and after.
        """
        # Without an operation etcd treats a transaction as a read, which any member may answer from its own state.
        read = RequestOp(request_range=RangeRequest(key=link.guard.key, keys_only=True))
        try:
            if (await link.txn(TxnRequest(compare=wanted.compare, success=[read]))).succeeded:
                return
        except (MetadataError, Outdated):
            pass
        raise MetadataUnknown(f"{refusal}, and it may have been done") from refusal

    async def _create_numbered(self, link: EtcdLink, create: Create) -> str:
        births = self._keys.births(paths.parent(create.path))
        request = RangeRequest(key=births, keys_only=True)
        found = first_or_none(await link.range(request))
        path = f"{create.path}{found.version if found else 0:010d}"
        try:
            await self._commit(link, [Create(path, create.data, create.ephemeral)], [unchanged(births, found)])
        except NodeExists:
            if first_or_none(await link.range(request)) != found:
                raise Outdated(path) from None  # another writer has got the number meanwhile
            raise
        return path

    def _state_changed(self, state: SessionState) -> None:
        for listener, context in self._listeners:
            self._loop.call_soon(listener, state, context=context)
