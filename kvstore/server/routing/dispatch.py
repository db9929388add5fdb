"""The Backend of every door of this server: brings operations, answers of links and news of the cluster to the router,
and does what it says. What may go straight to the leader here, or along the way of those before it, does so at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import assert_never

from kvstore.env import Env
from kvstore.errors import Moved, NotLeader
from kvstore.namespaces.rates import Rates
from kvstore.partition.leading.answers import Soon
from kvstore.partition.state.commands import NOT_NOW, Code, NotNow, Op, Sink
from kvstore.partition.state.traits import LEVEL_AT
from kvstore.ring.hashing import token_of
from kvstore.server.config import Limits
from kvstore.server.routing import events
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.membership import Membership
from kvstore.server.routing.pending import Pending
from kvstore.server.routing.ports import Links, LocalReplica
from kvstore.server.routing.router import FOLLOWER_LEVELS, Router
from kvstore.types import PartitionId, ServerId

LOOK_AGAIN_S = 0.02
"""How often what waits is looked at again, beside every change of the topology."""
LOOK_SOON_S, FEW = 0.005, 64
"""And how often while operations wait only for keys that are on their way, and few: to send these out costs little."""
WAITING_BYTES_MAX = 64 << 20
"""Keys and values of what waits."""
_BATCH = int(Code.BATCH)


class Dispatcher:
    """The router's driver."""

    def __init__(self, env: Env, server: ServerId, membership: Membership, limits: Limits) -> None:
        self._env, self._membership = env, membership
        self.topology = membership.topology
        self._local: dict[PartitionId, LocalReplica] = {}
        self._links: Links
        self._router = Router(
            server, membership.topology, self._serves, waiting_max=limits.waiting_max, bytes_max=WAITING_BYTES_MAX
        )
        self._held_keys = self._router.redirects.keys
        self._timer: asyncio.TimerHandle | None = None
        self._fail_later = Soon().give
        self._forget = membership.on_topology(self._on_topology)
        self._progress: dict[PartitionId, tuple[int, int]] = {}
        self._now = env.clock.now
        self.rates: Rates | None = None
        """There while a namespace has a rate."""

    def use_links(self, links: Links) -> None:
        """The links need the dispatcher, and it needs them: they are given once, before the first operation."""
        self._links = links

    def close(self) -> None:
        """Refuse what still waits."""
        self._forget()
        if self._timer is not None:
            self._timer.cancel()
        self._handle(events.Closing())

    # ── the Backend that doors see ────────────────────────────────────────────────────────────────────────────────────

    def on_topology(self, changed: Callable[[], None]) -> Callable[[], None]:
        return self._membership.on_topology(changed)

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        """(sequence, leader's time in ms), no smaller than those of any answer that this server gave."""
        known = self._progress.get(partition, (0, 0))
        local = self._local.get(partition)
        state = getattr(local, "state", None)
        return known if state is None else (max(known[0], state.seq), max(known[1], state.record_time_ms))

    def submit(
        self, op: Op, sink: Sink, token: int, ring_version: int = 0, partition: PartitionId | None = None
    ) -> None:
        """Carry out an operation on the partition that owns its key, or on `partition`.

        `sink.complete(token, …)` follows, once, never from inside this call. An operation that names a later ring than
        the one known here is delayed until that has been read again.
        """
        if self.rates is not None and (refusal := self.rates.refusal_or_none(_keys_of(op))) is not None:
            return self._fail_later(sink, token, refusal)
        known = self._router
        if self._held_keys or ring_version > known.ring_version or (partition is not None and ring_version):
            return self._submit_with_care(op, sink, token, ring_version, partition)
        target = known.partition_of(op[1]) if partition is None else partition
        local = self._local.get(target)
        if local is not None and local.serving:
            if target not in known.ways.sent_to and target not in known.waiting.lines:
                return local.submit(op, sink, token)
        else:
            way = known.ways.straight.get(target)
            level_at = LEVEL_AT.get(op[0])
            if way is not None and (level_at is None or op[level_at] not in FOLLOWER_LEVELS):
                number = known.follow(way, target, op, sink, token)
                if number:
                    return self._links.lanes[way.server].add(target, number, op)
        self._submit_with_care(op, sink, token, ring_version, partition)

    def submit_puts(self, ops: list[Op], sink: Sink, tokens: Sequence[int]) -> None:
        """The same for puts of one sink: those of one partition go there together, in this order."""
        if self.rates is not None and any(op[1].startswith(self.rates.prefixes.all) for op in ops):
            for op, token in zip(ops, tokens, strict=True):
                self.submit(op, sink, token)
            return
        known = self._router
        owners = known.topology.ring.partitions_of([op[1] for op in ops])
        targets = set(owners)
        for target in targets if len(targets) == 1 else sorted(targets):
            some, numbers = ops, tokens
            if len(targets) > 1:
                are_its = [owner == target for owner in owners]
                some, numbers = list(compress(ops, are_its)), list(compress(tokens, are_its))
            local, way = self._local.get(target), known.ways.straight.get(target)
            is_free = not (self._held_keys or target in known.ways.sent_to or target in known.waiting.lines)
            if is_free and local is not None and local.submit_puts(some, sink, numbers):
                continue
            is_served = local is not None and local.serving
            if way is not None and not is_served and not self._held_keys and way.has_room(len(some)):
                sent_as = known.follow_all(way, target, some, sink, numbers)
                self._links.lanes[way.server].add_puts(target, sent_as, some)
            else:
                for op, token in zip(some, numbers, strict=True):
                    self.submit(op, sink, token)

    def read_now(self, key: bytes) -> bytes | NotNow | None:
        """Return the row of a linearizable GET whose answer is here and takes no more than a look; else NOT_NOW. It
        overtakes no operation that was submitted and is answered: those are in the state that it reads."""
        if self._held_keys or (self.rates is not None and key.startswith(self.rates.prefixes.all)):
            return NOT_NOW
        known, token = self._router, token_of(key)
        target = known.owner_of(token)
        local = self._local.get(target)
        if local is None or target in known.ways.sent_to or target in known.waiting.lines:
            return NOT_NOW
        return local.read_now(key, token, self._now())

    def _submit_with_care(
        self, op: Op, sink: Sink, token: int, ring_version: int, partition: PartitionId | None
    ) -> None:
        awaits_ring = ring_version > self._router.ring_version and self._membership.hint_ring(ring_version)
        self._handle(events.Submitted(op, sink, token, partition, ring_version, awaits_ring))

    # ── what links and replicas tell ──────────────────────────────────────────────────────────────────────────────────

    def host(self, partition: PartitionId, replica: LocalReplica | None) -> None:
        """A replica of the partition is here from now on, or not any more."""
        if replica is None:
            self._local.pop(partition, None)
        else:
            self._local[partition] = replica
        self._handle(events.HostingChanged(partition, replica is not None))

    def swap(self, partition: PartitionId, old: LocalReplica, new: LocalReplica) -> bool:
        """Let operations go to `new` instead of `old`, which is behind it or was. False if they go elsewhere by now."""
        if self._local.get(partition) is not old:
            return False
        self._local[partition] = new
        return True

    def submit_here(self, partition: PartitionId, op: Op, sink: Sink, token: int, ring_version: int) -> None:
        """An operation that another server sent: done here or refused, never sent on."""
        local = self._local.get(partition)
        if (
            local is not None
            and ring_version == self._router.ring_version
            and local.serving
            and partition not in self._router.waiting.lines
        ):
            local.submit(op, sink, token)
        else:
            self._handle(events.SentByPeer(partition, op, sink, token, ring_version))

    def submit_puts_here(
        self, partition: PartitionId, ops: list[Op], sink: Sink, tokens: Sequence[int], ring_version: int
    ) -> bool:
        """The same for puts, in this order. False, and none is submitted, if the replica here may not just take
        them."""
        local, known = self._local.get(partition), self._router
        is_free = ring_version == known.ring_version and partition not in known.waiting.lines
        return is_free and local is not None and local.submit_puts(ops, sink, tokens)

    def turn_away(self, partition: PartitionId, op: Op, sink: Sink, token: int, moved: Moved) -> None:
        """The replica here was asked for what it does not own. It goes out again, at the latest when the ring has
        changed; another server sends out again what came from it."""
        self._handle(events.TurnedAway(op, sink, token, moved))

    def link_opened(self, flight: Flight) -> None:
        """Operations can be sent to the flight's server."""
        self._handle(events.LinkOpened(flight))

    def link_lost(self, flight: Flight, first_unsent: int) -> None:
        """The link is gone, and with it what had not left: operations from this number on."""
        self._handle(events.LinkLost(flight, first_unsent))

    def take_refusals(self, flight: Flight, errors: list[tuple[int, NotLeader | Moved]]) -> None:
        """The flight's server has refused operations, in the order of their numbers."""
        self._handle(events.Refused(flight, errors))

    def note_progress(self, partition: PartitionId, seq: int, time_ms: int) -> None:
        """An answer of this or an earlier progress went out through this server."""
        known = self._progress.get(partition, (0, 0))
        self._progress[partition] = (max(known[0], seq), max(known[1], time_ms))

    def under_way(self) -> tuple[Mapping[ServerId, Flight], Mapping[PartitionId, list[Pending]]]:
        """Return what links carry, and what waits for a leader."""
        return self._router.ways.flights, self._router.waiting.lines

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
        self._links.flush()  # it was thought out with the ring before, and says so
        self.topology = self._membership.topology
        self._handle(events.TopologyChanged(self.topology))
        self._handle(events.Expelled())

    def _on_timer(self) -> None:
        self._timer = None
        self._handle(events.Ticked())

    def _handle(self, event: events.Event) -> None:
        for command in self._router.handle(event, self._env.clock.now()):
            self._perform(command)
        if self._timer is None and self._router.is_waiting and not isinstance(event, events.Closing):
            look_s = LOOK_AGAIN_S if self._router.waiting.lines or len(self._held_keys) > FEW else LOOK_SOON_S
            self._timer = asyncio.get_running_loop().call_later(look_s, self._on_timer)

    def _perform(self, command: events.Command) -> None:
        match command:
            case events.SubmitHere(partition, op, sink, token):
                local = self._local.get(partition)
                if local is None:
                    self._fail_later(sink, token, self.topology.not_leader(partition))
                else:
                    local.submit(op, sink, token)
            case events.Send(server, partition, number, op):
                self._links.lanes[server].add(partition, number, op)
            case events.Connect(server):
                self._links.connect(server)
            case events.Fail(sink, token, error):
                self._fail_later(sink, token, error)
            case events.TurnPeerAway(sink, op, token, moved):
                sink.turn_away(op, token, moved)
            case events.ExpelHere():
                for partition in sorted(self._local):
                    self._local[partition].expel()
            case events.ReadLeader(partition):
                self._membership.suspect(partition)
            case events.ReadRing(0):
                self._membership.suspect_ring()
            case events.ReadRing(version):
                self._membership.hint_ring(version)
            case _:
                assert_never(command)


def _keys_of(op: Op) -> list[bytes]:
    """The keys by which an operation counts for its namespaces: of a range, where it begins."""
    if op[0] == _BATCH:
        return [each[1] for each in op[2]]
    return [op[1]] if op[1].__class__ is bytes else []
