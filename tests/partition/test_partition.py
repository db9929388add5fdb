"""One replica of a partition that does not lead."""

from errno import EMFILE
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.partition.partition import Partition
from kvstore.partition.state.commands import Get, Level, Op, Put, Scan
from kvstore.ring.moves import FIRST_MOVE
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
