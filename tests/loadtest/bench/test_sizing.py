"""The figures of the metadata store are read from its answer."""

from __future__ import annotations

import pytest

from loadtest.bench.sizing import store_counts

MNTR = "zk_version\t3.9.5-x\nzk_packets_received\t1200\nzk_znode_count\t65\nzk_watch_count\t144\n"
SRVR = "Zookeeper version: 3.9.5-x\nReceived: 1200\nZxid: 0x1f4\nMode: standalone\nNode count: 65\n"


def test_zookeeper_counts_are_read_from_its_answer() -> None:
    assert store_counts(MNTR, SRVR) == {"znodes": 65, "watches": 144, "requests": 1200, "writes": 500}


@pytest.mark.parametrize(("mntr", "srvr"), [("", ""), (MNTR, ""), ("", SRVR)])
def test_store_that_does_not_answer_is_not_idle(mntr: str, srvr: str) -> None:
    with pytest.raises(RuntimeError, match="expected the counts of a ZooKeeper"):
        store_counts(mntr, srvr)
