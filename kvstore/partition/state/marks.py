"""The contents of a MARK record: a pin begins, is extended, or ends. Decides only (docs/protocol.md, Pinned reads)."""

from __future__ import annotations

from typing import NamedTuple


class MarkRecord(NamedTuple):
    """The contents of a MARK record. DO NOT CHANGE the order of the fields; new fields come last and have a default."""

    pin: str
    deadline_ms: int
    """When the pin ends, by the wall clock of the leader that logged the record. 0 means that the pin has ended."""
    takes: bool
    """True if replicas must keep the state as it is at this record. False if the record only changes the deadline of a
    state that is already kept."""
    number: int = 0
    """The number of the pin. The numbers of all pins of a cluster rise. 0 if the record only changes a deadline, and in
    logs of version 2 and earlier (docs/protocol.md Tx13)."""
