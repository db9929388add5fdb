"""One running node: its parts, and what it reports about itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kvstore.autorecovery.auditor import Auditor
from kvstore.autorecovery.damage import DamageReports
from kvstore.autorecovery.worker import Worker
from kvstore.bookie import Bookie, BookieState
from kvstore.env import Env
from kvstore.env.interpreter import interpreter
from kvstore.env.log_output import Output
from kvstore.env.nursery import shielded
from kvstore.env.ports import Task
from kvstore.env.secret import ClusterSecret
from kvstore.errors import Unavailable
from kvstore.meta.store import MetadataStore, SessionState
from kvstore.partition.partition import Partition
from kvstore.partition.state.state import ReplicaState
from kvstore.ring import PartitionState
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.changes import AdminChanges
from kvstore.server.access.identities import Access
from kvstore.server.access.logins import Logins
from kvstore.server.balance.balancer import Balancer
from kvstore.server.clock.clock_sync import ClockSync
from kvstore.server.cluster.membership import Membership
from kvstore.server.cluster.ring_store import RingStore
from kvstore.server.cluster.rising import what_holds_it
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.cluster.version_follower import VersionFollower
from kvstore.server.config import NodeConfig, Role
from kvstore.server.feed.feeds import Feeds
from kvstore.server.grpc.stream import SessionStreams
from kvstore.server.hosting import Hosting
from kvstore.server.load.load import PartitionLoad
from kvstore.server.load.sampler import LoadSampler, loads_of_cluster
from kvstore.server.namespaces.keeper import Keeper
from kvstore.server.peer.links import PeerLinks
from kvstore.server.peer.server import PeerServer
from kvstore.server.placement.assign import replicas_held
from kvstore.server.placement.steward import Steward
from kvstore.server.redis.channel_peers import ChannelPeers
from kvstore.server.redis.listener import RespServer
from kvstore.server.redis.session import Facts
from kvstore.server.routing.backend import Backend
from kvstore.server.routing.dispatch import Dispatcher
from kvstore.server.routing.scan_slots import ScanSlots
from kvstore.server.status.copy_count import CopyCount
from kvstore.server.status.health_numbers import unserved_of
from kvstore.server.status.ledger_survey import LedgerSurvey
from kvstore.server.status.move_progress import Copied, MoveReports
from kvstore.server.status.node_report import TlsStatus
from kvstore.server.status.surveyor import Surveyor
from kvstore.server.tracing.open import traced_backend
from kvstore.server.write_probe import WriteProbe
from kvstore.types import PartitionId, ServerId
from kvstore.wal.deaths import ProvenDeaths

log = logging.getLogger(__name__)

VERSION = "0.2.0"


class Node:
    """One running node, created by `composition.serve`."""

    def __init__(self, config: NodeConfig, env: Env, store: MetadataStore, secret: ClusterSecret) -> None:
        self.config, self.env, self.store, self.secret = config, env, store, secret
        self.id = ServerId(config.id)
        self.version = VERSION
        self.zookeeper = config.metadata_address
        self.cluster: str
        """The cluster's id, assigned when the cluster was created."""
        self.is_draining = False
        self.versions: VersionFollower
        self.membership: Membership
        self.dispatcher: Dispatcher
        self.hosting: Hosting
        self.rings: RingStore
        self.steward: Steward
        self.balancer: Balancer
        self.load_sampler: LoadSampler
        self.progress: MoveReports
        self.feeds: Feeds
        self.clock_sync: ClockSync
        self.surveyor: Surveyor
        self.copy_count: CopyCount
        self.ledger_survey: LedgerSurvey
        self.namespaces: Keeper
        self.resp: RespServer
        self.channel_peers: ChannelPeers
        self.audit = AuditLog(env.clock.now, env.clock.date_ms, env.audit)
        self.changes = AdminChanges(env, self.audit)
        self.scans = ScanSlots(env.clock.now)
        self.access = Access(audit=self.audit, is_wanted=config.wants_access_control)
        self.logins = Logins(env, self.access, self.audit)
        self.links: PeerLinks
        self.deaths = ProvenDeaths()
        """The processes whose end was proven to this node."""
        self.peers: PeerServer
        self.streams: SessionStreams
        self.bookie: Bookie | None = None
        """None on a node without the bookie role."""
        self.worker: Worker | None = None
        """None on a node that repairs no ledgers."""
        self.damage_reports: DamageReports | None = None
        """Reports damage that the bookie's scrub finds; None without a bookie."""
        self.auditor: Auditor | None = None
        """None on a node that is not a candidate for auditor."""
        self.write_probe: WriteProbe
        self.is_open = False
        self.on_serving: list[Callable[[bool], Awaitable[None]]] = []
        """Awaited with False when the node begins to drain, and with True when it accepts operations again."""
        self._is_stopping = False
        self._handing_over: Task | None = None
        """The handover, since draining began."""
        self._turn = asyncio.Lock()
        """Held while a change between draining and serving is decided."""
        self.endpoint_histograms: Callable[[], Mapping[str, Any]] = dict
        """Return the histograms of the endpoints that the caller of `serve` opened."""
        self.resident_bytes: Callable[[], int] = lambda: 0
        """Return the process's resident memory in bytes. Set by the caller of `serve`."""
        self.cpu_s: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        """Return the process's user and system CPU time in seconds. Set by the caller of `serve`."""
        self.tls: TlsStatus | None = None
        self.log_output = Output(config.log_output)
        """The process's log output, if the caller of `serve` opened one."""
        self.engine_statistics: Callable[[], Mapping[str, int]] = dict
        """Return how much of the shared memory the partitions' states use. Set by the caller of `serve`."""

    def not_ready(self) -> list[str]:
        """Return why clients should use another server; empty if this server can answer for its partitions and forward
        everything else. A condition that affects all servers alike, such as a partition without a leader or a missing
        metadata store, is not a reason: a load balancer that finds no ready server refuses requests that could be
        served."""
        if not self.is_open:
            return ["starting"]
        if failure := self.env.liveness.failure:
            return [f"no metadata session because {failure}"]
        if self.is_draining:
            return ["draining"]
        if self.tls is not None and (fault := self.tls.fault()):
            return [fault]
        if Role.SERVER not in self.config.plays:
            return []
        elsewhere = {leader for leader, _ in self.dispatcher.topology.leaders.values()} - {self.id}
        return ["no other server is reachable"] if self.links.is_cut_off(elsewhere) else []

    def leaderless(self) -> list[PartitionId]:
        """Return the partitions without a known leader, including partitions that this server leads but does not serve
        yet."""
        if not self.is_open or Role.SERVER not in self.config.plays:
            return []
        partitions = self.dispatcher.topology.ring.partitions
        wanted = [each for each in sorted(partitions) if partitions[each].state is not PartitionState.RETIRED]
        return [each for each in wanted if not self._led(each)]

    async def unserved(self) -> Sequence[str]:
        """Return what the cluster does not serve, according to the nodes that answer; empty if everything is served.
        Asks every other server, which takes about one second at most."""
        if not self.is_open or Role.SERVER not in self.config.plays:
            return []
        return unserved_of(await self.surveyor.take())

    def statistics(self) -> dict[str, Mapping[str, Any]]:
        """Return the node's statistics by part."""
        if not self.is_open:
            return {}
        found: dict[str, Mapping[str, Any]] = {}
        if self.bookie is not None and self.damage_reports is not None:
            found["bookie"] = {**self.bookie.statistics(), "damage_marked_total": self.damage_reports.marked}
        if self.worker is not None:
            found["autorecovery"] = self.worker.statistics()
        if self.auditor is not None:
            found["auditor"] = self.auditor.statistics()
        if Role.SERVER in self.config.plays:
            found["server"] = {
                **self.resp.statistics(),
                **self.channel_peers.statistics(),
                **self.dispatcher.statistics(),
                **self.links.statistics(),
                **self.peers.statistics(),
                **self.streams.statistics(),
                **self.steward.statistics(),
                **self.balancer.statistics(),
                **self.feeds.statistics(),
                "partitions_without_leader": len(self.leaderless()),
                "cluster_version": self.versions.cluster,
                "servers_undecodable": len(self.membership.undecodable_servers),
                "ring_hints_false_total": self.membership.false_hints,
                **self.clock_sync.statistics(),
                **self.access.statistics(),
                **self.logins.statistics(),
                **self.env.slow.statistics(),
                **self.env.traces.statistics(),
            }
            if namespaces := self.namespaces.statistics():
                found["namespaces"] = namespaces
            found["engine"] = self.engine_statistics()
            found["cluster"], found["findings"] = self.surveyor.numbers(), self.surveyor.findings()
            heat = self.load_sampler.numbers()
            found["partitions"] = {
                str(each): {**table, "load": heat.get(each)} if each in heat else table
                for each, table in self.hosting.statistics().items()
            }
        return found

    def bookie_state(self) -> BookieState:
        """Return the state of the node's bookie. The node must have the bookie role."""
        if self.bookie is None:
            return BookieState(is_running=False)
        storage = self.bookie.storage
        return BookieState(
            is_running=not self.env.liveness.failure,
            is_readonly=storage.is_readonly,
            is_stopping=self._is_stopping,
            takes_copies=storage.takes_copies,
        )

    def process_statistics(self) -> dict[str, float]:
        """Return numbers that concern the whole process."""
        found = {
            "loop_starved": self.env.starved(),
            "metadata_connected": self.store.state is SessionState.CONNECTED,
            "draining": self.is_draining,
        }
        if self.is_open and Role.SERVER in self.config.plays:
            return {**found, "ring_version": self.dispatcher.topology.ring.version}
        return {**found}

    def histograms(self) -> dict[str, Mapping[str, Any]]:
        """Return histograms by part, for the metrics endpoint."""
        if not self.is_open:
            return {}
        found: dict[str, Mapping[str, Any]] = {}
        if self.bookie is not None:
            found["bookie"] = self.bookie.histograms()
        if Role.SERVER in self.config.plays:
            found["server"] = {**self.resp.histograms(), **self.endpoint_histograms()}
        return found

    def backend_of(self, endpoint: str) -> Backend:
        """Return the backend that an endpoint submits operations to. If tracing is on, the backend samples the
        operations."""
        return traced_backend(self.env.traces, self.dispatcher, endpoint)

    @property
    def topology(self) -> ClusterTopology:
        return self.dispatcher.topology

    async def reread_servers(self) -> None:
        """Read again which servers are up. Raises MetadataError."""
        await self.membership.reread_servers()

    async def copied(self) -> Copied:
        """Return the progress of the moves whose target leaders answer."""
        return await self.progress.of_cluster(self.links, self.id, sorted(self.topology.servers))

    async def loads(self) -> dict[PartitionId, PartitionLoad]:
        """Return the load of every partition whose leader answers."""
        return await loads_of_cluster(self.links, self.load_sampler, self.id, sorted(self.topology.servers))

    def replicas(self) -> Mapping[PartitionId, Mapping[str, Any]]:
        """Return the statistics of each local replica."""
        return self.hosting.statistics()

    async def begin_stopping(self) -> None:
        """Report at every endpoint that clients should use another server. Returns when a running drain has ended; no
        other drain begins after that."""
        async with self._turn:
            self._is_stopping = True
            await self._set_draining(True)
            if self._handing_over is not None:
                await shielded(self._handing_over)

    async def drain(self) -> list[PartitionId]:
        """Hand over all leaderships and accept no new ones. Returns the partitions that were led. The drain continues
        if the caller is cancelled. Raises Unavailable while the node starts or stops."""
        async with self._turn:
            self._check_up()
            await self._set_draining(True)
            led = self.hosting.leads
            handing_over = self._handing_over or self.env.nursery.spawn(self._hand_over(), name="drain")
            self._handing_over = handing_over
        await shielded(handing_over)
        return led

    async def undrain(self) -> bool:
        """Accept operations again once the handover is complete. Returns True if the node was draining. Continues if
        the caller is cancelled. Raises Unavailable while the node starts or stops."""
        self._check_up()
        was_draining = self.is_draining
        await shielded(self.env.nursery.spawn(self._serve_again(), name="undrain"))
        self._check_up()
        return was_draining

    def _check_up(self) -> None:
        """Raise Unavailable unless the node has started and is not stopping."""
        if not self.is_open:
            raise Unavailable(f"node {self.id} is starting; retry once it is up")
        if self._is_stopping:
            raise Unavailable(f"node {self.id} is stopping")

    async def _serve_again(self) -> None:
        async with self._turn:
            if self._is_stopping or not self.is_draining:
                return
            if self._handing_over is not None:
                await self._handing_over
                self._handing_over = None
                await self.hosting.start()
            await self.membership.announcement.announce_draining(False)
            await self._set_draining(False)
        log.info("node=%s accepts operations again", self.id)

    async def _hand_over(self) -> None:
        await self.hosting.drain()
        await self.membership.announcement.announce_draining(True)

    async def _set_draining(self, is_draining: bool) -> None:
        if self.is_draining is not is_draining:
            self.is_draining = is_draining
            for tell in self.on_serving:
                await tell(not is_draining)

    def state_of(self, partition: PartitionId) -> ReplicaState | None:
        """Return the state of the local replica, or None."""
        return self.hosting.state_of(partition)

    def hosted(self) -> dict[PartitionId, Partition]:
        """Return the local replicas."""
        return self.hosting.hosted()

    def status(self) -> dict[str, Any]:
        """Return the content of the status page."""
        shown: dict[str, Any] = {
            "id": self.config.id,
            "version": VERSION,
            "python": interpreter(),
            "roles": list(self.config.plays),
            "metadata": self.store.state.name.lower(),
            "date": self.clock_sync.report()._asdict() if self.is_open and Role.SERVER in self.config.plays else None,
            "not_ready": self.not_ready(),
        }
        if self.is_open and Role.SERVER in self.config.plays:
            topology = self.dispatcher.topology
            shown["ring_version"] = topology.ring.version
            shown["cluster_version"] = self.versions.cluster
            shown["cluster_version_waits_for"] = self.what_holds_the_version() or None
            shown["leaders"] = {each: leader[0] for each, leader in sorted(topology.leaders.items())}
            shown["leaderless"] = self.leaderless()
            shown["servers"] = sorted(topology.servers)
        return {**shown, **self.statistics()}

    def what_holds_the_version(self) -> str:
        """Return why the cluster version is below what this build supports, as far as this server knows; empty if it is
        not."""
        topology = self.topology
        wanted, unreadable = replicas_held(topology.ring), self.membership.undecodable_servers
        return what_holds_it(self.versions.found, topology.servers, wanted, self.versions.can, unreadable)

    def facts(self) -> Facts:
        """Return what INFO shows in addition to the listener's own fields."""
        topology = self.dispatcher.topology
        partitions: dict[str, object] = {}
        for each in sorted(topology.ring.partitions):
            leader = topology.leaders.get(each)
            partitions[each] = f"leader={leader[0] if leader else ''}"
        node = {"node_id": self.config.id, "kvstore_version": VERSION, "ring_version": topology.ring.version}
        user_s, system_s = self.cpu_s()
        return {
            "Memory": {"used_memory": self.resident_bytes()},
            "CPU": {"used_cpu_sys": f"{system_s:.2f}", "used_cpu_user": f"{user_s:.2f}"},
            "Kvstore": node,
            "Partitions": partitions,
        }

    def _led(self, partition: PartitionId) -> bool:
        leader = self.dispatcher.topology.leaders.get(partition)
        if leader is None:
            return False
        return leader[0] != self.id or partition in self.hosting.leads
