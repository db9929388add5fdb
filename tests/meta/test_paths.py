import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.meta import paths
from kvstore.types import BookieId, LedgerId, PartitionId, ServerId

LEDGER_PATHS = {
    7: "/ledgers/00/0000/L0007",
    123456789: "/ledgers/01/2345/L6789",
    2147483646: "/ledgers/21/4748/L3646",
    2147483647: "/ledgers/000/0000/0021/4748/L3647",
    4294967301: "/ledgers/000/0000/0042/9496/L7301",
    2**63 - 1: "/ledgers/922/3372/0368/5477/L5807",
}


@pytest.mark.parametrize(("ledger", "path"), LEDGER_PATHS.items())
def test_ledger_has_the_path_of_apaches_tools(ledger: int, path: str) -> None:
    assert paths.ledger(LedgerId(ledger)) == path
    assert paths.ledger_of(path) == ledger


@given(st.integers(0, 2**63 - 1))
def test_ledger_path_gives_its_ledger(ledger: int) -> None:
    assert paths.ledger_of(paths.ledger(LedgerId(ledger))) == ledger


@pytest.mark.parametrize(
    "path",
    [
        "/ledgers/available",
        "/ledgers/00/0000",
        "/ledgers/00/0000/L007",
        "/ledgers/00/0000/X0007",
        "/ledgers/00/0000/L0007/x",
        "/other/00/0000/L0007",
        "/ledgers/000/0000/0000/0000/L0007",  # a short id in the long tree
        "/ledgers/99/9999/L9999",  # a long id in the short tree
        "/ledgers/999/9999/9999/9999/L9999",  # more than 63 bits
    ],
)
def test_other_paths_are_no_ledgers(path: str) -> None:
    assert paths.ledger_of(path) is None


@pytest.mark.parametrize("ledger", [-1, 2**63])
def test_id_out_of_range_has_no_path(ledger: int) -> None:
    with pytest.raises(ValueError, match=str(ledger)):
        paths.ledger(LedgerId(ledger))


def test_listing_distinguishes_ledger_trees() -> None:
    names = ["00", "21", "000", "available", "cookies", "LAYOUT", "idgen", "underreplication", "1", "0000"]
    assert [name for name in names if paths.is_ledger_tree(name)] == ["00", "21", "000"]


def test_our_own_nodes_are_beside_the_ledgers() -> None:
    partition, server = PartitionId("p1"), ServerId("n1")
    assert paths.server(server) == "/servers/n1"
    assert paths.partition(partition) == "/partitions/p1"
    assert paths.partition_log(partition) == "/partitions/p1/log"
    assert paths.partition_term(partition) == "/partitions/p1/term"
    assert paths.partition_leader(partition) == "/partitions/p1/leader"
    assert paths.partition_pin(partition, "spark-7") == "/partitions/p1/pins/spark-7"
    assert paths.partition_replica(partition, server) == "/partitions/p1/replicas/n1"
    assert paths.snapshot("s1") == "/snapshots/s1"
    assert (paths.RING, paths.CONFIG) == ("/ring", "/config")


def test_bookies_register_under_their_ids() -> None:
    bookie = BookieId("b1-3f2a9c")
    assert paths.available(bookie) == "/ledgers/available/b1-3f2a9c"
    assert paths.readonly(bookie) == "/ledgers/available/readonly/b1-3f2a9c"
    assert paths.cookie(bookie) == "/ledgers/cookies/b1-3f2a9c"


def test_path_can_be_split_and_joined() -> None:
    assert paths.parent("/a/b") == "/a"
    assert paths.parent("/a") == "/"
    assert paths.join("/", "a") == "/a"
    assert paths.join("/a", "b") == "/a/b"
