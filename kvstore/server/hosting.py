"""Starts and stops replicas on this server so that they match the ring. When a replica has left this server and the
metadata store confirms it, the replica's state is set aside (docs/protocol.md H10)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvstore import versions
from kvstore.env import Env
from kvstore.errors import ClusterTooNew, Corrupted, MetadataError, StoreError, WrittenByNewer
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore
from kvstore.namespaces import Book
from kvstore.os_errors import is_passing
from kvstore.partition.config import PartitionConfig
from kvstore.partition.election.handover import HandoverTurns
from kvstore.partition.partition import Partition
from kvstore.partition.ports import Peers
from kvstore.partition.state.engine import Engine
from kvstore.partition.state.state import ReplicaState
from kvstore.ring import Ring, Rings, codec
from kvstore.server.cluster.membership import Membership
from kvstore.server.engines import Engines
from kvstore.server.routing.dispatch import Dispatcher
from kvstore.server.routing.transactions import RoutedParticipants
from kvstore.types import PartitionId, ServerId
from kvstore.wal.log import PartitionLogs

log = logging.getLogger(__name__)

NO_SPACE_RETRY_S = 5.0
"""Delay between attempts to start a replica on a full disk."""
LEFT_S = 1.0
REBUILD_DELAYS_S = (0.0, 60.0, 600.0, 3600.0)
"""Delays in seconds before a damaged copy is rebuilt, indexed by the number of earlier rebuilds."""
AGE_S = 60
"""Step in which the age of retired states is counted. A restart may add up to one step."""
START_PAUSE_S = 0.03
"""Pause between starting two replicas while others serve, because opening an engine stops the event loop for about 10
ms."""


class Hosting:
    """The replicas of one server, from `start` to `stop`. `stop` hands over all leaderships."""

    def __init__(
        self,
        env: Env,
        server: ServerId,
        config: PartitionConfig,
        store: MetadataStore,
        membership: Membership,
        dispatcher: Dispatcher,
        logs: PartitionLogs,
        peers: Peers,
        engines: Engines,
        rings: Rings,
        keep_s: float,
        known_versions: versions.Versions,
        book: Book,
    ) -> None:
        self._versions, self._book = known_versions, book
        self._env, self._server, self._config, self._store = env, server, config, store
        self._membership, self._dispatcher, self._logs, self._peers = membership, dispatcher, logs, peers
        self._engines, self._rings, self._keep_s = engines, rings, keep_s
        self._nursery = env.nursery.child("hosting")
        self._hosted: dict[PartitionId, Partition] = {}
        self._leaving: dict[PartitionId, Partition] = {}
        """Replicas that have left this server but are still read at pinned positions."""
        self._drained: dict[PartitionId, Partition] = {}
        """Replicas stopped by a drain. If the node continues, their claims and published positions must be
        withdrawn."""
        self._after_drain = env.nursery.child("after a drain")
        self._taking_back = asyncio.Lock()
        """Held while the metadata store is updated after a replica has stopped."""
        self._damaged: set[PartitionId] = set()
        """Damaged replicas that are to be rebuilt now."""
        self._rebuilt: dict[PartitionId, int] = {}
        """Number of rebuilds per partition since this process began."""
        self._held: set[PartitionId] = set()
        """Replicas that left without an orderly end: this process may still have their states open."""
        self._blocked: dict[PartitionId, StoreError] = {}
        """Replicas that do not start because a newer release wrote their copies, and the error of each."""
        self._turns = HandoverTurns()
        self._changed = asyncio.Event()
        self._forget: Callable[[], None] | None = None
        self._is_stopped = False
        self._stopping = asyncio.Lock()
        """Held during a handover of everything, so that each replica is stopped once."""

    async def start(self) -> None:
        """Start the replicas that the ring assigns to this server, and follow later changes of the ring. Can be
        called again after `stop`."""
        if self._is_stopped:
            self._is_stopped = False
            self._nursery = self._env.nursery.child("hosting")
        self._forget = self._membership.on_topology(self._changed.set)
        await self._reconcile()
        self._nursery.spawn(self._follow(), name="follow the ring")
        self._nursery.spawn(self._retire_unassigned(), name="retire unassigned states")
        self._nursery.spawn(self._retire_left_now_and_then(), name="retire replicas that left")
        self._nursery.spawn(self._age(), name="age retired states")

    # docs/protocol.md P23
    async def drain(self) -> None:
        """Hand over all leaderships and stop all replicas while the node keeps running. The node's session also
        stays open, so the claims and published positions of the replicas are withdrawn in the background."""
        await self.stop()
        self._after_drain = self._env.nursery.child("after a drain")
        self._after_drain.spawn(self._take_back_drained(), name="withdraw drained replicas")

    async def stop(self) -> None:
        """Hand over all leaderships, then sync and stop every replica. A concurrent call waits for the running one."""
        async with self._stopping:
            self._is_stopped = True
            await self._after_drain.close()
            if self._forget is not None:
                self._forget()
            await self._nursery.close()
            self._drained.update({**self._leaving, **self._hosted})
            for partition in sorted(self._leaving):
                self._leaving.pop(partition).close_state()  # the next process retires the state
            stopping = self._env.nursery.child("stopping")
            hosted = sorted(self._hosted)
            for task in [stopping.spawn(self._stop(each), name=f"stop {each}") for each in hosted]:
                await task
            await stopping.close()

    def statistics(self) -> dict[PartitionId, dict[str, Any]]:
        standing = {partition: _blocked(error) for partition, error in self._blocked.items()}
        return dict(sorted({**standing, **{each: self._hosted[each].statistics() for each in self._hosted}}.items()))

    @property
    def log_version(self) -> int:
        """Highest cluster version seen in the logs of local replicas."""
        return max((each.state.log_version for each in self._hosted.values()), default=versions.FIRST)

    @property
    def leads(self) -> list[PartitionId]:
        """The partitions that this server leads and serves, in order."""
        return [partition for partition, replica in sorted(self._hosted.items()) if replica.serving]

    def state_of(self, partition: PartitionId) -> ReplicaState | None:
        """Return the state of the local replica, or None if this server has no replica of the partition. The state
        of a replica that has left the server is still returned while clients can read it at pinned positions."""
        replica = self._hosted.get(partition) or self._leaving.get(partition)
        return None if replica is None else replica.state

    def hosted(self) -> dict[PartitionId, Partition]:
        """Return the local replicas."""
        return dict(sorted(self._hosted.items()))

    def leading(self) -> dict[PartitionId, Partition]:
        """Return the local replicas that lead their partitions and serve."""
        return {partition: replica for partition, replica in self._hosted.items() if replica.serving}

    def raise_log_versions(self) -> None:
        """Raise the versions of all logs that are led here, because the cluster's version has risen."""
        for replica in self._hosted.values():
            replica.raise_log_version()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._reconcile()

    async def _reconcile(self) -> None:
        await self._set_damaged_aside()
        ring = self._rings.ring
        assigned = [each for each in sorted(ring.partitions) if ring.partitions[each].is_on(self._server)]
        for partition in sorted(set(self._hosted) - set(assigned)):
            replica = self._hosted[partition]
            if await self._stop(partition, keep_pins=True):
                self._leaving[partition] = replica
            else:
                self._held.add(partition)  # the next process retires the state
        await self._retire_left()
        self._blocked = {each: why for each, why in self._blocked.items() if each in assigned}
        for partition in assigned:
            if partition not in self._hosted and partition not in self._blocked:
                async with self._taking_back:  # what is published from now on belongs to the new replica
                    self._drained.pop(partition, None)
                    if partition in self._leaving:
                        self._leaving.pop(partition).close_state()
                await self._begin_or_retry(partition)
                if self.leads:
                    await asyncio.sleep(START_PAUSE_S)

    async def _set_damaged_aside(self) -> None:
        """Stop the replicas whose copies are damaged and set their states aside, so that they start again empty
        (docs/protocol.md, P35)."""
        while self._damaged:  # another replica may be added during a stop
            partition = min(self._damaged)
            self._damaged.discard(partition)
            if partition in self._hosted:
                replica = self._hosted[partition]
                await self._stop(partition, keep_pins=True)
                replica.close_state()
                self._engines.set_damaged_aside(partition)

    def _rebuild(self, partition: PartitionId) -> None:
        """Schedule the rebuild of a damaged copy. The first rebuild starts at once. If the copy is damaged again,
        that indicates a bug, so each further rebuild is delayed longer."""
        count = self._rebuilt.get(partition, 0)
        self._rebuilt[partition] = count + 1
        delay_s = REBUILD_DELAYS_S[min(count, len(REBUILD_DELAYS_S) - 1)]
        log.error("partition=%s its copy here is damaged and is rebuilt in %d s", partition, delay_s)
        asyncio.get_running_loop().call_later(delay_s, self._schedule_rebuild, partition, self._hosted.get(partition))

    def _schedule_rebuild(self, partition: PartitionId, replica: Partition | None) -> None:
        if self._hosted.get(partition) is replica:
            self._damaged.add(partition)
            self._changed.set()

    async def _retire_unassigned(self) -> None:
        """Retire the states of replicas that were moved away while this server was down or while the replicas were
        blocked."""

        def is_used(partition: PartitionId) -> bool:
            """Return True if a replica here uses the state, or will soon."""
            member = self._rings.ring.partitions.get(partition)
            is_assigned = member is not None and member.is_on(self._server)
            return is_assigned or any(partition in each for each in (self._hosted, self._leaving, self._held))

        for partition in self._engines.find():
            if not is_used(partition) and await self._has_left(partition) and not is_used(partition):
                self._retire(partition)

    async def _retire_left_now_and_then(self) -> None:
        while True:
            await self._env.beat.pause(LEFT_S)
            for _, replica in sorted(self._leaving.items()):
                await replica.follow_pins()
            await self._retire_left()

    async def _retire_left(self) -> None:
        """Retire the states of replicas that have left this server, once other servers know that and no reader uses
        a pinned position in them."""
        for partition, replica in sorted(self._leaving.items()):
            is_known = await self._is_withdrawn(partition, replica, self._leaving)
            is_over = is_known and not replica.keeps_pins and await self._has_left(partition)
            if is_over and self._leaving.get(partition) is replica:
                del self._leaving[partition]
                replica.close_state()
                self._retire(partition)

    def _retire(self, partition: PartitionId) -> None:
        try:
            self._engines.retire(partition)
        except OSError as error:
            log.warning("partition=%s its state could not be set aside and stays in place: %s", partition, error)
        else:
            log.info("partition=%s has left this server, its state is set aside", partition)

    async def _has_left(self, partition: PartitionId) -> bool:
        """Return True if the current ring in the metadata store confirms that this server has no replica of the
        partition. If the ring has never contained the partition, return False, because the node may be connected to
        the wrong cluster."""
        try:
            await self._store.sync(paths.RING)
            data, _ = await self._store.get(paths.RING)
            ring = codec.decode(data)
        except (MetadataError, Corrupted) as error:
            log.info("partition=%s its state stays in place: %r", partition, error)
            return False
        member = ring.partitions.get(partition)
        return partition in ring.retired or (member is not None and not member.is_on(self._server))

    async def _age(self) -> None:
        """Remove retired states that have been kept long enough. Their age counts only running time, because wall
        clocks jump and because an operator may need the state on a server that was down. Also retry states that
        could not be retired earlier because the metadata store did not confirm that their replica has left."""
        while True:
            await asyncio.sleep(AGE_S)
            try:
                self._engines.age_retired(AGE_S, self._keep_s)
                await self._retire_unassigned()
            except OSError as error:
                log.warning("retired states do not age: %s", error)

    async def _begin_or_retry(self, partition: PartitionId) -> None:
        """Start the replica, or retry after NO_SPACE_RETRY_S seconds if the disk is full. The other replicas and the
        local bookie keep serving."""
        try:
            await self._begin(partition)
        except OSError as error:
            if not is_passing(error):
                raise
            log.warning("partition=%s could not be started here yet, retrying: %s", partition, error)
            asyncio.get_running_loop().call_later(NO_SPACE_RETRY_S, self._changed.set)

    # docs/protocol.md V4
    async def _begin(self, partition: PartitionId) -> None:
        """Start the replica. If a newer release wrote its copy, the replica stays blocked while the others serve."""
        engine = self._engines.open(partition)
        try:
            replica = self._made(partition, engine)
        except (ClusterTooNew, WrittenByNewer) as error:
            engine.close()
            log.error("partition=%s its replica here is blocked: %s", partition, error)
            self._blocked[partition] = error
            return
        except OSError:
            engine.close()  # otherwise the next attempt finds its files in use
            raise
        replica.on_outvoted(partial(self._rebuild, partition))
        self._hosted[partition] = replica
        self._dispatcher.host(partition, replica)
        await replica.start()
        log.info("partition=%s started here", partition)

    def _made(self, partition: PartitionId, engine: Engine) -> Partition:
        return Partition(
            self._env,
            self._config,
            partition,
            self._server,
            self._store,
            self._logs,
            self._peers,
            engine,
            lambda: _replicas_of(self._membership.topology.ring, partition),
            self._membership.note_leader,
            self._turns,
            self._rings,
            self._dispatcher.reject,
            self._versions,
            self._book,
            RoutedParticipants(self._dispatcher),
        )

    async def _stop(self, partition: PartitionId, *, keep_pins: bool = False) -> bool:
        """Stop a replica. Return True if it ended in order and its state is no longer open."""
        replica, is_done = self._hosted[partition], True
        try:
            await replica.stop(hand_over=True, keep_pins=keep_pins)
        except StoreError as error:
            log.warning("partition=%s could not be handed over: %s", partition, error)
            is_done = False
        self._dispatcher.host(partition, None)
        del self._hosted[partition]
        log.info("partition=%s has stopped here", partition)
        return is_done

    # docs/protocol.md P23
    async def _is_withdrawn(
        self, partition: PartitionId, replica: Partition, stopped: Mapping[PartitionId, Partition]
    ) -> bool:
        """Withdraw the replica's claims and published positions from the metadata store, so that other servers
        neither wait for the replica nor rely on it. Return True once that is done. Otherwise the caller retries,
        because the node and its session continue."""
        async with self._taking_back:
            if stopped.get(partition) is not replica:
                return False  # another replica has started: what is published belongs to it
            try:
                await replica.withdraw()
            except MetadataError as error:
                log.info("partition=%s its published position is not withdrawn yet: %r", partition, error)
                return False
            return True

    async def _take_back_drained(self) -> None:
        drained = self._drained
        while drained:
            for partition, replica in sorted(drained.items()):
                if await self._is_withdrawn(partition, replica, drained):
                    del drained[partition]
            await self._env.beat.pause(LEFT_S)


def _replicas_of(ring: Ring, partition: PartitionId) -> tuple[ServerId, ...]:
    member = ring.partitions.get(partition)
    return member.replicas if member is not None else ()


def _blocked(why: StoreError) -> dict[str, Any]:
    """Return the statistics of a blocked replica."""
    nothing = dict.fromkeys(("seq", "durable_seq", "epoch", "keys", "moves_stuck", "pins_held"), 0)
    return {
        "role": "stopped",
        "leader": None,
        **nothing,
        "failure": str(why),
        "lead_failure": "",
        "is_in_doubt": False,
        "leading": None,
        "log": None,
    }
