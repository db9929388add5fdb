"""Transactions over several partitions on real processes: commits, conflicts, retries, deaths of leaders between two
steps, and nodes of different versions (docs/protocol.md Tx1 to Tx14)."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from kvstore import versions
from kvstore.client import AsyncClient
from kvstore.devcluster.layout import NodePlace
from tests.beside import beside
from tests.cluster.harness import Cluster, running_cluster

pytestmark = [pytest.mark.cluster]

GONE = (OSError, HTTPException)
LOOK_MS = 300
"""Timeout of a read that finds out whether an intent is on its key."""
OLDER = versions.LATEST - 1
OLDER_BUILD = f"""
import sys
from kvstore import versions

versions.LATEST = {OLDER}
versions.LINK_LATEST = versions.link_version({OLDER})
from kvstore.cli.main import main

sys.exit(main())
"""
"""The code of a node that supports no newer cluster version than OLDER."""


class Answer(NamedTuple):
    status: int
    body: Any
    token: str

    @property
    def reason(self) -> str:
        """The name of the error; empty if the request was carried out."""
        return "" if self.status == 200 else str(self.body["reason"])


class Calls:
    """Requests to the HTTP gateway of a cluster's nodes, each sent once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._ids = count(1)

    def ask(
        self, node: str, method: str, target: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send one request. Raises one of GONE."""
        connection = HTTPConnection(*self.cluster.address(node, "http"), timeout=60)
        try:
            sent = {"Accept": "application/json", "Content-Type": "application/json", **(headers or {})}
            connection.request(method, target, None if body is None else orjson.dumps(body), sent)
            answer = connection.getresponse()
            return Answer(answer.status, orjson.loads(answer.read()), answer.headers.get("Kvstore-Token", ""))
        finally:
            connection.close()

    def request_id(self) -> str:
        """Return a new request id, as the header has it."""
        state = self.ask("n1", "GET", "/v1/cluster").body
        seen = max(each["time_ms"] for each in state["partitions"])
        return f"client={next(self._ids):032x}; sequence=1; seen={seen}"

    def transact(self, node: str, *steps: Mapping[str, Any], request: str = "", timeout_ms: int = 10_000) -> Answer:
        """Send a transaction once. Raises one of GONE."""
        headers = {"Kvstore-Request": request} if request else {}
        return self.ask(node, "POST", f"/v1/transaction?timeout_ms={timeout_ms}", {"operations": list(steps)}, headers)

    def carry_out(self, nodes: list[str], *steps: Mapping[str, Any], request: str) -> Answer:
        """Send a transaction under one request id to these nodes in turn, until it is carried out."""
        done: list[Answer] = []
        turns = count()

        def is_done() -> bool:
            try:
                answer = self.transact(nodes[next(turns) % len(nodes)], *steps, request=request, timeout_ms=3_000)
            except GONE:
                return False
            done.append(answer)
            return answer.status == 200

        self.cluster.wait_until(is_done, "the transaction is carried out")
        return done[-1]

    def value(self, key: str, *, node: str = "n1", level: str = "linearizable", token: str = "") -> str | None:
        """Return the value of a key, None if it is absent. Raises AssertionError for any other answer."""
        found = self.ask(
            node, "GET", f"/v1/keys/{key}?level={level}", headers={"Kvstore-Token": token} if token else {}
        )
        assert found.status in (200, 404), found
        return found.body["value"] if found.status == 200 else None

    def is_held(self, key: str, node: str) -> bool:
        """Return True if a linearizable read of the key at its leader waits, because an intent is on it."""
        try:
            found = self.ask(node, "GET", f"/v1/keys/{key}?timeout_ms={LOOK_MS}")
        except GONE:
            return False
        return found.status not in (200, 404)


class Places(NamedTuple):
    """Three partitions with three leaders, and one new key in each."""

    leaders: tuple[str, str, str]
    keys: tuple[str, str, str]

    @property
    def home(self) -> str:
        """The leader of the first key, which decides."""
        return self.leaders[0]

    def put(self, value: str) -> list[dict[str, Any]]:
        return [{"operation": "put", "key": key, "value": value} for key in self.keys]

    def increment(self) -> list[dict[str, Any]]:
        return [{"operation": "increment", "key": key, "delta": 1} for key in self.keys]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("transactions")) as started:
        yield started


@pytest.fixture
def calls(cluster: Cluster) -> Calls:
    for node in cluster.ids:
        if not cluster.is_running(node):
            cluster.start_node(node)
    cluster.wait_ready()
    cluster.wait_until(lambda: log_versions(cluster) == {versions.LATEST}, "the version rises")
    return Calls(cluster)


def log_versions(cluster: Cluster) -> set[Any]:
    """Return the cluster versions that the replicas' logs are written in."""
    return {each["log_version"] for node in cluster.ids for each in cluster.status(node)["partitions"].values()}


@pytest.fixture
async def places(calls: Calls) -> Places:
    return await places_of(calls.cluster)


names = count()


async def places_of(cluster: Cluster) -> Places:
    leaders: dict[str, str] = {}

    def are_apart() -> bool:
        leaders.update(cluster.leaders())
        return len(leaders) == len(set(leaders.values())) == 3

    cluster.wait_until(are_apart, "each partition has a leader of its own")  # leads return after a restart
    async with AsyncClient(cluster.url) as client:
        keys: dict[str, str] = {}
        while len(keys) < 3:
            key = f"key-{next(names)}"
            keys.setdefault(client.cluster.partition_of(key.encode()), key)
    order = sorted(leaders)
    one, two, three = ((leaders[each], keys[each]) for each in order)
    return Places((one[0], two[0], three[0]), (one[1], two[1], three[1]))


@contextmanager
def under_way(calls: Calls, places: Places, *steps: Mapping[str, Any], request: str) -> Iterator[None]:
    """Stop the last leader, and let a transaction wait for it again and again until the end of the block. The block
    begins when its intent is in the second partition."""

    def repeat(over: threading.Event) -> None:
        while not over.wait(0.01):
            with suppress(*GONE):
                calls.transact(places.home, *steps, request=request, timeout_ms=3_000)

    calls.cluster.pause(places.leaders[2])
    with beside(repeat):
        try:
            calls.cluster.wait_until(
                lambda: calls.is_held(places.keys[1], places.leaders[1]), "an intent holds the key"
            )
            yield
        finally:
            if calls.cluster.is_running(places.leaders[2]):
                calls.cluster.resume(places.leaders[2])


def test_transaction_over_partitions_is_seen_whole_at_every_node(calls: Calls, places: Places) -> None:
    assert [calls.value(key) for key in places.keys] == [None] * 3
    answer = calls.transact("n2", *places.put("1"))
    assert answer.status == 200, answer
    assert len(answer.body["positions"]) == 3
    assert all(each["version"] > 0 for each in answer.body["results"])
    for node in calls.cluster.ids:
        assert [calls.value(key, node=node) for key in places.keys] == ["1"] * 3


def test_session_reads_at_every_replica_see_an_own_commit(calls: Calls, places: Places) -> None:
    for number in range(10):
        answer = calls.transact(places.home, *places.put(str(number)))
        assert answer.status == 200, answer
        for node in calls.cluster.ids:
            found = [calls.value(key, node=node, level="session", token=answer.token) for key in places.keys]
            assert found == [str(number)] * 3


def test_failed_condition_in_one_partition_changes_no_other(calls: Calls, places: Places) -> None:
    assert calls.transact("n1", *places.put("1")).status == 200
    check = {"operation": "check", "key": places.keys[2], "if_absent": True}
    answer = calls.transact("n1", *places.put("2")[:2], check)
    assert (answer.status, answer.reason, answer.body["outcome"]) == (412, "CONDITION_FAILED", "refused")
    assert answer.body["key"] == places.keys[2]
    assert [calls.value(key) for key in places.keys] == ["1"] * 3
    calls.carry_out(["n1"], *places.put("3"), request=calls.request_id())  # nothing is held for long


def test_retry_with_one_request_id_is_carried_out_once(calls: Calls, places: Places) -> None:
    request = calls.request_id()
    first = calls.transact("n1", *places.increment(), request=request)
    again = [calls.transact(node, *places.increment(), request=request) for node in calls.cluster.ids]
    assert first.status == 200, first
    assert [each.body for each in again] == [first.body] * 3
    assert [calls.value(key) for key in places.keys] == ["1"] * 3


def test_transaction_that_names_a_version_meets_conflict_at_an_intent(calls: Calls, places: Places) -> None:
    """Other transactions wait for the intent."""
    other = {"operation": "put", "key": f"{{{places.keys[0]}}}-other", "value": "2"}
    named = {**places.put("2")[1], "if_absent": True}
    request = calls.request_id()
    with under_way(calls, places, *places.put("1"), request=request):
        met = calls.transact(places.home, other, named)
        assert (met.status, met.reason, met.body["outcome"]) == (409, "CONFLICT", "refused")
        assert calls.value(places.keys[1], node=places.leaders[1], level="stale") is None, "not yet decided"
        waits = calls.transact(places.home, other, places.put("2")[1])
        assert waits.status == 200 or waits.reason == "CONFLICT", waits
    calls.carry_out(calls.cluster.ids, *places.put("1"), request=request)
    assert calls.value(places.keys[0]) == calls.value(places.keys[2]) == "1"
    assert calls.value(places.keys[1]) in ("1", "2")


def test_read_transactions_see_a_constant_sum_during_transfers(calls: Calls, places: Places) -> None:
    assert calls.transact("n1", *places.put("100")).status == 200
    moved, sums = count(), list[int]()

    def transfer(over: threading.Event) -> None:
        while not over.wait(0.01):
            source, target = places.keys[next(moved) % 3], places.keys[(next(moved) + 1) % 3]
            if source != target:
                calls.transact(
                    "n2",
                    {"operation": "increment", "key": source, "delta": -7},
                    {"operation": "increment", "key": target, "delta": 7},
                )

    def are_enough() -> bool:
        found = calls.transact("n1", *({"operation": "get", "key": key} for key in places.keys))
        if found.status == 200:
            sums.append(sum(int(each["item"]["value"]) for each in found.body["results"]))
        return len(sums) >= 50

    with beside(transfer):
        calls.cluster.wait_until(are_enough, "50 read transactions")
    assert set(sums) == {300}
    assert next(moved) > 2


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_transaction_is_carried_out_once_when_a_leader_is_killed(calls: Calls, places: Places, victim: int) -> None:
    """The home's leader dies while it waits for a participant, or one of the participants' leaders does."""
    request, later = calls.request_id(), calls.request_id()
    with under_way(calls, places, *places.increment(), request=request):
        calls.cluster.kill(places.leaders[victim])
    others = [each for each in calls.cluster.ids if each != places.leaders[victim]]
    calls.carry_out(others, *places.increment(), request=request)
    calls.cluster.start_node(places.leaders[victim])
    assert [calls.value(key, node=others[0]) for key in places.keys] == ["1"] * 3
    calls.carry_out(others[1:], *places.put("free"), request=later)  # nothing is held for long


def test_intents_that_stand_when_all_nodes_are_killed_are_resolved(calls: Calls, places: Places) -> None:
    request = calls.request_id()
    with under_way(calls, places, *places.increment(), request=request):
        calls.cluster.kill_everything()
    calls.cluster.start()
    calls.cluster.wait_ready()
    found = {calls.value(key) for key in places.keys}
    assert found in ({None}, {"1"}), "all or nothing"
    calls.carry_out(calls.cluster.ids, *places.increment(), request=request)
    assert [calls.value(key) for key in places.keys] == ["1"] * 3


class Versioned:
    """Commands of nodes, of which some support no newer version than OLDER."""

    def __init__(self, cluster: Cluster) -> None:
        self.older = {"n3"}
        self._command: Callable[[NodePlace], list[str]] = cluster.local._command
        cluster.local._command = self._command_of  # type: ignore[method-assign]

    def _command_of(self, node: NodePlace) -> list[str]:
        command = self._command(node)
        _, _, _, *words = command  # python -m kvstore
        return [sys.executable, "-c", OLDER_BUILD, *words] if node.id in self.older else command


# docs/protocol.md V1, V4
async def test_mixed_cluster_refuses_transactions_until_its_version_rises(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    versioned = Versioned(cluster)
    calls = Calls(cluster)

    try:
        await asyncio.to_thread(cluster.start)
        cluster.wait_until(lambda: log_versions(cluster) == {OLDER}, "the version rises as far as all nodes support")
        places = await places_of(cluster)
        for node in cluster.ids:
            answer = calls.transact(node, *places.put("1"), timeout_ms=3_000)
            assert (answer.reason, answer.body["outcome"]) == ("NOT_YET_RAISED", "refused"), answer
        assert [calls.value(key) for key in places.keys] == [None] * 3
        for key in places.keys:
            assert calls.ask("n1", "PUT", f"/v1/keys/{key}", {"value": "0"}).status == 200
        tagged = [{"operation": "put", "key": f"{{{places.keys[0]}}}{each}", "value": "1"} for each in "ab"]
        assert calls.ask("n2", "POST", "/v1/batch", {"operations": tagged}).status == 200
        assert log_versions(cluster) == {OLDER}
        versioned.older.clear()
        cluster.terminate("n3")
        cluster.start_node("n3")
        cluster.wait_ready()
        cluster.wait_until(lambda: log_versions(cluster) == {versions.LATEST}, "the version rises")
        assert calls.transact("n3", *places.put("1")).status == 200
        assert [calls.value(key) for key in places.keys] == ["1"] * 3
    finally:
        cluster.end()
