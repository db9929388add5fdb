"""Ranges over HTTP: their number of keys, their deletion in parts, and cursors of another range."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.access import AddRole, AddUser, GrantRight, GrantRole, RevokeRole, Right
from kvstore.client.core.scanning import Bounds
from kvstore.errors import OutcomeUnknown, Overloaded
from kvstore.partition.state.commands import Code, Level, Op, Sink
from kvstore.proto.page_token import PageToken
from kvstore.server.gateway import ranges
from kvstore.server.grpc.scan import RING
from kvstore.server.routing import scan_slots
from kvstore.types import PartitionId
from tests.server.access.tables import HASH, table
from tests.server.gateway.world import World, gateway_world
from tests.server.grpc.test_scan import KEYS, P1, P2, Partitions


async def filled(world: World, *keys: str) -> None:
    for key in keys:
        assert (await world.ask("PUT", f"/v1/keys/{key}", b"v")).status == 200


async def count(world: World, query: str = "") -> int:
    answer = await world.ask("GET", f"/v1/count{query}")
    assert answer.status == 200, answer.body
    return int(answer.json["count"])


async def deleted(world: World, query: str) -> list[int]:
    """Return the number of keys that each request has deleted."""
    found, cursor = list[int](), ""
    for _ in range(100):
        part = await world.ask("DELETE", f"/v1/keys?{query}{cursor}")
        assert part.status == 200, part.body
        found.append(part.json["deleted"])
        if "next" not in part.json:
            return found
        cursor = f"&cursor={part.json['next']}"
    raise AssertionError("the deletion does not end")


async def test_range_is_counted_over_all_partitions(world: World) -> None:
    await filled(world, *(f"a{number:02}" for number in range(25)), "b", "%FF", "%FF%00")
    assert await count(world) == 28
    assert await count(world, "?prefix=a") == 25
    assert await count(world, "?start=a03&end=a05") == await count(world, "?prefix=%FF") == 2
    assert await count(world, "?start=b&level=strict") == 3
    assert await count(world, "?prefix=nothing") == 0
    assert not [op for op in world.backend.submitted if op.code == Code.SCAN], "no record is read for it"
    assert (await world.ask("GET", "/v1/count?prefix=a&start=b")).status == 400
    assert (await world.ask("GET", "/v1/count?limit=3")).status == 400


class Counted(Partitions):
    """Two partitions that are asked for their number of keys."""

    async def ask(self, op: Op, partition: PartitionId, ring_version: int) -> Any:
        items, following = await super().ask(op, partition, ring_version)
        self.asked_by.append(ring_version)
        return len(items), following

    def __init__(self) -> None:
        super().__init__()
        self.asked_by: list[int] = []


# docs/protocol.md M16
@pytest.mark.parametrize("level", [Level.LINEARIZABLE, Level.SESSION])
async def test_count_uses_the_later_ring_of_its_client(level: Level) -> None:
    """By the ring known here, keys that the client has written may be in a partition that is not asked."""
    partitions = Counted()
    partitions.held = {P1: KEYS[1:], P2: KEYS[:1]}
    known = partitions.ring.routed
    bounds, backend = Bounds(b"", b""), cast("Any", partitions)
    assert await ranges.count_range(backend, partitions.ask, bounds, level, {RING: known + 1}) == len(KEYS)
    assert partitions.ring.routed == known + 1
    assert await ranges.count_range(backend, partitions.ask, bounds, level, {RING: known}) == len(KEYS)
    assert partitions.asked_by == [0] * 4, "and nobody is asked by a ring that is not later than the server's"


async def test_count_waits_for_a_slot(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_slots, "SCANS_MAX", 0)
    monkeypatch.setattr(scan_slots, "WAIT_S", 0.0)
    for method, target in (("GET", "/v1/count"), ("DELETE", "/v1/keys?prefix=a")):
        answer = await world.ask(method, target)
        assert (answer.status, answer.json["reason"]) == (429, "OVERLOADED")


async def test_range_deletion_leaves_other_keys(world: World) -> None:
    await filled(world, *(f"a{number:02}" for number in range(25)), "a", "b", "%FF", "%FF%00", "Z")
    assert await deleted(world, "prefix=a0") == [10]
    assert await deleted(world, "start=a10&end=a12") == [2]
    assert await deleted(world, "prefix=a0") == [0], "again is no error"
    assert await deleted(world, "prefix=%FF") == [2]
    assert await count(world) == 16
    assert await deleted(world, "start=a") == [15]
    assert [each["key"] for each in (await world.ask("GET", "/v1/keys")).json["items"]] == ["Z"]


async def test_deletion_continues_at_its_cursor(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await filled(world, *(f"a{number:02}" for number in range(7)), "b")
    assert await deleted(world, "prefix=a&limit=3") == [3, 3, 1]
    await filled(world, *(f"a{number:02}" for number in range(7)))
    monkeypatch.setattr(ranges, "AT_ONCE", 2)
    first = (await world.ask("DELETE", "/v1/keys?prefix=a&timeout_ms=10000&limit=7")).json
    assert first == {"deleted": 7}
    await filled(world, *(f"a{number:02}" for number in range(7)))
    monkeypatch.setattr("kvstore.server.gateway.gateway.delete_range", over_at_once)
    assert await deleted(world, "prefix=a") == [2, 2, 2, 1], "as far as the time reaches"
    assert await count(world) == 1


async def over_at_once(*words: Any, until: float, **more: Any) -> Any:
    """A deletion whose time is over when it begins."""
    return await ranges.delete_range(*words, until=0.0, **more)


@pytest.mark.parametrize(
    "query",
    ["", "limit=5", "prefix=", "limit=0&prefix=a", "limit=10001&prefix=a", "prefix=a&start=b", "prefix=a&key=b",
     "level=stale&prefix=a", "prefix=a&cursor=x"],
)  # fmt: skip
async def test_deletion_without_or_with_malformed_range_deletes_nothing(world: World, query: str) -> None:
    await filled(world, "a")
    answer = await world.ask("DELETE", f"/v1/keys?{query}")
    assert (answer.status, answer.json["reason"], answer.json["outcome"]) == (400, "INVALID_REQUEST", "refused")
    assert await count(world) == 1


@pytest.mark.parametrize("header", ["If-Match", "Kvstore-Request"])
async def test_deletion_of_a_range_refuses_conditions(world: World, header: str) -> None:
    await filled(world, "a")
    answer = await world.ask("DELETE", "/v1/keys?prefix=a", **{header: '"1"'})
    assert (answer.status, await count(world)) == (400, 1)


async def test_begun_deletion_is_not_reported_as_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has deleted nothing is reported as refused."""
    await filled(world, "a1", "a2", "a3")
    monkeypatch.setattr(ranges, "AT_ONCE", 1)
    submit, done = world.backend.submit, 0

    def once(ops: Sequence[Op], sink: Sink, tokens: Sequence[int], *more: Any) -> None:
        nonlocal done
        for op, token in zip(ops, tokens, strict=True):
            done += op.code == Code.DELETE
            world.backend.failure = Overloaded("full") if done > 1 else None
            submit((op,), sink, (token,), *more)

    monkeypatch.setattr(world.backend, "submit", once)
    answer = await world.ask("DELETE", "/v1/keys?prefix=a")
    assert (answer.status, answer.json["outcome"]) == (504, "unknown")
    assert "1 keys were deleted, the rest were not: full" in answer.json["message"]
    answer = await world.ask("DELETE", "/v1/keys?prefix=a")
    assert (answer.status, answer.json["reason"], answer.json["outcome"]) == (429, "OVERLOADED", "refused")


async def test_refusal_does_not_hide_an_unknown_outcome_of_another_delete(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(world, "a1", "a2", "a3")
    submit, done = world.backend.submit, 0

    def by_turns(ops: Sequence[Op], sink: Sink, tokens: Sequence[int], *more: Any) -> None:
        nonlocal done
        for op, token in zip(ops, tokens, strict=True):
            done += op.code == Code.DELETE
            world.backend.failure = (None, Overloaded("full"), OutcomeUnknown("lost"), Overloaded("full"))[min(done, 3)]
            submit((op,), sink, (token,), *more)

    monkeypatch.setattr(world.backend, "submit", by_turns)
    answer = await world.ask("DELETE", "/v1/keys?prefix=a")
    assert (answer.status, answer.json["outcome"], answer.json["message"]) == (504, "unknown", "lost")


async def test_deletion_ends_when_its_right_is_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_world(tmp_path, table()) as world:
        for number in range(5):
            assert (await world.ask("PUT", f"/v1/keys/t/{number}", b"v", user="tenant")).status == 200
        monkeypatch.setattr(ranges, "AT_ONCE", 1)
        submit = world.backend.submit

        def revoking(ops: Sequence[Op], sink: Sink, tokens: Sequence[int], *more: Any) -> None:
            for op, token in zip(ops, tokens, strict=True):
                submit((op,), sink, (token,), *more)
                if op.code == Code.DELETE:
                    world.access.take(table(RevokeRole("tenant", "owns")))

        monkeypatch.setattr(world.backend, "submit", revoking)
        answer = await world.ask("DELETE", "/v1/keys?prefix=t/", user="tenant")
        assert (answer.status, answer.json["outcome"]) == (504, "unknown")
        assert "1 keys were deleted, the rest were not" in answer.json["message"]
        assert [op.key for op in world.backend.submitted if op.code == Code.DELETE] == [b"t/0"]


async def test_deletion_needs_the_right_to_read_its_keys(tmp_path: Path) -> None:
    writes = (
        AddUser("blind", HASH),
        AddRole("writes"),
        GrantRight("writes", Right.WRITE),
        GrantRole("blind", "writes"),
    )
    async with gateway_world(tmp_path, table(*writes)) as world:
        assert (await world.ask("PUT", "/v1/keys/a", b"v", user="blind")).status == 200
        for user in ("blind", "reader", "nothing"):
            answer = await world.ask("DELETE", "/v1/keys?prefix=a", user=user)
            assert (answer.status, answer.json["reason"], answer.json["outcome"]) == (
                403,
                "PERMISSION_DENIED",
                "refused",
            ), user
        assert (await world.ask("GET", "/v1/count", user="reader")).json == {"count": 1}
        assert (await world.ask("GET", "/v1/count", user="blind")).status == 403
        assert (await world.ask("GET", "/v1/count")).status == 401


# ── cursors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize(
    ("query", "token"),
    [
        ("prefix=a", PageToken(b"b1", b"c")),  # another prefix: the scan would have ended
        ("start=a", PageToken(b"a1", b"b")),  # a cursor inside the range: the scan would end there
        ("start=a&end=z", PageToken(b"a1", b"")),
        ("start=b&end=c", PageToken(b"a1", b"c")),  # a cursor from before the range
        ("prefix=a", PageToken(b"a", b"a1", True)),  # a cursor of a backward scan
    ],
)
async def test_cursor_of_another_range_is_refused(world: World, method: str, query: str, token: PageToken) -> None:
    await filled(world, "a1", "b1", "c1")
    answer = await world.ask(method, f"/v1/keys?{query}&cursor={token.encode()}")
    assert (answer.status, answer.json["reason"]) == (400, "INVALID_REQUEST")
    assert await count(world) == 3


async def test_cursor_without_a_range_deletes_nothing(world: World) -> None:
    await filled(world, "a1", "a2", "b1")
    first = (await world.ask("GET", "/v1/keys?prefix=a&limit=1")).json
    rest = (await world.ask("GET", f"/v1/keys?cursor={first['next']}")).json
    assert [each["key"] for each in rest["items"]] == ["a2"]
    assert (await world.ask("DELETE", f"/v1/keys?cursor={first['next']}")).status == 400
    spoiled = first["next"][:-1] + ("A" if first["next"][-1] != "A" else "B")
    for cursor in (spoiled, "YTI", "%2B"):
        answer = await world.ask("GET", f"/v1/keys?prefix=a&cursor={cursor}")
        assert (answer.status, "expected a page token" in answer.json["message"]) == (400, True)
