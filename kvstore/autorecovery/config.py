"""The settings of auto-recovery. Decides only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvstore.ranges import BYTES_MAX, COUNT_MAX, SECONDS_MAX, WrongSettings, between, range_faults

DELAY_S_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AutorecoveryConfig:
    """The settings of one node; what holds for the cluster is in the metadata store
    (kvstore/meta/recovery_settings.py)."""

    auditor: bool = True
    """Whether this node stands for auditor."""
    lost_bookie_delay_s: Annotated[int, between(0, DELAY_S_MAX)] = 60
    """How long a bookie is away before it counts as lost: longer than a restart. The first auditor of a cluster writes
    its value into the metadata store, and from then on that one counts (`kvstore autorecovery lost-bookie-delay`)."""
    check_interval_s: Annotated[float, between(0, SECONDS_MAX)] = 604_800.0
    """From one check of every entry to the next. 0: never."""
    check_ledgers_per_s: Annotated[float, between(0.01, COUNT_MAX)] = 50.0
    """How many ledgers that check asks their bookies about, at most."""
    placement_interval_s: Annotated[float, between(0, SECONDS_MAX)] = 3_600.0
    """From one audit of the zones that copies stand in to the next. 0: never."""

    worker: bool = True
    """Whether this node makes missing copies again, if it has a bookie or `log.bookies` is external."""
    bytes_per_s: Annotated[int, between(1 << 10, BYTES_MAX)] = 16 << 20
    """Copies are made at this rate, by this node's leaders and its worker together."""
    open_ledger_grace_s: Annotated[float, between(0.1, SECONDS_MAX)] = 30.0
    """A ledger that is not closed, and has no leader, is recovered when one of its bookies is lost and nothing has come
    to it for so long."""

    def __post_init__(self) -> None:
        if faults := range_faults(self):
            raise WrongSettings(*faults)
