"""The Redis port of a node: accepts connections, limits them, and answers their questions about the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from itertools import islice
from typing import Any

from kvstore.env import Env, Listener, Stream, StreamHandler
from kvstore.env.histogram import Histogram
from kvstore.env.networks import network_of
from kvstore.env.shares import Shares, largest_of_largest
from kvstore.namespaces.rates import Rates
from kvstore.partition.state.commands import Op
from kvstore.ring.hashing import SLOTS_HASH
from kvstore.ring.ring import Ring
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.changes import AdminChanges
from kvstore.server.access.identities import Access
from kvstore.server.access.logins import Logins
from kvstore.server.config import Limits
from kvstore.server.redis import replies
from kvstore.server.redis.admission import SERVERS_MAX, ClientAdmission
from kvstore.server.redis.channels import Channels
from kvstore.server.redis.commands.known_scripts import Scripts
from kvstore.server.redis.connection import RespConnection
from kvstore.server.redis.pipeline.in_flight_limit import InFlightLimit
from kvstore.server.redis.pipeline.latency import CommandLatency
from kvstore.server.redis.pipeline.reply_memory import CHECK_S, Holder, ReplyMemory
from kvstore.server.redis.session import REDIS_VERSION, Facts, ShownClient
from kvstore.server.redis.shared_answer import SharedAnswer
from kvstore.server.redis.slot_table import SlotRedirects
from kvstore.server.routing.ask import ask
from kvstore.server.routing.backend import Backend
from kvstore.server.routing.scan_slots import ScanSlots
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)

INPUT_BYTES_MAX = 256 << 20
"""Maximum number of bytes of incomplete and waiting commands and of watched keys, over all connections. Above this
limit, the connection with the most, of the network with the most, is closed, and unauthenticated ones before others."""
CLOSE_S = 1.0
"""Time in seconds that a stop waits for operations in flight and for clients to read their replies. Clients get no
reply to operations that take longer."""
CLOSE_CHECKS = 50
SILENT_S = 10.0
"""When the limit of connections is reached and one more arrives, a connection is closed that has sent no command for
this many seconds since it began. If access control is on: a connection that has not authenticated."""
UNAUTHENTICATED_SHARE = 2
"""Divisor of the connection limit. If access control is on, at most half of the connections may be unauthenticated.
When one more arrives, the oldest connection of the network with the most of them is closed."""
LOGIN_SURE_S = 0.5
"""Time in seconds that each unauthenticated connection has for its login, however many arrive after it."""

BROWSERS_S = 60.0
"""Minimum time in seconds between two log lines about connections that speak HTTP."""

NOBODY = ServerId("")
Leave = Callable[[], None]
AcceptPeer = Callable[[list[bytes], Stream, Leave], StreamHandler]


class RespServer:
    """The Redis port of one server. It accepts connections after `open` is called. `accept_peer` returns the handler
    that continues another server's connection."""

    def __init__(
        self,
        env: Env,
        backend: Backend,
        limits: Limits,
        accept_peer: AcceptPeer,
        facts: Callable[[], Facts],
        access: Access | None = None,
        logins: Logins | None = None,
        id: ServerId = NOBODY,
        allows_flush: bool = False,
        transactions_across_slots: bool = False,
        rates: Callable[[], Rates | None] = lambda: None,
        changes: AdminChanges | None = None,
        scans: ScanSlots | None = None,
        channels: Channels | None = None,
        redirects: SlotRedirects | None = None,
    ) -> None:
        """Access control is off if `access` is None. `id` is the server behind the port. `allows_flush` enables
        FLUSHDB and FLUSHALL. `transactions_across_slots` enables commands that change keys of several partitions
        together. `rates` returns the rates of namespaces, or None if no namespace has a rate. `redirects` decides
        which commands get MOVED; None: none."""
        self.redirects = redirects
        self.id, self.allows_flush, self.rates = id, allows_flush, rates
        self.transactions_across_slots = transactions_across_slots
        self.scripts, self.random, self.slow = Scripts(), env.random, env.slow
        self.backend = backend
        self.access = access if access is not None else Access()
        audit = AuditLog(env.clock.now, env.clock.date_ms, env.audit)
        self.logins = logins if logins is not None else Logins(env, self.access, audit)
        self.scans = scans if scans is not None else ScanSlots(env.clock.now)
        self.changes = changes if changes is not None else AdminChanges(env, audit)
        self.channels = channels if channels is not None else Channels()
        self.slow_subscribers_closed = 0
        self.commands = 0
        """Commands received since the start."""
        self.reports_at = 0
        """Number of commands after which connections next check for completed syncs."""
        self.report_syncs = env.report_syncs
        self.in_flight_limit = InFlightLimit()
        self.clients = SharedAnswer(self._describe_clients, env.clock.now)
        """The reply to CLIENT LIST."""
        self.info = SharedAnswer(self.facts, env.clock.now)
        self.reply_memory = ReplyMemory(env.clock.now, limits.output_bytes_max)
        self.rounds = CommandLatency(env.clock.now, env.slow)
        self.connections_accepted = 0
        self.connections_refused = 0
        self.silent_closed = 0
        self._env, self._limits, self._began = env, limits, env.clock.now()
        self._accept_peer, self._facts = accept_peer, facts
        self._nursery = env.nursery.child("resp")
        self._connections: dict[RespConnection, None] = {}
        self._silent: Shares[RespConnection] = Shares(env.known)
        """Connections that have sent no command yet, or must authenticate and have not, or claim to be servers and have
        not proven it."""
        self._active: Shares[RespConnection] = Shares(env.known)
        """The other connections of clients."""
        self._trials: Shares[RespConnection] = Shares(env.known)
        """Connections above the limit that have not proven yet that they come from servers."""
        self._input: dict[RespConnection, int] = {}
        self._input_bytes = 0
        self._browsers_until = 0.0
        """Clock time before which no further browser is logged."""
        self._capacity_timer: asyncio.TimerHandle | None = None
        self._last_id = 0
        self._listener: Listener | None = None
        self._end_listening = self.access.on_change(self._access_changed)

    async def open(self, address: str) -> str:
        """Start accepting connections and return the bound address. Raises OSError."""
        self._listener = await self._env.transport.listen(address, lambda: RespConnection(self))
        return self._listener.address

    async def close(self) -> None:
        """Stop accepting connections, answer the operations in flight, and close every connection. Takes at most
        about CLOSE_S seconds."""
        self._end_listening()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.close_soon()
        for _ in range(CLOSE_CHECKS):
            if all(connection.is_done() for connection in self._connections):
                break
            await asyncio.sleep(CLOSE_S / CLOSE_CHECKS)
        for connection in list(self._connections):
            connection.replies.abort()
        if self._capacity_timer is not None:
            self._capacity_timer.cancel()
        await self._nursery.close()

    def statistics(self) -> dict[str, int]:
        return {
            "resp_connections": len(self._connections),
            "resp_commands_total": self.commands,
            "resp_connections_refused_total": self.connections_refused,
            "resp_silent_closed_total": self.silent_closed,
            "resp_connections_unknown": len(self._silent),
            "resp_slow_readers_closed_total": self.reply_memory.closed,
            "resp_replies_put_off_total": self.reply_memory.put_off,
            "resp_replies_refused_total": self.reply_memory.refused,
            "resp_output_bytes": self.reply_memory.held(),
            "resp_input_bytes": self._input_bytes,
            "resp_commands_under_way": self.in_flight_limit.commands + self.in_flight_limit.more,
            "resp_channels": self.channels.channel_count,
            "resp_subscriptions": self.channels.subscriptions,
            "resp_patterns": self.channels.pattern_count,
            "resp_messages_published_total": self.channels.published,
            "resp_messages_delivered_total": self.channels.delivered,
            "resp_slow_subscribers_closed_total": self.slow_subscribers_closed,
        }

    def histograms(self) -> dict[str, Mapping[str, Histogram]]:
        return {"resp_command_s": self.rounds.histograms}

    # ── for connections ───────────────────────────────────────────────────────────────────────────────────────────────

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def admit(self, connection: RespConnection) -> ClientAdmission:
        """Decide whether a new connection is accepted: clients up to the limit, and above the limit only other
        servers."""
        if self.access.is_on and len(self._silent) >= max(1, self._limits.connections_max // UNAUTHENTICATED_SHARE):
            is_above = not self._close_silent(LOGIN_SURE_S)
        else:
            is_full = len(self._connections) >= self._limits.connections_max
            is_above = is_full and not self._close_silent(SILENT_S) and not self._displace_active(connection)
        if is_above and len(self._trials) >= SERVERS_MAX and not self._displace_trial():
            return ClientAdmission.NO
        self._connections[connection] = None
        self.connections_accepted += 1
        if is_above:
            self._trials.add(connection, network_of(connection.host))
            return ClientAdmission.IF_SERVER
        self._silent.add(connection, network_of(connection.host), self.now())
        return ClientAdmission.YES

    def note_active(self, connection: RespConnection) -> None:
        """Record that the connection has sent a command, and has authenticated if it must."""
        network = network_of(connection.host)
        if self._silent.discard(connection):
            self._active.add(connection, network)
        if self.access.is_on:
            self._env.known.note(network)

    def _close_silent(self, least_s: float) -> bool:
        """Close the silent connection that must give way first, if it has been silent for at least `least_s`
        seconds. Return True if a connection was closed."""
        silent = self._silent.first_to_go()
        if silent is None or self.now() - self._silent.since(silent) < least_s:
            return False
        self.forget(silent)
        silent.replies.abort()
        self.silent_closed += 1
        return True

    def _displace_active(self, newcomer: RespConnection) -> bool:
        """Close the oldest connection of the network with the most connections, unless the newcomer's network would
        have as many. Its commands in flight have CLOSE_S seconds to be answered. While access control is on, peers
        from unknown networks close no connection of a user. Return True if a connection was closed."""
        network = network_of(newcomer.host)
        if self.access.is_on and network not in self._env.known:
            return False
        oldest = self._active.displaced_by(network)
        if oldest is None:
            return False
        self.forget(oldest)
        self.connections_refused += 1
        oldest.close_soon()
        asyncio.get_running_loop().call_later(CLOSE_S, oldest.replies.abort)
        return True

    def _displace_trial(self) -> bool:
        """Refuse a connection on trial to free its slot. Otherwise unauthenticated peers that claim to be servers
        could keep real servers out."""
        oldest = self._trials.first_to_go()
        if oldest is None:
            return False
        self.forget(oldest)
        oldest.refuse()
        return True

    def _access_changed(self) -> None:
        for connection in list(self._connections):
            connection.access_changed()
            if connection.is_unauthenticated() and connection not in self._trials:
                self._active.discard(connection)
                self._silent.add(connection, network_of(connection.host), self.now())
            elif connection.replies.issued:
                self.note_active(connection)

    def forget(self, connection: RespConnection) -> None:
        self._connections.pop(connection, None)
        self._silent.discard(connection)
        self._active.discard(connection)
        self._trials.discard(connection)
        self.reply_memory.forget(connection.replies)
        self.in_flight_limit.forget(connection.pipeline)
        self._input_bytes -= self._input.pop(connection, 0)

    def note_input(self, connection: RespConnection, size: int) -> None:
        """Record that incomplete and waiting commands and watched keys of `connection` now take `size` bytes."""
        held = self._input.get(connection, 0)
        if size == held:
            return
        self._input_bytes += size - held
        if size:
            self._input[connection] = size
        else:
            del self._input[connection]
        while self._input_bytes > INPUT_BYTES_MAX:
            has_unauthenticated = any(each.is_unauthenticated() for each in self._input)
            largest = largest_of_largest(
                (each, network_of(each.host), held)
                for each, held in self._input.items()
                if each.is_unauthenticated() or not has_unauthenticated
            )
            largest.abandon("ERR the server holds too many incomplete commands; try again")

    def wait_for_capacity(self, connection: Holder, size: int) -> None:
        """Resume `connection` when there is capacity for replies of `size` bytes, or refuse it if none becomes free."""
        self.reply_memory.wait(connection, size)
        if self._capacity_timer is None:
            self._capacity_timer = asyncio.get_running_loop().call_later(CHECK_S, self._check_capacity)

    def _check_capacity(self) -> None:
        self._capacity_timer = None
        self.reply_memory.check()
        if self.reply_memory.is_awaited and self._capacity_timer is None:
            self._capacity_timer = asyncio.get_running_loop().call_later(CHECK_S, self._check_capacity)

    def now(self) -> float:
        return self._env.clock.now()

    def now_ms(self) -> int:
        return self._env.clock.date_ms()

    def note_slow_subscriber(self) -> None:
        """Count a subscriber that is disconnected because it reads its messages too slowly."""
        self.slow_subscribers_closed += 1

    def note_browser(self, address: str) -> None:
        """Log that a connection is closed because its client speaks HTTP. Logs at most one line per BROWSERS_S
        seconds."""
        now = self.now()
        if now >= self._browsers_until:
            self._browsers_until = now + BROWSERS_S
            log.warning(
                "closed a connection that speaks HTTP to the Redis port, others are not logged for a minute address=%s",
                address,
            )

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._nursery.spawn(work, name="special")

    @property
    def ring(self) -> Ring:
        return self.backend.topology.ring

    def owner_of(self, key: bytes) -> PartitionId:
        return self.ring.partition_of(key)

    def ask(self, op: Op, partition: PartitionId) -> Awaitable[Any]:
        return ask(self.backend, op, partition)

    def accept_peer(self, words: list[bytes], stream: Stream, leave: Leave) -> StreamHandler:
        """Return the handler that continues the connection of another server. Raises CommandError."""
        return self._accept_peer(words, stream, leave)

    def _describe_clients(self) -> bytes:
        return replies.bulk(b"".join(each.session.describe(each.address) for each in self._connections))

    def shown_clients(self, most: int) -> list[ShownClient]:
        """Return at most `most` of the open connections for the dashboard."""
        return [each.session.shown(each.address) for each in islice(self._connections, most)]

    @property
    def mode(self) -> str:
        """The mode that clients see: `cluster` if the server replies MOVED, otherwise `standalone`."""
        return "cluster" if self.redirects is not None and self.ring.hash is SLOTS_HASH else "standalone"

    def facts(self) -> Facts:
        port = self._listener.address.rpartition(":")[2] if self._listener else "0"
        uptime_s = int(self._env.clock.now() - self._began)
        server = {"redis_version": REDIS_VERSION, "redis_mode": self.mode, "arch_bits": 64, "tcp_port": port}
        clients = {"connected_clients": len(self._connections), "maxclients": self._limits.connections_max}
        received = {"total_connections_received": self.connections_accepted, "total_commands_processed": self.commands}
        channels = {"pubsub_channels": self.channels.channel_count, "pubsub_patterns": self.channels.pattern_count}
        own: dict[str, Mapping[str, object]] = {
            "Server": {**server, "uptime_in_seconds": uptime_s, "uptime_in_days": uptime_s // 86_400},
            "Clients": {**clients, "blocked_clients": 0},
            "Stats": {**received, "rejected_connections": self.connections_refused, **channels},
            "Replication": {"role": "master", "connected_slaves": 0},
            "Cluster": {"cluster_enabled": int(self.mode == "cluster")},
        }
        return {**own, **self._facts()}
