"""Stores the load of one node's leaders during the last hour, for charts. The memory is bounded: SERIES × SAMPLES
doubles, 11,520 bytes. Decides only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvstore.proto.admin_pb2 import NodeReport

SAMPLES = 360
SAMPLE_S = 10.0
"""Interval in seconds: an hour of samples in total."""
SERIES = ("operations", "writes", "written_bytes", "queued")
"""Values per second, except `queued`, which is a number of operations."""


class LoadHistory:
    """A ring buffer of samples. A new sample replaces the oldest."""

    def __init__(self) -> None:
        self._rings = {name: array("d", bytes(8 * SAMPLES)) for name in SERIES}
        self._taken = 0

    @property
    def size_bytes(self) -> int:
        return sum(len(ring) * ring.itemsize for ring in self._rings.values())

    def take(self, report: NodeReport) -> None:
        """Store a sample from the node's report on itself."""
        leads = [replica.lead for replica in report.replicas if replica.HasField("lead")]
        at = self._taken % SAMPLES
        self._rings["operations"][at] = sum(lead.ops_per_s for lead in leads)
        self._rings["writes"][at] = sum(lead.writes_per_s for lead in leads)
        self._rings["written_bytes"][at] = sum(lead.written_bytes_per_s for lead in leads)
        self._rings["queued"][at] = sum(lead.queued for lead in leads)
        self._taken += 1

    def of(self, name: str) -> Sequence[float]:
        """Return the samples of a series, oldest first. Raises KeyError if the name is not in SERIES."""
        ring = self._rings[name]
        if self._taken <= SAMPLES:
            return ring[: self._taken]
        start = self._taken % SAMPLES
        return ring[start:] + ring[:start]
