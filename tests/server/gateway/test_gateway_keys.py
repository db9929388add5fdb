"""Single keys over HTTP: values and JSON, conditions, expiries, levels, tokens, request ids."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any
from urllib.parse import quote_from_bytes

import pytest
from multidict import CIMultiDict

from kvstore.errors import OutcomeUnknown, Overloaded, Unavailable
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.partition.state.commands import Code, Flag, Get, Level
from tests.server.gateway.world import CLIENT, World
from tests.waiting import wait_until

EVERY_BYTE = bytes(range(256))


async def test_value_is_returned_byte_for_byte(world: World) -> None:
    put = await world.ask("PUT", "/v1/keys/k", EVERY_BYTE)
    got = await world.ask("GET", "/v1/keys/k")
    assert (put.status, put.json) == (200, {"version": 1})
    assert (got.status, got.body, got.headers["ETag"]) == (200, EVERY_BYTE, '"1"')
    assert got.headers["Content-Type"] == "application/octet-stream"
    assert got.headers["X-Content-Type-Options"] == "nosniff"


async def test_stored_html_is_not_served_as_a_page(world: World) -> None:
    await world.ask("PUT", "/v1/keys/k", b"<script>alert(1)</script>", Content_Type="text/html")
    got = await world.ask("GET", "/v1/keys/k", Accept="text/html,*/*;q=0.8")
    assert got.headers["Content-Type"] == "application/octet-stream"
    assert "sandbox" in got.headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (EVERY_BYTE, quote_from_bytes(EVERY_BYTE, safe="")),
        (b"a/b/c", "a/b/c"),
        (b"a/b/c", "a%2Fb%2fc"),
        (b"a//b/", "a//b/"),
        (b"a+b c", "a+b%20c"),
        (b"../../../healthz", "../../../healthz"),
        (b".", "%2e"),
        (b"{key}", "{key}"),
        (b"a?b#c&d=%", "a%3Fb%23c%26d=%25"),
        (b"\xff" * KEY_BYTES_MAX, "%FF" * KEY_BYTES_MAX),
    ],
)
async def test_every_key_has_a_path(world: World, key: bytes, path: str) -> None:
    assert (await world.ask("PUT", f"/v1/keys/{path}", b"v")).status == 200
    assert world.backend.submitted[-1].key == key
    assert (await world.ask("GET", f"/v1/keys/{path}")).body == b"v"
    assert (await world.ask("DELETE", f"/v1/keys/{path}")).json["sequence"] == 2


@pytest.mark.parametrize("path", ["", "%FF" * (KEY_BYTES_MAX + 1), "a%", "a%g0", "a%4"])
async def test_invalid_key_is_refused(world: World, path: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        answer = await world.ask(method, f"/v1/keys/{path}")
        assert (answer.status, answer.json["reason"], answer.json["outcome"]) == (400, "INVALID_REQUEST", "refused")
    assert world.backend.submitted == []


async def test_absent_key_is_not_found(world: World) -> None:
    answer = await world.ask("GET", "/v1/keys/k")
    assert (answer.status, answer.json["code"], answer.json["reason"]) == (404, 404, "ABSENT")
    assert answer.json["partition"] in world.backend.partitions
    assert (await world.ask("HEAD", "/v1/keys/k")).status == 404
    assert (await world.ask("DELETE", "/v1/keys/k")).json == {"sequence": 0}


async def test_json_uses_text_for_utf8_and_base64_otherwise(world: World) -> None:
    await world.ask("PUT", "/v1/keys/k", '{"value": "gr\\u00fcn \\u0000"}', Content_Type="application/json")
    got = (await world.ask("GET", "/v1/keys/k", Accept="application/json")).json
    assert {name: got[name] for name in ("key", "value", "version", "created", "expires_ms")} == {
        "key": "k", "value": "grün \0", "version": 1, "created": 1, "expires_ms": 0,
    }  # fmt: skip
    data = base64.b64encode(EVERY_BYTE).decode()
    await world.ask("PUT", "/v1/keys/%FF", f'{{"value_base64": "{data}"}}', Content_Type="application/json")
    assert (await world.ask("GET", "/v1/keys/%FF")).body == EVERY_BYTE
    got = (await world.ask("GET", "/v1/keys/%FF", Accept="application/json, */*")).json
    assert (got["key_base64"], got["value_base64"], "value" in got, "key" in got) == ("/w==", data, False, False)
    got = (await world.ask("GET", "/v1/keys/k?encoding=base64", Accept="application/json")).json
    assert base64.b64decode(got["value_base64"]).decode() == "grün \0"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"{}", b'{"value": "a", "value_base64": "YQ=="}', b'{"value": 1}', b'{"a": 1}',
     b'{"value_base64": "\xc3\xa4"}', b'{"value_base64": "a"}', b'{"value": "\xff"}', b'{"value": "\\ud800"}'],
)  # fmt: skip
async def test_malformed_json_body_is_refused_with_the_reason(world: World, body: bytes) -> None:
    answer = await world.ask("PUT", "/v1/keys/k", body, Content_Type="application/json")
    assert (answer.status, answer.json["reason"]) == (400, "INVALID_REQUEST")
    assert "expected" in answer.json["message"]
    assert world.backend.submitted == []


async def test_head_returns_the_headers_without_the_value(world: World) -> None:
    await world.ask("PUT", "/v1/keys/k?ttl_ms=60000", b"12345")
    head, got = await world.ask("HEAD", "/v1/keys/k"), await world.ask("GET", "/v1/keys/k")
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", "5")
    for name in ("ETag", "Kvstore-Created", "Kvstore-Written-Ms", "Kvstore-Expires-Ms", "Kvstore-Token"):
        assert head.headers[name] == got.headers[name]
    assert world.backend.submitted[-2].code == Code.META


# ── conditions ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_write_obeys_its_condition(world: World) -> None:
    missing = await world.ask("PUT", "/v1/keys/k", b"0", If_Match="*")
    first = await world.ask("PUT", "/v1/keys/k", b"1", If_None_Match="*")
    again = await world.ask("PUT", "/v1/keys/k", b"2", If_None_Match="*")
    wrong = await world.ask("PUT", "/v1/keys/k", b"2", If_Match='"7"')
    right = await world.ask("PUT", "/v1/keys/k", b"2", If_Match=first.headers["ETag"])
    assert [each.status for each in (missing, first, again, wrong, right)] == [412, 200, 412, 412, 200]
    assert (missing.json["reason"], missing.json.get("version")) == ("CONDITION_FAILED", 0)
    assert (wrong.json["version"], wrong.json["outcome"]) == (1, "refused")
    assert (await world.ask("DELETE", "/v1/keys/k", If_Match='"1"')).status == 412
    assert (await world.ask("DELETE", "/v1/keys/k", If_Match=right.headers["ETag"])).json["sequence"] == 3
    assert (await world.ask("DELETE", "/v1/keys/k", If_Match="*")).status == 412


async def test_read_obeys_its_condition(world: World) -> None:
    assert (await world.ask("GET", "/v1/keys/k", If_Match="*")).status == 412
    assert (await world.ask("GET", "/v1/keys/k", If_None_Match="*")).status == 404
    await world.ask("PUT", "/v1/keys/k", b"1")
    for method in ("GET", "HEAD"):
        for tags in ('"1"', '"7", "1"', "*"):
            answer = await world.ask(method, "/v1/keys/k", If_None_Match=tags)
            assert (answer.status, answer.body, answer.headers["ETag"]) == (304, b"", '"1"')
            assert (await world.ask(method, "/v1/keys/k", If_Match=tags)).status == 200
        for tags in ('"2"', '"01"', '"other,than-ours"', 'W/"2"', '"9999999999999999999"'):
            assert (await world.ask(method, "/v1/keys/k", If_None_Match=tags)).status == 200
            assert (await world.ask(method, "/v1/keys/k", If_Match=tags)).status == 412


async def test_weak_tag_matches_for_reads_and_never_for_writes(world: World) -> None:
    """RFC 9110, 13.1: If-Match compares strongly, If-None-Match weakly."""
    await world.ask("PUT", "/v1/keys/k", b"1")
    assert (await world.ask("GET", "/v1/keys/k", If_None_Match='W/"1"')).status == 304
    assert (await world.ask("GET", "/v1/keys/k", If_Match='W/"1"')).status == 412
    for tags in ('W/"1"', '"other"', '"01"', 'W/"1", W/"2"'):
        answer = await world.ask("PUT", "/v1/keys/k", b"2", If_Match=tags)
        assert (answer.status, answer.json["version"], answer.json["outcome"]) == (412, 1, "refused")
        assert (await world.ask("DELETE", "/v1/keys/k", If_Match=tags)).status == 412
    assert (await world.ask("PUT", "/v1/keys/k", b"2", If_Match='W/"1", "1"')).status == 200


async def test_if_match_with_several_versions_accepts_any(world: World) -> None:
    """RFC 9110, 13.1.1: the condition is met if any of the tags is the key's version."""
    await world.ask("PUT", "/v1/keys/k", b"1")
    for tags in ('"1", "7"', '"7", "9", W/"2", "2"', '"3","2"'):
        assert (await world.ask("PUT", "/v1/keys/k", b"new", If_Match=tags)).status == 200, tags
    answer = await world.ask("PUT", "/v1/keys/k", b"other", If_Match='"1", "2", "3", "7"')
    assert (answer.status, answer.json["version"], answer.json["outcome"]) == (412, 4, "refused")
    assert (await world.ask("GET", "/v1/keys/k")).body == b"new"
    assert (await world.ask("DELETE", "/v1/keys/k", If_Match='"3", "5"')).status == 412
    gone = await world.ask("DELETE", "/v1/keys/k?return_old=true", If_Match='"9", "3", "4"')
    assert (gone.status, gone.json["old"]["value"]) == (200, "new")
    assert (await world.ask("DELETE", "/v1/keys/k", If_Match='"3", "4"')).json["version"] == 0


async def test_retry_with_several_versions_is_applied_once(world: World) -> None:
    """The first attempt changed the version, so none of the tags matches any more."""
    for _ in range(3):
        await world.ask("PUT", "/v1/keys/k", b"1")
    request = world.request_id(1)
    for _ in range(3):
        answer = await world.ask("PUT", "/v1/keys/k", b"2", If_Match='"2", "3"', Kvstore_Request=request)
        assert (answer.status, answer.json["version"]) == (200, 4)
    answer = await world.ask("PUT", "/v1/keys/k?return_old=true", b"2", If_Match='"2", "4"')
    assert answer.status == 400, "its answer to an unmet condition would be remembered"
    assert (await world.ask("PUT", "/v1/keys/k?return_old=true", b"2", If_Match='W/"2", "4"')).json["applied"]


async def lines(world: World, method: str, *headers: tuple[str, str]) -> int:
    """Return the status of a request with exactly these header lines."""
    async with world.http.request(method, f"{world.url}/v1/keys/k", data=b"new", headers=CIMultiDict(headers)) as told:
        return told.status


async def test_list_headers_are_joined_and_other_repeated_headers_refused(world: World) -> None:
    """RFC 9110, 5.3. The second line would be ignored, and the write that it forbids applied."""
    await world.ask("PUT", "/v1/keys/k", b"old")
    assert await lines(world, "PUT", ("If-Match", '"7"'), ("If-Match", 'W/"1"')) == 412
    assert await lines(world, "PUT", ("If-Match", '"8"'), ("If-Match", '"7"')) == 412
    assert await lines(world, "PUT", ("If-None-Match", "*"), ("If-None-Match", "*")) == 400
    for name, *values in (("Kvstore-TTL-Ms", "1000", "2000"), ("Kvstore-Token", "p1=0", "p2=0")):
        assert await lines(world, "PUT", (name, values[0])) == 200, "one of it is right"
        assert await lines(world, "PUT", *((name, value) for value in values)) == 400, name
    await world.ask("PUT", "/v1/keys/k", b"old")
    assert (await world.ask("GET", "/v1/keys/k")).body == b"old"
    headers = CIMultiDict((("If-None-Match", '"7"'), ("If-None-Match", '"4"')))
    async with world.http.get(f"{world.url}/v1/keys/k", headers=headers) as answer:
        assert answer.status == 304
    assert await lines(world, "PUT", ("If-Match", 'W/"3"'), ("If-Match", '"4"')) == 200


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("PUT", {"If-Match": "1"}),
        ("PUT", {"If-Match": 'w/"1"'}),
        ("PUT", {"If-Match": '"1""2"'}),
        ("PUT", {"If-Match": '"1'}),
        ("PUT", {"If-Match": ","}),
        ("PUT", {"If-Match": '*, "1"'}),
        ("PUT", {"If-None-Match": '"1"'}),
        ("PUT", {"If-Match": "*", "If-None-Match": "*"}),
        ("GET", {"If-None-Match": "1"}),
        ("PUT", {"Kvstore-TTL-Ms": "1s"}),
        ("PUT", {"Kvstore-TTL-Ms": "0"}),
    ],
)
async def test_malformed_condition_is_refused(world: World, method: str, headers: dict[str, str]) -> None:
    await world.ask("PUT", "/v1/keys/k", b"old")
    answer = await world.ask(method, "/v1/keys/k", b"new" if method == "PUT" else None, **headers)
    assert (answer.status, answer.json["reason"]) == (400, "INVALID_REQUEST")
    assert (await world.ask("GET", "/v1/keys/k")).body == b"old"


async def test_return_old_returns_the_previous_record(world: World) -> None:
    await world.ask("PUT", "/v1/keys/k", b"1")
    put = (await world.ask("PUT", "/v1/keys/k?return_old=true", b"2", If_Match='"1"')).json
    kept = await world.ask("PUT", "/v1/keys/k?return_old=true", b"3", If_Match='"1"')
    deleted = (await world.ask("DELETE", "/v1/keys/k?return_old=true")).json
    assert (put["applied"], put["version"], put["old"]["value"]) == (True, 2, "1")
    assert (kept.json["applied"], kept.json["version"], kept.json["old"]["value"]) == (False, 2, "2")
    assert "ETag" not in kept.headers
    assert (deleted["sequence"], deleted["old"]["value"]) == (3, "2")


# ── expiries and numbers ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("target", "headers", "wanted"),
    [
        ("?ttl_ms=60000", {}, (60_000, Flag.RELATIVE_TTL)),
        ("", {"Kvstore-TTL-Ms": "60000"}, (60_000, Flag.RELATIVE_TTL)),
        ("?ttl_ms=60000", {"Kvstore-TTL-Ms": "60000"}, (60_000, Flag.RELATIVE_TTL)),
        ("?expires_ms=9000000000000", {}, (9_000_000_000_000, Flag.NONE)),
        ("?keep_ttl=true", {}, (0, Flag.KEEP_TTL)),
        ("?keep_ttl=false", {}, (0, Flag.NONE)),
    ],
)
async def test_expiry_is_given_in_one_way(
    world: World, target: str, headers: dict[str, str], wanted: tuple[int, int]
) -> None:
    assert (await world.ask("PUT", f"/v1/keys/k{target}", b"v", **headers)).status == 200
    op = world.backend.submitted[-1]
    assert (op.expires_ms, op.flags) == wanted


@pytest.mark.parametrize(
    "query",
    ["ttl=60", "ttl_ms=", "ttl_ms=1.5", "ttl_ms=-1", "ttl_ms=0", f"ttl_ms={1 << 62}", "ttl_ms=1&ttl_ms=2",
     "ttl_ms=1&expires_ms=2", "keep_ttl=true&ttl_ms=1", "keep_ttl=1", "level=stale", "timeout_ms=0",
     "timeout_ms=30001", "encoding=hex", "a", "&", "ttl%5Fms=x", "%FF=1"],
)  # fmt: skip
async def test_unknown_parameter_is_refused(world: World, query: str) -> None:
    """An ignored time to live would create a key that lives forever."""
    answer = await world.ask("PUT", f"/v1/keys/k?{query}", b"v")
    assert (answer.status, answer.json["reason"]) == (400, "INVALID_REQUEST")
    assert world.backend.submitted == []


async def test_refusal_of_a_parameter_names_those_that_the_route_has(world: World) -> None:
    answer = await world.ask("GET", "/v1/keys/k?read=stale")
    assert answer.json["message"] == "expected a parameter of get (encoding, level, timeout_ms), got 'read'"


async def test_increment_adds_and_append_appends(world: World) -> None:
    assert (await world.ask("POST", "/v1/increment/a/b")).json == {"value": 1, "version": 1}
    assert (await world.ask("POST", "/v1/increment/a%2Fb?delta=-3")).json == {"value": -2, "version": 2}
    assert (await world.ask("POST", "/v1/append/a/b", b"x")).json == {"length": 3, "version": 3}
    answer = await world.ask("POST", "/v1/append/a/b", b'{"value": "y"}', Content_Type="application/json")
    assert answer.json["length"] == 4
    assert (await world.ask("GET", "/v1/keys/a/b")).body == b"-2xy"
    answer = await world.ask("POST", "/v1/increment/a/b")
    assert (answer.status, answer.json["reason"]) == (400, "INVALID_REQUEST")
    assert (await world.ask("POST", f"/v1/increment/k?delta={1 << 63}")).status == 400


async def test_expiry_is_changed_and_removed(world: World) -> None:
    assert (await world.ask("POST", "/v1/expire/k?ttl_ms=60000")).json == {"changed": False}
    await world.ask("PUT", "/v1/keys/k", b"v")
    assert (await world.ask("POST", "/v1/expire/k?ttl_ms=60000")).json == {"changed": True}
    assert "Kvstore-Expires-Ms" in (await world.ask("GET", "/v1/keys/k")).headers
    assert (await world.ask("POST", "/v1/expire/k?expires_ms=0")).json == {"changed": True}
    assert "Kvstore-Expires-Ms" not in (await world.ask("GET", "/v1/keys/k")).headers
    assert (await world.ask("POST", "/v1/expire/k")).status == 400


@pytest.mark.parametrize("target", ["/v1/increment/k", "/v1/expire/k?ttl_ms=1"])
async def test_body_on_a_route_without_one_is_refused(world: World, target: str) -> None:
    answer = await world.ask("POST", target, b"delta=5")
    assert (answer.status, "expected no body" in answer.json["message"]) == (400, True)
    assert world.backend.submitted == []


# ── levels, tokens, request ids ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_read_has_the_requested_level(world: World, level: Level, method: str) -> None:
    await world.ask(method, f"/v1/keys/k?level={level.name.lower()}")
    assert world.backend.submitted[-1].level == level


async def test_token_travels_from_response_to_request(world: World) -> None:
    put = await world.ask("PUT", "/v1/keys/k", b"v", Kvstore_Token="=1,p1=9,p2=9,p3=9,gone=7")
    owner = world.backend.topology.ring.partition_of(b"k")
    ring = world.backend.topology.ring.routed
    token = dict(pair.split("=") for pair in put.headers["Kvstore-Token"].split(","))
    assert token == {"": str(ring), **dict.fromkeys(("p1", "p2", "p3"), "9")}, (
        "it never goes back, and forgets what is gone"
    )
    got = await world.ask("GET", "/v1/keys/k?level=session", Kvstore_Token=f"={ring},{owner}=1")
    assert world.backend.submitted[-1] == Get(b"k", Level.SESSION, 1)
    assert got.headers["Kvstore-Token"] == f"={ring},{owner}=1"
    assert int(got.headers["Kvstore-Time-Ms"]) > 0


# docs/protocol.md M16
async def test_token_keeps_partitions_of_a_ring_unknown_to_the_server(world: World) -> None:
    """Without the sequences of a partition that has joined, the session's next read at another server could be
    stale."""
    ring = world.backend.topology.ring.routed
    put = await world.ask("PUT", "/v1/keys/k", b"v", Kvstore_Token=f"={ring + 1},p4=700")
    token = dict(pair.split("=") for pair in put.headers["Kvstore-Token"].split(","))
    assert (token[""], token["p4"]) == (str(ring + 1), "700")
    later = await world.ask("PUT", "/v1/keys/k", b"v", Kvstore_Token=f"={ring},p4=700")
    assert "p4" not in later.headers["Kvstore-Token"]


async def test_token_names_the_owner_by_its_own_ring(world: World) -> None:
    """The ring may change while a response is in flight. If a token of the newer ring lacked the new owner, the next
    session read could go to a replica that has not applied what the client has seen."""
    await world.ask("PUT", "/v1/keys/k", b"v")
    before = world.backend.topology
    owner = before.ring.partition_of(b"k")
    other = next(each for each in sorted(world.backend.partitions) if each != owner)
    tokens = type(before.ring.tokens)(dict.fromkeys(before.ring.tokens, other))
    world.backend.held_reads = []
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(world.ask("GET", "/v1/keys/k"))
        await wait_until(lambda: is_held(world), what="the read is under way")
        ring = replace(before.ring, version=before.ring.version + 1, tokens=tokens)
        world.backend.topology = replace(before, ring=ring)
        world.backend.do_held_reads()
    token = dict(pair.split("=") for pair in asked.result().headers["Kvstore-Token"].split(","))
    assert (token[""], other in token) == (str(ring.routed), True)


async def is_held(world: World) -> bool:
    return bool(world.backend.held_reads)


@pytest.mark.parametrize("token", ["p1", "p1=", "p1=x", "P1=1", "p1=1,p1=2", "p1=-1", f"p1={1 << 62}", "p1=1,,"])
async def test_token_not_issued_by_a_server_is_refused(world: World, token: str) -> None:
    assert (await world.ask("GET", "/v1/keys/k", Kvstore_Token=token)).status == 400


# docs/protocol.md P16
async def test_retried_request_is_applied_once(world: World) -> None:
    await world.ask("POST", "/v1/increment/k")
    id_ = world.request_id(1)
    first = await world.ask("POST", "/v1/increment/k", Kvstore_Request=id_)
    again = await world.ask("POST", "/v1/increment/k", Kvstore_Request=id_)
    other = await world.ask("POST", "/v1/increment/k", Kvstore_Request=world.request_id(2))
    assert [each.json["value"] for each in (first, again, other)] == [2, 2, 3]
    late = await world.ask("POST", "/v1/increment/k", Kvstore_Request=id_)
    assert (late.status, late.json["reason"]) == (409, "REQUEST_EXPIRED"), "the second has said: I have the first"
    kept = await world.ask("POST", "/v1/increment/k", Kvstore_Request=world.request_id(3, first=2))
    again = await world.ask("POST", "/v1/increment/k", Kvstore_Request=world.request_id(2))
    assert (kept.json["value"], again.json["value"]) == (4, 3)


async def test_response_carries_the_time_for_request_ids(world: World) -> None:
    old = f"client={CLIENT}; sequence=1; seen=1"
    await world.ask("PUT", "/v1/keys/k", b"v")
    late = await world.ask("PUT", "/v1/keys/k", b"w", Kvstore_Request=old)
    assert (late.status, late.json["reason"], late.json["outcome"]) == (409, "REQUEST_EXPIRED", "unknown")
    id_ = old.replace("seen=1", f"seen={late.headers['Kvstore-Time-Ms']}")
    assert (await world.ask("PUT", "/v1/keys/k", b"w", Kvstore_Request=id_)).json["version"] == 2


@pytest.mark.parametrize(
    "id_",
    ["", "7", "sequence=1; seen=1", f"client={CLIENT}; sequence=0; seen=1", f"client={CLIENT}; sequence=1",
     f"client={CLIENT[1:]}; sequence=1; seen=1", f"client={CLIENT}; sequence=1; seen=1; seen=2",
     f"client={CLIENT}; sequence=1; seen=1; time=2", f"client={'g' * 32}; sequence=1; seen=1",
     f"client={CLIENT}; sequence={1 << 62}; seen=1"],
)  # fmt: skip
async def test_malformed_request_id_is_refused_before_the_operation(world: World, id_: str) -> None:
    answer = await world.ask("PUT", "/v1/keys/k", b"v", Kvstore_Request=id_)
    assert (answer.status, answer.json["reason"]) == (400, "INVALID_REQUEST")
    assert world.backend.submitted == []


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        (Overloaded("full"), 429, "refused"),
        (Unavailable("no leader"), 503, "refused"),
        (OutcomeUnknown("lost"), 504, "unknown"),
    ],
)
async def test_three_outcomes_are_distinguished(world: World, error: Any, status: int, outcome: str) -> None:
    world.backend.failure = error
    for answer in (await world.ask("PUT", "/v1/keys/k", b"v"), await world.ask("DELETE", "/v1/keys/k")):
        assert (answer.status, answer.json["code"], answer.json["outcome"]) == (status, status, outcome)
        assert answer.json["message"] == str(error)
        assert answer.json["partition"] in world.backend.partitions
        assert ("Retry-After" in answer.headers) == ("retry_after" in answer.json) == (outcome == "refused")


async def test_timed_out_write_is_unknown_and_read_is_refused(world: World) -> None:
    world.backend.hold()
    put = await world.ask("PUT", "/v1/keys/k?timeout_ms=20", b"v")
    world.backend.held_reads = []
    got = await world.ask("GET", "/v1/keys/k?timeout_ms=20")
    assert (put.status, put.json["reason"], put.json["outcome"]) == (504, "OUTCOME_UNKNOWN", "unknown")
    assert (got.status, got.json["reason"], got.json["outcome"]) == (503, "UNAVAILABLE", "refused")
    world.backend.let_go()


async def test_unknown_routes_and_methods_name_the_known_ones(world: World) -> None:
    for target in ("/v1/", "/v1/key/k", "/v1/keysk", "/v1/batch/", "/v1/increment", "/v2/keys/k", "/v1/../healthz"):
        answer = await world.ask("GET", target)
        assert answer.status == 404, target
    answer = await world.ask("GET", "/v1/nothing")
    assert (answer.json["code"], "/v1/openapi.json" in answer.json["message"]) == (404, True)
    answer = await world.ask("POST", "/v1/keys/k", b"v")
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD, PUT, DELETE")
    assert answer.json["reason"] == "INVALID_REQUEST"


async def test_largest_key_and_value_are_stored(world: World) -> None:
    value = b"v" * VALUE_BYTES_MAX
    assert (await world.ask("PUT", "/v1/keys/k", value)).status == 200
    assert (await world.ask("GET", "/v1/keys/k")).body == value
