"""Entries on their way: how many there may be, and what is behind an acknowledgement."""

from errno import EIO
from typing import Any

import pytest

from kvstore.errors import Overloaded
from kvstore.partition.leading.flight import FLIGHTS_MAX
from kvstore.partition.state.commands import Level, get, put
from kvstore.partition.state.marks import Mark
from kvstore.wal.leading.leader_log import IN_FLIGHT_MAX
from tests.partition.one_partition import Partition


@pytest.fixture
def p() -> Partition:
    return Partition().start()


def test_records_beyond_what_may_be_under_way_are_refused_and_leave_nothing_behind(p: Partition) -> None:
    """The log refused them behind the leader's back: it waited for them ever after, and answered nobody."""
    assert FLIGHTS_MAX < IN_FLIGHT_MAX
    records = [p.loop.create_task(p.leader.append_record(Mark("pin", 0, takes=False))) for _ in range(FLIGHTS_MAX + 4)]
    proof = p.loop.create_task(p.leader.prove())
    p.settle()
    assert len(p.log.under_way) == FLIGHTS_MAX
    assert [isinstance(each.exception(), Overloaded) for each in (*records, proof) if each.done()] == [True] * 5
    p.acknowledge(FLIGHTS_MAX)
    assert p.do(put(b"a", b"1"), put(b"b", b"1")) == [1, 2]
    assert p.state.position == p.log.acknowledged[-1].position
    assert p.do(get(b"b", Level.STRICT)).value == b"1"


def test_an_engine_that_cannot_be_read_behind_an_acknowledgement_ends_the_process(
    p: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    p.do(put(b"a", b"1"))
    (read,) = p.submit(get(b"a", Level.STRICT))
    assert p.result(read) == "waits"

    def broken(*_: Any) -> Any:
        raise OSError(EIO, "read error")

    monkeypatch.setattr(p.engine, "multi_get", broken)
    monkeypatch.setattr(p.engine, "get", broken)
    p.acknowledge()
    assert len(p.fatal) == 1
    assert "cannot be read" in p.fatal[0]
    assert not p.leader.serving
