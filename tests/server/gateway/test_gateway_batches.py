"""Batches and scans over HTTP."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest

from kvstore.errors import Conflict, Overloaded
from kvstore.partition.state.commands import Code, Flag, Scan
from kvstore.partition.state.traits import INTERNAL
from kvstore.server.gateway import gateway, routes
from kvstore.server.routing import scan_slots
from kvstore.types import PartitionId
from tests.server.gateway.world import World


def operation(name: str, key: str = "{t}a", **fields: Any) -> dict[str, Any]:
    return {"operation": name, "key": key, **fields}


async def test_batch_is_applied_whole_and_answers_each_operation(world: World) -> None:
    answer = await world.batch(
        operation("put", value="7", if_absent=True),
        operation("increment", delta=-9),
        operation("increment", "{t}b"),
        operation("get"),
        {"operation": "append", "key_base64": base64.b64encode(b"{t}\xff").decode(), "value_base64": "/w=="},
        operation("meta", "{t}b"),
        operation("expire", "{t}b", ttl_ms=60_000),
        operation("put", "{t}c", value="1", return_old=True),
        operation("delete", "{t}c", return_old=True, if_present=True),
        operation("delete", "{t}nothing"),
        operation("get", "{t}nothing"),
        operation("check", if_version=2),
    )
    assert answer.status == 200, answer.body
    results = answer.json["results"]
    assert results[:3] == [{"version": 1}, {"value": -2, "version": 2}, {"value": 1, "version": 3}]
    assert (results[3]["item"]["key"], results[3]["item"]["value"]) == ("{t}a", "-2")
    assert results[4] == {"length": 1, "version": 4}
    assert (results[5]["item"]["length"], "value" in results[5]["item"]) == (1, False)
    assert results[6] == {"changed": True}
    assert (results[7]["applied"], "old" in results[7], results[8]["old"]["value"]) == (True, False, "1")
    assert results[9:] == [{"sequence": 0}, {"item": None}, {"version": 2}]
    assert answer.headers["Kvstore-Token"]


async def test_unmet_condition_undoes_the_batch_or_its_own_operation(world: World) -> None:
    parts = (operation("put", value="1"), operation("put", "{t}b", value="2", if_present=True))
    whole = await world.batch(*parts)
    assert (whole.status, whole.json["reason"]) == (412, "CONDITION_FAILED")
    assert (await world.ask("GET", "/v1/keys/{t}a")).status == 404
    each = await world.batch(*parts, independent=True)
    assert (each.status, each.json["results"][0]) == (200, {"version": 1})
    failure = each.json["results"][1]["failure"]
    assert (failure["code"], failure["reason"], failure["version"]) == (412, "CONDITION_FAILED", 0)


async def test_batch_over_two_partitions_is_refused_with_both_names(world: World) -> None:
    ring = world.backend.topology.ring
    keys = [next(k for n in range(99) if ring.partition_of((k := f"k{n}").encode()) == p) for p in ("p1", "p2")]
    answer = await world.batch(*(operation("put", key, value="v") for key in keys))
    assert (answer.status, "p1 and p2" in answer.json["message"]) == (400, True)
    assert world.backend.submitted == []


# docs/protocol.md P16
async def test_retried_batch_is_applied_once(world: World) -> None:
    await world.batch(operation("increment"))
    data, id_ = orjson.dumps({"operations": [operation("increment")]}), world.request_id(1)
    for _ in range(2):
        answer = await world.ask("POST", "/v1/batch", data, Content_Type="application/json", Kvstore_Request=id_)
        assert answer.json["results"] == [{"value": 2, "version": 2}]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"operation": "scan", "key": "k"}, "operation"),
        ({"operation": "get"}, "key or key_base64, got neither"),
        ({"operation": "get", "key": "k", "key_base64": "aw=="}, "got both"),
        ({"operation": "get", "key": ""}, "at least 1 byte"),
        ({"operation": "get", "key": "k" * 4097}, "4096"),
        (
            {"operation": "get", "key": "k", "value": "v"},
            "of get in a batch (key, key_base64, operation), got also value",
        ),
        ({"operation": "put", "key": "k"}, "value or value_base64, got neither"),
        ({"operation": "put", "key": "k", "value": "v", "ttl": 1}, "ttl"),
        ({"operation": "put", "key": "k", "value": "v", "ttl_ms": "1"}, "$.operations[0].ttl_ms"),
        ({"operation": "put", "key": "k", "value": "v", "ttl_ms": 1, "expires_ms": 2}, "expected one of"),
        ({"operation": "put", "key": "k", "value": "v", "if_absent": True, "if_version": 1}, "expected one of"),
        ({"operation": "put", "key": "k", "value": "v", "if_version": 0}, "if_version"),
        ({"operation": "expire", "key": "k"}, "got neither"),
        ({"operation": "check", "key": "k"}, "got none"),
        ({"operation": "increment", "key": "k", "delta": 1 << 63}, "delta"),
        ({"operation": "increment", "key": "k", "delta": 1.5}, "delta"),
    ],
)
async def test_malformed_batch_is_refused_with_the_place(world: World, part: dict[str, Any], said: str) -> None:
    answer = await world.batch(part)
    assert (answer.status, answer.json["reason"]) == (400, "INVALID_REQUEST")
    assert said in answer.json["message"]
    assert world.backend.submitted == []


# docs/protocol.md Tx1
@pytest.mark.parametrize("code", sorted(INTERNAL))
async def test_operation_of_leaders_is_refused(world: World, code: int) -> None:
    for name in (code, Code(code).name, Code(code).name.lower()):
        for path in ("/v1/batch", "/v1/transaction"):
            answer = await world.batch(operation("put", value="v"), {"operation": name, "key": "{t}a"}, path=path)
            assert (answer.status, answer.json["reason"]) == (400, "INVALID_REQUEST")
    assert world.backend.submitted == []


async def test_batch_must_be_json_and_not_empty(world: World) -> None:
    answer = await world.ask("POST", "/v1/batch", b"{}", Content_Type="text/plain")
    assert (answer.status, "application/json" in answer.json["message"]) == (415, True)
    assert (await world.batch()).status == 400


async def test_response_larger_than_a_message_is_not_a_refusal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MESSAGE_BYTES_MAX", 300)
    await world.ask("PUT", "/v1/keys/k", b"v" * 200)
    answer = await world.batch(operation("get", "k"))
    assert (answer.status, answer.json["reason"], answer.json["outcome"]) == (504, "OUTCOME_UNKNOWN", "unknown")


async def test_reads_of_batches_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise Overloaded("full")

    monkeypatch.setattr(world.gateway._batches, "sink", full)
    answer = await world.batch(operation("get", "k"))
    assert (answer.status, answer.json["reason"]) == (429, "OVERLOADED")
    answer = await world.ask("DELETE", "/v1/keys/k?return_old=true")
    assert (answer.status, answer.json["reason"]) == (429, "OVERLOADED"), "as may single writes"


# ── scans ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def filled(world: World, *keys: str) -> None:
    for key in keys:
        assert (await world.ask("PUT", f"/v1/keys/{key}", f"of {key}".encode())).status == 200


async def scanned(world: World, query: str) -> list[Any]:
    """Return the items of all pages."""
    found: list[Any] = []
    cursor = ""
    for _ in range(100):
        page = await world.ask("GET", f"/v1/keys?{query}{cursor}")
        assert page.status == 200, page.body
        found += page.json["items"]
        if "next" not in page.json:
            return found
        cursor = f"&cursor={page.json['next']}"
    raise AssertionError("the scan does not end")


async def test_scan_returns_each_key_once_in_order_for_any_page_size(world: World) -> None:
    keys = sorted([f"a{number:02}" for number in range(25)])
    await filled(world, *keys, "b", "%FF", "%FF%00")
    for limit in (1, 3, 7, 1000):
        found = await scanned(world, f"prefix=a&limit={limit}")
        assert [(each["key"], each["value"]) for each in found] == [(key, f"of {key}") for key in keys]
    found = await scanned(world, "start=a24&limit=2")
    assert [each.get("key", each.get("key_base64")) for each in found] == ["a24", "b", "/w==", "/wA="]
    assert [each["key"] for each in await scanned(world, "start=a03&end=a05&limit=1")] == ["a03", "a04"]
    assert [each["key_base64"] for each in await scanned(world, "prefix=%FF&encoding=base64")] == ["/w==", "/wA="]
    assert await scanned(world, "prefix=nothing") == []


async def test_keys_only_scan_omits_the_values(world: World) -> None:
    await filled(world, "a", "b")
    found = await scanned(world, "keys_only=true&level=strict&limit=1")
    assert [(each["key"], "value" in each) for each in found] == [("a", False), ("b", False)]
    scans = [op for op in world.backend.submitted if isinstance(op, Scan)]
    assert {op.flags for op in scans} == {Flag.KEYS_ONLY}
    assert {op.level for op in scans} == {routes.LEVELS.index("strict")}


async def test_page_ends_early_when_it_is_large(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await filled(world, "a", "b", "c")
    monkeypatch.setattr(gateway, "MESSAGE_BYTES", 1)
    monkeypatch.setattr("kvstore.server.grpc.scan.MESSAGE_BYTES", 1)
    page = (await world.ask("GET", "/v1/keys?limit=1000")).json
    assert len(page["items"]) == 1
    assert [each["key"] for each in await scanned(world, "limit=1000")] == ["a", "b", "c"]


async def test_scan_waits_for_a_slot(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_slots, "SCANS_MAX", 0)
    monkeypatch.setattr(scan_slots, "WAIT_S", 0.0)
    answer = await world.ask("GET", "/v1/keys")
    assert (answer.status, answer.json["reason"]) == (429, "OVERLOADED")


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "prefix=a&start=b", "cursor=%2B", "cursor=abc%3D%3D%3D", "cursor=a", "keys_only=yes",
     "level=fresh", f"start={'k' * 4098}", "prefix", "key=a"],
)  # fmt: skip
async def test_malformed_scan_is_refused(world: World, query: str) -> None:
    answer = await world.ask("GET", f"/v1/keys?{query}")
    assert answer.status == (200 if query == "prefix" else 400), answer.body


async def test_cluster_route_reports_leaders_and_times(world: World) -> None:
    await world.ask("PUT", "/v1/keys/k", b"v")
    found = (await world.ask("GET", "/v1/cluster")).json
    assert (found["server"], found["ring_version"]) == ("n1", world.backend.topology.ring.routed)
    assert [each["id"] for each in found["partitions"]] == ["p1", "p2", "p3"]
    owner = world.backend.topology.ring.partition_of(b"k")
    state = next(each for each in found["partitions"] if each["id"] == owner)
    assert (state["sequence"], state["time_ms"] > 0) == (1, True)
    assert PartitionId(owner) in world.backend.partitions


# ── transactions ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_transaction_answers_each_operation_and_its_positions(world: World) -> None:
    parts = (operation("check", if_absent=True), operation("put", value="7"), operation("get"))
    answer = await world.batch(*parts, path="/v1/transaction")
    assert answer.status == 200, answer.body
    owner = world.backend.topology.ring.partition_of(b"{t}a")
    assert answer.json["results"][:2] == [{"version": 0}, {"version": 1}]
    assert answer.json["positions"] == {owner: 1}
    assert f"{owner}=1" in answer.headers["Kvstore-Token"]


async def test_transaction_whose_condition_is_unmet_names_the_key(world: World) -> None:
    parts = (operation("put", value="1"), operation("check", "{t}b", if_present=True))
    answer = await world.batch(*parts, path="/v1/transaction")
    assert (answer.status, answer.json["reason"], answer.json["version"]) == (412, "CONDITION_FAILED", 0)
    assert answer.json["key"] == "{t}b"
    assert (await world.ask("GET", "/v1/keys/{t}a")).status == 404


async def test_transaction_that_reads_several_partitions_returns_their_token(world: World) -> None:
    for number in range(9):
        await world.ask("PUT", f"/v1/keys/k{number}", b"%d" % number)
    answer = await world.batch(*(operation("get", f"k{number}") for number in range(9)), path="/v1/transaction")
    assert [each["item"]["value"] for each in answer.json["results"]] == list("012345678")
    assert answer.json["positions"].keys() == {"p1", "p2", "p3"}
    assert all(
        f"{name}={number}" in answer.headers["Kvstore-Token"] for name, number in answer.json["positions"].items()
    )


# docs/protocol.md Tx1
async def test_transaction_over_partitions_with_a_lock_is_refused(world: World) -> None:
    owner = world.backend.topology.ring.partition_of(b"{a}/lock/l/1")
    other = next(key for n in range(99) if world.backend.topology.ring.partition_of((key := f"k{n}").encode()) != owner)
    parts = (operation("put", other, value="1"), operation("check", "{a}/lock/l/1", if_present=True))
    answer = await world.batch(*parts, path="/v1/transaction")
    assert (answer.status, answer.json["reason"]) == (400, "INVALID_REQUEST")
    assert "expected no key of a session, lock," in answer.json["message"]


async def test_conflict_is_409_and_may_be_retried(world: World) -> None:
    world.backend.failure = Conflict("another transaction holds b'k'")
    answer = await world.batch(operation("put", value="1"), path="/v1/transaction")
    assert (answer.status, answer.json["reason"], answer.json["outcome"]) == (409, "CONFLICT", "refused")
    assert answer.headers["Retry-After"] == "1"
