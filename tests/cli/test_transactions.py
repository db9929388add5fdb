"""`kvstore partition intents` and `kvstore transaction abandon`, with servers that answer by the book."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.cli import intents, transactions
from kvstore.cli.cluster import ClusterOptions
from kvstore.errors import OutcomeUnknown, StoreError, Unavailable
from kvstore.proto import admin_pb2
from kvstore.proto.admin_pb2 import StandingDecision, StandingIntent, TransactionReplica
from tests.commands import kvstore

HELD = StandingIntent(key=b"\xffb", sequence=5, attempt="p3/7/1", home="p3", is_exclusive=True, age_s=45.04)
READ = StandingIntent(key=b"c", sequence=6, attempt="p3/7/2", home="p3", age_s=50)


class Cluster:
    """Three nodes; n3 does not answer. Both n1 and n2 have a replica of p1, and n2 leads it."""

    def __init__(self) -> None:
        self.replicas = {
            "n1": [TransactionReplica(partition="p1", sequence=90, intents=[HELD])],
            "n2": [TransactionReplica(partition="p1", is_leader=True, sequence=80, intents=[HELD, READ])],
        }
        self.asked: list[tuple[str, str, str]] = []
        self.forced: list[bool] = []
        self.silent: dict[str, StoreError] = {"n3": Unavailable("n3 refuses the connection")}

    def ask(self, cluster: ClusterOptions, work: Callable[[Any, float], Any]) -> Any:
        server = cluster.server or ""
        if server in self.silent:
            raise self.silent[server]

        def standing(request: Any, timeout: float) -> Any:
            return admin_pb2.TransactionsResponse(replicas=self.replicas.get(server, []))

        def abandon(request: Any, timeout: float) -> Any:
            self.asked.append((server, request.home, request.attempt))
            self.forced.append(request.force)
            own = [each for replica in self.replicas.get(server, []) if replica.is_leader for each in replica.intents]
            return admin_pb2.AbandonTransactionsResponse(intents=own)

        return work(SimpleNamespace(Transactions=standing, AbandonTransactions=abandon), 1.0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    nodes = {"n1": "n1", "n2": "n2", "n3": "n3", "n4": ""}
    for module in (intents, transactions):
        monkeypatch.setattr(module, "addresses_of", lambda cluster: nodes)
        monkeypatch.setattr(module, "ask_admin", found.ask)
    return found


def test_intents_are_listed_as_the_leader_has_them_oldest_first(cluster: Cluster) -> None:
    done = kvstore("partition", "intents", "--json")
    assert [(each["attempt"], each["what"], each["age_s"]) for each in json.loads(done.stdout)] == [
        ("p3/7/2", "shared intent", 50.0),
        ("p3/7/1", "exclusive intent", 45.0),
    ]
    assert [each.get("key_base64", each.get("key")) for each in json.loads(done.stdout)] == ["c", "/2I="]
    assert "n3 does not show its transactions: n3 refuses" in done.stderr
    assert "n4 does not show its transactions: it is not up" in done.stderr
    assert r"\xffb" in kvstore("partition", "intents", "p1").stdout


def test_intents_of_a_quiet_cluster_are_none(cluster: Cluster) -> None:
    assert kvstore("partition", "intents", "p9").stdout == "no transaction is under way\n"


def test_decisions_are_listed_with_the_number_of_their_intents(cluster: Cluster) -> None:
    decision = StandingDecision(home_key=b"h", sequence=3, attempt="p3/7/1", age_s=60, keys=[b"a", b"b"])
    cluster.replicas["n1"].append(TransactionReplica(partition="p3", decisions=[decision]))
    (row,) = json.loads(kvstore("partition", "intents", "p3", "--json").stdout)
    assert (row["what"], row["key"], row["home"], row["leader"]) == ("decision for 2 intents", "h", "p3", False)


def test_abandon_asks_every_server_that_is_up(cluster: Cluster) -> None:
    done = kvstore("transaction", "abandon", "p3", "--yes", "--json")
    assert done.returncode != 0, "n3 may lead a partition with such intents"
    assert cluster.asked == [("n1", "p3", ""), ("n2", "p3", "")]
    assert cluster.forced == [False, False]
    kvstore("transaction", "abandon", "p3", "--yes", "--force")
    assert cluster.forced[2:] == [True, True]


@pytest.mark.parametrize("error", [Unavailable("n1 refuses the connection"), OutcomeUnknown("n1 did not answer")])
def test_abandon_continues_behind_a_silent_node(cluster: Cluster, error: StoreError) -> None:
    cluster.silent = {"n1": error}
    done = kvstore("transaction", "abandon", "p3", "--yes", "--json")
    assert cluster.asked == [("n2", "p3", ""), ("n3", "p3", "")]
    found = json.loads(done.stdout)
    assert ([each["attempt"] for each in found["abandoned"]], found["silent"]) == (["p3/7/1", "p3/7/2"], ["n1"])
    assert f"n1 does not abandon its transactions: {error}" in done.stderr
    assert done.returncode != 0, "n1 may lead a partition with such intents"
    assert "got no answer from n1" in done.stderr


def test_abandon_names_what_it_has_aborted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "addresses_of", lambda place: {"n1": "n1", "n2": "n2"})
    done = kvstore("transaction", "abandon", "p3", "--yes")
    assert done.stdout == "aborted 2 transactions of p3; freed 2 keys\n"


def test_abandon_asks_before_it_loses_data(cluster: Cluster) -> None:
    done = kvstore("transaction", "abandon", "p3")
    assert done.returncode != 0
    assert "lose their parts in other partitions if p3 has committed them" in " ".join(done.stderr.split())
    assert cluster.asked == []


def test_abandon_is_refused_for_what_a_replica_of_the_home_has_committed(cluster: Cluster) -> None:
    cluster.replicas["n1"].append(TransactionReplica(partition="p3", decisions=[StandingDecision(attempt="p3/7/1")]))
    done = kvstore("transaction", "abandon", "p3", "--yes")
    assert "a replica of p3 has decided to commit p3/7/1" in done.stderr
    assert cluster.asked == []
    kvstore("transaction", "abandon", "p3", "--attempt", "p3/7/2", "--yes")
    assert ("n2", "p3", "p3/7/2") in cluster.asked
