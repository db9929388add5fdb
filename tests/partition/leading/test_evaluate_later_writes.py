"""Writes of a later release: a leader refuses them until the version of its log allows their records."""

from __future__ import annotations

import pytest

from kvstore.errors import NotYetRaised
from kvstore.partition.state.commands import TYPES, Check, Code, Op, Put, Transact
from kvstore.partition.state.move_records import LogVersion
from kvstore.partition.state.traits import SINCE, WRITES
from tests.partition.one_partition import Partition

WRITE: dict[Code, Op] = {
    Code.TRANSACT: Transact(b"a", (Put(b"a", b"1"), Check(b"a", 4, 1))),
}
LATER = sorted(code for code in set(SINCE) & WRITES)


# docs/protocol.md V4
@pytest.mark.parametrize("code", WRITE, ids=lambda code: code.name)
def test_later_write_is_refused_until_log_version_allows_it(code: Code) -> None:
    p = Partition().start()
    assert p.state.log_version < SINCE[code], "the test has no older log"
    refused = p.do(WRITE[code])
    assert isinstance(refused, NotYetRaised), refused
    assert p.state.get(b"a") is None
    p.loop.create_task(p.leader.append_record(LogVersion(SINCE[code])))
    p.settle()
    p.acknowledge()
    assert not isinstance(p.do(WRITE[code]), NotYetRaised)


def test_every_later_write_has_a_class() -> None:
    assert {type(op) for op in WRITE.values()} <= {TYPES[code] for code in LATER}
