"""The numbers of the pins in a log rise (docs/protocol.md, Tx13)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.partition.config import PartitionConfig
from kvstore.partition.state.marks import MarkRecord
from tests.partition.one_partition import Partition


def send(p: Partition, record: MarkRecord) -> Any:
    """Append a record and leave it in flight."""
    task = p.loop.create_task(p.leader.append_record(record))
    p.settle()
    return task


@pytest.mark.parametrize("is_acknowledged", [True, False])
def test_pin_that_is_older_than_the_last_one_is_refused(is_acknowledged: bool) -> None:
    p = Partition(PartitionConfig(expiry_sweep_s=0)).start()
    sent = len(p.log.in_flight)
    first = send(p, MarkRecord("one", 1 << 60, True, 5))
    if is_acknowledged:
        p.acknowledge(len(p.log.in_flight))
        assert first.done()
    for number in (4, 5):
        refused = send(p, MarkRecord("two", 1 << 60, True, number))
        assert refused.done()
        with pytest.raises(Unavailable, match="number above 5"):
            refused.result()
    allowed = [
        send(p, MarkRecord("", 0, False, 4)),
        send(p, MarkRecord("one", 9, False)),
        send(p, MarkRecord("x", 9, True)),
    ]
    assert not any(each.done() for each in allowed), "these keep nothing, or have no number"
    p.acknowledge(len(p.log.in_flight))
    assert len(p.log.in_flight) == sent
    assert p.state.mark == 5
