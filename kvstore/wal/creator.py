"""Creates ledgers for partitions' logs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from random import Random

from kvstore.env.ports import Clock
from kvstore.errors import MetadataError
from kvstore.meta.ledgers import LedgerStore
from kvstore.types import NO_LEDGER, BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, PartitionId
from kvstore.wal.choice import BookieChoice
from kvstore.wal.config import LogConfig
from kvstore.wal.new_ids import NewLedgerIds

log = logging.getLogger(__name__)

OWNER_KEY = "kvstore-partition"
"""Key in a ledger's custom metadata. The value is the partition for which the ledger was created; it identifies
orphans."""
PROCESS_KEY = "kvstore-process"
"""Key in a ledger's custom metadata. The value is the identity of the process that has made the ledger
(docs/protocol.md, G28)."""

PREPARED_S_MAX = 20.0
"""Seconds for which a ledger that was created ahead may be used. During that time it cannot be deleted as an orphan."""


PasswordOf = Callable[[LedgerId], bytes]
"""Returns the password of a new ledger."""


def no_password(_: LedgerId) -> bytes:
    """Return an empty password. Any client that reaches the bookies can then fence and write the ledger."""
    return b""


class LedgerCreator:
    """Creates open ledgers for partitions. The caller must add each of them to its partition's ledger list."""

    def __init__(
        self,
        ids: NewLedgerIds,
        ledgers: LedgerStore,
        choice: BookieChoice,
        config: LogConfig,
        *,
        clock: Clock,
        random: Random,
        announce: Callable[[LedgerMetadata], None] = lambda _: None,
        password_of: PasswordOf = no_password,
        process: bytes = b"",
    ) -> None:
        """`announce` is called for each created ledger. `password_of` returns the password of a new ledger
        (docs/protocol.md, B13). `process` is the identity of this process; empty if its end will never be proven."""
        self._ids = ids
        self._ledgers = ledgers
        self._choice = choice
        self._config = config
        self._clock = clock
        self._random = random
        self._announce = announce
        self._password_of = password_of
        self._process = ((PROCESS_KEY, process),) if process else ()
        self._prepared: dict[PartitionId, tuple[LedgerMetadata, float]] = {}
        """The ledger created ahead for each partition, and its creation time on the boot-time clock."""

    async def prepare(self, partition: PartitionId) -> None:
        """Create a ledger ahead for the next `create`, unless a usable one exists. Raises NotEnoughBookies or
        MetadataError."""
        if self._ready(partition) is None:
            await self._drop_prepared(partition)
            metadata = await self._make(partition, NO_LEDGER, ())
            self._prepared[partition] = metadata, self._clock.now()

    async def discard(self, metadata: LedgerMetadata) -> None:
        """Delete an unused ledger that certainly no list names. If the deletion fails, the ledger is an orphan and is
        deleted later (docs/protocol.md, G2, G22)."""
        try:
            await self._ledgers.remove(metadata.ledger, 0)
        except MetadataError as error:
            log.info("unlisted ledger not deleted, the sweep will delete it ledger=%d error=%r", metadata.ledger, error)

    async def _drop_prepared(self, partition: PartitionId) -> None:
        metadata, _ = self._prepared.pop(partition, (None, 0.0))
        if metadata is not None:
            await self.discard(metadata)

    def _ready(self, partition: PartitionId) -> LedgerMetadata | None:
        """Return the ledger that was created ahead if it is as good as a new one, otherwise None."""
        metadata, made_at = self._prepared.get(partition, (None, 0.0))
        if metadata is None or self._clock.now() - made_at > PREPARED_S_MAX:
            return None
        quorum, _ = self._choice.new_ensemble(self._config.quorum)
        is_as_good = metadata.quorum == quorum and self._choice.spares().issuperset(metadata.fragments[0].ensemble)
        return metadata if is_as_good else None

    async def create(
        self, partition: PartitionId, after: LedgerId, failed: Collection[BookieId] = ()
    ) -> LedgerMetadata:
        """Return a new open ledger whose id is greater than `after`. Bookies in `failed` are avoided. A ledger created
        ahead is used if possible, which saves several requests. Raises NotEnoughBookies or MetadataError (MetadataLost
        if the metadata store is an older copy of itself)."""
        ready = None if failed else self._ready(partition)
        if ready is not None and ready.ledger > after:
            del self._prepared[partition]
            return ready
        await self._drop_prepared(partition)
        return await self._make(partition, after, failed)

    async def _make(self, partition: PartitionId, after: LedgerId, failed: Collection[BookieId]) -> LedgerMetadata:
        quorum, ensemble = self._choice.new_ensemble(self._config.quorum, failed)
        ledger = await self._ids.next_id(after, ensemble, quorum.ack)
        metadata = LedgerMetadata(
            ledger,
            quorum,
            (Fragment(EntryId(0), ensemble),),
            digest=self._config.digest,
            password=self._password_of(ledger),
            custom=((OWNER_KEY, partition.encode()), *self._process),
            ctime_ms=self._clock.date_ms(),
            token=self._random.getrandbits(62) + 1,
        )
        await self._ledgers.create(metadata)
        self._announce(metadata)
        return metadata


# docs/protocol.md G28
def maker_of(metadata: LedgerMetadata) -> bytes:
    """Return the identity of the process that has made the ledger; empty if the ledger does not name it."""
    return next((value for key, value in metadata.custom if key == PROCESS_KEY), b"")


# docs/protocol.md P34
def owner_of(metadata: LedgerMetadata) -> PartitionId | None:
    """Return the partition for whose log the ledger was created, or None if there is none. A value that cannot be a
    partition name comes from a foreign client and counts as none. Otherwise every leader that iterates over all ledgers
    would fail at the value or use it in a znode path."""
    value = next((value for key, value in metadata.custom if key == OWNER_KEY), b"")
    try:
        name = value.decode()
    except UnicodeDecodeError:
        return None
    is_name = name.isprintable() and "/" not in name and name not in ("", ".", "..")
    return PartitionId(name) if is_name else None
