"""The settings of partitions' logs. Decides only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from kvstore.ranges import BYTES_MAX, PERIOD_MIN_S, SECONDS_MAX, WrongSettings, between, range_faults
from kvstore.types import DigestType, Quorum

CHECK_EVERY_S_MAX = 3.0
"""A leader replaces a bookie after 3 s of silence, and abandons its log after 6 s without an acknowledgement. It counts
both in these checks (kvstore/wal/leading/standstill.py)."""
ROLL_ENTRIES_MAX = 10_000_000
"""A bookie keeps the places of an open ledger's entries in memory."""
FRAGMENTS_MAX = 1_000
PLACES_MAX = 5_000
"""Maximum number of bookie ids, of up to 200 bytes each, in the metadata of one ledger. The metadata must fit into a
node of the metadata store, 1 MiB."""


class BookieKind(StrEnum):
    """Where the ledgers are stored."""

    NODES = "nodes"
    """Nodes of this cluster with the role bookie."""
    EXTERNAL = "external"
    """Bookies that are not nodes of this cluster, for example Apache's. They must be registered in the same metadata
    store."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Settings of the logs. The defaults suit a three-node cluster."""

    bookies: BookieKind = BookieKind.NODES
    """Storage of the ledgers. With `external`, the node has no bookie, but still repairs ledgers."""
    quorum: Quorum = field(default_factory=lambda: Quorum(3, 3, 2))
    """Ensemble size, write quorum and ack quorum of new ledgers when enough bookies are writable. With fewer bookies,
    down to the ack quorum, the ensemble is smaller. The ensemble size times `roll_fragments` must be at most 5,000."""
    unsafe: bool = False
    """Allow an ack quorum of 1, so that the loss of one disk loses acknowledged writes."""
    digest: DigestType = DigestType.CRC32C
    """Checksum of each entry of new ledgers, by its number in the BookKeeper protocol. 2 (HMAC) needs a password and
    more CPU time."""
    roll_bytes: Annotated[int, between(1, BYTES_MAX)] = 256 << 20
    """Roll a ledger after this many payload bytes."""
    roll_entries: Annotated[int, between(1, ROLL_ENTRIES_MAX)] = 250_000
    """Roll a ledger after this many entries."""
    roll_age_s: Annotated[float, between(0.1, SECONDS_MAX)] = 900.0
    """Roll a ledger this long after its first entry."""
    roll_fragments: Annotated[int, between(2, FRAGMENTS_MAX)] = 32
    """Roll a ledger after this many changes of its ensemble."""
    check_every_s: Annotated[float, between(PERIOD_MIN_S, CHECK_EVERY_S_MAX)] = 2.0
    """Seconds between two checks of a leader whether to roll its ledger and whether copies are missing."""
    orphan_age_s: Annotated[float, between(2, SECONDS_MAX)] = 600.0
    """Seconds after which a ledger of this partition that no list names is deleted."""

    def __post_init__(self) -> None:
        faults = range_faults(self)
        if self.quorum.ack < 2 and not self.unsafe:
            faults.append(
                f"quorum: expected an ack quorum of at least 2, got {self.quorum.ack}: one lost disk would lose writes"
            )
        if (places := self.quorum.ensemble * self.roll_fragments) > PLACES_MAX:
            faults.append(
                f"quorum: expected roll_fragments times the ensemble to be at most {PLACES_MAX}, got {places}; the "
                "metadata of a ledger name so many bookies"
            )
        if faults:
            raise WrongSettings(*faults)
