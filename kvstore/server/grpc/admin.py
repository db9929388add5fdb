"""The Admin service. It answers requests of operators from the node itself and from the cluster's metadata."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import grpc

from kvstore.env import Env
from kvstore.env.log_output import Output
from kvstore.env.profiler import Profiler, name_of
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.meta.bookies import BookieView
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import MetadataStore, SessionState
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.partition import Partition
from kvstore.proto import admin_pb2, admin_pb2_grpc
from kvstore.rpc.calls import Few
from kvstore.server.access.identities import Access
from kvstore.server.balance.balancer import Balancer
from kvstore.server.grpc.access_admin import AccessAdmin
from kvstore.server.grpc.namespace_admin import NamespaceAdmin
from kvstore.server.grpc.ring_admin import RingAdmin, RingSource
from kvstore.server.grpc.transaction_admin import TransactionAdmin
from kvstore.server.namespaces.keeper import Keeper
from kvstore.server.routing.backend import Backend
from kvstore.server.status.ledger_survey import LedgerSurvey
from kvstore.server.status.slow_report import slow_report
from kvstore.server.status.surveyor import Surveyor
from kvstore.types import BookieId, LedgerId, PartitionId
from kvstore.versions import Versions
from kvstore.wal.lists import LedgerLists

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
DRAIN_TIMEOUT_S = 30.0


class AdminSource(RingSource, Protocol):
    """The node that the service reports on. Implemented by kvstore.server.app.Node."""

    log_output: Output

    @property
    def env(self) -> Env: ...
    @property
    def version(self) -> str: ...
    @property
    def zookeeper(self) -> str:
        """The connection string of the metadata store, as configured."""
        ...

    @property
    def access(self) -> Access: ...
    @property
    def is_draining(self) -> bool: ...
    def replicas(self) -> Mapping[PartitionId, Mapping[str, Any]]:
        """Return the statistics of each local replica."""
        ...

    def statistics(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the statistics of each part of the node."""
        ...

    async def drain(self) -> list[PartitionId]:
        """Hand over all leaderships and accept no new ones. Returns the partitions that were led."""
        ...

    async def undrain(self) -> bool:
        """Accept operations again. Returns True if the node was draining. Raises Unavailable."""
        ...

    def hosted(self) -> Mapping[PartitionId, Partition]:
        """Return the local replicas."""
        ...

    @property
    def surveyor(self) -> Surveyor: ...
    @property
    def balancer(self) -> Balancer: ...
    @property
    def namespaces(self) -> Keeper: ...
    @property
    def versions(self) -> Versions: ...
    @property
    def ledger_survey(self) -> LedgerSurvey: ...


class Admin(admin_pb2_grpc.AdminServicer):
    """The gRPC service `kvstore.v1.Admin`. Like those of all services, its methods raise StoreError, which
    kvstore/rpc/malformed.py converts to gRPC statuses."""

    def __init__(self, env: Env, source: AdminSource, backend: Backend) -> None:
        self._source = source
        self._ring = RingAdmin(env, source, backend)
        self._access = AccessAdmin(source.store, source.access, env.clock.date_ms, env.clock.passed_ms)
        self._namespaces = NamespaceAdmin(source.store, source.namespaces, source.versions)
        self._transactions = TransactionAdmin(source, env.clock, backend.on_topology)
        self._profiler = Profiler()
        self._clock = env.clock
        self._began = env.clock.now()
        self._reads = Few("surveys")

    async def Status(self, request: admin_pb2.StatusRequest, context: Context) -> admin_pb2.StatusResponse:
        source, topology = self._source, self._source.topology
        response = admin_pb2.StatusResponse(
            server=source.id,
            version=source.version,
            zookeeper=source.zookeeper,
            ring_version=topology.ring.version,
            metadata_connected=source.store.state is SessionState.CONNECTED,
            draining=source.is_draining,
            uptime_s=self._clock.now() - self._began,
            statistics=numbers(source.statistics()),
        )
        led: dict[str, list[str]] = {}
        for partition, (leader, _) in sorted(topology.leaders.items()):
            led.setdefault(leader, []).append(partition)
        members = {replica for member in topology.ring.partitions.values() for replica in member.replicas}
        for id in sorted(members | set(topology.servers)):
            node = response.nodes.add(id=id, alive=id in topology.servers, leads=led.get(id, []))
            if (member := topology.servers.get(id)) is not None:
                node.grpc, node.resp, node.http = member.grpc, member.resp, member.http
                node.zone, node.bookie = member.zone, member.bookie
        return response

    async def NodeStatus(self, request: admin_pb2.NodeStatusRequest, context: Context) -> admin_pb2.NodeReport:
        return self._source.surveyor.own()

    async def ClusterStatus(self, request: admin_pb2.ClusterStatusRequest, context: Context) -> admin_pb2.ClusterReport:
        return await self._source.surveyor.take()

    async def Ring(self, request: admin_pb2.RingRequest, context: Context) -> admin_pb2.RingResponse:
        ring, leaders = self._source.topology.ring, self._source.topology.leaders
        shares = ring.shares()
        ids = sorted(ring.partitions)
        place = {partition: index for index, partition in enumerate(ids)}
        response = admin_pb2.RingResponse(
            version=ring.version,
            tokens=ring.tokens.keys(),
            owners=[place[owner] for owner in ring.tokens.values()],
            hash=ring.hash.name,
        )
        for partition in ids:
            member = ring.partitions[partition]
            response.partitions.add(
                id=partition,
                state=member.state.value,
                leader=leaders.get(partition, ("", 0))[0],
                replicas=member.replicas,
                share=shares[partition],
            )
        return response

    async def ChangeRing(self, request: admin_pb2.ChangeRingRequest, context: Context) -> admin_pb2.ChangeRingResponse:
        return await self._ring.change(request)

    async def RingStatus(self, request: admin_pb2.RingStatusRequest, context: Context) -> admin_pb2.RingStatusResponse:
        return await self._read(self._ring.status, context)

    async def Loads(self, request: admin_pb2.LoadsRequest, context: Context) -> admin_pb2.LoadsResponse:
        return await self._read(self._ring.loads, context)

    async def Balance(self, request: admin_pb2.BalanceRequest, context: Context) -> admin_pb2.BalanceResponse:
        return await self._read(self._source.balancer.explain, context)

    async def ChangeReplicas(
        self, request: admin_pb2.ChangeReplicasRequest, context: Context
    ) -> admin_pb2.RingStatusResponse:
        return await self._ring.change_replicas(request)

    async def Partitions(self, request: admin_pb2.PartitionsRequest, context: Context) -> admin_pb2.PartitionsResponse:
        return await self._read(self._partitions, context)

    async def Ledgers(self, request: admin_pb2.LedgersRequest, context: Context) -> admin_pb2.LedgersResponse:
        return await self._read(lambda: self._ledgers(request), context)

    async def Ledger(self, request: admin_pb2.LedgerRequest, context: Context) -> admin_pb2.LedgerResponse:
        return await self._source.ledger_survey.ledger(LedgerId(request.ledger))

    async def Bookies(self, request: admin_pb2.BookiesRequest, context: Context) -> admin_pb2.BookiesResponse:
        return await self._read(lambda: _bookies(self._source.store), context)

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        return await _drain(self._source, request.timeout_s or DRAIN_TIMEOUT_S)

    async def Undrain(self, request: admin_pb2.UndrainRequest, context: Context) -> admin_pb2.UndrainResponse:
        return admin_pb2.UndrainResponse(was_draining=await self._source.undrain())

    async def Access(self, request: admin_pb2.AccessRequest, context: Context) -> admin_pb2.AccessResponse:
        return await self._read(self._access.read, context)

    async def ChangeAccess(self, request: admin_pb2.ChangeAccessRequest, context: Context) -> admin_pb2.AccessResponse:
        return await self._access.change(request)

    async def Namespaces(self, request: admin_pb2.NamespacesRequest, context: Context) -> admin_pb2.NamespacesResponse:
        return await self._read(self._namespaces.read, context)

    async def ChangeNamespaces(
        self, request: admin_pb2.ChangeNamespacesRequest, context: Context
    ) -> admin_pb2.NamespacesResponse:
        return await self._namespaces.change(request)

    async def LogLevel(self, request: admin_pb2.LogLevelRequest, context: Context) -> admin_pb2.LogLevelResponse:
        output = self._source.log_output
        if request.logger:
            try:
                output.set_level(request.logger, request.level)
            except ValueError as error:
                raise InvalidRequest(str(error)) from None
        elif request.level:
            raise InvalidRequest(f"expected a logger with the level {request.level[:100]!r}, got none")
        return admin_pb2.LogLevelResponse(levels=output.levels())

    async def Transactions(
        self, request: admin_pb2.TransactionsRequest, context: Context
    ) -> admin_pb2.TransactionsResponse:
        return self._transactions.standing()

    async def AbandonTransactions(
        self, request: admin_pb2.AbandonTransactionsRequest, context: Context
    ) -> admin_pb2.AbandonTransactionsResponse:
        return await self._transactions.abandon(request)

    async def SlowLog(self, request: admin_pb2.SlowLogRequest, context: Context) -> admin_pb2.SlowLogResponse:
        return slow_report(self._source.env.slow, request.count, request.key)

    async def Profile(self, request: admin_pb2.ProfileRequest, context: Context) -> admin_pb2.ProfileResponse:
        profile = await self._profiler.take(request.seconds, request.rate)
        response = admin_pb2.ProfileResponse(samples=profile.samples, took_s=profile.took_s)
        places: dict[str, int] = {}
        for (thread, calls), seen in profile.stacks.items():
            frames = [places.setdefault(name_of(code), len(places)) for code in calls]
            response.stacks.add(thread=thread, frames=frames, samples=seen.samples, cpu_us=seen.cpu_ns // 1_000)
        response.frames.extend(places)
        return response

    async def _read(self, work: Callable[[], Awaitable[T]], context: Context) -> T:
        """Run `work`, which reads much of the metadata store, in one of few slots. Raises Overloaded if no slot is
        free."""
        with self._reads.place(context):
            return await work()

    async def _partitions(self) -> admin_pb2.PartitionsResponse:
        response = admin_pb2.PartitionsResponse()
        topology, store, here = self._source.topology, self._source.store, self._source.replicas()
        for partition in sorted(topology.ring.partitions):
            leader, epoch = topology.leaders.get(partition, ("", 0))
            status = response.partitions.add(id=partition, leader=leader, epoch=epoch)
            listed, _ = await LedgerLists(store).read(partition)
            status.ledgers.extend(each.id for each in listed.ledgers)
            status.trimmed_sequence = listed.trimmed_seq
            published = await Claims(store, partition, self._source.id).published()
            for server in topology.ring.partitions[partition].replicas:
                replica = status.replicas.add(server=server, reachable=server in topology.servers)
                replica.role = "leader" if server == leader else "follower"
                if server in published:
                    replica.sequence, replica.epoch = published[server].seq, published[server].epoch
                if server == self._source.id and partition in here:
                    own = here[partition]
                    replica.role = str(own.get("role", replica.role))
                    replica.sequence = max(replica.sequence, int(own.get("seq", 0)))
                    replica.statistics.update(numbers({"": own}))
        return response

    async def _ledgers(self, request: admin_pb2.LedgersRequest) -> admin_pb2.LedgersResponse:
        survey = self._source.ledger_survey
        return await (survey.page(LedgerId(request.first)) if request.all else survey.ledgers(request.partition))


async def _bookies(store: MetadataStore) -> admin_pb2.BookiesResponse:
    view = BookieView(store)
    await view.refresh()
    named = await LedgerStore(store).count_by_bookie()
    known = {*await CookieStore(store).bookies(), *view.current.all, *named}
    response = admin_pb2.BookiesResponse()
    for bookie in sorted(known):
        response.bookies.add(
            id=bookie,
            address=view.address(bookie) or "",
            state=_state(view, bookie),
            ledgers=named[bookie],
        )
    return response


async def _drain(source: AdminSource, timeout_s: float) -> admin_pb2.DrainResponse:
    try:
        async with asyncio.timeout(timeout_s):
            return admin_pb2.DrainResponse(handed_over=await source.drain())
    except TimeoutError:
        raise Unavailable(f"not every partition was handed over within {timeout_s:g} s") from None


def numbers(tree: Mapping[str, Any]) -> dict[str, float]:
    """Flatten nested mappings into numbers with dotted names. Values that are no numbers are skipped. Decides only."""
    found: dict[str, float] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            inner = numbers(value)
            found |= {f"{name}.{key}" if name else key: number for key, number in inner.items()}
        elif isinstance(value, int | float):
            found[str(name)] = float(value)
    return found


def _state(view: BookieView, bookie: BookieId) -> str:
    if bookie in view.current.writable:
        return "writable"
    return "readonly" if bookie in view.current.readonly else "lost"
