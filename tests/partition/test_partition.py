"""One replica of a partition that does not lead."""

from errno import EMFILE
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore.env.clock import SystemClock
from kvstore.errors import Unavailable
from kvstore.partition.election import snapshots
from kvstore.partition.moves import source
from kvstore.partition.partition import Partition
from kvstore.partition.state.commands import Get, Level, Op, Put, Scan
from kvstore.partition.state.move_records import Founded
from kvstore.partition.state.tokens import EVERYTHING
from kvstore.ring.moves import FIRST_MOVE
from kvstore.types import PartitionId, ServerId
from tests.partition import one_partition


@pytest.mark.parametrize("read", [Get(b"a", Level.STALE), Scan(b"", b"", 9, 0, Level.STALE)])
def test_replica_that_cannot_read_its_engine_refuses_the_read(monkeypatch: pytest.MonkeyPatch, read: Op) -> None:
    """The error used to reach the router, which then carried out no other operation of the same step."""
    p = one_partition.Partition().start()
    p.do(Put(b"a", b"1"))
    replica: Any = SimpleNamespace(
        id=p.state.partition,
        state=p.state,
        _tail=SimpleNamespace(catch_up=lambda: None),
        _replica=SimpleNamespace(following=SimpleNamespace(failure=None)),
        _is_behind_start=False,
        _rings=SimpleNamespace(ring=SimpleNamespace(next_move=FIRST_MOVE, partitions={})),
    )

    def broken(*_: Any) -> Any:
        raise OSError(EMFILE, "too many open files")

    for name in ("multi_get", "iterate"):
        monkeypatch.setattr(p.engine, name, broken)
    assert isinstance(Partition._answer_here(replica, read), Unavailable)


@pytest.mark.parametrize("method", [snapshots.BEGIN, source.PAGE])
def test_replica_that_cannot_read_its_engine_refuses_a_peer(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The error used to close the link from the peer, and everything in progress on it had an unknown outcome."""
    p = one_partition.Partition()
    started = p.loop.create_task(p.leader.start(Founded(EVERYTHING.spans)))
    p.settle()
    p.acknowledge()
    assert started.done()
    replica: Any = object.__new__(Partition)
    replica.id, replica._tail = p.state.partition, SimpleNamespace(catch_up=lambda: None)
    replica._exports = snapshots.Exports(p.state, SystemClock())
    replica._source = source.Source(p.leader._env, p.state.partition, p.state, lambda: None, source.FREEZE_S)

    def broken(*_: Any) -> Any:
        raise OSError(EMFILE, "too many open files")

    for name in ("get", "iterate"):
        monkeypatch.setattr(p.engine, name, broken)
    asked = msgspec.msgpack.encode(source.MoveRequest(1, PartitionId("p2"), EVERYTHING.spans[0]))
    answer = p.loop.create_task(replica._answer_peer(ServerId("n2"), method, asked))
    p.settle()
    assert isinstance(answer.exception(), Unavailable)
