"""The settings of partitions' logs. Decides only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.types import DigestType, Quorum


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
    make a smaller ensemble."""
    unsafe: bool = False
    """Allow an ack quorum of 1, which loses acknowledged writes with one disk."""
    digest: DigestType = DigestType.CRC32C
    roll_bytes: int = 256 << 20
    """A ledger is rolled after so many payload bytes."""
    roll_entries: int = 250_000
    """... or so many entries."""
    roll_age_s: float = 900.0
    """... or so long after its first entry."""
    roll_fragments: int = 32
    """... or when its ensemble has changed so often."""
    check_every_s: float = 2.0
    """How often a leader asks whether to roll, and whether copies are missing."""
    orphan_age_s: float = 600.0
    """A ledger of this partition that no list names is swept after this time."""

    def __post_init__(self) -> None:
        faults = []
        if self.quorum.ack < 2 and not self.unsafe:
            faults.append(
                f"ack quorum {self.quorum.ack}: one lost disk would lose acknowledged writes; want at least 2"
            )
        for name in (
            "roll_bytes",
            "roll_entries",
            "roll_age_s",
            "roll_fragments",
            "check_every_s",
        ):
            if getattr(self, name) <= 0:
                faults.append(f"{name}: want more than 0, got {getattr(self, name)}")
        if faults:
            raise ValueError("; ".join(faults))
