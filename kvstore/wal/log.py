"""Access to the logs of all partitions on this node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvstore.env.ports import Env
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import MetadataStore
from kvstore.meta.underreplication import Underreplication
from kvstore.proto.digest import EntryDigest, master_key
from kvstore.types import NO_ENTRY, BookieId, LedgerId, LedgerMetadata, PartitionId, Position, Seq
from kvstore.wal.choice import BookieChoice
from kvstore.wal.config import LogConfig
from kvstore.wal.copies.pace import CopyPace
from kvstore.wal.creator import LedgerCreator, PasswordOf, no_password
from kvstore.wal.deaths import ProvenDeaths
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.leading.leader_log import LeaderLog
from kvstore.wal.leading.owners import LedgerOwners
from kvstore.wal.lists import LedgerLists, ReadersLists
from kvstore.wal.new_ids import NewLedgerIds
from kvstore.wal.ports import BookieClient, ListedLedger
from kvstore.wal.seek import Seeker
from kvstore.wal.tailing.tail import BATCH_BYTES_MAX, TailReader
from kvstore.wal.takeover import LogTakeover, Others, no_others

BYTES_PER_S = 16 << 20
"""Default rate in bytes per second at which leaders on this node make missing copies."""


class PartitionLogs:
    """The logs of all partitions on this node. This package does not parse payloads, so the caller passes `is_release`,
    which returns True for the payload of a release record."""

    def __init__(
        self,
        env: Env,
        store: MetadataStore,
        bookies: BookieClient,
        choice: BookieChoice,
        *,
        is_release: Callable[[bytes], bool],
        config: LogConfig | None = None,
        password_of: PasswordOf = no_password,
        pace: CopyPace | None = None,
        on_marked: Callable[[], None] = lambda: None,
        instance_id: str | None = None,
        deaths: ProvenDeaths | None = None,
    ) -> None:
        """`pace` limits the copies that leaders on this node make. `on_marked` is called after a leader has marked a
        ledger as under-replicated. `instance_id` is the id of the cluster; if it is None, the id found when the first
        log is opened is used. `deaths` are the processes whose end is proven."""
        self._env = env
        self._store = store
        self._config = config or LogConfig()
        self._ledgers = LedgerStore(store)
        self._ports = LedgerPorts(env.clock, bookies, self._ledgers, choice, env.traces)
        self._identity = ClusterIdentity(store, instance_id)
        new_ids = NewLedgerIds(store, bookies, choice, self._identity, clock=env.clock, nursery=env.nursery)
        self._lists = LedgerLists(store, new_ids.saw_list)
        self._is_release, self._deaths = is_release, deaths or ProvenDeaths()
        self._pace = pace or CopyPace(env.clock, BYTES_PER_S)
        self._owners = LedgerOwners()
        self._marks, self._on_marked = Underreplication(store), on_marked
        self._readers_lists = ReadersLists(store, new_ids.saw_list)
        self.seeker = Seeker(self._ports, self._readers_lists, env.nursery)
        """Finds positions in logs."""
        self._readers: dict[PartitionId, dict[TailReader, None]] = {}
        """Open readers by partition. They are notified at once when this node itself changes a log."""
        self._creator = LedgerCreator(
            new_ids,
            self._ledgers,
            choice,
            self._config,
            clock=env.clock,
            random=env.random,
            announce=self._announce,
            password_of=password_of,
            process=env.death.identity,
        )

    async def open_as_leader(
        self,
        partition: PartitionId,
        lease_ms: int,
        next_seq: Callable[[], Seq],
        applied: Callable[[], Position | None] = lambda: None,
        others: Others = no_others,
    ) -> LeaderLog:
        """Take over the log and return it ready for appends. The takeover fences and recovers the last two ledgers,
        waits until their leases expire, and creates and lists a new ledger.

        The callback `applied` returns the position of the local state, and `others` the furthest position of the other
        replicas. Both are called before recovery, and the log must reach both positions. After recovery, `next_seq`
        returns the lower bound of the new ledger's first sequence for the list. Raises NotRecoverable, NotEnoughBookies
        or MetadataError (MetadataLost if the log does not reach those positions). The caller may retry from the start.
        """
        await self._identity.check()
        nursery = self._env.nursery.child(f"{partition} log")
        takeover = LogTakeover(
            partition,
            ports=self._ports,
            lists=self._lists,
            creator=self._creator,
            is_release=self._is_release,
            deaths=self._deaths,
            nursery=nursery,
        )
        try:
            opened = await takeover.run(lease_ms, next_seq, applied, others)
        except BaseException:
            await nursery.close()
            raise
        for reader in self._readers.get(partition, ()):
            reader.nudge()
        return LeaderLog(
            partition,
            opened,
            store=self._store,
            identity=self._identity,
            ports=self._ports,
            lists=self._lists,
            creator=self._creator,
            config=self._config,
            lease_ms=lease_ms,
            mark=self._mark,
            pace=self._pace,
            owners=self._owners,
            nursery=nursery,
        )

    async def _mark(self, ledger: LedgerId, lacking: Collection[BookieId]) -> None:
        if await self._marks.mark(ledger, lacking, self._env.clock.date_ms()):
            self._on_marked()

    async def prepare(self, partition: PartitionId) -> None:
        """Create a ledger ahead of a call of `open_as_leader` that is about to follow. Raises NotEnoughBookies or
        MetadataError."""
        await self._creator.prepare(partition)

    def _announce(self, metadata: LedgerMetadata) -> None:
        """Send a new ledger's bookies a LAC that confirms nothing. The bookies then read the ledger's metadata now, so
        that the first entry, which clients wait for, is not delayed by that read (docs/protocol.md B3)."""
        digest = EntryDigest(metadata.digest, metadata.password)
        body, key = digest.lac_packet(metadata.ledger, NO_ENTRY), master_key(metadata.password)
        for bookie in metadata.fragments[0].ensemble:
            self._ports.bookies.write_lac(bookie, metadata.ledger, key, body, NO_ENTRY)

    def reader(
        self, partition: PartitionId, after: Position | None, *, batch_bytes: int = BATCH_BYTES_MAX
    ) -> TailReader:
        """Return a reader that starts after `after`, or at the first ledger if `after` is None. A batch ends with the
        entry that reaches `batch_bytes`."""
        readers = self._readers.setdefault(partition, {})
        reader = TailReader(
            partition,
            after,
            store=self._store,
            lists=self._readers_lists,
            ports=self._ports,
            nursery=self._env.nursery.child(f"{partition} reader"),
            batch_bytes=batch_bytes,
            on_close=lambda reader: readers.pop(reader, None),
        )
        readers[reader] = None
        return reader

    async def ledgers(self, partition: PartitionId) -> tuple[Sequence[ListedLedger], Seq]:
        """Return the current ledger list, and the sequence below which the log was trimmed."""
        listed, _ = await self._lists.read(partition)
        return listed.infos, listed.trimmed_seq
