"""Carries out what assign.py decides: moves replicas off servers that are drained or lost, and removes what retired
partitions leave behind.

Every server runs a steward, but only that of the first server by name acts. Two stewards that act at once do no harm,
because each change is a compare-and-set of the ring.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence

from kvstore import versions
from kvstore.env import Env
from kvstore.env.ports import Task
from kvstore.errors import StoreError
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore, SessionState
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.ranking import Published
from kvstore.ring import PartitionState, Ring, Rings, steps
from kvstore.server.cluster.cluster_reader import ClusterReader
from kvstore.server.cluster.cluster_version import ClusterVersionStore
from kvstore.server.cluster.membership import Membership
from kvstore.server.cluster.rising import may_rise, next_version, what_holds_it
from kvstore.server.cluster.topology import Member
from kvstore.server.cluster.version_follower import VersionFollower
from kvstore.server.placement.assign import Change, Finish, GiveUp, decide, replicas_held
from kvstore.server.placement.newcomers import NOTHING, STUCK_S, Newcomers, Pair, Progress
from kvstore.server.placement.retirement import drop_kept, ledgers_made_for, partitions_kept, remove_rest, set_apart
from kvstore.types import LedgerId, PartitionId, ServerId

log = logging.getLogger(__name__)

TICK_S = 1.0
CHECK_KEPT_S = 30.0
"""Interval in seconds of the check for kept logs that are old enough to delete."""
LATELY_S = 60.0
"""Seconds for which an absent server's last known version still counts when the cluster version is raised, because
the server may be restarting."""
CLOSE_BEHIND = 1_000
"""Maximum number of mutations that a newcomer may lag behind its leader when it replaces a replica. They are applied
within milliseconds."""


class Steward:
    """The part of one server in maintaining the cluster."""

    def __init__(
        self,
        env: Env,
        server: ServerId,
        store: MetadataStore,
        membership: Membership,
        rings: Rings,
        known: VersionFollower,
        *,
        repair_after_s: float,
        keep_ms: int = 0,
        logs_at: Callable[[], int] = lambda: versions.FIRST,
    ) -> None:
        """`keep_ms` is the time in milliseconds for which the log of a partition that has left the ring stays
        readable. `logs_at` returns the highest cluster version in the logs of local replicas."""
        self._logs_at = logs_at
        self._rise_waits_for = ""
        self._lately: dict[ServerId, tuple[Member, float]] = {}
        """Servers that are or recently were registered, and the time at which this process last saw each of them."""
        self._keep_ms, self._kept_checked_at = keep_ms, 0.0
        self._kept_since: dict[PartitionId, float] = {}
        """Kept logs, with the time since which this process has known each of them."""
        self._env, self._server, self._store = env, server, store
        self._membership, self._rings, self._repair_after_s = membership, rings, repair_after_s
        self._versions, self._version_store, self._reader = known, ClusterVersionStore(store), ClusterReader(store)
        self._nursery = env.nursery.child("steward")
        self._missing: dict[ServerId, float] = {}
        """Servers of the ring that are absent, with the time since which this process has not seen each of them."""
        self._watched = Newcomers()
        self._removal: Task | None = None
        """The last removal of retired partitions. It reads all ledgers, so the steward does not wait for it."""
        self.changes = 0
        self._failed: list[str] = []
        self._not_removed: list[str] = []

    def start(self) -> None:
        self._nursery.spawn(self._act_now_and_then(), name="act")

    async def close(self) -> None:
        await self._nursery.close()

    def statistics(self) -> dict[str, int]:
        wanted = replicas_held(self._rings.ring)
        return {"steward_changes_total": self.changes, "servers_missing": sum(each in wanted for each in self._missing)}

    async def _act_now_and_then(self) -> None:
        while True:
            await self._env.beat.pause(TICK_S * (1 + self._env.random.random() / 4))
            if self._store.state is not SessionState.CONNECTED:
                self._missing.clear()  # absent servers are unknown, so none has been absent for long
                self._watched.forget()
                continue
            failed: list[str] = []
            await self._try(self._act(failed), failed)
            if failed and failed != self._failed:
                log.warning("the steward failed and retries: %s", "; ".join(failed))
            self._failed = failed

    # docs/protocol.md P34
    async def _try(self, work: Awaitable[object], failed: list[str]) -> None:
        """Perform one task. If it fails, the error is added to `failed`, and other tasks still run."""
        try:
            await work
        except (StoreError, ValueError) as error:
            failed.append(repr(error))

    async def _act(self, failed: list[str]) -> None:
        servers = self._membership.topology.servers
        self._note_missing(servers)
        self._note_lately(servers)
        await self._try(self._keep_risen(), failed)
        if self._server != min(servers, default=""):
            return
        await self._try(self._rise(servers), failed)
        # docs/protocol.md V2
        unfit = frozenset(id for id, member in servers.items() if member.can < self._versions.cluster)
        fit = {id: member for id, member in servers.items() if id not in unfit}
        alive = {id: member.zone for id, member in fit.items() if member.resp and not member.draining}
        ring = self._rings.ring
        gone = frozenset(self._gone())
        newcomers = [(partition, server) for partition, server in self._newcomers() if server not in unfit]
        caught_up: set[Pair] = set()
        by_pair: dict[Pair, Progress] = {}
        for pair in newcomers:
            await self._try(self._note_newcomer(pair, caught_up, by_pair), failed)
        now = self._env.clock.now()
        self._watched.note({pair: progress for pair, progress in by_pair.items() if pair[1] in alive}, now)
        stuck, resting = self._watched.stuck(now), self._watched.resting(now)
        for change in decide(ring, alive, gone, caught_up, unfit, stuck, resting):
            log.info("ring version=%d: %s", ring.version, change)
            await self._try(self._replace(change, stuck), failed)
        self._remove_retired(ring)
        if self._env.clock.now() - self._kept_checked_at >= CHECK_KEPT_S:
            self._kept_checked_at = self._env.clock.now()
            await self._drop_kept()

    async def _change(self, step: Callable[[Ring], Ring]) -> None:
        await self._rings.change(step)
        self.changes += 1

    # docs/protocol.md H6
    async def _replace(self, change: Change, stuck: Container[Pair]) -> None:
        await self._change(change.step)
        match change:
            case Finish(_, newcomer):
                self._watched.caught_up(newcomer)
            case GiveUp(partition, newcomer) if (partition, newcomer) in stuck:
                self._watched.given_up(newcomer, self._env.clock.now())
                log.warning(
                    "partition=%s server=%s its new replica made no progress for %d s and is cancelled; check its "
                    "disk and "
                    "its log",
                    partition,
                    newcomer,
                    STUCK_S,
                )

    # docs/protocol.md V1
    async def _rise(self, servers: Mapping[ServerId, Member]) -> None:
        """Raise the cluster version if, according to the current registrations, every server supports a higher one."""
        if self._versions.found.version >= versions.LATEST:
            self._rise_waits_for = ""
            return
        wanted = replicas_held(self._rings.ring)
        unreadable = self._membership.undecodable_servers
        # Servers with replicas count only if they are registered now.
        lately = {server: member for server, (member, _) in self._lately.items() if server not in wanted}
        known = {**lately, **servers}
        self._log_what_blocks_it(what_holds_it(self._versions.found, known, wanted, versions.LATEST, unreadable))
        if not may_rise(self._versions.found, known, wanted):
            return
        await self._store.sync(paths.SERVERS)
        members = await self._reader.servers(None)
        wanted = replicas_held(await self._reader.ring())
        version = next_version(await self._version_store.read(), {**lately, **members}, wanted)
        if version is not None and not self._reader.undecodable_servers:
            found = await self._version_store.rise(version, versions.release_for(version))
            self.changes += 1
            log.info("cluster version=%d is supported by all of %s", found.version, ", ".join(sorted(members)))
            self._versions.poll()

    def _log_what_blocks_it(self, reasons: str) -> None:
        """Log the reasons once."""
        if reasons and reasons != self._rise_waits_for:
            log.info("cluster version=%d does not rise: %s", self._versions.cluster, reasons)
        self._rise_waits_for = reasons

    # docs/protocol.md V1
    async def _keep_risen(self) -> None:
        """Restore the cluster version that servers and logs know if the metadata store has a lower one, which means
        that it holds an older copy. Any server may be the only one that knows."""
        known = max(self._versions.cluster, self._logs_at())
        if self._versions.stored >= known:
            return
        self._versions.poll()
        if (await self._version_store.read()).version >= known:
            return  # a log showed the rise before the watch did
        found = await self._version_store.write_back(known, versions.release_for(known))
        self.changes += 1
        log.warning("cluster version=%d restored, because the metadata store had a lower one", found.version)
        self._versions.poll()

    async def _drop_kept(self) -> None:
        """Delete the kept logs that are old both by the metadata store's time and by this process's observation: no
        clock alone removes a log (docs/protocol.md, P31)."""
        now = self._env.clock.now()
        kept = await partitions_kept(self._store)
        self._kept_since = {each: self._kept_since.get(each, now) for each in kept}
        old = [each for each, since in self._kept_since.items() if (now - since) * 1000 >= self._keep_ms]
        await drop_kept(self._store, now_ms=self._env.clock.passed_ms(), keep_ms=self._keep_ms, among=old)

    def _note_missing(self, servers: Container[ServerId]) -> None:
        ring = self._rings.ring
        wanted = {*replicas_held(ring), *ring.draining}
        now = self._env.clock.now()
        self._missing = {server: self._missing.get(server, now) for server in sorted(wanted) if server not in servers}

    def _note_lately(self, servers: Mapping[ServerId, Member]) -> None:
        now = self._env.clock.now()
        self._lately = {server: each for server, each in self._lately.items() if now - each[1] < LATELY_S}
        self._lately |= {server: (member, now) for server, member in servers.items()}

    def _gone(self) -> list[ServerId]:
        if not self._repair_after_s:
            return []
        before = self._env.clock.now() - self._repair_after_s
        return [server for server, since in self._missing.items() if since <= before]

    def _newcomers(self) -> list[tuple[PartitionId, ServerId]]:
        members = self._rings.ring.partitions
        return [(each, newcomer) for each in sorted(members) for newcomer, _ in members[each].replacing]

    async def _note_newcomer(self, pair: Pair, caught_up: set[Pair], by_pair: dict[Pair, Progress]) -> None:
        """Record whether a newcomer has caught up, and how far it is, if its progress is known and there are other
        replicas that it could follow."""
        partition, newcomer = pair
        published = await Claims(self._store, partition, self._server).published()
        own, others = published.pop(newcomer, None), list(published.values())
        if not others:
            return
        if (progress := _progress(own, others)) is not None:
            by_pair[pair] = progress
        if (
            own is not None
            and not own.is_stopped
            and own.seq + CLOSE_BEHIND >= max(each.seq for each in others)
            and (own.seq > 0 or own.epoch > 0)
        ):
            caught_up.add(pair)

    def _remove_retired(self, ring: Ring) -> None:
        """Start removing the remains of retired partitions, unless a removal is already running."""
        retired = [each for each in sorted(ring.partitions) if ring.partitions[each].state is PartitionState.RETIRED]
        if retired and (self._removal is None or self._removal.done()):
            self._removal = self._nursery.spawn(self._remove_all(retired), name="remove what has retired")

    async def _remove_all(self, retired: list[PartitionId]) -> None:
        failed: list[str] = []
        await self._try(self._remove_all_that_can(retired, failed), failed)
        if failed and failed != self._not_removed:
            log.warning("retired partitions are not removed yet: %s", "; ".join(failed))
        self._not_removed = failed

    async def _remove_all_that_can(self, retired: list[PartitionId], failed: list[str]) -> None:
        apart: list[PartitionId] = []
        for partition in retired:
            await self._try(self._set_apart(partition, apart), failed)
        made = await ledgers_made_for(self._store, apart) if apart else {}
        for partition, ledgers in made.items():
            await self._try(self._remove(partition, ledgers), failed)

    async def _set_apart(self, partition: PartitionId, apart: list[PartitionId]) -> None:
        if await set_apart(self._store, partition, now_ms=self._env.clock.passed_ms()):
            apart.append(partition)

    async def _remove(self, partition: PartitionId, made: list[LedgerId]) -> None:
        if await remove_rest(self._store, partition, made, now_ms=self._env.clock.passed_ms()):
            await self._change(lambda ring: steps.forget(ring, partition))
            log.info("partition=%s is retired and was removed", partition)


def _progress(own: Published | None, others: Sequence[Published]) -> Progress | None:
    """Return the progress of a newcomer, given what it has published, if anything. Return None if its release does
    not publish progress."""
    if own is None:
        return NOTHING
    if own.taken is None:
        return None
    follows = own.taken[0] > 0 and not own.is_stopped
    return Progress(own.taken, max(each.seq for each in others) if follows else None)
