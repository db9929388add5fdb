"""The partition replicas of this server: started and stopped so that they are those that the ring assigns to it. The
state of one that is not here any more is set aside, once the metadata store says so (docs/protocol.md H10)."""

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
from kvstore.server.routing.dispatch import Dispatcher
from kvstore.types import PartitionId, ServerId
from kvstore.wal.ports import Logs

log = logging.getLogger(__name__)

OpenEngine = Callable[[PartitionId], Engine]
RetireEngine = Callable[[PartitionId], None]
SpoilEngine = Callable[[PartitionId], None]
AgeRetired = Callable[[int, float], None]
FindEngines = Callable[[], list[PartitionId]]
ROOM_S = 5.0
"""Between two attempts to begin a replica on a full disk."""
LEFT_S = 1.0
ANEW_S = (0.0, 60.0, 600.0, 3600.0)
"""Before a damaged copy is made anew, by how often that has been done."""
AGE_S = 60
"""Of the time for which a retired state is kept, what is counted at once. A restart may add so much to it."""
BREATH_S = 0.03
"""Between two replicas that begin where others answer: to open an engine stops the event loop for some 10 ms."""


class Hosting:
    """Follows the ring. `stop` hands over what is led here."""

    def __init__(
        self,
        env: Env,
        server: ServerId,
        config: PartitionConfig,
        store: MetadataStore,
        membership: Membership,
        dispatcher: Dispatcher,
        logs: Logs,
        peers: Peers,
        open_engine: OpenEngine,
        retire_engine: RetireEngine,
        find_engines: FindEngines,
        spoil_engine: SpoilEngine,
        rings: Rings,
        keep_s: float,
        age_retired: AgeRetired,
        known_versions: versions.Versions = versions.FIXED,
        book: Book | None = None,
    ) -> None:
        self._versions, self._book = known_versions, book
        self._env, self._server, self._config, self._store = env, server, config, store
        self._membership, self._dispatcher, self._logs, self._peers = membership, dispatcher, logs, peers
        self._open_engine, self._retire_engine, self._find_engines = open_engine, retire_engine, find_engines
        self._spoil_engine = spoil_engine
        self._rings, self._keep_s, self._age_retired = rings, keep_s, age_retired
        self._nursery = env.nursery.child("hosting")
        self._hosted: dict[PartitionId, Partition] = {}
        self._leaving: dict[PartitionId, Partition] = {}
        """Replicas that are not here any more, but for what is pinned of them."""
        self._drained: dict[PartitionId, Partition] = {}
        """Replicas that were stopped with all others: if the node goes on, what they have claimed and published is to
        be taken back."""
        self._after_drain = env.nursery.child("after a drain")
        self._taking_back = asyncio.Lock()
        """Held while the metadata store is told that one of all these has stopped."""
        self._spoilt: set[PartitionId] = set()
        """Replicas whose copies are damaged, and are to be made anew now."""
        self._made_anew: dict[PartitionId, int] = {}
        """How often, since this process began."""
        self._held: set[PartitionId] = set()
        """Replicas that left and did not end in good order: this process may have their states open."""
        self._standing: dict[PartitionId, StoreError] = {}
        """Replicas whose copies a newer release has written, and why they do not begin."""
        self._turns = HandoverTurns()
        self._changed = asyncio.Event()
        self._forget: Callable[[], None] | None = None
        self._is_stopped = False
        self._stopping = asyncio.Lock()
        """Held while all are handed over: a replica is stopped once."""

    async def start(self) -> None:
        """Start what the ring assigns now, and follow its changes. Also again after a `stop`."""
        if self._is_stopped:
            self._is_stopped = False
            self._nursery = self._env.nursery.child("hosting")
        self._forget = self._membership.on_topology(self._changed.set)
        await self._reconcile()
        self._nursery.spawn(self._follow(), name="follow the ring")
        self._nursery.spawn(self._retire_strangers(), name="retire what has moved away")
        self._nursery.spawn(self._retire_left_now_and_then(), name="retire what has left")
        self._nursery.spawn(self._age(), name="age what is retired")

    # docs/protocol.md P23
    async def drain(self) -> None:
        """`stop`, on a node that goes on. So does its session, and what the replicas have claimed and published in it
        would stand for as long: it is taken back, once this has returned."""
        await self.stop()
        self._after_drain = self._env.nursery.child("after a drain")
        self._after_drain.spawn(self._take_back_drained(), name="take back what is drained")

    async def stop(self) -> None:
        """Hand over what is led here, and stop every replica; its state is synced. One that is called while another is
        under way returns after that."""
        async with self._stopping:
            self._is_stopped = True
            await self._after_drain.close()
            if self._forget is not None:
                self._forget()
            await self._nursery.close()
            self._drained.update({**self._leaving, **self._hosted})
            for partition in sorted(self._leaving):
                self._leaving.pop(partition).close_state()  # the next process retires it
            stopping = self._env.nursery.child("stopping")
            hosted = sorted(self._hosted)
            for task in [stopping.spawn(self._stop(each), name=f"stop {each}") for each in hosted]:
                await task
            await stopping.close()

    def statistics(self) -> dict[PartitionId, dict[str, Any]]:
        standing = {partition: _standing(error) for partition, error in self._standing.items()}
        return dict(sorted({**standing, **{each: self._hosted[each].statistics() for each in self._hosted}}.items()))

    @property
    def log_version(self) -> int:
        """The highest cluster version by which a log is written that has a replica here, as far as that has read."""
        return max((each.state.log_version for each in self._hosted.values()), default=versions.FIRST)

    @property
    def leads(self) -> list[PartitionId]:
        """The partitions that this server leads and answers for."""
        return [partition for partition, replica in sorted(self._hosted.items()) if replica.serving]

    def state_of(self, partition: PartitionId) -> ReplicaState | None:
        """The state of the replica here, or of one that has left and is still read at pinned positions."""
        replica = self._hosted.get(partition) or self._leaving.get(partition)
        return None if replica is None else replica.state

    def leading(self) -> dict[PartitionId, Partition]:
        """The replicas that lead and answer."""
        return {partition: replica for partition, replica in self._hosted.items() if replica.serving}

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._reconcile()

    async def _reconcile(self) -> None:
        await self._set_spoilt_aside()
        ring = self._rings.ring
        assigned = [each for each in sorted(ring.partitions) if ring.partitions[each].is_on(self._server)]
        for partition in sorted(set(self._hosted) - set(assigned)):
            replica = self._hosted[partition]
            if await self._stop(partition, keep_pins=True):
                self._leaving[partition] = replica
            else:
                self._held.add(partition)  # the next process retires it
        await self._retire_left()
        self._standing = {each: why for each, why in self._standing.items() if each in assigned}
        for partition in assigned:
            if partition not in self._hosted and partition not in self._standing:
                async with self._taking_back:  # what stands there from now on is of the one that begins
                    self._drained.pop(partition, None)
                    if partition in self._leaving:
                        self._leaving.pop(partition).close_state()
                await self._begin_if_there_is_room(partition)
                if self.leads:
                    await asyncio.sleep(BREATH_S)

    async def _set_spoilt_aside(self) -> None:
        """Stop the replicas whose copies are damaged; they begin again with nothing (docs/protocol.md, P35)."""
        while self._spoilt:  # one may come while another is being stopped
            partition = min(self._spoilt)
            self._spoilt.discard(partition)
            if partition in self._hosted:
                replica = self._hosted[partition]
                await self._stop(partition, keep_pins=True)
                replica.close_state()
                self._spoil_engine(partition)

    def _make_anew(self, partition: PartitionId) -> None:
        """Now, if it is the first time. One that is found damaged again and again is a fault of the program's, and is
        not copied all the time."""
        count = self._made_anew.get(partition, 0)
        self._made_anew[partition] = count + 1
        delay_s = ANEW_S[min(count, len(ANEW_S) - 1)]
        log.error("partition=%s its copy here is damaged: it is made anew in %d s", partition, delay_s)
        asyncio.get_running_loop().call_later(delay_s, self._spoil, partition, self._hosted.get(partition))

    def _spoil(self, partition: PartitionId, replica: Partition | None) -> None:
        if self._hosted.get(partition) is replica:
            self._spoilt.add(partition)
            self._changed.set()

    async def _retire_strangers(self) -> None:
        """Set aside states whose replicas went elsewhere while this server was down, or while they stood still here."""

        def is_used(partition: PartitionId) -> bool:
            """By somebody here, or soon."""
            member = self._rings.ring.partitions.get(partition)
            is_assigned = member is not None and member.is_on(self._server)
            return is_assigned or any(partition in each for each in (self._hosted, self._leaving, self._held))

        for partition in self._find_engines():
            if not is_used(partition) and await self._has_left(partition) and not is_used(partition):
                self._retire(partition)

    async def _retire_left_now_and_then(self) -> None:
        while True:
            await self._env.beat.rest(LEFT_S)
            for _, replica in sorted(self._leaving.items()):
                await replica.follow_pins()
            await self._retire_left()

    async def _retire_left(self) -> None:
        """Set aside the states of replicas that have left, once others know that, and nobody reads of them at pinned
        positions."""
        for partition, replica in sorted(self._leaving.items()):
            is_known = await self._is_taken_back(partition, replica, self._leaving)
            is_over = is_known and not replica.keeps_pins and await self._has_left(partition)
            if is_over and self._leaving.get(partition) is replica:
                del self._leaving[partition]
                replica.close_state()
                self._retire(partition)

    def _retire(self, partition: PartitionId) -> None:
        try:
            self._retire_engine(partition)
        except OSError as error:
            log.warning("partition=%s its state could not be set aside, and stays as it is: %s", partition, error)
        else:
            log.info("partition=%s is not here any more, its state is set aside", partition)

    async def _has_left(self, partition: PartitionId) -> bool:
        """Whether the metadata store says, asked for it now, that this server has no replica of the partition. What the
        ring has never heard of has not left: perhaps this is the wrong cluster."""
        try:
            await self._store.sync(paths.RING)
            data, _ = await self._store.get(paths.RING)
            ring = codec.decode(data)
        except (MetadataError, Corrupted) as error:
            log.info("partition=%s its state is left as it is: %r", partition, error)
            return False
        member = ring.partitions.get(partition)
        return partition in ring.retired or (member is not None and not member.is_on(self._server))

    async def _age(self) -> None:
        """Remove what was set aside when it has been there for so long while a process ran here. Dates jump; and a
        server that does not run for a while may be the one that somebody is about to need. What is still to be set
        aside is looked for again: the metadata store may not have said so before."""
        while True:
            await asyncio.sleep(AGE_S)
            try:
                self._age_retired(AGE_S, self._keep_s)
                await self._retire_strangers()
            except OSError as error:
                log.warning("what is set aside does not age: %s", error)

    async def _begin_if_there_is_room(self, partition: PartitionId) -> None:
        """Others serve it meanwhile, and the bookie here what it has."""
        try:
            await self._begin(partition)
        except OSError as error:
            if not is_passing(error):
                raise
            log.warning("partition=%s is not started here yet, trying again: %s", partition, error)
            asyncio.get_running_loop().call_later(ROOM_S, self._changed.set)

    # docs/protocol.md V4
    async def _begin(self, partition: PartitionId) -> None:
        """Begin the replica; one whose copy a newer release has written stands still, and the others serve."""
        engine = self._open_engine(partition)
        try:
            replica = self._made(partition, engine)
        except (ClusterTooNew, WrittenByNewer) as error:
            engine.close()
            log.error("partition=%s its replica here stands still: %s", partition, error)
            self._standing[partition] = error
            return
        replica.on_outvoted(partial(self._make_anew, partition))
        self._hosted[partition] = replica
        self._dispatcher.host(partition, replica)
        await replica.start()
        log.info("partition=%s starts here", partition)

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
            self._dispatcher.turn_away,
            self._versions,
            self._book,
        )

    async def _stop(self, partition: PartitionId, *, keep_pins: bool = False) -> bool:
        """Whether it has ended in good order, and nothing holds its state any more."""
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
    async def _is_taken_back(
        self, partition: PartitionId, replica: Partition, stopped: Mapping[PartitionId, Partition]
    ) -> bool:
        """Take back what the replica has claimed and published, so that nobody waits for it or counts on it. It is
        tried until it is done: this server goes on, and with it the session."""
        async with self._taking_back:
            if stopped.get(partition) is not replica:
                return False  # another one is here: what stands there is its own
            try:
                await replica.withdraw()
            except MetadataError as error:
                log.info("partition=%s what was published here is not taken back yet: %r", partition, error)
                return False
            return True

    async def _take_back_drained(self) -> None:
        drained = self._drained
        while drained:
            for partition, replica in sorted(drained.items()):
                if await self._is_taken_back(partition, replica, drained):
                    del drained[partition]
            await self._env.beat.rest(LEFT_S)


def _replicas_of(ring: Ring, partition: PartitionId) -> tuple[ServerId, ...]:
    member = ring.partitions.get(partition)
    return member.replicas if member is not None else ()


def _standing(why: StoreError) -> dict[str, Any]:
    """The numbers of a replica that has not begun, as far as others ask for them."""
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
