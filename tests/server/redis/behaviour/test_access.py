"""Permissions at the Redis port: unauthenticated clients, users without a right, and changes while they are
connected."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis
from redis import exceptions

from kvstore.access import Change, GrantRight, RemoveUser, RevokeRight, RevokeRole, Right, SetPassword, Switch
from kvstore.namespaces import Namespace
from kvstore.namespaces.rates import Rates
from kvstore.partition.state.commands import Code, Op
from kvstore.ring.hashing import SLOTS_HASH, TOKENS
from kvstore.server.access import logins
from kvstore.server.access.identities import Access
from kvstore.server.redis.commands import scans
from kvstore.server.redis.commands.table import COMMANDS
from kvstore.server.redis.gate import Need
from kvstore.server.routing import keys as routing_keys
from kvstore.server.routing import scan_slots
from kvstore.server.routing.scan_slots import SCANS_OF_USER_MAX
from kvstore.types import PartitionId
from tests.server.access.tables import OTHER_HASH, table
from tests.server.redis.resp_port import Raw, RespPort, redis_port
from tests.server.redis.test_parser import packed
from tests.waiting import PATIENCE_S

OFF = (Switch(False),)


@pytest.fixture
def access() -> Access:
    return Access(table())


@pytest.fixture
async def resp(tmp_path: Path, access: Access) -> AsyncIterator[RespPort]:
    async with redis_port(tmp_path, access=access, hash=SLOTS_HASH) as opened:
        yield opened


@asynccontextmanager
async def client_of(resp: RespPort, user: str | None, password: str = "secret") -> AsyncIterator[redis.Redis]:
    client = redis.Redis(host=resp.host, port=resp.port, username=user, password=password if user else None, protocol=3)
    try:
        yield client
    finally:
        await client.aclose()


async def line_of(raw: Raw, *words: bytes) -> bytes:
    raw.writer.write(packed(*words))
    return await raw.read_line()


@asynccontextmanager
async def logged_in(resp: RespPort, user: bytes, password: bytes = b"secret") -> AsyncIterator[Raw]:
    async with resp.raw() as raw:
        assert await line_of(raw, b"AUTH", user, password) == b"+OK\r\n"
        yield raw


WORDS = {b"KVSTORE.PEER": [b"1", b"n2", b"n1"], b"CLIENT": [b"ID"], b"CONFIG": [b"GET", b"*"], b"ACL": [b"WHOAMI"]}


@pytest.mark.parametrize("name", sorted(COMMANDS))
async def test_unauthenticated_client_is_refused_every_command(resp: RespPort, name: bytes) -> None:
    """A new command is included automatically."""
    command = COMMANDS[name]
    words = [name, *WORDS.get(name, [b"1"] * (command.least - 1))]
    async with resp.raw() as raw:
        answer = await line_of(raw, *words)
    if command.need_of(words) is Need.NOTHING:
        assert name in (b"AUTH", b"HELLO", b"RESET", b"QUIT", b"KVSTORE.PEER")
    else:
        assert answer == b"-NOAUTH Authentication required.\r\n"


async def test_unauthenticated_client_is_refused_in_pipelines(resp: RespPort) -> None:
    async with resp.raw() as raw:
        raw.writer.write(packed(b"SET", b"t/a", b"1") * 8 + packed(b"GET", b"t/a") * 8)
        for _ in range(16):
            assert await raw.read_line() == b"-NOAUTH Authentication required.\r\n"
    async with client_of(resp, "reader") as reader:
        assert await reader.get("t/a") is None


async def test_get_behind_reset_in_one_packet_has_no_permissions(resp: RespPort) -> None:
    async with logged_in(resp, b"tenant") as raw:
        assert await line_of(raw, b"SET", b"t/a", b"1") == b"+OK\r\n"
        raw.writer.write(
            packed(b"GET", b"t/a") + packed(b"RESET") + packed(b"GET", b"t/a") + packed(b"SET", b"t/a", b"2")
        )
        expected = b"$1\r\n1\r\n+RESET\r\n" + 2 * b"-NOAUTH Authentication required.\r\n"
        assert await raw.read(len(expected)) == expected


async def test_wrong_names_and_passwords_get_equal_replies(resp: RespPort) -> None:
    async with resp.raw() as raw:
        for user, password in ((b"tenant", b"Secret"), (b"nobody", b"secret"), (b"certified", b""), (b"tenant", b"")):
            answer = await line_of(raw, b"AUTH", user, password)
            assert answer == b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
        assert (await line_of(raw, b"AUTH", b"secret")).startswith(b"-WRONGPASS")  # for the user default
        assert (await line_of(raw, b"HELLO", b"3")).startswith(b"-NOAUTH HELLO must be called")
        assert (await line_of(raw, b"HELLO", b"3", b"AUTH", b"tenant", b"x")).startswith(b"-WRONGPASS")
        assert await line_of(raw, b"PING") == b"-NOAUTH Authentication required.\r\n"


async def test_redis_clients_log_in_by_user_and_password(resp: RespPort) -> None:
    async with client_of(resp, "tenant") as client:
        assert await client.acl_whoami() in (b"tenant", "tenant")
        assert await client.set("t/a", "1")
        assert await client.get("t/a") == b"1"
        with pytest.raises(exceptions.NoPermissionError, match="user tenant lacks the right read for get of key 'a'"):
            await client.get("a")
    async with client_of(resp, "tenant", "wrong") as client:
        with pytest.raises(exceptions.AuthenticationError):
            await client.ping()
    async with client_of(resp, None) as client:
        with pytest.raises(exceptions.AuthenticationError):
            await client.ping()


DENIED = [
    (b"GET", b"x"),
    (b"SET", b"x", b"1"),
    (b"SET", b"t", b"1"),
    (b"MGET", b"t/1", b"x"),
    (b"MSET", b"t/1", b"new", b"x", b"1"),
    (b"DEL", b"t/1", b"x"),
    (b"EXISTS", b"x"),
    (b"INCR", b"x"),
    (b"EXPIRE", b"x", b"1"),
    (b"TTL", b"x"),
    (b"GETRANGE", b"x", b"0", b"-1"),
    (b"DBSIZE",),
    (b"FLUSHDB",),
    (b"FLUSHALL", b"ASYNC"),
    (b"CLIENT", b"LIST"),
    (b"CLUSTER", b"COUNTKEYSINSLOT", b"1"),
    (b"CLUSTER", b"GETKEYSINSLOT", b"1", b"1"),
]


@pytest.mark.parametrize("words", DENIED, ids=lambda words: b" ".join(words).decode())
async def test_tenant_changes_nothing_beyond_the_prefix(resp: RespPort, words: tuple[bytes, ...]) -> None:
    async with logged_in(resp, b"tenant") as raw:
        assert await line_of(raw, b"SET", b"t/1", b"old") == b"+OK\r\n"
        assert (await line_of(raw, *words)).startswith(b"-NOPERM user tenant lacks the right ")
        assert await raw.ask(packed(b"GET", b"t/1"), b"$3\r\nold\r\n") == b"$3\r\nold\r\n"
        assert await line_of(raw, b"MULTI") == b"+OK\r\n"
        assert await line_of(raw, b"SET", b"t/1", b"new") == b"+QUEUED\r\n"
        assert (await line_of(raw, *words)).startswith(b"-NOPERM ")
        assert (await line_of(raw, b"EXEC")).startswith(b"-EXECABORT ")
        assert await raw.ask(packed(b"GET", b"t/1"), b"$3\r\nold\r\n") == b"$3\r\nold\r\n"


async def test_write_that_returns_the_old_value_needs_the_right_to_read(resp: RespPort, access: Access) -> None:
    async with client_of(resp, "reader") as reader, client_of(resp, "tenant") as tenant:
        await tenant.set("t/a", "1")
        with pytest.raises(exceptions.NoPermissionError, match="right write"):
            await reader.set("t/a", "2")
        for words in (("GETSET", "t/a", "2"), ("GETDEL", "t/a"), ("INCR", "t/a"), ("SET", "t/a", "2", "GET")):
            with pytest.raises(exceptions.NoPermissionError):
                await reader.execute_command(*words)
        assert await reader.get("t/a") == b"1"


async def test_tenant_sees_only_its_prefix_in_scans(resp: RespPort) -> None:
    async with client_of(resp, "tenant") as tenant, client_of(resp, "reader") as reader:
        async with logged_in(resp, b"tenant") as raw:
            await line_of(raw, b"SET", b"t/a", b"1")
        resp.server.access.take(table(*OFF))
        async with client_of(resp, None) as anybody:
            await anybody.set("other", "1")
        resp.server.access.take(table())
        assert await tenant.keys("*") == [b"t/a"]
        assert [key async for key in tenant.scan_iter()] == [b"t/a"]
        assert sorted(await reader.keys("*")) == [b"other", b"t/a"]
        assert await reader.dbsize() == 2


async def test_refusals_of_keys_do_not_reveal_other_keys(resp: RespPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the number of keys nor whether many match a pattern."""
    async with client_of(resp, "tenant") as tenant, client_of(resp, "reader") as reader:
        await tenant.set("t/a", "1")
        resp.server.access.take(table(*OFF))
        async with client_of(resp, None) as anybody:
            for number in range(3):
                await anybody.set(f"other{number}", "1")
        resp.server.access.take(table())
        monkeypatch.setattr(scans, "REPLY_BYTES_MAX", 10)
        assert await tenant.keys("*") == [b"t/a"]
        with pytest.raises(exceptions.ResponseError, match="larger than 10 bytes"):
            await reader.keys("*")
        monkeypatch.setattr(scans, "KEYS_MAX", 2)
        assert await tenant.keys("*") == [b"t/a"]
        await tenant.mset({"t/b": "1", "t/c": "1"})
        monkeypatch.setattr(scans, "REPLY_BYTES_MAX", 1_000)
        with pytest.raises(exceptions.ResponseError, match="at most 2 keys with this prefix"):
            await tenant.keys("*")
        with pytest.raises(exceptions.ResponseError, match="got 6; use SCAN"):
            await reader.keys("*")


async def test_administrator_may_not_read(resp: RespPort) -> None:
    async with client_of(resp, "root") as root:
        assert len(await root.client_list()) == 1
        for words in (("GET", "a"), ("SET", "a", "1"), ("KEYS", "*"), ("SCAN", "0"), ("DBSIZE",)):
            with pytest.raises(exceptions.NoPermissionError):
                await root.execute_command(*words)


async def test_client_of_a_removed_or_changed_user_is_disconnected(resp: RespPort, access: Access) -> None:
    for change in (RemoveUser("tenant"), SetPassword("tenant", OTHER_HASH)):
        access.take(table())
        async with logged_in(resp, b"tenant") as raw, logged_in(resp, b"reader") as stays:
            access.take(table(change))
            assert (await raw.read_to_end()).startswith(b"-NOAUTH ")
            assert await line_of(stays, b"PING") == b"+PONG\r\n"
        async with resp.raw() as raw:  # a verified login does not outlive the change
            assert (await line_of(raw, b"AUTH", b"tenant", b"secret")).startswith(b"-WRONGPASS")


async def test_revoked_right_applies_to_the_next_command(resp: RespPort, access: Access) -> None:
    async with logged_in(resp, b"tenant") as raw:
        assert await line_of(raw, b"SET", b"t/a", b"1") == b"+OK\r\n"
        access.take(table(RevokeRole("tenant", "owns")))
        assert (await line_of(raw, b"GET", b"t/a")).startswith(b"-NOPERM ")
        access.take(table())
        assert await line_of(raw, b"GET", b"t/a") == b"$1\r\n"


EVERYTHING = GrantRight("owns", Right.READ), GrantRight("owns", Right.WRITE)


@pytest.mark.parametrize(
    ("right", "stays", "goes"),
    [
        (Right.READ, ("SET x 3",), ("GET x", "GETDEL x", "GETSET x 4", "DBSIZE")),
        (Right.WRITE, ("GET x", "DBSIZE"), ("SET x 3", "GETDEL x", "DEL x", "MSET x 1 y 2")),
    ],
)
async def test_user_with_all_rights_has_no_guard_until_they_are_revoked(
    resp: RespPort, access: Access, right: Right, stays: tuple[str, ...], goes: tuple[str, ...]
) -> None:
    access.take(table(*EVERYTHING))
    async with client_of(resp, "tenant") as client:
        for words in ("SET x 1", *stays, *goes, "SET x 2"):
            await client.execute_command(*words.split())
        access.take(table(*EVERYTHING, RevokeRight("owns", right)))
        for words in stays:
            await client.execute_command(*words.split())
        for words in goes:
            with pytest.raises(exceptions.NoPermissionError):
                await client.execute_command(*words.split())
        async with client.pipeline(transaction=False) as pipeline:
            for words in goes[:1] * 20:
                pipeline.execute_command(*words.split())
            for found in await pipeline.execute(raise_on_error=False):
                assert isinstance(found, exceptions.NoPermissionError)


async def test_reads_beyond_the_prefix_are_refused_individually(resp: RespPort) -> None:
    async with client_of(resp, "tenant") as client:
        await client.set("t/a", "1")
        async with client.pipeline(transaction=False) as pipeline:
            for number in range(40):
                pipeline.get("t/a" if number % 2 else "x")
            found = await pipeline.execute(raise_on_error=False)
        assert found[1::2] == [b"1"] * 20
        assert {type(each) for each in found[::2]} == {exceptions.NoPermissionError}


async def test_open_connections_follow_access_control_on_and_off(resp: RespPort, access: Access) -> None:
    access.take(table(*OFF))
    async with resp.raw() as raw:
        assert await line_of(raw, b"SET", b"a", b"1") == b"+OK\r\n"
        assert await raw.ask(packed(b"ACL", b"WHOAMI"), b"$7\r\ndefault\r\n") == b"$7\r\ndefault\r\n"
        access.take(table())
        assert (await line_of(raw, b"GET", b"a")).startswith(b"-NOAUTH ")
        access.take(table(*OFF))
        assert await line_of(raw, b"GET", b"a") == b"$1\r\n"


async def test_reset_forgets_the_user(resp: RespPort) -> None:
    async with logged_in(resp, b"tenant") as raw:
        assert await line_of(raw, b"RESET") == b"+RESET\r\n"
        assert (await line_of(raw, b"GET", b"t/a")).startswith(b"-NOAUTH ")


async def test_failed_logins_are_limited_and_verified_ones_succeed(resp: RespPort) -> None:
    async with logged_in(resp, b"tenant"), resp.raw() as raw:
        for number in range(logins.FAILURES_MAX):
            assert (await line_of(raw, b"AUTH", b"root", b"guess%d" % number)).startswith(b"-WRONGPASS")
        hashes = resp.server.logins.hashes
        for _ in range(50):
            assert b"too many failed logins" in await line_of(raw, b"AUTH", b"root", b"secret")
        assert resp.server.logins.hashes == hashes
        assert await line_of(raw, b"AUTH", b"tenant", b"secret") == b"+OK\r\n"
        assert resp.server.logins.statistics()["logins_limited_total"] == 50


async def test_connection_without_access_control_has_no_guard(tmp_path: Path) -> None:
    async with redis_port(tmp_path) as resp, resp.raw() as raw:
        assert await line_of(raw, b"PING") == b"+PONG\r\n"
        (connection,) = resp.server._connections
        assert connection.pipeline.gate is None
        assert connection.replies.backend is resp.backend


WALKS = ["DBSIZE", "KEYS *", "SCAN 0", "RANDOMKEY", "CLUSTER COUNTKEYSINSLOT 1", "CLUSTER GETKEYSINSLOT 1 1"]


@pytest.mark.parametrize("words", WALKS)
@pytest.mark.parametrize(
    ("change", "answer"),
    [(RevokeRole("reader", "reads"), b"-NOPERM user reader lacks the right read"), (RemoveUser("reader"), b"-NOAUTH ")],
)
async def test_traversal_returns_nothing_when_the_right_is_revoked(
    resp: RespPort, access: Access, monkeypatch: pytest.MonkeyPatch, words: str, change: Change, answer: bytes
) -> None:
    """The right is checked before the traversal, before each page, and before the reply."""
    async with client_of(resp, "tenant") as tenant:
        await tenant.set("t/secret", "1")
    asked, ask = list[Code](), resp.server.ask

    async def revoked_then_asked(op: Op, partition: PartitionId) -> Any:
        asked.append(Code(op.code))
        found = await ask(op, partition)
        access.take(table(change))  # while the page is on its way back
        return found

    async with logged_in(resp, b"reader") as raw:
        monkeypatch.setattr(resp.server, "ask", revoked_then_asked)
        told = await line_of(raw, *words.encode().split())
    assert told.startswith(answer)
    assert len(asked) == 1  # nothing was read for the user from then on


async def test_traversal_begun_before_access_was_on_returns_nothing(
    resp: RespPort, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    access.take(table(*OFF))
    ask = resp.server.ask

    async def asked_who_he_is_meanwhile(op: Op, partition: PartitionId) -> Any:
        found = await ask(op, partition)
        access.take(table())
        return found

    async with resp.raw() as raw:
        assert await line_of(raw, b"SET", b"t/secret", b"1") == b"+OK\r\n"
        monkeypatch.setattr(resp.server, "ask", asked_who_he_is_meanwhile)
        assert (await line_of(raw, b"SCAN", b"0")).startswith(b"-NOAUTH ")


@pytest.mark.parametrize("pages", [1, 32])
async def test_scan_cursor_of_a_tenant_does_not_reveal_other_keys(
    resp: RespPort, access: Access, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """A cursor is a position on the ring, and a key's position is its hash: a user that guesses keys could learn
    which exist."""
    monkeypatch.setattr(routing_keys, "RANGES_MAX", pages)
    monkeypatch.setattr(routing_keys, "PAGE_KEYS_MAX", 5)
    monkeypatch.setattr(routing_keys, "STRIDE", TOKENS >> 5)
    mine = {b"t/%d" % number for number in range(20)}
    access.take(table(*OFF))
    async with client_of(resp, None) as anybody:
        await anybody.mset(dict.fromkeys([*mine, *(b"other%d" % number for number in range(300))], b"1"))
    access.take(table())
    places = {(SLOTS_HASH.token_of(key) + 1) % TOKENS for key in mine}
    for count in (1, 3, 1_000):
        found, cursors, cursor = list[bytes](), list[int](), 0
        async with client_of(resp, "tenant") as tenant:
            while cursor or not cursors:
                cursor, more = await tenant.scan(cursor, count=count)
                assert len(more) <= count
                cursors.append(int(cursor))
                found += more
        assert sorted(found) == sorted(mine), "each of them, once"
        assert {each for each in cursors if each not in places and each % (TOKENS >> 5)} == set()
        assert cursors == [*sorted(cursors[:-1]), 0]


async def test_random_key_of_few_among_many_is_found_in_few_steps(
    resp: RespPort, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user may see none of the keys near the random position."""
    access.take(table(*OFF))
    async with client_of(resp, None) as anybody:
        await anybody.mset({f"other{number}": "1" for number in range(3_000)})
    access.take(table())
    looked, ask = list[int](), resp.server.ask

    async def asked(op: Op, partition: PartitionId) -> Any:
        found = await ask(op, partition)
        looked.append(found if op.code == Code.COUNT else len(found[0]))
        return found

    monkeypatch.setattr(resp.server, "ask", asked)
    async with client_of(resp, "tenant") as tenant:
        for command, none, mine in (
            (tenant.randomkey, None, b"t/mine"), (partial(tenant.keys, "*"), [], [b"t/mine"]),
            (partial(tenant.scan, 0), (0, []), (0, [b"t/mine"])),
        ):  # fmt: skip
            for found in (none, mine):
                looked.clear()
                assert await command() == found
                assert sum(looked) < 500, "keys of others are not looked at"
                await tenant.set("t/mine", "1")
            await tenant.delete("t/mine")


async def test_concurrent_scans_of_a_user_are_bounded(
    resp: RespPort, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_slots, "WAIT_S", 0.2)
    held, in_flight, ask = asyncio.Event(), list[Op](), resp.server.ask

    async def held_up(op: Op, partition: PartitionId) -> Any:
        in_flight.append(op)
        await held.wait()
        return await ask(op, partition)

    async with client_of(resp, "reader") as reader, client_of(resp, "tenant") as tenant:
        await tenant.set("t/a", "1")
        monkeypatch.setattr(resp.server, "ask", held_up)
        many = [asyncio.ensure_future(tenant.randomkey()) for _ in range(SCANS_OF_USER_MAX + 3)]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait(many, return_when=asyncio.FIRST_EXCEPTION)
            done, waiting = await asyncio.wait(many, timeout=0.5)
        assert (len(done), len(waiting), len(in_flight)) == (3, SCANS_OF_USER_MAX, SCANS_OF_USER_MAX)
        assert all("8 scans of user tenant are running" in str(each.exception()) for each in done)
        other = asyncio.ensure_future(reader.randomkey())
        held.set()
        assert await asyncio.gather(other, *waiting) == [b"t/a"] * (SCANS_OF_USER_MAX + 1)


async def test_scans_are_charged_to_the_rate_of_the_namespace(resp: RespPort, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates(lambda: 0.0, Counter())
    rates.take([Namespace(name="tenant", prefix=b"t/", ops_per_s=1, burst=4)])
    monkeypatch.setattr(resp.server, "rates", lambda: rates)
    async with client_of(resp, "tenant") as tenant:
        for _ in range(4):
            await tenant.randomkey()
        with pytest.raises(exceptions.ResponseError, match="namespace tenant"):
            await tenant.scan(0)


async def test_rename_checks_permissions_at_each_step(
    resp: RespPort, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user with all rights has no guard. Once a right is revoked, a guard checks the remaining steps."""
    access.take(table(*EVERYTHING))
    async with logged_in(resp, b"tenant") as raw:
        assert await line_of(raw, b"SET", b"{x}1", b"1") == b"+OK\r\n"
        submit = resp.backend.submit

        def revoked_then_submitted(ops: Sequence[Op], *more: Any) -> None:
            submit(ops, *more)
            access.take(table(RevokeRole("tenant", "owns")))

        (connection,) = resp.server._connections
        monkeypatch.setattr(resp.backend, "submit", revoked_then_submitted)
        assert connection.replies.backend is resp.backend
        assert (await line_of(raw, b"RENAME", b"{x}1", b"{x}2")).startswith(
            b"-NOPERM user tenant lacks the right write"
        )
        monkeypatch.undo()
        access.take(table(*EVERYTHING))
        assert await line_of(raw, b"EXISTS", b"{x}2") == b":0\r\n"
