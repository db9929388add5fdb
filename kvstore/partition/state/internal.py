"""The identity of an attempt to carry out a transaction (docs/protocol.md Tx3). It names the records that the attempt
writes to the logs of several partitions, and the messages between their leaders."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.types import PartitionId


class Attempt(NamedTuple):
    """The identity of one attempt of a home leader to carry out a transaction. No two attempts have the same one."""

    partition: PartitionId
    """The home partition: the partition that owned the transaction's home key when the attempt began."""
    epoch: int
    """The epoch of the home partition's leader."""
    number: int
    """The number of the attempt among those of this leader, from 1."""

    def __str__(self) -> str:
        return f"{self.partition}/{self.epoch}/{self.number}"
