"""Asks every server and every bookie for its state and combines the answers. All of them are asked at once, and the
survey takes at most one second. It does not need the metadata store: while that is unavailable, the last known state
is used."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from kvstore.env import Env
from kvstore.errors import BookieError, InvalidRequest, MetadataError, NotLeader, StoreError
from kvstore.meta.bookies import BookieView
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.store import SessionState
from kvstore.proto.admin_pb2 import BalanceReport, ClusterReport, NodeReport
from kvstore.server.access.identities import Access
from kvstore.server.clock.clock_sync import ClockSync
from kvstore.server.cluster.membership import Membership
from kvstore.server.config import NodeConfig
from kvstore.server.load.sampler import LoadSampler
from kvstore.server.namespaces.keeper import Keeper
from kvstore.server.namespaces.usage_messages import messages_of
from kvstore.server.peer.links import PeerLinks
from kvstore.server.status.copy_count import CopyCount
from kvstore.server.status.health_numbers import counts_of, numbers_of
from kvstore.server.status.latencies import RecentLatencies
from kvstore.server.status.move_progress import MoveReports
from kvstore.server.status.node_report import Reported, add_troubles, report_of
from kvstore.server.status.overview import ClusterSurvey, node_of, report_of_cluster, servers_of
from kvstore.types import BookieId, PartitionId, ServerId
from kvstore.versions import Versions
from kvstore.wal.bookies import BookieClients

log = logging.getLogger(__name__)
Detail = TypeVar("Detail", bound=Message)

STATUS = PartitionId("@status")
"""The id under which servers ask each other for reports. No partition has this id."""
METHOD = "node"
CALL_S = 1.0
"""Time after which a server counts as not answering."""
CACHED_S = 0.5
"""Seconds for which the result of a survey is reused, for any number of callers."""
OLD = "its release does not report this"
WATCH_S = 15.0
"""Interval in seconds of surveys for this node's metrics."""
COOKIES_S = 10.0
"""Interval in seconds at which the list of all known bookies is read."""


class SurveyNode(Reported, Protocol):
    """The node, and the parts of it that a survey uses. Implemented by kvstore.server.app.Node."""

    @property
    def config(self) -> NodeConfig: ...
    @property
    def links(self) -> PeerLinks: ...
    @property
    def membership(self) -> Membership: ...
    @property
    def access(self) -> Access: ...
    @property
    def clock_sync(self) -> ClockSync: ...
    @property
    def namespaces(self) -> Keeper: ...
    @property
    def versions(self) -> Versions: ...
    @property
    def load_sampler(self) -> LoadSampler: ...
    @property
    def progress(self) -> MoveReports: ...
    @property
    def copy_count(self) -> CopyCount: ...
    def histograms(self) -> Mapping[str, Mapping[str, Any]]:
        """Return histograms by part of the node."""
        ...


class Surveyor:
    """Surveys the cluster from one node. The process that runs the node sets `snapshot` and `disk`, which read the
    machine's state."""

    def __init__(self, env: Env, node: SurveyNode, view: BookieView, bookies: BookieClients) -> None:
        self._env, self._node, self._view, self._bookies = env, node, view, bookies
        self._began = env.clock.now()
        self._nursery = env.nursery.child("survey")
        self._turn = asyncio.Lock()
        self._last = ClusterReport()
        self._taken_at = -math.inf
        self._until = -math.inf
        self._cookies: frozenset[BookieId] = frozenset()
        self._cookies_until = -math.inf
        self._latencies = RecentLatencies()
        self.snapshot: Callable[[], Mapping[str, Any]] = dict
        """Returns the state of the last snapshot, as in kvstore.server.http.last_snapshot."""
        self.snapshot_age_max_s: Callable[[], float] = lambda: 0.0
        """Returns the limit of the last snapshot's age in seconds. 0 if there is none, or if the snapshots have not
        been read yet."""
        self.details: Mapping[str, Callable[[], Message]] = {}
        """Returns a part of this node that pages of the dashboard show of every server, by method."""
        self.disk: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns the total and the free bytes of the disk with the data directory."""
        self.balance: Callable[[], BalanceReport | None] = lambda: None
        """Returns the state of the balancer, if this server balances the cluster."""
        self.troubles: Callable[[], Mapping[str, str]] = dict
        """Returns the reason why each directory cannot be written, as of the last probe of
        kvstore.server.write_probe."""
        self.watcher: Callable[[ClusterReport], None] | None = None
        """Called with each regular survey, every WATCH_S seconds."""

    @property
    def server(self) -> ServerId:
        """This server."""
        return self._node.id

    def start(self) -> None:
        """Start regular surveys for metrics and alerts. Each survey costs one call to each other server; there is
        one every WATCH_S seconds."""
        self._nursery.spawn(self._watch(), name="survey now and then")

    async def close(self) -> None:
        await self._nursery.close()

    async def _watch(self) -> None:
        while True:
            report = await self.take()
            if self.watcher is not None:
                self.watcher(report)
            await self._env.beat.pause(WATCH_S)

    def numbers(self) -> Mapping[str, float]:
        """Return the health of the cluster as numbers, as of the last survey. Empty before the first survey."""
        if self._taken_at == -math.inf:
            return {}
        return {**numbers_of(self._last), "survey_age_s": max(0.0, self._env.clock.now() - self._taken_at)}

    def findings(self) -> Mapping[str, Mapping[str, int]]:
        """Return the number of findings by code, as of the last survey."""
        return {code: {"count": count} for code, count in counts_of(self._last).items()}

    def own(self) -> NodeReport:
        """Return this node's report. It is built from memory."""
        node, now = self._node, self._env.clock.now()
        member = node.membership.announcement.member
        is_open = node.is_open
        report = report_of(
            node,
            {"zone": member.zone, "roles": member.roles, "grpc": member.grpc, "resp": member.resp, "http": member.http},
            uptime_s=now - self._began,
            read_age_s=max(0.0, now - node.membership.read_at),
            starved=self._env.starved(),
            access_on=node.access.is_on,
            date=node.clock_sync.report(),
            ring_version=node.membership.topology.ring.version,
            loads={load.partition: load for load in node.load_sampler.loads()} if is_open else {},
            moves=node.progress.by_move() if is_open else {},
            latencies=self._latencies.take(node.histograms().get("server", {}), now),
            snapshot=self.snapshot(),
            disk=self.disk(),
            reserve_bytes=node.config.storage.reserve_bytes,
            copies=node.copy_count.report(),
        )
        report.snapshot_age_max_s = self.snapshot_age_max_s()
        add_troubles(report, self.troubles())
        if (balance := self.balance()) is not None:
            report.balance.MergeFrom(balance)
        # Another bookie may listen at the address of a bookie that is no longer registered, and rightly refuses
        # connections.
        by_bookies = {by: why for by, why in self._bookies.refusals().items() if by in self._view.current.all}
        for by, reason in (*node.links.refusals().items(), *by_bookies.items()):
            report.refused_by.add(by=by, reason=reason)
        report.users_like_nodes.extend(node.access.users_like_nodes())
        return report

    def answer(self, server: ServerId, method: str, body: bytes) -> bytes:
        """Answer another server with this node's report, or with one of `details`. Raises InvalidRequest."""
        if method == METHOD:
            return self.own().SerializeToString()
        if (detail := self.details.get(method)) is None:
            raise InvalidRequest(f"expected the method {' or '.join((METHOD, *self.details))}, got {method!r}")
        return detail().SerializeToString()

    async def details_of_all(self, method: str, kind: type[Detail]) -> tuple[dict[str, Detail], dict[str, str]]:
        """Return one of `details` of each server, and the reason for each server that does not answer. `kind` is the
        message that `details` returns for this method. Takes at most CALL_S seconds."""
        own = self._node.id
        others = [server for server in servers_of(self._node.membership.topology) if server != own]
        asked = {
            server: self._nursery.spawn(self._call(server, method, kind, old=OLD), name=f"{method} {server}")
            for server in others
        }
        answers: dict[str, Detail | str] = {own: kind.FromString(self.answer(own, method, b""))}
        answers |= {server: await task for server, task in asked.items()}
        return (
            {server: each for server, each in sorted(answers.items()) if not isinstance(each, str)},
            {server: each for server, each in sorted(answers.items()) if isinstance(each, str)},
        )

    async def take(self) -> ClusterReport:
        """Return a report on the cluster that is at most CACHED_S seconds old. Takes at most CALL_S seconds, even if
        many nodes do not answer. Concurrent callers share one report and must not modify it."""
        async with self._turn:
            if self._env.clock.now() >= self._until:
                self._last = await self._survey()
                self._taken_at = self._env.clock.now()
                self._until = self._taken_at + CACHED_S
            return self._last

    async def _survey(self) -> ClusterReport:
        node = self._node
        topology = node.membership.topology
        others = [server for server in servers_of(topology) if server != node.id]
        asked = {server: self._nursery.spawn(self._ask(server), name=f"survey {server}") for server in others}
        apart = [
            each for each, address in sorted(self._view.current.all.items()) if not node_of(each, address, topology)
        ]
        spaces = {bookie: self._nursery.spawn(self._space(bookie), name=f"survey {bookie}") for bookie in apart}
        cookies = self._nursery.spawn(self._read_cookies(), name="survey cookies")
        found: dict[ServerId, NodeReport | str] = {server: await answer for server, answer in asked.items()}
        answered: dict[BookieId, tuple[int, int] | str] = {bookie: await answer for bookie, answer in spaces.items()}
        await cookies
        reports = {server: answer for server, answer in found.items() if not isinstance(answer, str)}
        return report_of_cluster(
            ClusterSurvey(
                server=node.id,
                topology=topology,
                reports={node.id: self.own(), **reports},
                silence={server: answer for server, answer in found.items() if isinstance(answer, str)},
                bookies=self._view.current,
                known_bookies=self._cookies,
                spaces=answered,
                quorum=node.config.log.quorum,
                date_ms=self._env.clock.date_ms(),
                cluster_version=node.versions.cluster,
                namespaces=messages_of(node.namespaces, node.namespaces.book.table),
            )
        )

    async def _ask(self, server: ServerId) -> NodeReport | str:
        """Return the report of a server, or the reason why there is none, without the name of the server."""
        member = self._node.membership.topology.servers.get(server)
        old = NodeReport(id=server, version=member.version if member else "")
        return await self._call(server, METHOD, NodeReport, old=old)

    async def _call(self, server: ServerId, method: str, kind: type[Detail], *, old: Detail | str) -> Detail | str:
        """Call another server. Return its answer, or the reason why there is none, without the name of the server. A
        server whose release does not know the method counts as answering `old`."""
        try:
            async with asyncio.timeout(CALL_S):
                return kind.FromString(await self._node.links.call(server, STATUS, method, b"", CALL_S))
        except (NotLeader, InvalidRequest):
            return old
        except TimeoutError:
            return f"no answer within {CALL_S:g} s"
        except (StoreError, DecodeError) as error:
            return (str(error) or repr(error)).removeprefix(f"{server} ")

    async def _space(self, bookie: BookieId) -> tuple[int, int] | str:
        """Ask a bookie for its disk space. Return its total and free bytes, or the reason as a string if it does not
        answer."""
        try:
            async with asyncio.timeout(CALL_S):
                return await self._bookies.space(bookie)
        except TimeoutError:
            return f"no answer within {CALL_S:g} s"
        except BookieError as error:
            return str(error) or repr(error)

    async def _read_cookies(self) -> None:
        """Read the list of all bookies that have ever existed, at most once per COOKIES_S seconds. While the
        metadata store is unavailable, the last list is kept."""
        now = self._env.clock.now()
        if now < self._cookies_until or self._node.store.state is not SessionState.CONNECTED:
            return
        try:
            async with asyncio.timeout(CALL_S):
                self._cookies = frozenset(await CookieStore(self._node.store).bookies())
        except (TimeoutError, MetadataError) as error:
            log.info("cannot update the list of known bookies: %r", error)
        else:
            self._cookies_until = now + COOKIES_S
