"""A simulated cluster of bookies and writers without partitions: real bookies on simulated disks and a simulated
network, the real ledger client, and an in-memory metadata store whose calls take time and sometimes have an unknown
outcome.

Every node runs a bookie and may write. A crash of a node ends both. The promises about ledgers are checked at each
write to the metadata store (tests/sim/judges/rules.py), at each confirmation, and at the end on the disks of all
bookies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.connections.service import BookieService
from kvstore.bookie.storage import BookieStorage
from kvstore.env.ports import Env
from kvstore.errors import Corrupted, MetadataUnknown
from kvstore.meta import ledger_metadata, paths
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.registration import RegisteredBookies
from kvstore.meta.store import Change, Create
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import EntryDigest
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.bookies import BookieClients
from kvstore.wal.choice import BookieChoice
from kvstore.wal.config import LogConfig
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.log import PartitionLogs
from tests.sim.judges.rules import MetadataRules
from tests.sim.world.env import SimNode, SimWorld

SESSION_S = 3.0
RELEASE = b"release"
FAULTS = ("crash", "power", "silent", "all", "pause", "cut", "isolate", "resets", "unknown", "away", "slow")
Work = Callable[["Writer"], Coroutine[Any, Any, None]]


class SimStore(MemoryStore):
    """One session, over a connection that takes time and may break in the middle of a write."""

    def __init__(self, tree: MemoryTree, random: Random) -> None:
        super().__init__(tree)
        self.trouble = 0.0
        """Share of writes whose connection breaks in flight; half of these writes have been done."""
        self._random = random

    async def _turn(self) -> None:
        await asyncio.sleep(self._random.uniform(0.0002, 0.003))
        await super()._turn()

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        self._break("before")
        made = await super().create(path, data, ephemeral=ephemeral, sequential=sequential)
        self._break("after")
        return made

    async def set(self, path: str, data: bytes, version: int) -> int:
        self._break("before")
        new = await super().set(path, data, version)
        self._break("after")
        return new

    async def multi(self, changes: Sequence[Change]) -> None:
        self._break("before")
        await super().multi(changes)
        self._break("after")

    def _break(self, moment: str) -> None:
        if self._random.random() < self.trouble / 2:
            raise MetadataUnknown(f"the connection broke {moment} the write")


class View:
    """The registered bookies as one node knows them: without delay in these tests."""

    def __init__(self, cluster: LedgerCluster) -> None:
        self._cluster = cluster
        self.listeners: list[Callable[[], None]] = []

    @property
    def current(self) -> RegisteredBookies:
        return RegisteredBookies({BookieId(b): f"{n}:3181" for b, n in sorted(self._cluster.registered.items())}, {})

    def zone(self, bookie: BookieId) -> str:
        return self._cluster.zones.get(bookie.partition("-")[0], "")

    def on_change(self, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)


class Writer:
    """The log-writing parts of a node's process."""

    def __init__(self, cluster: LedgerCluster, name: str, env: Env, storage: BookieStorage, store: SimStore) -> None:
        self.cluster = cluster
        self.name = name
        self.env = env
        self.store = store
        self.storage = storage
        view = View(cluster)
        own = storage.bookie
        self.bookies = BookieClients(env, cluster.address, own=(own, storage))
        self.choice = BookieChoice(view, store, clock=env.clock, random=env.random, own=own)
        self.ledgers = LedgerStore(store)
        self.ports = LedgerPorts(env.clock, self.bookies, self.ledgers, self.choice)
        self.logs = PartitionLogs(
            env, store, self.bookies, self.choice, is_release=RELEASE.__eq__, config=cluster.log_config
        )
        cluster.views[name] = view


class LedgerCluster:
    """A cluster of `nodes` nodes in one world. Each runs `work` beside its bookie."""

    def __init__(
        self, seed: int, *, nodes: int = 3, log_config: LogConfig | None = None, segment_bytes: int = 1 << 16
    ) -> None:
        self.world = SimWorld(seed)
        self.random = self.world.fork("ledgers")
        self.log_config = log_config or LogConfig()
        self.names = [f"n{i}" for i in range(1, nodes + 1)]
        self.tree = MemoryTree(lambda: 1_790_000_000_000 + int(self.world.loop.time() * 1000))
        self.confirmed: dict[LedgerId, EntryId] = {}
        """By ledger: the last entry that its writer has confirmed."""
        self.broken: list[str] = []
        """Rules that were broken."""
        self.rules = MetadataRules(
            lambda ledger: self.confirmed.get(ledger, NO_ENTRY), self.broken.append, self._closed_at
        )
        self.tree.observers.append(self.rules)
        self.zones: dict[str, str] = {}
        """The zones of nodes that have one."""
        self.registered: dict[str, str] = {}
        """Bookie id -> node."""
        self.views: dict[str, View] = {}
        self.writers: dict[str, Writer] = {}
        """The writers of the nodes whose process is up."""
        self.work: Work | None = None
        self._segment_bytes = segment_bytes

    def __enter__(self) -> LedgerCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.world.close()

    def run(self, scenario: Coroutine[Any, Any, None], limit_s: float = 300.0) -> None:
        """Run the scenario and check that no rule was broken."""
        self.world.run(scenario, limit_s=limit_s)
        assert not self.broken, f"seed {self.world.seed}: {self.broken[0]}"

    def address(self, bookie: BookieId) -> str | None:
        """Return the address of a bookie, registered or not. An address never changes."""
        return f"{bookie.partition('-')[0]}:3181"

    def node(self, name: str) -> SimNode:
        return self.world.node(name)

    # Nodes.

    def start_all(self) -> None:
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> None:
        """Start the node's process. Its bookie registers when it serves."""
        self.node(name).start(self._main(name))

    def crash(self, name: str, *, power: bool = False, silent: bool = False) -> None:
        """End the process. Its registration outlives it by a session timeout."""
        self.writers.pop(name, None)
        self.node(name).crash(power=power, silent=silent)
        incarnation = self.node(name).incarnation
        self.world.loop.call_later(SESSION_S, self._expire, name, incarnation)

    def _expire(self, name: str, incarnation: int) -> None:
        if self.node(name).incarnation == incarnation and not self.node(name).is_running:
            self.registered.pop(f"{name}-1", None)
            self._registrations_changed()

    async def wait_up(self, count: int | None = None) -> None:
        """Wait until `count` nodes, by default all, run their work."""
        while True:
            if len(self.writers) >= (len(self.names) if count is None else count):
                return
            await asyncio.sleep(0.01)

    def _main(self, name: str) -> Callable[[Env], Coroutine[Any, Any, None]]:
        async def main(env: Env) -> None:
            store = SimStore(self.tree, env.random)
            bookie = BookieId(f"{name}-1")
            config = BookieConfig(name=name, listen=f"{name}:3181", segment_bytes=self._segment_bytes, reserve_bytes=0)
            storage = BookieStorage(env, config, bookie, MetadataAuthority(store, ClusterIdentity(store)))
            await storage.start()
            service = BookieService(storage, config)
            await env.transport.listen(f"{name}:3181", service.handler)
            self.registered[bookie] = name
            writer = self.writers[name] = Writer(self, name, env, storage, store)
            self._registrations_changed()
            if self.work is not None:
                env.nursery.spawn(self.work(writer), name=f"work of {name}")
            await asyncio.Event().wait()

        return main

    def _registrations_changed(self) -> None:
        for name, view in sorted(self.views.items()):
            process = self.node(name).process
            if process is not None and process.alive:
                for listener in view.listeners:
                    self.world.loop.call_soon(listener, context=process.context.copy())

    # Faults.

    async def chaos(self, seconds: float, faults: Sequence[str], pace_s: float = 0.3) -> None:
        """Strike with one fault after another and undo each a little later. At the end everything is up and
        reachable."""
        end = self.world.loop.time() + seconds
        while self.world.loop.time() < end and faults:
            await asyncio.sleep(self.random.expovariate(1 / pace_s))
            await self._strike(self.random.choice(faults), self.random.choice(self.names))
        self.heal()
        await self.wait_up()

    async def _strike(self, fault: str, name: str) -> None:
        self.world.trace.event("chaos", fault, name)
        await getattr(self, f"_{fault}")(name)
        if not self.node(name).is_running:
            self.start(name)

    async def _a_while(self, least: float, most: float) -> None:
        await asyncio.sleep(self.random.uniform(least, most))

    async def _crash(self, name: str) -> None:
        self.crash(name)
        await self._a_while(0, 1.0)

    async def _power(self, name: str) -> None:
        self.crash(name, power=True)
        await self._a_while(0, 1.0)

    async def _silent(self, name: str) -> None:
        self.crash(name, silent=True)
        await self._a_while(0, 2.0)

    async def _all(self, name: str) -> None:
        for each in self.names:
            self.crash(each, power=self.random.random() < 0.5)
        for each in self.names:
            await self._a_while(0, 0.3)
            self.start(each)

    async def _pause(self, name: str) -> None:
        self.node(name).pause()
        await self._a_while(0.01, 2.0)
        self.node(name).resume()

    async def _cut(self, name: str) -> None:
        other = self.random.choice([each for each in self.names if each != name])
        cut = self.random.choice((self.world.network.cut, self.world.network.cut_one_way))
        cut(name, other)
        await self._a_while(0.05, 3.0)
        self.world.network.heal(name, other)

    async def _isolate(self, name: str) -> None:
        self.world.network.split([name], [each for each in self.names if each != name])
        await self._a_while(0.05, 3.0)
        self.world.network.heal()

    async def _resets(self, name: str) -> None:
        for _ in range(self.random.randint(1, 5)):
            self.world.network.reset_random()

    async def _unknown(self, name: str) -> None:
        """Give writes to the metadata store an unknown outcome."""
        for writer in self.writers.values():
            writer.store.trouble = 0.3
        await self._a_while(0.2, 2.0)
        for writer in self.writers.values():
            writer.store.trouble = 0.0

    async def _away(self, name: str) -> None:
        """Make the metadata store unreachable."""
        stores = [writer.store for _, writer in sorted(self.writers.items())]
        away = stores if self.random.random() < 0.5 else self.random.sample(stores, 1)
        for store in away:
            store.suspend()
        await self._a_while(0.1, 4.0)
        for store in away:
            store.resume()

    async def _slow(self, name: str) -> None:
        self.node(name).disk.slow_syncs((0.02, self.random.uniform(0.05, 0.6)))
        await self._a_while(0.2, 2.0)
        self.node(name).disk.slow_syncs(self.world.disk_config.sync_s)

    def heal(self) -> None:
        """End all faults."""
        self.world.network.heal()
        for writer in self.writers.values():
            writer.store.trouble = 0.0

    # Promises.

    def _closed_at(self, ledger: LedgerId, last: EntryId) -> None:
        confirmed = self.confirmed.get(ledger, NO_ENTRY)
        if last < confirmed:
            self.broken.append(f"L10 ledger {ledger} is closed at {last}, entry {confirmed} was confirmed")

    def note_confirmed(self, ledger: LedgerId, entry: EntryId) -> None:
        """Record that a writer was notified: the entry can no longer be lost."""
        if entry != self.confirmed.get(ledger, NO_ENTRY) + 1:
            self.broken.append(f"L3 ledger {ledger}: entry {entry} confirmed after {self.confirmed.get(ledger)}")
        self.confirmed[ledger] = entry
        recorded = self.rules.ledgers.get(ledger)
        if recorded is None:
            self.broken.append(f"L3 ledger {ledger}: confirmed without metadata")
        elif recorded.state is LedgerState.CLOSED and recorded.last_entry < entry:
            self.broken.append(f"L10 ledger {ledger}: {entry} confirmed, closed at {recorded.last_entry}")
        elif self._holders(recorded, entry) < recorded.quorum.ack:
            self.broken.append(f"L3 ledger {ledger}: {entry} confirmed without an ack quorum of {recorded}")

    def _holders(self, recorded: LedgerMetadata, entry: EntryId) -> int:
        """Return how many bookies in the metadata have the entry on disk, or are down and may have it."""
        count = 0
        for bookie in recorded.write_set(entry):
            writer = self.writers.get(bookie.partition("-")[0])
            held = None if writer is None else writer.storage.inventory.ledgers.get(recorded.ledger)
            count += writer is None or (held is not None and bool(held.index.get(entry)[0]))
        return count

    def recorded(self) -> dict[LedgerId, LedgerMetadata]:
        """Return the current metadata of all ledgers."""
        found = {}
        for path in self.tree.paths():
            ledger = paths.ledger_of(path)
            if ledger is not None:
                found[ledger] = ledger_metadata.decode(ledger, self.tree.get(path)[0])
        return found

    def check_disks(self) -> None:
        """Check L11 and L15: every entry of every closed ledger has an ack quorum of copies in the places that its
        metadata names, all with one payload. All bookies must be up."""
        for ledger, metadata in self.recorded().items():
            if metadata.state is not LedgerState.CLOSED:
                continue
            for entry in map(EntryId, range(metadata.last_entry + 1)):
                copies = self._copies(metadata, entry)
                assert len(copies) >= metadata.quorum.ack, (
                    f"seed {self.world.seed}: L11 entry {entry} of {metadata} is only on {sorted(copies)}"
                )
                assert len(set(copies.values())) == 1, f"seed {self.world.seed}: L15 entry {entry} of ledger {ledger}"

    def _copies(self, metadata: LedgerMetadata, entry: EntryId) -> dict[str, bytes]:
        digest = EntryDigest(metadata.digest, metadata.password)
        found: dict[str, bytes] = {}
        for bookie in metadata.write_set(entry):
            writer = self.writers[bookie.partition("-")[0]]

            def done(status: Status, _entry: int, packet: bytes | None, _lac: int, bookie: BookieId = bookie) -> None:
                if status == Status.OK and packet is not None:
                    try:
                        found[bookie] = digest.open(metadata.ledger, entry, packet).payload
                    except Corrupted:
                        return

            writer.storage.read(metadata.ledger, entry, done=done)
        return found


def make_root(tree: MemoryTree) -> None:
    """Create the initial nodes of a cluster."""
    session = tree.open_session()
    for path in (paths.LEDGERS, paths.AVAILABLE, paths.READONLY, paths.IDGEN, paths.PARTITIONS):
        tree.apply(session, [Create(path)])
    tree.apply(session, [Create(paths.INSTANCE_ID, b"simulated")])
