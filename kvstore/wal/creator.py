"""Creates ledgers for partitions' logs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random

from kvstore.env.ports import Clock
from kvstore.meta.ledger_ids import LedgerIdGenerator
from kvstore.meta.ledgers import LedgerStore
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, PartitionId
from kvstore.wal.choice import BookieChoice
from kvstore.wal.config import LogConfig

OWNER_KEY = "kvstore-partition"
"""In a ledger's custom metadata: whose log it was made for. By this tag orphans are found."""

PREPARED_S_MAX = 20.0
"""How long a ledger that was made ahead may be used: long before it can be taken for an orphan."""


class LedgerCreator:
    """Makes open ledgers that no list names yet."""

    def __init__(
        self,
        ids: LedgerIdGenerator,
        ledgers: LedgerStore,
        choice: BookieChoice,
        config: LogConfig,
        *,
        clock: Clock,
        random: Random,
        greet: Callable[[LedgerMetadata], None] = lambda _: None,
    ) -> None:
        """`greet` is called for each ledger made."""
        self._ids = ids
        self._ledgers = ledgers
        self._choice = choice
        self._config = config
        self._clock = clock
        self._random = random
        self._greet = greet
        self._prepared: dict[PartitionId, tuple[LedgerMetadata, float]] = {}
        """Ledgers made ahead, and when."""

    async def prepare(self, partition: PartitionId) -> None:
        """Make a ledger ahead for the next `create`, unless there is one. Raises NotEnoughBookies, MetadataError."""
        if self._ready(partition) is None:
            metadata = await self._make(partition, LedgerId(-1), ())
            self._prepared[partition] = metadata, self._clock.now()

    def _ready(self, partition: PartitionId) -> LedgerMetadata | None:
        """What was made ahead, if it is as good as a new one. What is not is an orphan, and swept some time."""
        metadata, made_at = self._prepared.get(partition, (None, 0.0))
        if metadata is None or self._clock.now() - made_at > PREPARED_S_MAX:
            return None
        quorum, _ = self._choice.new_ensemble(self._config.quorum)
        is_as_good = metadata.quorum == quorum and self._choice.spares().issuperset(metadata.fragments[0].ensemble)
        return metadata if is_as_good else None

    async def create(
        self, partition: PartitionId, after: LedgerId, failed: Collection[BookieId] = ()
    ) -> LedgerMetadata:
        """A new open ledger whose id is above `after`. Raises NotEnoughBookies, MetadataError."""
        ready = None if failed else self._ready(partition)
        self._prepared.pop(partition, None)
        if ready is not None and ready.ledger > after:
            return ready
        return await self._make(partition, after, failed)

    async def _make(self, partition: PartitionId, after: LedgerId, failed: Collection[BookieId]) -> LedgerMetadata:
        quorum, ensemble = self._choice.new_ensemble(self._config.quorum, failed)
        ledger = await self._ids.next_id()
        while ledger <= after:
            ledger = await self._ids.next_id()  # ids rise; only a list made by hand could be ahead of them
        metadata = LedgerMetadata(
            ledger,
            quorum,
            (Fragment(EntryId(0), ensemble),),
            digest=self._config.digest,
            custom=((OWNER_KEY, partition.encode()),),
            ctime_ms=self._clock.wall_ms(),
            token=self._random.getrandbits(62) + 1,
        )
        await self._ledgers.create(metadata)
        self._greet(metadata)
        return metadata


def owner_of(metadata: LedgerMetadata) -> PartitionId | None:
    """The partition whose log the ledger was made for; None if it is nobody's."""
    return next((PartitionId(value.decode()) for key, value in metadata.custom if key == OWNER_KEY), None)
