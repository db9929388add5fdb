"""The settings of auto-recovery. Decides only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvstore.ranges import BYTES_MAX, COUNT_MAX, SECONDS_MAX, WrongSettings, between, range_faults

DELAY_S_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AutorecoveryConfig:
    """Settings of one node. Cluster-wide settings are in the metadata store (kvstore/meta/recovery_settings.py)."""

    auditor: bool = True
    """Run a candidate for the auditor role on this node."""
    lost_bookie_delay_s: Annotated[int, between(0, DELAY_S_MAX)] = 60
    """Seconds that a bookie must be away before it counts as lost; longer than a restart takes. The first auditor of a
    cluster writes its value into the metadata store. From then on the stored value applies; change it with `kvstore
    autorecovery lost-bookie-delay`."""
    check_interval_s: Annotated[float, between(0, SECONDS_MAX)] = 604_800.0
    """Seconds between two checks of every entry; 0 disables the check."""
    check_ledgers_per_s: Annotated[float, between(0.01, COUNT_MAX)] = 50.0
    """Maximum number of ledgers per second that the check asks bookies about."""
    placement_interval_s: Annotated[float, between(0, SECONDS_MAX)] = 3_600.0
    """Seconds between two audits of the zones of copies; 0 disables the audit."""

    worker: bool = True
    """Run a replication worker on this node, if it has a bookie or `log.bookies` is external."""
    bytes_per_s: Annotated[int, between(1 << 10, BYTES_MAX)] = 16 << 20
    """Maximum rate of copying, shared by the leaders and the replication worker of this node."""
    open_ledger_grace_s: Annotated[float, between(0.1, SECONDS_MAX)] = 30.0
    """Seconds that an open ledger without a leader is left alone after its last change, when one of its bookies is
    lost. After that, the worker recovers the ledger."""

    def __post_init__(self) -> None:
        if faults := range_faults(self):
            raise WrongSettings(*faults)
