"""The Backend of every endpoint of this server. It passes operations, answers from links and changes of the cluster
to the router, and executes the router's commands. An operation that can go straight to the local leader, or that can
follow earlier operations over a link, bypasses the router."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import assert_never

from kvstore.env import Env
from kvstore.errors import InvalidRequest, Moved, NotLeader
from kvstore.namespaces.rates import Rates
from kvstore.partition.leading.answers import NextTurnDelivery
from kvstore.partition.state.commands import NOT_NOW, NotNow, Op, Put, Sink, Transact
from kvstore.partition.state.traits import POINT_READS
from kvstore.partition.transactions.limits import check_transaction
from kvstore.server.cluster.membership import Membership
from kvstore.server.config import Limits
from kvstore.server.routing import events
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.pending import Pending
from kvstore.server.routing.ports import LinksPort, LocalReplica
from kvstore.server.routing.read_transaction import only_reads_several, transact_read_only
from kvstore.server.routing.router import FOLLOWER_LEVELS, Router
from kvstore.types import PartitionId, ServerId

RETRY_S = 0.02
"""Interval in seconds of the check of waiting operations. They are also checked at every change of the topology."""
RETRY_SOON_S, HELD_FEW_MAX = 0.005, 64
"""Interval in seconds of the check while operations wait only for held keys, and the maximum number of such
operations for which it is used, because the check is then cheap."""
WAITING_BYTES_MAX = 64 << 20
"""Maximum bytes of keys and values of waiting operations."""
_PUTS = {Put}


class Dispatcher:
    """Executes the commands of one server's router, and is the Backend of the server's endpoints."""

    def __init__(self, env: Env, server: ServerId, membership: Membership, limits: Limits) -> None:
        self._env, self._membership = env, membership
        self.topology, self.on_topology = membership.topology, membership.on_topology
        self._local: dict[PartitionId, LocalReplica] = {}
        self._links: LinksPort
        self._router = Router(
            server, membership.topology, self._serves, waiting_max=limits.waiting_max, bytes_max=WAITING_BYTES_MAX
        )
        self._held_keys = self._router.redirects.keys
        self._timer: asyncio.TimerHandle | None = None
        self._fail_later = NextTurnDelivery().deliver
        self._forget = membership.on_topology(self._on_topology)
        self._progress: dict[PartitionId, tuple[int, int]] = {}
        self._now = env.clock.now
        self.rates: Rates | None = None
        """The rate limits, while a namespace has one."""

    def use_links(self, links: LinksPort) -> None:
        """Set the links. Call this once, before the first operation. It is separate from the constructor because the
        links need the dispatcher and the dispatcher needs the links."""
        self._links = links

    def close(self) -> None:
        """Fail the operations that still wait."""
        self._forget()
        if self._timer is not None:
            self._timer.cancel()
        self._handle(events.Closing())

    # ── the Backend for endpoints ────────────────────────────────────────────────────────────────────────────────────

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        """Return (sequence, leader's time in ms) of the partition. Both are at least as high as in any answer that
        this server has given."""
        known = self._progress.get(partition, (0, 0))
        local = self._local.get(partition)
        state = getattr(local, "state", None)
        return known if state is None else (max(known[0], state.seq), max(known[1], state.record_time_ms))

    def submit(
        self,
        ops: Sequence[Op],
        sink: Sink,
        tokens: Sequence[int],
        ring_version: int = 0,
        partition: PartitionId | None = None,
    ) -> None:
        """Execute operations on the partitions that own their keys, or on `partition` if it is given.

        `sink.complete(token, …)` is called once for each operation, never from inside this call. If `ring_version` is
        newer than the ring that this server knows, the operations are delayed until the server has read the ring again.
        """
        router = self._router
        if (
            ops[1:]
            and set(map(type, ops)) == _PUTS
            and not self._held_keys
            and ring_version <= router.ring_version
            and partition is None
            and (self.rates is None or not any(op.key.startswith(self.rates.prefixes.all) for op in ops))
        ):
            return self._submit_puts(ops, sink, tokens)
        for op, token in zip(ops, tokens, strict=True):
            if (
                self.rates is not None
                and (refusal := self.rates.refusal_or_none(_counted(op, partition, router))) is not None
            ):
                self._fail_later(sink, token, refusal)
                continue
            if op.__class__ is Transact and self._takes_transaction(op, sink, token, ring_version):
                continue
            if self._held_keys or ring_version > router.ring_version or (partition is not None and ring_version):
                self._submit_with_care(op, sink, token, ring_version, partition)
                continue
            target = router.partition_of(op.key) if partition is None else partition
            local = self._local.get(target)
            if local is not None and local.serving:
                if target not in router.routes.sent_to and target not in router.waiting.lines:
                    local.submit((op,), sink, (token,))
                    continue
            else:
                flight = router.routes.direct.get(target)
                if (
                    flight is not None
                    and op.level not in FOLLOWER_LEVELS
                    and not (flight.reads.is_on and op.code in POINT_READS)
                ):
                    number = router.follow(flight, target, op, sink, token)
                    if number:
                        self._links.by_server[flight.server].add(target, number, op)
                        continue
            self._submit_with_care(op, sink, token, ring_version, partition)

    def _takes_transaction(self, op: Transact, sink: Sink, token: int, ring_version: int) -> bool:
        """Return True if the transaction was refused, or is carried out here because it only reads."""
        partition_of = self._router.partition_of
        try:
            check_transaction(op, partition_of)
        except InvalidRequest as error:
            self._fail_later(sink, token, error)
            return True
        if only_reads_several(op, partition_of):
            transact_read_only(self, op, sink, token, ring_version)
            return True
        return False

    def _submit_puts(self, ops: Sequence[Op], sink: Sink, tokens: Sequence[int]) -> None:
        """Submit puts while no key is held. All puts of one partition are submitted in one call, in their order."""
        router = self._router
        owners = router.topology.ring.partitions_of([op.key for op in ops])
        targets = set(owners)
        for target in targets if len(targets) == 1 else sorted(targets):
            some, numbers = ops, tokens
            if len(targets) > 1:
                are_its = [owner == target for owner in owners]
                some, numbers = list(compress(ops, are_its)), list(compress(tokens, are_its))
            local, flight = self._local.get(target), router.routes.direct.get(target)
            if local is not None and local.serving:
                if not (self._held_keys or target in router.routes.sent_to or target in router.waiting.lines):
                    local.submit(some, sink, numbers)
                    continue
            elif flight is not None and not self._held_keys and flight.has_capacity(len(some)):
                sent_as = router.follow_puts(flight, target, some, sink, numbers)
                self._links.by_server[flight.server].add_puts(target, sent_as, some)
                continue
            for op, token in zip(some, numbers, strict=True):
                self.submit((op,), sink, (token,))

    def read_now(self, keys: list[bytes]) -> list[bytes | None] | NotNow:
        """Return the rows that linearizable GETs of `keys` find, None for an absent key. Return NOT_NOW unless one
        partition led here owns all keys and each GET takes only a lookup. The reads see every write that was
        answered before, because the state that they read contains it."""
        if self._held_keys or (self.rates is not None and any(key.startswith(self.rates.prefixes.all) for key in keys)):
            return NOT_NOW
        router = self._router
        hash = router.topology.ring.hash
        tokens = hash.tokens_of(keys) if keys[1:] else [hash.token_of(keys[0])]
        target = router.owner_of(tokens[0])
        local = self._local.get(target)
        if local is None or target in router.routes.sent_to or target in router.waiting.lines:
            return NOT_NOW
        if tokens[1:] and router.topology.ring.owners_of(tokens).count(target) < len(keys):
            return NOT_NOW
        return local.read_now(keys, tokens, self._now())

    def submit_uncharged(self, op: Op, sink: Sink, token: int, ring_version: int = 0) -> None:
        """Execute a part of a transaction on the partition that owns its key. Rate limits do not apply, because they
        applied to the client's operation that caused it."""
        self._submit_with_care(op, sink, token, ring_version, None)

    def _submit_with_care(
        self, op: Op, sink: Sink, token: int, ring_version: int, partition: PartitionId | None
    ) -> None:
        awaits_ring = ring_version > self._router.ring_version and self._membership.hint_ring(ring_version)
        self._handle(events.Submitted(op, sink, token, partition, ring_version, awaits_ring))

    # ── events of links and replicas ──────────────────────────────────────────────────────────────────────────────────

    def host(self, partition: PartitionId, replica: LocalReplica | None) -> None:
        """Record that this server has a replica of the partition from now on, or with None that it no longer has
        one."""
        if replica is None:
            self._local.pop(partition, None)
        else:
            self._local[partition] = replica
        self._handle(events.HostingChanged(partition, replica is not None))

    def swap(self, partition: PartitionId, old: LocalReplica, new: LocalReplica) -> bool:
        """Route operations to the replica `new` instead of `old`. One of the two wraps the other. Return False, and
        change nothing, if operations are not routed to `old` any longer."""
        if self._local.get(partition) is not old:
            return False
        self._local[partition] = new
        return True

    def replica_here(self, partition: PartitionId, ring_version: int) -> LocalReplica | None:
        """Return the local replica if operations from another server that used this ring version may go to it
        without further checks, otherwise None."""
        local, router = self._local.get(partition), self._router
        is_free = ring_version == router.ring_version and partition not in router.waiting.lines
        return local if is_free else None

    def submit_here(self, partition: PartitionId, op: Op, sink: Sink, token: int, ring_version: int) -> None:
        """Execute or refuse an operation that another server sent here. The operation is never forwarded again."""
        replica = self.replica_here(partition, ring_version)
        if replica is not None and replica.serving:
            replica.submit((op,), sink, (token,))
        else:
            self._handle(events.SentByPeer(partition, op, sink, token, ring_version))

    def reject(self, op: Op, sink: Sink, token: int, moved: Moved) -> None:
        """Handle an operation that the local replica rejected because it does not own the key. This server sends the
        operation again, at the latest when the ring has changed. If another server sent it here, the operation is
        refused, and that server sends it again."""
        self._handle(events.RejectedHere(op, sink, token, moved))

    def link_opened(self, flight: Flight) -> None:
        """Record that operations can be sent to the flight's server."""
        self._handle(events.LinkOpened(flight))

    def link_lost(self, flight: Flight, first_unsent: int) -> None:
        """Handle the loss of a link. Operations numbered `first_unsent` and higher had not been sent."""
        self._handle(events.LinkLost(flight, first_unsent))

    def take_refusals(self, flight: Flight, errors: list[tuple[int, NotLeader | Moved]]) -> None:
        """Handle operations that the flight's server has refused. `errors` has their numbers, in ascending order,
        and their errors."""
        self._handle(events.RefusedByPeer(flight, errors))

    def reads_answered(self, flight: Flight, *, is_check: bool = False) -> None:
        """Send reads that wait for their turn on the link. With `is_check`, also fail the overdue ones."""
        self._handle(events.ReadsAnswered(flight, is_check))

    def note_progress(self, partition: PartitionId, seq: int, time_ms: int) -> None:
        """Record that this server has passed on an answer with this progress."""
        known = self._progress.get(partition, (0, 0))
        self._progress[partition] = (max(known[0], seq), max(known[1], time_ms))

    def in_transit(self) -> tuple[Mapping[ServerId, Flight], Mapping[PartitionId, list[Pending]]]:
        """Return the operations in transit, by server, and the operations that wait for a leader, by partition."""
        return self._router.routes.flights, self._router.waiting.lines

    def statistics(self) -> dict[str, int]:
        return {
            "forwarded_total": self._router.forwarded,
            "waited_for_leader_total": self._router.waited,
            "waiting_for_leader": self._router.waiting.count,
            "redirected": len(self._router.redirects),
            "redirected_total": self._router.redirects.total,
            "leader_wait_timeouts_total": self._router.timed_out,
        }

    # ── inside ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _serves(self, partition: PartitionId) -> bool:
        local = self._local.get(partition)
        return local is not None and local.serving

    def _on_topology(self) -> None:
        self._links.flush()  # based on the former ring, and marked so
        self.topology = self._membership.topology
        self._handle(events.TopologyChanged(self.topology))
        self._handle(events.MovedRejected())

    def _handle(self, event: events.Event) -> None:
        if isinstance(event, events.Ticked):
            self._timer = None
        for command in self._router.handle(event, self._env.clock.now()):
            self._perform(command)
        if self._timer is None and self._router.is_waiting and not isinstance(event, events.Closing):
            retry_s = RETRY_S if self._router.waiting.lines or len(self._held_keys) > HELD_FEW_MAX else RETRY_SOON_S
            self._timer = asyncio.get_running_loop().call_later(retry_s, self._handle, events.Ticked())

    def _perform(self, command: events.Command) -> None:
        match command:
            case events.SubmitHere(partition, op, sink, token):
                local = self._local.get(partition)
                if local is None:
                    self._fail_later(sink, token, self.topology.not_leader(partition))
                else:
                    local.submit((op,), sink, (token,))
            case events.Send(server, partition, number, op):
                self._links.by_server[server].add(partition, number, op)
            case events.Connect(server):
                self._links.connect(server)
            case events.Fail(sink, token, error):
                self._fail_later(sink, token, error)
            case events.RejectPeer(sink, op, token, moved):
                sink.reject(op, token, moved)
            case events.RejectMoved():
                for partition in sorted(self._local):
                    self._local[partition].redirect_moved()
            case events.ReadLeader(partition):
                self._membership.suspect(partition)
            case events.ReadRing(0):
                self._membership.suspect_ring()
            case events.ReadRing(version):
                self._membership.hint_ring(version)
            case _:
                assert_never(command)


# docs/protocol.md N5
def _counted(op: Op, partition: PartitionId | None, router: Router) -> list[bytes]:
    """Return the keys by which an operation is charged to namespaces. All partitions receive the same operation on a
    range, so only the partition that owns the range's first key charges it."""
    if op.ops:
        return [each.key for each in op.ops]
    return [op.key] if partition is None or router.partition_of(op.key) == partition else []
