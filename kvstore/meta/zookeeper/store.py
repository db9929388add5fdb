"""The metadata store's driver for ZooKeeper, on kazoo. See session.py for the session.

Answers come through `rawlink` from kazoo's threads to the event loop. Each call has a deadline. After it the outcome is
unknown, and the connection is broken on purpose. ZooKeeper's own watches fire once and end with the connection. Here
they are armed again before anybody is called, so a caller that reads then sees everything that the unarmed watch has
missed.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kazoo import exceptions as kazoo
from kazoo.security import ACL

from kvstore.env.events import end_task
from kvstore.env.liveness.port import UNWATCHED, Liveness
from kvstore.env.tls import Tls
from kvstore.errors import (
    MetadataDenied,
    MetadataError,
    MetadataUnavailable,
    MetadataUnknown,
    NodeExists,
    NoSuchNode,
    NotEmpty,
    VersionConflict,
)
from kvstore.meta import paths
from kvstore.meta.login import MetadataLogin
from kvstore.meta.store import (
    Change,
    Check,
    Create,
    Delete,
    MetadataHistory,
    SessionState,
    SetData,
    Stat,
    Watch,
    check_change_sizes,
)
from kvstore.meta.zookeeper.session import GuardedClient, NotSent, ZooKeeperSession
from kvstore.meta.zookeeper.watches import RearmedWatch

log = logging.getLogger(__name__)

SESSION_TIMEOUT_S = 6.0
CALL_TIMEOUT_S = 5.0
"""Longer than a ping that fails, and than any sync of a healthy server's disk."""
CONNECT_TIMEOUT_S = 15.0
PREPARE_AGAIN_S = 0.05
"""Pause between two attempts to create the chroot, in seconds."""
CALLS_MAX = 1000
"""Maximum number of calls in flight; more are refused. ZooKeeper throttles at this number."""

_ERRORS: dict[type[Exception], type[MetadataError]] = {
    kazoo.NoNodeError: NoSuchNode,
    kazoo.NodeExistsError: NodeExists,
    kazoo.NotEmptyError: NotEmpty,
    kazoo.BadVersionError: VersionConflict,
    NotSent: MetadataUnavailable,
    kazoo.ThrottledOpError: MetadataUnavailable,  # the server is overloaded, and has done nothing
    kazoo.ConnectionLoss: MetadataUnknown,
    kazoo.ConnectionClosedError: MetadataUnknown,
    kazoo.SessionExpiredError: MetadataUnknown,
    kazoo.SessionMovedError: MetadataUnknown,
    kazoo.OperationTimeoutError: MetadataUnknown,
    kazoo.AuthFailedError: MetadataDenied,  # raised before anything is sent on a connection
    kazoo.SessionClosedRequireSaslError: MetadataDenied,
    kazoo.NoAuthError: MetadataDenied,
}
_REFUSED = (
    kazoo.BadArgumentsError,
    kazoo.UnimplementedError,
    kazoo.NoChildrenForEphemeralsError,
    kazoo.InvalidACLError,
    kazoo.NotReadOnlyCallError,
    kazoo.EphemeralOnLocalSessionError,
    kazoo.NoWatcherError,
    kazoo.ReconfigDisabledError,
    kazoo.QuotaExceededError,
)
"""Errors that are raised before anything is done. After any other error the change may have been made: ZooKeeper has an
error for everything that fails after a change, and kazoo replaces answers that it does not understand by its own error.
"""
_WHY: dict[type[Exception], str] = {
    kazoo.AuthFailedError: "it refuses the login",
    kazoo.SessionClosedRequireSaslError: "it requires a login; set metadata.user",
    kazoo.NoAuthError: "the node's ACL names another user, or there was no login; check metadata.user",
}
_NOT_THE_CAUSE = (kazoo.RolledBackError, kazoo.RuntimeInconsistency)
"""Results of a transaction's changes before and after the change that failed."""

Submit = Callable[[GuardedClient], Any]


def _error(path: str, error: BaseException) -> MetadataError:
    known = _ERRORS.get(type(error))  # type: ignore[arg-type]
    if known is MetadataDenied:
        return known(f"{path}: ZooKeeper denies access: {_WHY[type(error)]}")  # type: ignore[index]
    if known is not None:
        return known(path)
    found = MetadataError if isinstance(error, _REFUSED) else MetadataUnknown
    return found(f"{path}: {type(error).__name__} {error}".rstrip())


class ZooKeeperStore:
    """A MetadataStore on a ZooKeeper ensemble, below the chroot of its address. Create it with `connect`."""

    def __init__(
        self,
        address: str,
        *,
        session_timeout_s: float,
        call_timeout_s: float,
        tls: Tls | None,
        login: MetadataLogin | None,
        liveness: Liveness,
    ) -> None:
        hosts, _, chroot = address.partition("/")
        self._chroot = f"/{chroot.strip('/')}" if chroot.strip("/") else ""
        self._call_timeout_s = call_timeout_s
        self._loop = asyncio.get_running_loop()
        self._calls = 0
        self._listeners: list[tuple[Callable[[SessionState], None], contextvars.Context]] = []
        self._standings: dict[str, RearmedWatch] = {}
        self._session = ZooKeeperSession(
            hosts, session_timeout_s, tls=tls, login=login, liveness=liveness, changed=self._state_changed
        )
        self.history: MetadataHistory = self._session

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        tls: Tls | None = None,
        login: MetadataLogin | None = None,
        liveness: Liveness = UNWATCHED,
    ) -> ZooKeeperStore:
        """Connect to the store at `host:port,host:port/chroot`, and create the chroot if it is absent. The store
        reconnects by itself afterwards.

        Raises MetadataUnavailable after `connect_timeout_s` seconds, MetadataDenied if the login is refused or its user
        may not read the chroot, OSError for unusable TLS files, ConfigError.
        """
        if tls is not None:
            tls.client_context()  # kazoo would take a missing file for a server that is down, and retry forever
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
                await store._prepare_unless_refused()
        except BaseException as error:
            await store.close()
            if isinstance(error, TimeoutError):
                raise MetadataUnavailable(f"no ZooKeeper answers at {address} within {connect_timeout_s} s") from None
            raise
        return store

    async def _prepare_unless_refused(self) -> None:
        preparing = self._loop.create_task(self._prepare(), name="metadata connect")
        refused = self._loop.create_task(self._session.refused.wait(), name="metadata login refused")
        try:
            await asyncio.wait((preparing, refused), return_when=asyncio.FIRST_COMPLETED)
            if not preparing.done():
                raise MetadataDenied(f"ZooKeeper refuses the login of {self._session.user}")
            preparing.result()
        finally:
            try:
                await end_task(preparing)
            finally:  # the caller has cancelled this task, and the first wait raises that
                await end_task(refused)

    async def _prepare(self) -> None:
        connected = asyncio.Event()
        self.on_state(lambda state: connected.set() if state is SessionState.CONNECTED else None)
        while True:
            if self.state is not SessionState.CONNECTED:
                await connected.wait()
            connected.clear()
            with suppress(MetadataUnavailable, MetadataUnknown):
                return await self._create_chroot()
            # A request that kazoo refuses has not waited for anything, and the break of the connection is reported on a
            # turn of the event loop. Without a pause the loop would spin forever.
            await asyncio.sleep(PREPARE_AGAIN_S)

    async def _create_chroot(self) -> None:
        chroot, self._chroot = self._chroot, ""
        try:
            parts = chroot.strip("/").split("/") if chroot else []
            for count in range(1, len(parts) + 1):
                await self._ensure_node("/" + "/".join(parts[:count]))
        finally:
            self._chroot = chroot
        try:
            await self.get("/")
        except NoSuchNode:
            raise MetadataDenied(f"{chroot}: ZooKeeper does not let {self._session.user} create it") from None

    async def _ensure_node(self, path: str) -> None:
        """Create a node unless it exists or belongs to another user, who may have created a place for us below it.
        ZooKeeper does not even show a user whether a forbidden node exists."""
        try:
            if await self._call(path, lambda client: client.exists_async(path)) is None:
                await self.create(path)
        except NodeExists:
            return
        except MetadataDenied as error:
            if not isinstance(error.__cause__, kazoo.NoAuthError):
                raise

    @property
    def state(self) -> SessionState:
        return self._session.state

    @property
    def session(self) -> int:
        return self._session.id

    async def get(self, path: str) -> tuple[bytes, Stat]:
        full = self._full(path)
        data, stat = await self._call(path, lambda client: client.get_async(full))
        return data, _stat(stat)

    async def children(self, path: str) -> list[str]:
        full = self._full(path)
        return sorted(await self._call(path, lambda client: client.get_children_async(full)))

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        full = self._full(path)
        check_change_sizes([Create(path, data)])
        created: str = await self._call(
            path, lambda client: client.create_async(full, data, ephemeral=ephemeral, sequence=sequential)
        )
        return created[len(self._chroot) :]

    async def set(self, path: str, data: bytes, version: int) -> int:
        full = self._full(path)
        check_change_sizes([SetData(path, data, version)])
        return _stat(await self._call(path, lambda client: client.set_async(full, data, version))).version

    async def delete(self, path: str, version: int) -> None:
        full = self._full(path)
        await self._call(path, lambda client: client.delete_async(full, version))

    async def multi(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        full = [self._full(change.path) for change in changes]
        check_change_sizes(changes)
        results = await self._call(changes[0].path, lambda client: _transaction(client, full, changes))
        if len(results) != len(changes):
            raise MetadataUnknown(f"{changes[0].path}: expected {len(changes)} results, got {len(results)}")
        failed = [(change, result) for change, result in zip(changes, results, strict=True) if _is_error(result)]
        for change, result in failed:
            if not isinstance(result, _NOT_THE_CAUSE):
                raise _error(change.path, result)
        if failed:
            raise MetadataError(f"{failed[0][0].path}: the transaction was rolled back, and no reason given")

    async def sync(self, path: str) -> None:
        full = self._full(path)
        await self._call(path, lambda client: client.sync_async(full))

    @property
    def has_chroot(self) -> bool:
        """True if the tree of this store is below a node, so that other trees may exist beside it."""
        return bool(self._chroot)

    async def acl(self, path: str) -> list[ACL]:
        """Return the ACL of a node. Raises NoSuchNode, MetadataDenied."""
        full = self._full(path)
        return list((await self._call(path, lambda client: client.get_acls_async(full)))[0])

    async def set_acl(self, path: str, acl: Sequence[ACL]) -> None:
        """Set the ACL of a node. Raises NoSuchNode, MetadataDenied."""
        full = self._full(path)
        await self._call(path, lambda client: client.set_acls_async(full, list(acl)))

    def watch(self, path: str, changed: Callable[[], None]) -> Watch:
        full = self._full(path)
        standing = self._standings.get(full)
        if standing is None:
            standing = self._standings[full] = RearmedWatch(full, self._loop, self._standings)
        watch = standing.join(changed)
        if self.state is SessionState.CONNECTED:
            standing.arm(self._session.client)
        return watch

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        self._listeners.append((listener, contextvars.copy_context()))

    async def close(self) -> None:
        await self._session.close()

    def break_connection(self) -> None:
        """Break the connection as a network would. For tests and drills."""
        self._session.break_connection("on request")

    def _full(self, path: str) -> str:
        paths.check(path)
        return (self._chroot + path if path != "/" else self._chroot) or "/"

    async def _call(self, path: str, submit: Submit) -> Any:
        """Submit a request and return its answer. Raises the errors in _ERRORS."""
        if self.state is not SessionState.CONNECTED:
            raise MetadataUnavailable(f"{path}: ZooKeeper cannot be reached, the session is {self.state.name}")
        if self._calls >= CALLS_MAX:
            raise MetadataUnavailable(f"{path}: {self._calls} metadata calls are in flight already")
        answered: asyncio.Future[Any] = self._loop.create_future()
        self._calls += 1
        try:
            submit(self._session.client).rawlink(partial(_post, self._loop, answered))
            async with asyncio.timeout(self._call_timeout_s):
                answer = await answered
        except NotSent as error:
            raise _error(path, error) from None
        except TimeoutError:
            self._session.break_connection(f"no answer for {path} in {self._call_timeout_s} s")
            raise MetadataUnknown(f"{path}: no answer in {self._call_timeout_s} s") from None
        finally:
            self._calls -= 1
        if answer.exception is not None:
            raise _error(path, answer.exception) from answer.exception
        return answer.value

    def _state_changed(self, state: SessionState) -> None:
        for listener, context in self._listeners:
            self._loop.call_soon(listener, state, context=context)
        if state is SessionState.CONNECTED:
            for standing in list(self._standings.values()):
                standing.renew(self._session.client)


def _post(loop: asyncio.AbstractEventLoop, answered: asyncio.Future[Any], answer: Any) -> None:
    """Pass the answer from a thread of kazoo's to the waiter, if the waiter and the loop still exist."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, answered, answer)


def _settle(answered: asyncio.Future[Any], answer: Any) -> None:
    if not answered.done():
        answered.set_result(answer)


def _stat(stat: Any) -> Stat:
    return Stat(stat.version, stat.czxid, stat.ephemeralOwner, stat.mtime)


def _is_error(result: Any) -> bool:
    return isinstance(result, Exception)


def _transaction(client: GuardedClient, full: Sequence[str], changes: Sequence[Change]) -> Any:
    transaction = client.transaction()
    for path, change in zip(full, changes, strict=True):
        match change:
            case Create():
                transaction.create(path, change.data, ephemeral=change.ephemeral)
            case SetData():
                transaction.set_data(path, change.data, change.version)
            case Delete():
                transaction.delete(path, change.version)
            case Check():
                transaction.check(path, change.version)
    return transaction.commit_async()
