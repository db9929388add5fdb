"""Sends each operation to the replica that may answer it: here by a plain call, elsewhere in the frames of a peer link.

An operation whose leader is not known, or which its supposed leader refused, waits here, bounded in number and time,
until the topology has changed or the leader says so. What waits for a partition keeps its order, and what comes later
waits behind it.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable
from operator import itemgetter

from kvstore.env import Env
from kvstore.errors import InvalidRequest, Moved, NotLeader, Overloaded, StoreError, Unavailable
from kvstore.partition.answers import Soon
from kvstore.partition.commands import LEVEL_AT, Code, Level, Op, Sink
from kvstore.server.astray import WAIT_S, Astray, FromPeer, Strays
from kvstore.server.config import Limits
from kvstore.server.frames import check_one_partition
from kvstore.server.members import ClusterTopology
from kvstore.server.membership import Membership
from kvstore.server.ways import KEYLESS, UNORDERED, Links, LocalReplica, UnderWay, Waiting, written_bytes
from kvstore.types import PartitionId, ServerId

LOOK_AGAIN_S = 0.02
"""How often what waits is looked at again, beside every change of the topology."""
LOOK_SOON_S, FEW = 0.005, 64
"""And how often while operations wait only for keys that are on their way, and few: to send these out costs little."""
SUSPECT_AGAIN_S = 0.25
"""How often the ring is read again because a partition did not own what the ring says it does."""
ASK_AGAIN_S = 0.1
"""How long a server that refused as not the leader is left alone while the topology still names it."""
WAITING_BYTES_MAX = 64 << 20
"""Keys and values of what waits."""
_ARRIVED = 1 << 60
"""What was refused elsewhere has smaller numbers than what has only arrived: it was here before."""

_GET, _META = int(Code.GET), int(Code.META)
_LINEARIZABLE, _SESSION = int(Level.LINEARIZABLE), int(Level.SESSION)
_FOLLOWER_LEVELS = frozenset({_SESSION, int(Level.STALE)})
_SEQUENCED = frozenset({_GET, _META})


class Dispatcher:
    """The Backend of every door of this server."""

    def __init__(self, env: Env, server: ServerId, membership: Membership, limits: Limits) -> None:
        self._env, self._server, self._membership, self._limits = env, server, membership, limits
        self._local: dict[PartitionId, LocalReplica] = {}
        self._links: Links
        self._topology: ClusterTopology = membership.topology
        self._partition_of: Callable[[bytes], PartitionId] = self._topology.ring.partition_of
        self._ring_version = self._topology.ring.routed
        self._waiting: dict[PartitionId, list[Waiting]] = {}
        self._waiting_count = self._waiting_bytes = 0
        self._refused_by: dict[PartitionId, tuple[ServerId, float]] = {}
        """Servers that did not lead what the topology said they lead, and until when they are not asked again."""
        self._sent_to: dict[PartitionId, ServerId] = {}
        """Where the operations of a partition went last, if to another server. Some may still be under way there."""
        self._arrivals = _ARRIVED
        self._timer: asyncio.TimerHandle | None = None
        self._fail_later = Soon().give
        self._forget = membership.on_topology(self._on_topology)
        self._strays = Strays(self._fail_later, most=limits.waiting_max, bytes_max=WAITING_BYTES_MAX)
        self._astray = self._strays.keys
        self._turned_away = 0
        self._suspected_at = -SUSPECT_AGAIN_S
        self.forwarded = 0
        self.waited = 0
        self.timed_out = 0
        self._progress: dict[PartitionId, tuple[int, int]] = {}

    def use_links(self, links: Links) -> None:
        """The links need the dispatcher, and it needs them: they are given once, before the first operation."""
        self._links = links

    def close(self) -> None:
        """Refuse what still waits."""
        self._forget()
        if self._timer is not None:
            self._timer.cancel()
        for partition in sorted(self._waiting):
            for _, _, sink, token, _, _ in self._waiting[partition]:
                self._fail_later(sink, token, Unavailable("this server is stopping"))
        self._strays.fail_all(Unavailable("this server is stopping"))
        self._waiting.clear()
        self._waiting_count = self._waiting_bytes = 0

    # ── the Backend that doors see ────────────────────────────────────────────────────────────────────────────────────

    @property
    def topology(self) -> ClusterTopology:
        return self._topology

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
        if partition is None:
            partition = self._partition_of(op[1])
        elif ring_version and ring_version != self._ring_version:
            self._fail_moved(op, sink, token, ring_version)
            return
        local = self._local.get(partition)
        if (
            local is None
            or not local.serving
            or ring_version > self._ring_version
            or partition in self._waiting
            or partition in self._sent_to
            or self._astray
        ):
            self._submit_elsewhere(partition, op, sink, token, ring_version)
        else:
            local.submit(op, sink, token)

    # ── what links and replicas tell ──────────────────────────────────────────────────────────────────────────────────

    def host(self, partition: PartitionId, replica: LocalReplica | None) -> None:
        """A replica of the partition is here from now on, or not any more."""
        if replica is None:
            self._local.pop(partition, None)
            self._drain()
        else:
            self._local[partition] = replica

    def swap(self, partition: PartitionId, old: LocalReplica, new: LocalReplica) -> bool:
        """Let operations go to `new` instead of `old`, which is behind it or was. False if they go elsewhere by now."""
        if self._local.get(partition) is not old:
            return False
        self._local[partition] = new
        return True

    def submit_here(self, partition: PartitionId, op: Op, sink: Sink, token: int, ring_version: int) -> None:
        """An operation that another server sent: done here or refused, never sent on."""
        local = self._local.get(partition)
        if local is None:
            self._fail_later(sink, token, self._topology.not_leader(partition))
        elif ring_version != self._ring_version and not self._owns(partition, op, ring_version):
            self._fail_moved(op, sink, token, ring_version)
        elif local.serving and partition not in self._waiting:
            local.submit(op, sink, token)
        elif self._topology.is_led_by(self._server, partition):
            self._arrivals += 1
            self._wait(partition, (self._arrivals, op, sink, token, self._now() + WAIT_S, True))
        else:
            self._fail_later(sink, token, self._topology.not_leader(partition))

    def take_back(self, partition: PartitionId, waiting: Waiting, error: StoreError, server: ServerId) -> None:
        """An operation that `server` refused, or that did not reach it: it goes out again, or fails with `error`."""
        order, op, sink, token, deadline, _ = waiting
        now = self._now()
        if isinstance(error, NotLeader):
            self._refused_by[partition] = (server, now + ASK_AGAIN_S)
            self._membership.suspect(partition)
        if not isinstance(error, NotLeader | Moved | Unavailable) or now >= deadline > 0:
            self._fail_later(sink, token, error)
        elif isinstance(error, Moved) or (op[0] not in KEYLESS and self._partition_of(op[1]) != partition):
            self._stray((order, op, sink, token, deadline, False))
        else:
            self._wait(partition, (order, op, sink, token, deadline or now + WAIT_S, False))

    def turn_away(self, partition: PartitionId, op: Op, sink: Sink, token: int, moved: Moved) -> None:
        """The replica here was asked for what it does not own. It goes out again, at the latest when the ring has
        changed; another server sends out again what came from it."""
        if isinstance(sink, FromPeer):
            return self._fail_moved(op, sink, token, partition=moved.partition)
        if not isinstance(sink, Astray):
            sink = Astray(sink, self._now() + WAIT_S)
        if not sink.place:
            # Whatever else on this key has come back or waits was submitted after it.
            sink.place = self._turned_away = self._turned_away + 1
        self._stray((sink.place, op, sink, token, 0.0, False))

    def _fail_moved(self, op: Op, sink: Sink, token: int, ring_version: int = 0, partition: str = "") -> None:
        """It was thought out with another ring."""
        if ring_version > self._ring_version:
            self._membership.hint_ring(ring_version)
        moved = Moved(partition, self._ring_version)
        if isinstance(sink, FromPeer):
            sink.turn_away(op, token, moved)
        else:
            self._fail_later(sink, token, moved)

    def expect(self, under_way: Iterable[UnderWay]) -> None:
        """Operations that will come back, or are done before what follows them."""
        self._strays.expect(under_way)
        if self._astray:
            self._look_later()

    def _is_behind_a_stray(self, op: Op) -> bool:
        """Whether another one has to be done before this. Reads need not wait for writes of others; doors let those of
        one caller wait for its own."""
        return bool(self._astray) and op[0] not in UNORDERED and self._strays.holds(op)

    def _stray(self, waiting: Waiting) -> None:
        if waiting[1][0] in KEYLESS:
            return self._fail_moved(waiting[1], waiting[2], waiting[3])
        if self._now() - self._suspected_at > SUSPECT_AGAIN_S:  # a change of the ring is also told by a watch
            self._suspected_at = self._now()
            self._membership.suspect_ring()
        self._strays.add(waiting, self._now())
        self._look_later()

    def _send_strays(self) -> None:
        for waiting in self._strays.take(self._now()):
            partition, op = self._partition_of(waiting[1][1]), waiting[1]
            if op[0] == Code.BATCH and op[4] is None:  # with a request id it may be done already: its owner knows
                try:
                    check_one_partition(op, self._partition_of)
                except InvalidRequest as error:
                    self._fail_later(waiting[2], waiting[3], error)
                    continue
            if partition in self._waiting or not self._send(partition, waiting):
                self._wait(partition, waiting)

    def note_progress(self, partition: PartitionId, seq: int, time_ms: int) -> None:
        """An answer of this or an earlier progress went out through this server."""
        known = self._progress.get(partition, (0, 0))
        self._progress[partition] = (max(known[0], seq), max(known[1], time_ms))

    def statistics(self) -> dict[str, int]:
        return {
            "forwarded_total": self.forwarded,
            "waited_for_leader_total": self.waited,
            "waiting_for_leader": self._waiting_count,
            "astray": len(self._strays),
            "astray_total": self._strays.total,
            "leader_wait_timeouts_total": self.timed_out,
        }

    # ── inside ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _submit_elsewhere(self, partition: PartitionId, op: Op, sink: Sink, token: int, ring_version: int) -> None:
        level_at = LEVEL_AT.get(op[0])
        if level_at is not None and op[level_at] in _FOLLOWER_LEVELS:
            if op[level_at] == _SESSION and op[0] in _SEQUENCED and self._may_mean_another(op, ring_version):
                op = (op[0], op[1], _LINEARIZABLE, 0)
            elif local := self._local.get(partition):
                return local.submit(op, sink, token)
        if self._is_behind_a_stray(op):
            self._arrivals += 1
            return self._stray((self._arrivals, op, sink, token, 0.0, False))
        if ring_version > self._ring_version and self._membership.hint_ring(ring_version):
            pass  # it goes out when that one has been read
        elif partition not in self._waiting:
            self._arrivals += 1
            if self._send(partition, (self._arrivals, op, sink, token, 0.0, False)):
                return
        self._arrivals += 1
        self._wait(partition, (self._arrivals, op, sink, token, self._now() + WAIT_S, False))

    def _send(self, partition: PartitionId, waiting: Waiting) -> bool:
        """Give the operation to whoever leads. False if nobody is known to."""
        local = self._local.get(partition)
        if local is not None and local.serving:
            if not self._is_settled(partition, self._server):
                return False
            local.submit(waiting[1], waiting[2], waiting[3])
            return True
        leader = self._topology.leaders.get(partition)
        if waiting[5] and (local is None or (leader is not None and leader[0] != self._server)):
            # Another server's: done here or refused, never sent on.
            self._fail_later(waiting[2], waiting[3], self._topology.not_leader(partition))
            return True
        if leader is None or leader[0] == self._server or partition in self._refused_by:
            return False
        if not self._is_settled(partition, leader[0]) or not self._links.submit(leader[0], partition, waiting):
            return False
        self._sent_to[partition] = leader[0]
        self.forwarded += 1
        return True

    def _is_settled(self, partition: PartitionId, server: ServerId) -> bool:
        """Whether nothing is under way elsewhere that may come back and should be done before what goes to `server`."""
        former = self._sent_to.get(partition, server)
        if former != server:
            if not self._links.is_clear(former, partition):
                return False
            del self._sent_to[partition]
        return True

    def _wait(self, partition: PartitionId, waiting: Waiting) -> None:
        if self._waiting_count >= self._limits.waiting_max or self._waiting_bytes >= WAITING_BYTES_MAX:
            error = Overloaded(f"{self._waiting_count} operations of {self._waiting_bytes} bytes wait for leaders")
            self._fail_later(waiting[2], waiting[3], error)
            return
        self.waited += 1
        self._waiting_count += 1
        self._waiting_bytes += written_bytes(waiting[1])
        insort(self._waiting.setdefault(partition, []), waiting, key=itemgetter(0))
        self._look_later()

    def _look_later(self) -> None:
        if self._timer is None:
            look_s = LOOK_AGAIN_S if self._waiting or len(self._astray) > FEW else LOOK_SOON_S
            self._timer = asyncio.get_running_loop().call_later(look_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._drain()
        self._send_strays()
        if self._waiting or self._astray:
            self._look_later()

    def _on_topology(self) -> None:
        self._links.flush()  # it was thought out with the ring before, and says so
        before, self._topology = self._topology, self._membership.topology
        self._partition_of = self._topology.ring.partition_of
        self._ring_version = self._topology.ring.routed
        for partition in sorted(self._refused_by):
            if self._topology.leaders.get(partition) != before.leaders.get(partition):
                self._refused_by[partition] = (self._refused_by[partition][0], 0.0)
                self._ask_again(partition, 0.0)
        if self._topology.ring.routed != before.ring.routed:
            self.expect(self._links.astray(self._partition_of))
            for partition in sorted(self._local):
                self._local[partition].expel()
            self._file_again()
            self._send_strays()
        if self._waiting:
            self._drain()

    def _drain(self) -> None:
        """Send what can be sent, in order; refuse what has waited too long."""
        now = self._now()
        for partition in sorted(self._waiting):
            waiting = self._waiting.pop(partition)
            self._waiting_count -= len(waiting)
            left = self._drain_partition(partition, waiting, now)
            self._waiting_bytes -= sum(written_bytes(each[1]) for each in waiting[: len(waiting) - len(left)])
            if left:
                self._waiting[partition] = left + self._waiting.pop(partition, [])
                self._waiting_count += len(left)

    def _drain_partition(self, partition: PartitionId, waiting: list[Waiting], now: float) -> list[Waiting]:
        self._ask_again(partition, now)
        for place, each in enumerate(waiting):
            if each[4] <= now:
                self.timed_out += 1
                self._fail_later(each[2], each[3], self._topology.nobody(partition))
            elif not each[5] and self._is_behind_a_stray(each[1]):
                self._stray(each)
            elif not self._send(partition, each):
                return waiting[place:]
        return []

    def _ask_again(self, partition: PartitionId, now: float) -> None:
        """Leave the server that refused alone no longer, if it is time and everything that it refused has come back:
        until then the order is not whole."""
        refused = self._refused_by.get(partition)
        if refused is not None and refused[1] <= now and self._links.is_clear(refused[0], partition):
            del self._refused_by[partition]

    def _file_again(self) -> None:
        """The ring has changed: what waits for a key's partition waits for its new one."""
        filed, self._waiting = self._waiting, {}
        for partition in sorted(filed):
            for each in filed[partition]:
                if each[1][0] in KEYLESS:
                    self._waiting_count -= 1
                    self._fail_moved(each[1], each[2], each[3])
                elif not each[5] and self._is_behind_a_stray(each[1]):
                    self._waiting_count -= 1
                    self._waiting_bytes -= written_bytes(each[1])
                    self._stray(each)
                else:
                    owner = self._partition_of(each[1][1])
                    insort(self._waiting.setdefault(owner, []), each, key=itemgetter(0))

    def _owns(self, partition: PartitionId, op: Op, ring_version: int) -> bool:
        """Whether who asks by another version of the ring may have this partition's answer (docs/protocol.md M16)."""
        member = self._topology.ring.partitions.get(partition)
        is_known = member is not None and ring_version >= member.owned_at
        return is_known and op[0] not in KEYLESS and self._partition_of(op[1]) == partition

    def _may_mean_another(self, op: Op, ring_version: int) -> bool:
        """Whether a session read may carry what its client has seen of another partition than is asked here. Only the
        leader knows an answer that is right anyhow (docs/protocol.md M16)."""
        return ring_version != self._ring_version and bool(ring_version or op[3])

    def _now(self) -> float:
        return self._env.clock.now()
