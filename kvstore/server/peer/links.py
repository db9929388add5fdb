"""Manages the links to other servers: which servers have a link, how it is opened, and outgoing calls between
replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from kvstore import versions
from kvstore.env import Env
from kvstore.env.nursery import shielded
from kvstore.errors import InvalidRequest, OutcomeUnknown, Overloaded, PeerRefused, StoreError, Unavailable
from kvstore.server.peer import frames
from kvstore.server.peer.frames import FrameError
from kvstore.server.peer.link import PeerLink
from kvstore.server.peer.proof import Credentials
from kvstore.server.peer.reach import CHECK_S, Reach
from kvstore.server.routing.dispatch import Dispatcher
from kvstore.types import PartitionId, ServerId

CONNECT_TIMEOUT_S = 2.0
CONNECT_AGAIN_S = 0.1
CUT_OFF_S = 5.0
"""Seconds for which a failed connection attempt counts as evidence of a network failure."""
HERE_MAX = 1_024
"""Maximum number of concurrent calls between replicas on this server."""
REFUSAL_S = 60.0
"""Seconds for which a refused link is reported, unless the next attempt succeeds."""
FAULT_LOG_S = 60.0
"""Interval in seconds between log lines about a refused link, because the link is retried constantly."""

log = logging.getLogger(__name__)


class PeerLinks:
    """The links to all other servers. The dispatcher sends operations over them, and replicas make calls over them."""

    def __init__(
        self,
        env: Env,
        credentials: Credentials,
        dispatcher: Dispatcher,
        forwarded_max: int,
        serve_here: Callable[[ServerId, PartitionId, str, bytes], Awaitable[bytes]],
        known: versions.Versions = versions.FIXED,
    ) -> None:
        """`known` provides the version that this server supports and the version of its cluster."""
        self._versions = known
        self.credentials, self.dispatcher, self.forwarded_max = credentials, dispatcher, forwarded_max
        self.server = credentials.server
        self._env, self.beat, self.now, self.traces = env, env.beat, env.clock.now, env.traces
        self._serve_here = serve_here
        self._here = 0
        self._waiting: dict[asyncio.Future[bytes], None] = {}
        """Open answers of local replicas."""
        self._nursery = env.nursery.child("peer links")
        self.by_server: dict[ServerId, PeerLink] = {}
        self._addresses: dict[ServerId, str] = {}
        """The last known address of each server. A server whose znode is gone may still be running."""
        self._refused_at: dict[ServerId, float] = {}
        self._reach = Reach()
        self._faults = 0
        self._fault_logged_at: dict[ServerId, float] = {}
        self._refusals: dict[ServerId, tuple[float, str]] = {}
        """The time and reason of the last refusal by each server."""
        self.lost_links = 0
        self._is_closed = False

    # ── for the dispatcher ────────────────────────────────────────────────────────────────────────────────────────────

    def connect(self, server: ServerId) -> None:
        """Start opening a link to the server, unless there is one already."""
        if server not in self.by_server:
            self._open(server)

    def is_cut_off(self, servers: Collection[ServerId]) -> bool:
        """Return True if the last connection attempts to all of these servers failed. Requires at least two servers,
        because one silent server tells more about that server than about the network. This call retries the
        connections, because a server that is cut off receives no operations that would open them."""
        since = self.now() - CUT_OFF_S
        if len(servers) < 2 or not all(self._has_failed(server, since) for server in servers):
            return False
        for server in sorted(servers):
            if server not in self.by_server:
                self._open(server)
        return True

    def flush(self) -> None:
        """Send the operations that were submitted in this turn of the event loop, on every link."""
        for link in self.by_server.values():
            link.flush()

    # ── for the replicas ──────────────────────────────────────────────────────────────────────────────────────────────

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        """See kvstore.partition.ports.Peers."""
        if len(body) > frames.BODY_BYTES_MAX:
            raise InvalidRequest(f"expected a call of at most {frames.BODY_BYTES_MAX} bytes, got {len(body)}")
        if server == self.server:
            return await self._call_here(partition, method, body, timeout_s)
        link = self.by_server.get(server)
        if link is None:  # tests for None, because an idle link may be falsy
            link = self._open(server, at_once=True)
        if link is None:
            raise Unavailable(f"no address is known for server {server}")
        if link.is_open:
            return await link.call(partition, method, body, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await shielded(link.opened)
        except ConnectionRefusedError as error:
            raise PeerRefused(f"{server} refuses connections") from error
        except (OSError, FrameError, TimeoutError) as error:
            raise Unavailable(f"{server} is unreachable: {error or 'no answer in time'}") from error
        return await link.call(partition, method, body, timeout_s)

    # docs/protocol.md P40
    def silent_s(self, server: ServerId) -> float | None:
        """See kvstore.partition.ports.Peers."""
        link = self.by_server.get(server)
        if link is not None and link.is_open:
            return link.silent_s(self.now())
        return self._reach.silent_s(server, self.now())

    async def _call_here(self, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        """Call a replica on this server as if over a link: the timeout applies, and a call that has started runs to
        its end even if its caller is cancelled."""
        if self._is_closed:
            raise Unavailable(f"server {self.server} is stopping")
        if self._here >= HERE_MAX:
            raise Overloaded(f"expected at most {HERE_MAX} concurrent calls to {self.server}; retry")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._here += 1
        self._nursery.spawn(self._answer_here(answer, partition, method, body), name=f"{partition} {method}")
        self._waiting[answer] = None
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise OutcomeUnknown(f"{self.server} did not answer {method} within {timeout_s} s") from None
        finally:
            del self._waiting[answer]

    async def _answer_here(
        self, answer: asyncio.Future[bytes], partition: PartitionId, method: str, body: bytes
    ) -> None:
        try:
            found = await self._serve_here(self.server, partition, method, body)
        except StoreError as error:
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(found)
        finally:
            self._here -= 1

    # ── for links ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def lost(self, link: PeerLink) -> None:
        """Handle the loss of a link. Another link is opened when it is needed."""
        if self.by_server.get(link.server) is link:
            del self.by_server[link.server]
            self.lost_links += 1
            now = self.now()
            if self._reach.lost(link.server, link.last_received_at(now), now):
                asyncio.get_running_loop().call_later(self.beat.delay_s(CHECK_S), self._check_reach)

    # docs/protocol.md V3
    def version_to(self, server: ServerId) -> int:
        """Return the highest version that both sides are known to support. Every server supports the cluster
        version."""
        member = self.dispatcher.topology.servers.get(server)
        its = max(member.can if member is not None else versions.FIRST, self._versions.cluster)
        return versions.link_version(min(its, self._versions.can))

    def report_fault(self, server: ServerId, error: FrameError) -> None:
        """Close the link to a server that refuses it, failed to prove its identity or sent malformed frames, and log
        the error."""
        self._faults += 1
        now = self.now()
        self._refusals[server] = now, str(error)
        if now - self._fault_logged_at.get(server, now - FAULT_LOG_S) >= FAULT_LOG_S:
            self._fault_logged_at[server] = now
            log.warning("server=%s link refused or ended: %s", server, error)

    def refusals(self) -> dict[ServerId, str]:
        """Return the reasons why servers have recently refused links from this server, by server."""
        since = self.now() - REFUSAL_S
        return {
            server: reason
            for server, (at, reason) in sorted(self._refusals.items())
            if at >= since and not ((link := self.by_server.get(server)) is not None and link.is_open)
        }

    def statistics(self) -> dict[str, int]:
        return {
            "peer_links": sum(link.is_open for link in self.by_server.values()),
            "peer_links_lost_total": self.lost_links,
            "peer_links_refused_total": self._faults,
            "peer_operations_in_flight": sum(link.in_flight for link in self.by_server.values()),
        }

    async def close(self) -> None:
        """Close every link and open no more. Operations in progress end as after the loss of a link."""
        self._is_closed = True
        for server in sorted(self.by_server):
            self.by_server[server].close()
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(OutcomeUnknown(f"server {self.server} stopped before it answered"))
        await self._nursery.close()

    def _check_reach(self) -> None:
        """Retry the registered servers that are unreachable. Nothing else would connect to them, because they lead
        no partitions."""
        if self._is_closed:
            return
        silent = self._reach.check(self.now())
        for server in silent:
            if server not in self.dispatcher.topology.servers:
                self._reach.forget(server)
            elif server not in self.by_server:
                self._open(server)
        if silent:
            asyncio.get_running_loop().call_later(self.beat.delay_s(CHECK_S), self._check_reach)
        else:
            self._reach.pause()

    def _has_failed(self, server: ServerId, since: float) -> bool:
        link = self.by_server.get(server)
        return (link is None or not link.is_open) and self._refused_at.get(server, since) > since

    def _open(self, server: ServerId, *, at_once: bool = False) -> PeerLink | None:
        """Start connecting and return the link. Return None if no address is known, if the last attempt failed a
        moment ago, or after `close`."""
        address = self._address_of(server)
        if (
            address is None
            or self._is_closed
            or (not at_once and self.now() - self._refused_at.get(server, -1e9) < CONNECT_AGAIN_S)
        ):
            return None
        link = self.by_server[server] = PeerLink(self, server)
        self._nursery.spawn(self._connect(link, address), name=f"connect {server}")
        return link

    def _address_of(self, server: ServerId) -> str | None:
        member = self.dispatcher.topology.servers.get(server)
        if member is not None:
            self._addresses[server] = member.resp
        return self._addresses.get(server)

    async def _connect(self, link: PeerLink, address: str) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._env.transport.connect(address, link)
                await shielded(link.opened)
            self._reach.received(link.server)
        except (OSError, FrameError) as error:
            link.fail_opening(error if not isinstance(error, TimeoutError) else ConnectionError("no answer in time"))
            self._refused_at[link.server] = self.now()
            link.close()
            self.lost(link)
