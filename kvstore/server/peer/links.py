"""Links to the other servers: which servers have one, how it is made, and the calling half of the replicas' Peers."""

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
from kvstore.server.peer.reach import LOOK_S, Reach
from kvstore.server.routing.dispatch import Dispatcher
from kvstore.types import PartitionId, ServerId

CONNECT_TIMEOUT_S = 2.0
CONNECT_AGAIN_S = 0.1
CUT_OFF_S = 5.0
"""For how long a failed attempt to connect says something about the network."""
HERE_MAX = 1_024
"""Calls of replicas to others on this server that are under way."""
REFUSAL_S = 60.0
"""How long a refused link is reported, unless the next one is accepted."""
COMPLAIN_S = 60.0
"""A link that is refused is tried again and again, and logged once in that time."""

log = logging.getLogger(__name__)


class PeerLinks:
    """The links to all other servers: the dispatcher's Links, and the calling half of the replicas' Peers."""

    def __init__(
        self,
        env: Env,
        credentials: Credentials,
        dispatcher: Dispatcher,
        forwarded_max: int,
        serve_here: Callable[[ServerId, PartitionId, str, bytes], Awaitable[bytes]],
        known: versions.Versions = versions.FIXED,
    ) -> None:
        """`known`: what this server can do, and what its cluster is at."""
        self._versions = known
        self.credentials, self.dispatcher, self.forwarded_max = credentials, dispatcher, forwarded_max
        self.server = credentials.server
        self._env, self.beat, self.now, self.traces = env, env.beat, env.clock.now, env.traces
        self._serve_here = serve_here
        self._here = 0
        self._waiting: dict[asyncio.Future[bytes], None] = {}
        """For answers of replicas here."""
        self._nursery = env.nursery.child("peer links")
        self.by_server: dict[ServerId, PeerLink] = {}
        self._addresses: dict[ServerId, str] = {}
        """The last ones known: a server whose znode is gone may still be there."""
        self._refused_at: dict[ServerId, float] = {}
        self._reach = Reach()
        self._complaints = 0
        self._complained_at: dict[ServerId, float] = {}
        self._refusals: dict[ServerId, tuple[float, str]] = {}
        """When and why servers last refused a link of this server."""
        self.lost_links = 0
        self._is_closed = False

    # ── for the dispatcher ────────────────────────────────────────────────────────────────────────────────────────────

    def connect(self, server: ServerId) -> None:
        """Begin to open a link to the server, if there is none."""
        if server not in self.by_server:
            self._open(server)

    def is_cut_off(self, servers: Collection[ServerId]) -> bool:
        """Whether the last attempts to connect to all of these servers have failed. Two at least: the silence of one
        says more about it than about this server. A server that is cut off tries again, since nobody will send it
        operations, for which it would connect."""
        since = self.now() - CUT_OFF_S
        if len(servers) < 2 or not all(self._has_failed(server, since) for server in servers):
            return False
        for server in sorted(servers):
            if server not in self.by_server:
                self._open(server)
        return True

    def flush(self) -> None:
        """Send what was submitted."""
        for link in self.by_server.values():
            link.flush()

    # ── for the replicas ──────────────────────────────────────────────────────────────────────────────────────────────

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        """See kvstore.partition.ports.Peers."""
        if len(body) > frames.BODY_BYTES_MAX:
            raise InvalidRequest(f"a call of {len(body)} bytes, at most {frames.BODY_BYTES_MAX}")
        if server == self.server:
            return await self._call_here(partition, method, body, timeout_s)
        link = self.by_server.get(server)
        if link is None:  # and not merely idle, which its length would say
            link = self._open(server, at_once=True)
        if link is None:
            raise Unavailable(f"no address is known for server {server}")
        if link.is_open:
            return await link.call(partition, method, body, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await shielded(link.opened)
        except ConnectionRefusedError as error:
            raise PeerRefused(f"{server} refuses connections: {error}") from error
        except (OSError, FrameError, TimeoutError) as error:
            raise Unavailable(f"{server} cannot be reached: {error or 'no answer in time'}") from error
        return await link.call(partition, method, body, timeout_s)

    # docs/protocol.md P40
    def unheard_s(self, server: ServerId) -> float | None:
        """See kvstore.partition.ports.Peers."""
        link = self.by_server.get(server)
        if link is not None and link.is_open:
            return link.silent_s(self.now())
        return self._reach.unheard_s(server, self.now())

    async def _call_here(self, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        """The same as by a link: nobody waits longer than he said, and what has begun goes to its end, whatever becomes
        of who called."""
        if self._is_closed:
            raise Unavailable(f"server {self.server} stops")
        if self._here >= HERE_MAX:
            raise Overloaded(f"{HERE_MAX} calls to {self.server} are under way")
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
        """The link is gone; another one is made when it is needed."""
        if self.by_server.get(link.server) is link:
            del self.by_server[link.server]
            self.lost_links += 1
            now = self.now()
            if self._reach.lost(link.server, link.last_heard_at(now), now):
                asyncio.get_running_loop().call_later(self.beat.delay_s(LOOK_S), self._look)

    # docs/protocol.md V3
    def version_to(self, server: ServerId) -> int:
        """The highest version that both can do, as far as the server has said; once the cluster is at a higher one, all
        of its servers can do that."""
        member = self.dispatcher.topology.servers.get(server)
        its = max(member.can if member is not None else versions.FIRST, self._versions.cluster)
        return versions.link_version(min(its, self._versions.can))

    def complain(self, server: ServerId, error: FrameError) -> None:
        """The server refuses the link, does not prove itself, or has sent what is no frame: the link ends."""
        self._complaints += 1
        now = self.now()
        self._refusals[server] = now, str(error)
        if now - self._complained_at.get(server, now - COMPLAIN_S) >= COMPLAIN_S:
            self._complained_at[server] = now
            log.warning("server=%s no link to it, or no more: %s", server, error)

    def refusals(self) -> dict[ServerId, str]:
        """Return why servers have refused the links of this server lately, by server."""
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
            "peer_links_refused_total": self._complaints,
            "peer_operations_in_flight": sum(link.in_flight for link in self.by_server.values()),
        }

    async def close(self) -> None:
        """End every link, and make no more; what is under way on them is answered as on a loss."""
        self._is_closed = True
        for server in sorted(self.by_server):
            self.by_server[server].close()
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(OutcomeUnknown(f"server {self.server} stopped before it answered"))
        await self._nursery.close()

    def _look(self) -> None:
        """Try the unheard servers again, as long as they are registered. Nobody else would, because nobody sends them
        anything while they do not lead."""
        if self._is_closed:
            return
        unheard = self._reach.look(self.now())
        for server in unheard:
            if server not in self.dispatcher.topology.servers:
                self._reach.forget(server)
            elif server not in self.by_server:
                self._open(server)
        if unheard:
            asyncio.get_running_loop().call_later(self.beat.delay_s(LOOK_S), self._look)
        else:
            self._reach.rest()

    def _has_failed(self, server: ServerId, since: float) -> bool:
        link = self.by_server.get(server)
        return (link is None or not link.is_open) and self._refused_at.get(server, since) > since

    def _open(self, server: ServerId, *, at_once: bool = False) -> PeerLink | None:
        """Begin to connect. None if no address is known, if the last attempt failed a moment ago, or after `close`."""
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
            self._reach.heard(link.server)
        except (OSError, FrameError) as error:
            link.fail_opening(error if not isinstance(error, TimeoutError) else ConnectionError("no answer in time"))
            self._refused_at[link.server] = self.now()
            link.close()
            self.lost(link)
