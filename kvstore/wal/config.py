"""The settings of partitions' logs. Decides only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from kvstore.ranges import BYTES_MAX, PERIOD_MIN_S, SECONDS_MAX, WrongSettings, between, range_faults
from kvstore.types import DigestType, Quorum

CHECK_EVERY_S_MAX = 3.0
"""A leader gives a bookie up after 3 s of silence, and its log after 6 s without an acknowledgement. It counts both in
these checks (kvstore/wal/leading/standstill.py)."""
ROLL_ENTRIES_MAX = 10_000_000
"""A bookie keeps the places of an open ledger's entries in memory."""
FRAGMENTS_MAX = 1_000
PLACES_MAX = 5_000
"""Bookie ids in the metadata of one ledger, of up to 200 bytes each. The metadata must fit in a node of the metadata
store, 1 MiB."""


class Keepers(StrEnum):
    """Storage of the ledgers."""

    NODES = "nodes"
    """Nodes of this cluster that have the role bookie."""
    EXTERNAL = "external"
    """Bookies that are no nodes of it, and are registered in the same metadata store; Apache's for example."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Defaults suit a three-node cluster."""

    bookies: Keepers = Keepers.NODES
    """`external`: the node has no bookie of its own, and repairs ledgers all the same."""
    quorum: Quorum = field(default_factory=lambda: Quorum(3, 3, 2))
    """Ensemble, write and ack quorum of new ledgers when enough bookies are writable; fewer, down to the ack quorum,
    make a smaller ensemble. The ensemble times `roll_fragments` is at most 5,000."""
    unsafe: bool = False
    """Allow an ack quorum of 1, which loses acknowledged writes with one disk."""
    digest: DigestType = DigestType.CRC32C
    """Checksum of each entry of new ledgers, by its number on Apache's wire. 2 has a key, and costs more."""
    roll_bytes: Annotated[int, between(1, BYTES_MAX)] = 256 << 20
    """A ledger is rolled after so many payload bytes."""
    roll_entries: Annotated[int, between(1, ROLL_ENTRIES_MAX)] = 250_000
    """... or so many entries."""
    roll_age_s: Annotated[float, between(0.1, SECONDS_MAX)] = 900.0
    """... or so long after its first entry."""
    roll_fragments: Annotated[int, between(2, FRAGMENTS_MAX)] = 32
    """... or when its ensemble has changed so often."""
    check_every_s: Annotated[float, between(PERIOD_MIN_S, CHECK_EVERY_S_MAX)] = 2.0
    """How often a leader asks whether to roll, and whether copies are missing."""
    orphan_age_s: Annotated[float, between(2, SECONDS_MAX)] = 600.0
    """A ledger of this partition that no list names is swept after this time."""

    def __post_init__(self) -> None:
        faults = range_faults(self)
        if self.quorum.ack < 2 and not self.unsafe:
            faults.append(
                f"quorum: ack quorum {self.quorum.ack}: one lost disk would lose acknowledged writes; want at least 2"
            )
        if (places := self.quorum.ensemble * self.roll_fragments) > PLACES_MAX:
            faults.append(
                f"quorum: expected roll_fragments times the ensemble to be at most {PLACES_MAX}, got {places}; the "
                "metadata of a ledger name so many bookies"
            )
        if faults:
            raise WrongSettings(*faults)
