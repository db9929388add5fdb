"""The settings of auto-recovery. Decides only."""

from __future__ import annotations

from dataclasses import dataclass

DELAY_S_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AutorecoveryConfig:
    """Of one node; what holds for the cluster is in the metadata store (kvstore/meta/recovery_settings.py)."""

    auditor: bool = True
    """Whether this node stands for auditor."""
    lost_bookie_delay_s: int = 60
    """How long a bookie is away before it counts as lost: longer than a restart. The first auditor of a cluster writes
    its value into the metadata store, and from then on that one counts (`kvstore autorecovery lost-bookie-delay`)."""
    check_interval_s: float = 604_800.0
    """From one check of every entry to the next. 0: never."""
    check_ledgers_per_s: float = 50.0
    """How many ledgers that check asks their bookies about, at most."""
    placement_interval_s: float = 3_600.0
    """From one audit of the zones that copies stand in to the next. 0: never."""

    worker: bool = True
    """Whether this node makes missing copies again, if it has a bookie or `log.bookies` is external."""
    bytes_per_s: int = 16 << 20
    """Copies are made at this rate, by this node's leaders and its worker together."""
    open_ledger_grace_s: float = 30.0
    """A ledger that is not closed, and has no leader, is recovered when one of its bookies is lost and nothing has come
    to it for so long."""

    def __post_init__(self) -> None:
        faults = []
        if not 0 <= self.lost_bookie_delay_s <= DELAY_S_MAX:
            faults.append(f"lost_bookie_delay_s: want 0 to {DELAY_S_MAX}, got {self.lost_bookie_delay_s}")
        for name in ("check_interval_s", "placement_interval_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                faults.append(f"{name}: want a finite number from 0 on, got {getattr(self, name):g}")
        for name in ("check_ledgers_per_s", "bytes_per_s", "open_ledger_grace_s"):
            if not 0 < getattr(self, name) < float("inf"):
                faults.append(f"{name}: want a finite number above 0, got {getattr(self, name):g}")
        if faults:
            raise ValueError("; ".join(faults))
