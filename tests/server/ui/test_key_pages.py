"""The key browser: the viewer's rights, bounded pages, and values of other people shown as text."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest

from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.ui import key_pages, keys
from kvstore.server.ui.pages import POLICY
from tests.server.access.tables import table
from tests.server.gateway.world import ResponseKind, World, gateway_world
from tests.server.status.test_overview import N1, N2, P1, P2, RING, SERVERS
from tests.server.ui.made import HOSTILE
from tests.server.ui.test_view import Elements

RAW = bytes(range(256))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with gateway_world(tmp_path) as made:
        yield made


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[World]:
    async with gateway_world(tmp_path, table()) as made:
        yield made


async def put(world: World, key: bytes, value: bytes, user: str = "") -> None:
    assert (await world.ask("PUT", f"/v1/keys/{quote(key, safe='')}", value, user=user)).status in (200, 201)


def text_of(answer: ResponseKind) -> str:
    return answer.body.decode()


def linked(answer: ResponseKind, page: str) -> list[str]:
    paths = [str(each["href"]) for each in Elements(text_of(answer)).of("a")]
    return [path for path in paths if path.partition("?")[0] == f"/ui/{page}" and "?" in path]


def value_of(answer: ResponseKind) -> str:
    found = re.search(r"<pre[^>]*>(.*)</pre>", text_of(answer), re.S)
    assert found is not None
    return html.unescape(found[1])


async def test_keys_are_listed_by_prefix_in_bounded_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "PAGE_KEYS", 3)
    for number in range(7):
        await put(world, b"order/%d" % number, b"v" * number)
    await put(world, b"other", b"v")
    seen: list[str] = []
    path = "/ui/keys?prefix=order/"
    for _ in range(3):
        answer = await world.ask("GET", path)
        assert (answer.status, answer.headers["Content-Security-Policy"]) == (200, POLICY)
        seen += linked(answer, "key")
        following = [each for each in linked(answer, "keys") if "after=" in each]
        path = following[0] if following else ""
    assert seen == [f"/ui/key?key=order%2F{number}" for number in range(7)]
    assert path == "", "the last page has no next one"


async def test_key_and_value_of_any_bytes_are_shown_as_text(world: World) -> None:
    for key in (HOSTILE.encode(), b'"><img src=x onerror=alert(1)>', RAW, b"a`b`c"):
        await put(world, key, HOSTILE.encode())
        for path in ("/ui/keys", f"/ui/key?key={quote(key)}", f"/ui/keys?prefix={quote(key)}"):
            answer = await world.ask("GET", path)
            assert answer.status == 200, path
            assert "<script>alert" not in text_of(answer)
            assert "<img" not in text_of(answer)
            elements = Elements(text_of(answer))
            assert not [name for _, each in elements.found for name in each if name.startswith("on")]
            assert [len(elements.of(name)) for name in ("main", "header", "footer", "nav", "h1")] == [1] * 5
    listed = await world.ask("GET", f"/ui/keys?prefix={quote(RAW)}")
    assert linked(listed, "key") == [f"/ui/key?key={quote(RAW, safe='')}"]
    assert value_of(await world.ask("GET", f"/ui/key?key={quote(RAW)}")) == HOSTILE
    assert "a`b`c" in text_of(await world.ask("GET", "/ui/keys?prefix=a"))


async def test_value_is_shown_as_text_json_and_hex(world: World) -> None:
    await put(world, b"k", b'{"a": [1, "<b>"]}')
    assert value_of(await world.ask("GET", "/ui/key?key=k")) == '{\n  "a": [\n    1,\n    "<b>"\n  ]\n}'
    assert value_of(await world.ask("GET", "/ui/key?key=k&form=text")) == '{"a": [1, "<b>"]}'
    first = value_of(await world.ask("GET", "/ui/key?key=k&form=hex")).splitlines()[0]
    assert first == '000000  7b 22 61 22 3a 20 5b 31 2c 20 22 3c 62 3e 22 5d  {"a": [1, "<b>"]'
    await put(world, b"k", b"no json")
    assert "expected JSON, got something else" in text_of(await world.ask("GET", "/ui/key?key=k&form=json"))
    await put(world, b"k", RAW)
    assert value_of(await world.ask("GET", "/ui/key?key=k")).startswith("000000  00 01 02 03")


async def test_value_that_another_node_leads_is_shown(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def over_a_link(*_: object) -> tuple[bytes, int, int, int, int]:
        return b"led elsewhere", 7, 7, 1_700_000_000_000, 0

    monkeypatch.setattr(key_pages, "ask_session", over_a_link)
    assert value_of(await world.ask("GET", "/ui/key?key=k")) == "led elsewhere"


async def test_long_value_is_cut(world: World) -> None:
    await put(world, b"k", b"x" * (keys.VALUE_BYTES_MAX + 5))
    answer = await world.ask("GET", "/ui/key?key=k")
    assert len(value_of(answer)) == keys.VALUE_BYTES_MAX
    assert "The first 64 KiB are shown." in text_of(answer)
    assert "(65,541 bytes)" in text_of(answer)
    assert "expected at most 64 KiB to show as JSON" in text_of(await world.ask("GET", "/ui/key?key=k&form=json"))


async def test_missing_key_and_wrong_requests_are_refused(world: World) -> None:
    answer = await world.ask("GET", "/ui/key?key=none")
    assert (answer.status, "The key does not exist." in text_of(answer)) == (404, True)
    assert (await world.ask("GET", "/ui/key")).status == 400
    assert (await world.ask("GET", "/ui/keys?after=rubbish")).status == 400
    assert (await world.ask("POST", "/ui/keys?prefix=a")).status == 405


WATCHED_PAGES = (
    *("/ui/keys?prefix=t/", "/ui/key?key=t/a"),
    *("/ui/keys", "/ui/keys?prefix=x", "/ui/key?key=x", "/ui/sessions"),
)


@pytest.mark.parametrize(
    ("user", "statuses"),
    [
        ("tenant", [200, 200, 403, 403, 403, 403]),
        ("reader", [200, 200, 200, 200, 404, 200]),
        ("nothing", [403] * 6),
        ("root", [403] * 6),
        ("", [401] * 6),
    ],
)
async def test_pages_have_the_rights_of_their_viewer(guarded: World, user: str, statuses: list[int]) -> None:
    await put(guarded, b"t/a", b"mine", user="tenant")
    assert [(await guarded.ask("GET", path, user=user)).status for path in WATCHED_PAGES] == statuses
    assert (await guarded.ask("GET", "/ui/ui.css", user=user)).status == (200 if user else 401)
    shown = (await guarded.ask("GET", "/ui/key?key=t/a", user=user)).body
    assert (b"mine" in shown) == (statuses[1] == 200)


async def test_key_page_names_the_partition_and_its_leader(world: World, guarded: World) -> None:
    await put(world, b"t/a", b"v")
    for key, partition in (("t/a", "p3"), ("absent", "p2")):
        answer = await world.ask("GET", f"/ui/key?key={key}")
        assert linked(answer, "partition") == [f"/ui/partition?id={partition}"]
        assert "<dt>leader</dt><dd>none</dd>" in text_of(answer), "the server of this test knows no leader"
    await put(guarded, b"t/a", b"v", user="tenant")
    answer = await guarded.ask("GET", "/ui/key?key=t/a", user="tenant")
    assert "<dt>partition</dt><dd>p3</dd>" in text_of(answer)
    assert linked(answer, "partition") == []


def test_place_of_a_key_links_to_its_leader() -> None:
    led = ClusterTopology(RING, {P1: (N1, 4), P2: (N2, 6)}, SERVERS)
    shown = [keys.place_of(b"k%d" % number, led, is_linked=True) for number in range(9)]
    assert {tuple(fact.text for fact in place) for place in shown} == {("p1", "n1"), ("p2", "n2")}
    assert {place[1].link for place in shown} == {"/ui/node?id=n1", "/ui/node?id=n2"}
    assert [fact.link for fact in keys.place_of(b"k", led, is_linked=False)] == ["", ""]


async def test_page_leads_its_viewer_only_where_the_viewer_may_go(guarded: World) -> None:
    await put(guarded, b"t/a", b"v", user="tenant")
    for user in ("tenant", "root"):
        for path in ("/ui/keys?prefix=t/", "/ui/key?key=t/a", "/ui/sessions"):
            elements = Elements(text_of(await guarded.ask("GET", path, user=user)))
            paths = {str(each["href"]).partition("?")[0] for name in ("a", "link") for each in elements.of(name)}
            paths |= {str(each["src"]) for each in elements.of("script")}
            asked = {each: (await guarded.ask("GET", each, user=user)).status for each in paths if each[0] == "/"}
            assert "/ui/tables.js" in asked
            assert ("/ui" in asked) == (user == "root")
            refused = {each for each, status in asked.items() if status == 403}
            assert refused <= {"/ui/keys", "/ui/sessions"}, "whose rights depend on the prefix"


async def test_user_who_may_not_see_the_cluster_is_led_to_the_keys(guarded: World) -> None:
    for path in ("/", "/ui"):
        answer = await guarded.ask("GET", path, user="tenant", Accept="text/html,*/*;q=0.8")
        assert linked(answer, "keys") == ["/ui/keys?prefix=t%2F"]
        assert (await guarded.ask("GET", path, user="tenant")).status == 403, "a program is refused"
    assert (await guarded.ask("GET", "/ui/users", user="tenant", Accept="text/html")).status == 403


async def test_refusal_names_the_prefixes_that_the_viewer_may_read(guarded: World) -> None:
    answer = await guarded.ask("GET", "/ui/keys", user="tenant")
    assert linked(answer, "keys") == ["/ui/keys?prefix=t%2F"]
    assert "You may read no key." in text_of(await guarded.ask("GET", "/ui/keys", user="nothing"))
    assert any('"who":"nothing"' in line and "PERMISSION" in line for line in guarded.audit.lines), guarded.audit.lines


async def test_sessions_and_locks_are_told_from_other_keys(world: World) -> None:
    for key in (
        b"{app}/session/s1",
        b"{app}/lock/job/s1-000000000001",
        b"{app}/member/workers/s1",
        b"{app}/mine",
        b"{b}/lock/x/s2-000000000001",
    ):
        await put(world, key, b"w")
    answer = await world.ask("GET", "/ui/sessions?tag=app")
    assert answer.status == 200
    assert linked(answer, "key") == [
        f"/ui/key?key={quote(each, safe='')}"
        for each in ("{app}/lock/job/s1-000000000001", "{app}/member/workers/s1", "{app}/session/s1")
    ]
    assert "3 keys of sessions, locks, elections, groups, barriers and queues among 4 keys" in text_of(answer)
    assert len(linked(await world.ask("GET", "/ui/sessions"), "key")) == 4


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (b"{app}/session/s1", ("session", "app", "s1", "s1")),
        (b"{app}/lock/job/s1-00000000000a", ("lock", "app", "job", "s1")),
        (b"{app}/leader/db/s-1-00000000000a", ("leader", "app", "db", "s-1")),
        (b"{app}/member/workers/s1", ("member", "app", "workers", "s1")),
        (b"{app}/queue/mail/7", ("queue", "app", "mail/7", "none")),
    ],
)
def test_key_of_coordination_names_its_holder(key: bytes, parts: tuple[str, ...]) -> None:
    assert tuple(keys.parts_of(key)) == parts
