"""Make a replica's state differ from its log."""

from __future__ import annotations

from kvstore.partition.state import rows
from kvstore.types import PartitionId
from tests.sim.nodes import Node


def damage(node: Node, partition: PartitionId, *, by: int = 0x5A5A, value: tuple[bytes, bytes] | None = None) -> None:
    """Change the state as if an entry had been applied wrongly. `value` is a key with a wrong value, which readers
    also see."""
    replica = node.replica(partition)
    assert replica is not None
    state = replica.state
    before = state.engine.get(rows.META_KEY)
    if before is None:
        return
    state.crc ^= by
    batch = state.engine.batch()
    batch.put(rows.META_KEY, rows.encode_meta(*rows.meta_of(before)._replace(crc=state.crc)))
    if value is not None:
        key, wrong = value
        row = state.engine.get(rows.data_key(state.hash, key))
        assert row is not None, f"there is no {key!r}"
        found = rows.record_of(row)
        batch.put(
            rows.data_key(state.hash, key), rows.encode_record(wrong, found.version, found.created, found.written_ms, 0)
        )
    state.engine.write(batch)
    state._crcs[-1] = (state.seq, state.crc)
