"""The composition root: wires one node from its configuration, its ports and its metadata store. Contains no sockets
and no threads.

The simulation runs the same composition. The caller of `serve` opens the listeners that need the real world (gRPC,
HTTP).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

from kvstore import versions
from kvstore.autorecovery.auditor import Auditor
from kvstore.autorecovery.damage import DamageReports
from kvstore.autorecovery.worker import Worker
from kvstore.bookie import Bookie, BookieConfig, refuse_orphaned_directories
from kvstore.env import Env, Stream
from kvstore.env.secret import ClusterSecret
from kvstore.env.slow_log import SlowLog
from kvstore.errors import PermissionDenied
from kvstore.meta.bookies import BookieView
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.history.verified import VerifiedStore
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import MetadataStore
from kvstore.partition.state.entry import is_release
from kvstore.server.access.certificates import common_names
from kvstore.server.access.follow import AccessFollower
from kvstore.server.access.stream_authenticator import StreamAuthenticator
from kvstore.server.app import VERSION, Node
from kvstore.server.balance.balancer import Balancer
from kvstore.server.clock.clock_sync import DATES, ClockSync, JudgedClock
from kvstore.server.clock.saved_date import saved_offset
from kvstore.server.cluster.membership import Membership
from kvstore.server.cluster.ring_store import RingStore
from kvstore.server.cluster.topology import Member
from kvstore.server.cluster.version_follower import VersionFollower
from kvstore.server.config import NodeConfig, Role
from kvstore.server.engines import Engines
from kvstore.server.feed.end import latest_of
from kvstore.server.feed.feeds import Feeds
from kvstore.server.grpc.ring_admin import RingAdmin
from kvstore.server.grpc.session import Sessions
from kvstore.server.grpc.stream import SessionStreams
from kvstore.server.hosting import Hosting
from kvstore.server.ledger_passwords import made_with, password_of
from kvstore.server.load.sampler import LOADS, LoadSampler
from kvstore.server.namespaces.follow import NamespaceFollower
from kvstore.server.namespaces.keeper import NAMESPACES, Keeper
from kvstore.server.peer.identity import is_named
from kvstore.server.peer.last_words import last_words, with_last_words
from kvstore.server.peer.links import PeerLinks
from kvstore.server.peer.node_peers import NodePeers, credentials_of
from kvstore.server.peer.server import PeerServer
from kvstore.server.placement.steward import Steward
from kvstore.server.redis.channel_peers import CHANNELS, ChannelPeers
from kvstore.server.redis.channels import Channels
from kvstore.server.redis.listener import RespServer
from kvstore.server.redis.slot_table import SlotRedirects
from kvstore.server.routing.dispatch import Dispatcher
from kvstore.server.routing.overdue_watch import OverdueWatch
from kvstore.server.status.copy_count import CopyCount
from kvstore.server.status.ledger_survey import LEDGERS, LedgerSurvey
from kvstore.server.status.move_progress import MOVES, MoveReports
from kvstore.server.status.outage_watch import OutageWatch
from kvstore.server.status.surveyor import STATUS, Surveyor
from kvstore.server.tracing.open import open_traces
from kvstore.server.write_probe import WriteProbe
from kvstore.types import BookieId, ServerId
from kvstore.wal.bookies import BookieClients
from kvstore.wal.choice import BookieChoice
from kvstore.wal.copies.pace import CopyPace
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.log import PartitionLogs
from kvstore.wal.ports import LocalBookie

log = logging.getLogger(__name__)


@asynccontextmanager
async def serve(
    config: NodeConfig,
    *,
    env: Env,
    store: MetadataStore,
    secret: ClusterSecret,
    engines: Engines,
    open_listeners: Callable[[Node, AsyncExitStack], Awaitable[None]] | None = None,
    can: int = versions.LATEST,
) -> AsyncIterator[Node]:
    """Run a node. Leaving the context hands over its leaderships and stops it.

    `open_listeners` opens what needs the real world, once operations can be accepted. `can` is the highest cluster
    version that the node supports. Raises ConfigError, OSError (an address is in use), MetadataUnavailable,
    MetadataLost.
    """
    clock = JudgedClock(env.clock, ServerId(config.id), saved_offset(env))
    slow = SlowLog(config.server.slow_ms, clock.now, clock.date_ms, env.starved)
    write_probe = WriteProbe(env.disk, clock.now, env.beat.pause)
    env = replace(env, clock=clock, slow=slow, writable=write_probe.check)
    traces = open_traces(config.tracing, config.id, VERSION, env)
    async with AsyncExitStack() as stack:
        if traces is not None:
            env = replace(env, traces=traces)
            stack.push_async_callback(asyncio.to_thread, traces.close)
        store = await _verified(env, store, config.id, stack)
        node = Node(config, env, store, secret)
        node.write_probe = write_probe
        await _follow_access(node, stack)
        logs, view, bookies = await _open_log(node, stack)
        if Role.SERVER in config.plays:
            await _follow_version(node, stack, can)
            node.copy_count = CopyCount(node.env, node, view)
            stack.push_async_callback(node.copy_count.close)
            await _open_server(node, stack, logs, clock, Surveyor(node.env, node, view, bookies))
            outages = OutageWatch(node.env, node, view)
            outages.start()
            stack.push_async_callback(outages.close)
            _make_hosting(node, stack, logs, engines)
            if open_listeners is not None:
                await open_listeners(node, stack)
            await _host(node, stack)
        elif open_listeners is not None:
            await open_listeners(node, stack)
        node.is_open = True
        if Role.SERVER in config.plays:
            await node.membership.announcement.announce_up()
        log.info("node=%s is up: %s", config.id, config.listeners())
        yield node
        await node.begin_stopping()
        log.info("node=%s is stopping", config.id)


# docs/protocol.md B29
async def _verified(env: Env, store: MetadataStore, node: str, stack: AsyncExitStack) -> VerifiedStore:
    """Return the metadata store as all parts of the node use it. Raises MetadataLost if it is an older copy of
    itself."""
    verifying = env.nursery.child("metadata verification")
    stack.push_async_callback(verifying.close)
    verified = VerifiedStore(store, env.disk, node)
    await verified.open(verifying)
    return verified


async def _follow_access(node: Node, stack: AsyncExitStack) -> None:
    """Load the access table before any listener opens. A node with only a bookie needs it too, for its HTTP
    listener."""
    stack.callback(node.logins.close)
    follower = AccessFollower(node.env, node.store, node.access)
    stack.push_async_callback(follower.close)
    await follower.open()


# docs/protocol.md V2
async def _follow_version(node: Node, stack: AsyncExitStack, can: int) -> None:
    """Read the cluster version before any replica opens. Raises ClusterTooNew."""
    node.versions = VersionFollower(node.env, node.store, node.id, can)
    stack.push_async_callback(node.versions.close)
    await node.versions.open()


async def _open_log(node: Node, stack: AsyncExitStack) -> tuple[PartitionLogs, BookieView, BookieClients]:
    """Start the node's own bookie, if it has one, and return access to all logs, the bookie view and the bookies."""
    config, env, store = node.config, node.env, node.store
    own: tuple[BookieId, LocalBookie] | None = None
    if Role.BOOKIE in config.plays:
        advertised = config.advertised(config.bookie) if config.advertise else ""
        of_bookie = BookieConfig(
            name=config.id,
            id=config.bookie_id,
            listen=config.bookie,
            advertise=advertised,
            zone=config.zone,
            connections_max=config.limits.bookie_connections_max,
            **{each.name: getattr(config.storage, each.name) for each in fields(config.storage)},
        )
        bookie = Bookie(env, of_bookie, store, made_with(node.secret), partial(_is_no_client_of_bookies, node))
        node.bookie = started = await stack.enter_async_context(bookie)
        node.write_probe.bookies = lambda: [each.path for each in started.directories() if not each.failure]
        own = (node.bookie.id, node.bookie.storage)
    else:
        await refuse_orphaned_directories(env, config.storage, CookieStore(store))
    probing = env.nursery.child("write probe")
    stack.push_async_callback(probing.close)
    probing.spawn(node.write_probe.run(), name="write probe")
    view = BookieView(store)
    viewing = env.nursery.child("bookie view")
    stack.push_async_callback(viewing.close)  # a failed start is retried in this process
    await view.start(viewing)
    node.cluster = instance_id = await LayoutStore(store).instance_id()
    bookies = BookieClients(env, view.address, own=own, cluster=instance_id)
    stack.callback(bookies.close)
    choice = BookieChoice(view, store, clock=env.clock, random=env.random, own=own[0] if own else None)
    _open_auditing(node, stack, bookies, choice)
    pace = CopyPace(env.clock, config.autorecovery.bytes_per_s)
    _open_worker(node, stack, LedgerPorts(env.clock, bookies, LedgerStore(store), choice), pace)
    logs = PartitionLogs(
        env,
        store,
        bookies,
        choice,
        is_release=is_release,
        config=config.log,
        password_of=password_of(node.secret),
        instance_id=instance_id,
        pace=pace,
        on_marked=node.worker.poll if node.worker is not None else lambda: None,
        deaths=node.deaths,
    )
    return logs, view, bookies


def _open_worker(node: Node, stack: AsyncExitStack, ports: LedgerPorts, pace: CopyPace) -> None:
    """Start repairing ledgers on a node with a bookie, and on a node of a cluster with external bookies, which no other
    node may repair."""
    settings = node.config.autorecovery
    if settings.worker and (node.bookie is not None or node.config.is_external):
        name = node.bookie.id if node.bookie is not None else node.id
        node.worker = Worker(node.env, node.store, ports, settings, pace, name=name)
        node.worker.start()
        stack.push_async_callback(node.worker.close)


# docs/protocol.md B33
def _is_no_client_of_bookies(node: Node, stream: Stream) -> bool:
    """Return True if the connection's certificate belongs to a user or is not allowed by `bookie_clients`."""
    certificate, wanted = stream.get_extra_info("peercert"), node.config.bookie_clients
    if node.access.is_user(stream):
        reason = (
            "expected a certificate that names no user, got a user's certificate; a bookie does not know permissions"
        )
    elif certificate and wanted and not is_named(certificate, wanted):
        reason = "expected a certificate that bookie_clients allows, got another one"
    else:
        return False
    names = common_names(certificate)
    peer: Any = stream.get_extra_info("peername") or ("?", 0)
    node.access.refused(ascii(",".join(names)[:64]), str(peer[0]), "bookie connection", PermissionDenied(reason))
    return True


def _open_auditing(node: Node, stack: AsyncExitStack, bookies: BookieClients, choice: BookieChoice) -> None:
    """Start the auditor candidate and the reports of damage that the bookie's scrub finds."""
    if node.bookie is not None:
        node.damage_reports = reports = DamageReports(node.env, node.store, node.bookie.id)
        node.bookie.on_damage(reports.found)
        reports.start()
        stack.push_async_callback(reports.close)
    if node.config.autorecovery.auditor:
        candidate = node.bookie.id if node.bookie is not None else node.id
        settings = node.config.autorecovery
        node.auditor = Auditor(node.env, node.store, settings, candidate, bookies=bookies, choice=choice)
        node.auditor.start()
        stack.push_async_callback(node.auditor.close)


def _member_of(node: Node) -> Member:
    """Return how the node registers itself while it starts."""
    config = node.config
    return Member(
        id=config.id,
        resp=config.advertised(config.resp),
        grpc=config.advertised(config.grpc),
        http=config.advertised(config.http),
        bookie=config.advertised(config.bookie) if Role.BOOKIE in config.plays else "",
        zone=config.zone,
        roles=tuple(config.plays),
        version=VERSION,
        can=node.versions.can,
        starting=True,
        nonce=node.env.random.randbytes(8).hex(),
    )


async def _open_server(
    node: Node, stack: AsyncExitStack, logs: PartitionLogs, clock: JudgedClock, surveyor: Surveyor
) -> None:
    """Open the parts that accept operations, but not the partitions."""
    config, env = node.config, node.env
    membership = node.membership = Membership(env, node.store, _member_of(node))
    stack.push_async_callback(membership.close)
    membership.start()
    await membership.wait_ring()
    credentials = await credentials_of(env, node.id, node.store, node.secret)
    node.rings = RingStore(node.store, membership)
    dispatcher = node.dispatcher = Dispatcher(env, node.id, membership, config.limits)
    stack.callback(dispatcher.close)
    forwarded_max = config.limits.forwarded_max
    node.peers = PeerServer(env, credentials, dispatcher, 2 * forwarded_max, node.versions)
    node.links = PeerLinks(env, credentials, dispatcher, forwarded_max, node.peers.answer, node.versions)
    node.peers.on_proven = node.access.cluster_names.note_shown
    dispatcher.use_links(node.links)
    stack.callback(node.versions.on_rise(node.peers.end_outdated))
    _watch_overdue(env, dispatcher, stack)
    node.clock_sync = ClockSync(env, node.id, clock, node.links, lambda: membership.topology.ring)
    stack.push_async_callback(node.clock_sync.close)
    node.peers.serve_at_once(DATES, node.clock_sync.answer)
    node.clock_sync.start()
    node.surveyor, surveyor.troubles = surveyor, lambda: node.write_probe.troubles
    node.peers.serve_at_once(STATUS, surveyor.answer)
    stack.push_async_callback(surveyor.close)
    await _follow_namespaces(node, stack)
    latest = partial(latest_of, env.clock, dispatcher)
    node.feeds = Feeds(env, node.store, logs, lambda: membership.topology.ring, latest, node.cluster)
    stack.push_async_callback(node.feeds.close)
    stack.callback(membership.on_topology(node.feeds.read_ring))
    stack.push_async_callback(node.peers.close)
    stack.push_async_callback(node.links.close)
    authenticator = StreamAuthenticator(node.access, node.logins, env.nursery)
    sessions = Sessions(node.backend_of("session"), env.clock, env.slow)
    node.streams = SessionStreams(sessions, config.id, authenticator, node.cluster)
    accept_peer = node.streams.with_peers(with_last_words(node.peers.accept, node.cluster, node.deaths))
    node.resp = RespServer(
        env,
        node.backend_of("redis"),
        config.limits,
        accept_peer,
        node.facts,
        access=node.access,
        logins=node.logins,
        id=node.id,
        allows_flush=config.server.redis_flush,
        transactions_across_slots=config.redis.transactions_across_slots,
        rates=lambda: dispatcher.rates,
        changes=node.changes,
        scans=node.scans,
        channels=_open_channels(node, stack),
        redirects=_redirects(node) if config.redis.redirects else None,
    )
    await node.resp.open(config.resp)
    stack.push_async_callback(node.resp.close)
    _leave_last_words(node, stack)
    membership.announcement.on_placed = node.versions.poll
    await membership.announce()
    stack.push_async_callback(membership.announcement.withdraw)


def _redirects(node: Node) -> SlotRedirects:
    """Return the rules by which Redis commands are redirected."""
    membership, links = node.membership, node.links

    def is_reachable(server: ServerId) -> bool:
        link = links.by_server.get(server)
        return link is not None and link.is_open

    return SlotRedirects(node.id, lambda: membership.topology, is_reachable)


# docs/protocol.md G28
def _leave_last_words(node: Node, stack: AsyncExitStack) -> None:
    """Let the other servers learn of the end of this process."""
    death, membership = node.env.death, node.membership
    if not death.certificate:
        return

    def leave() -> None:
        others = {each.resp for each in membership.topology.servers.values() if each.resp and each.id != node.id}
        death.leave(last_words(node.id, node.cluster, death.certificate), others)

    stack.callback(membership.on_topology(leave))
    leave()


def _open_channels(node: Node, stack: AsyncExitStack) -> Channels:
    """Return the Pub/Sub channels, whose messages also reach the other servers."""
    channels = Channels()
    membership = node.membership
    others = ChannelPeers(node.env, node.id, node.links, lambda: membership.topology.servers, channels)
    node.channel_peers = others
    node.peers.serve(CHANNELS, others.answer)
    stack.push_async_callback(others.close)
    return channels


def _watch_overdue(env: Env, dispatcher: Dispatcher, stack: AsyncExitStack) -> None:
    overdue = OverdueWatch(env, dispatcher)
    overdue.start()
    stack.push_async_callback(overdue.close)


async def _follow_namespaces(node: Node, stack: AsyncExitStack) -> None:
    """Load the namespaces before this server leads anything."""
    membership = node.membership
    keeper = node.namespaces = Keeper(
        node.env,
        node.id,
        node.dispatcher,
        node.links,
        servers=lambda: membership.topology.servers,
        partitions=lambda: membership.topology.ring.partitions,
    )
    node.peers.serve_at_once(NAMESPACES, keeper.answer)
    stack.push_async_callback(keeper.close)
    follower = NamespaceFollower(node.env, node.store, keeper.take)
    stack.push_async_callback(follower.close)
    keeper.reread = follower.reread
    await follower.open()


def _make_hosting(node: Node, stack: AsyncExitStack, logs: PartitionLogs, engines: Engines) -> None:
    """Create the hosting of replicas and its reports before a listener can query them."""
    node.hosting = Hosting(
        node.env,
        node.id,
        node.config.partition,
        node.store,
        node.membership,
        node.dispatcher,
        logs,
        NodePeers(node.links, node.peers),
        engines,
        node.rings,
        node.config.retired_keep_s,
        node.versions,
        node.namespaces.book,
    )
    stack.callback(node.versions.on_rise(node.hosting.raise_log_versions))
    node.load_sampler = LoadSampler(node.env, node.hosting, node.dispatcher)
    node.ledger_survey = LedgerSurvey(node.env.nursery, node, node.links, node.hosting)
    stack.push_async_callback(node.ledger_survey.close)
    node.progress = MoveReports(node.hosting.leading)
    ring_admin = RingAdmin(node.env, node, node.dispatcher)
    node.balancer = Balancer(node.env, node, node.surveyor, ring_admin, node.config.balance)
    node.surveyor.balance = node.balancer.report


async def _host(node: Node, stack: AsyncExitStack) -> None:
    """Start the replicas that the ring assigns to this server and the services that depend on them."""
    stack.push_async_callback(node.hosting.stop)  # also after an incomplete start
    stack.push_async_callback(node.load_sampler.close)
    await node.hosting.start()
    node.namespaces.start()
    node.copy_count.start()
    node.surveyor.start()
    node.load_sampler.start()
    node.peers.serve(LOADS, node.load_sampler.answer)
    node.peers.serve(LEDGERS, node.ledger_survey.answer)
    node.peers.serve(MOVES, node.progress.answer)
    repair_after_s = node.config.repair_after_s
    keep_ms = node.config.partition.retention_ms
    node.steward = Steward(
        node.env,
        node.id,
        node.store,
        node.membership,
        node.rings,
        node.versions,
        repair_after_s=repair_after_s,
        keep_ms=keep_ms,
        logs_at=lambda: node.hosting.log_version,
    )
    node.steward.start()
    stack.push_async_callback(node.steward.close)
    node.balancer.start()
    stack.push_async_callback(node.balancer.close)
