"""Logins: their cost, refusals without a hash, names in certificates, and lines in the audit log."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator

import pytest

from kvstore.access import AccessTable, Password, RemoveUser, Right, SetPassword, Switch
from kvstore.env.networks import network_of
from kvstore.env.nursery import TaskNursery
from kvstore.errors import NotAuthenticated, Overloaded, PermissionDenied, StoreError
from kvstore.partition.state.commands import Get
from kvstore.server.access import logins as module
from kvstore.server.access.audit import LINES_MAX, AuditLog, caller_of
from kvstore.server.access.certificates import common_names
from kvstore.server.access.identities import Access
from kvstore.server.access.logins import Logins
from tests.audited import KeptLines
from tests.client.serving import env_of
from tests.server.access.tables import OTHER_HASH, PASSWORD, table
from tests.waiting import PATIENCE_S


@pytest.fixture
def lines() -> KeptLines:
    return KeptLines()


@pytest.fixture
def access(lines: KeptLines) -> Access:
    return Access(table(), AuditLog(lambda: 0.0, lambda: 5, lines))


@pytest.fixture
async def logins(access: Access, lines: KeptLines) -> AsyncIterator[Logins]:
    nursery = TaskNursery("test")
    made = Logins(env_of(nursery), access, AuditLog(lambda: 0.0, lambda: 5, lines))
    yield made
    made.close()
    await nursery.close()


async def test_verified_login_is_not_hashed_again_until_the_password_changes(logins: Logins, access: Access) -> None:
    for _ in range(3):
        assert (await logins.login("tenant", PASSWORD, "a")).name == "tenant"
    assert logins.hashes == 1
    access.take(table(SetPassword("tenant", OTHER_HASH)))
    assert logins.known_or_none("tenant", PASSWORD) is None
    with pytest.raises(NotAuthenticated):
        await logins.login("tenant", PASSWORD, "a")
    assert (await logins.login("tenant", b"another", "a")).name == "tenant"


async def test_listeners_limit_unknown_networks_only_while_access_control_is_on(lines: KeptLines) -> None:
    """Without access control the networks of clients do not become known."""
    nursery, access = TaskNursery("test"), Access(table())
    env = env_of(nursery)
    logins = Logins(env, access, AuditLog(lambda: 0.0, lambda: 5, lines))
    assert env.known.clients_authenticate
    access.take(AccessTable())
    assert not env.known.clients_authenticate
    access.take(table())
    assert env.known.clients_authenticate
    logins.close()
    access.take(AccessTable())
    assert env.known.clients_authenticate, "closed logins follow no table"
    await nursery.close()


async def test_identical_concurrent_logins_share_a_hash(logins: Logins) -> None:
    found = await asyncio.gather(*(logins.login("tenant", PASSWORD, "a") for _ in range(40)))
    assert {each.name for each in found} == {"tenant"}
    assert logins.hashes == 1


async def test_guesses_of_one_address_cost_few_hashes(logins: Logins) -> None:
    async def guess(number: int) -> None:
        with pytest.raises(StoreError):
            await logins.login("root", b"%d" % number, "a")

    await asyncio.gather(*map(guess, range(100)))
    assert logins.hashes <= module.FAILURES_MAX
    assert logins.statistics()["logins_limited_total"] >= 90
    with pytest.raises(NotAuthenticated, match="too many"):
        await logins.login("tenant", PASSWORD, "a")
    assert (await logins.login("tenant", PASSWORD, "b")).name == "tenant"


async def test_repeated_wrong_password_does_not_block_other_clients(logins: Logins, access: Access) -> None:
    """Also for a removed user. A client that repeats the same login guesses nothing."""
    assert (await logins.login("tenant", PASSWORD, "a")).name == "tenant"
    access.take(table(RemoveUser("tenant")))
    for user, wrong in (("tenant", PASSWORD), ("root", b"the former one")):
        for _ in range(3 * module.FAILURES_MAX):
            with pytest.raises(NotAuthenticated, match="invalid username-password pair"):
                await logins.login(user, wrong, "a")
    assert logins.hashes == 3
    assert (await logins.login("root", PASSWORD, "a")).name == "root"
    access.take(table())
    assert (await logins.login("tenant", PASSWORD, "a")).name == "tenant"


async def test_remembered_wrong_logins_are_bounded(logins: Logins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRONG_MAX", 4)
    for number in range(7):
        with pytest.raises(NotAuthenticated):
            await logins.login("root" * 1_000_000, b"%d" % number, str(number))
    assert len(logins._wrong) == 4
    assert sum(len(part) for each in logins._wrong for part in each) < 4_000, "whatever names strangers say"


async def test_remembered_addresses_are_bounded(logins: Logins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ADDRESSES_MAX", 4)
    for number in range(20):
        logins._note_failure(str(number))
    assert list(logins._failures) == ["16", "17", "18", "19"]


async def test_abandoned_right_login_does_not_count_as_a_failure(logins: Logins) -> None:
    """The client has a short deadline: its login is completed, and known when the client returns."""
    attempt = asyncio.ensure_future(logins.login("tenant", PASSWORD, "a"))
    await asyncio.sleep(0)
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    await asyncio.gather(*logins._pending.values())
    await asyncio.sleep(0)
    assert logins.known_or_none("tenant", PASSWORD) is not None
    assert logins._failures["a"].times == 0


async def test_abandoned_guess_counts_as_a_failure(logins: Logins) -> None:
    for number in range(module.FAILURES_MAX):
        attempt = asyncio.ensure_future(logins.login("tenant", b"%d" % number, "a"))
        await asyncio.sleep(0)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
    await asyncio.gather(*logins._pending.values())
    with pytest.raises(NotAuthenticated, match="too many"):
        await logins.login("tenant", b"one more", "a")


async def test_login_fails_when_the_password_changes_during_its_hash(logins: Logins, access: Access) -> None:
    attempt = asyncio.ensure_future(logins.login("tenant", PASSWORD, "a"))
    await asyncio.sleep(0)
    access.take(table(SetPassword("tenant", OTHER_HASH)))
    with pytest.raises(NotAuthenticated):
        await attempt
    assert logins.known_or_none("tenant", PASSWORD) is None


@pytest.mark.parametrize(
    "header", ["Basic \u00e9", "Basic \udcff", "Basic", "", "Basic YQ=", "Bearer YTpi", "Basic //86eA=="]
)
def test_malformed_authorization_header_has_no_credentials(header: str) -> None:
    assert module.basic_or_none(header) is None


async def test_waiting_logins_are_bounded(logins: Logins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PENDING_MAX", 2)
    found = await asyncio.gather(
        *(logins.login("root", b"%d" % number, str(number)) for number in range(6)), return_exceptions=True
    )
    assert sum("waiting to be checked" in str(each) for each in found) == 4
    assert logins.hashes == 2


def stand_still(logins: Logins, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Block the thread with a login until the event is set. Later logins wait."""
    resume, right = threading.Event(), Password.is_right

    def is_right(hashed: Password, password: bytes) -> bool:
        resume.wait()
        return password != b"guess" and right(hashed, password)

    monkeypatch.setattr(Password, "is_right", is_right)
    return resume


async def test_login_of_failing_address_waits_behind_other_addresses(
    logins: Logins, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    async def attempt(password: bytes, address: str) -> None:
        try:
            await logins.login("tenant", password, address)
        except NotAuthenticated:
            pass
        finally:
            ended.append(address)

    resume = stand_still(logins, monkeypatch)
    attempts = [asyncio.ensure_future(attempt(b"guess%d" % number, "bad")) for number in range(5)]
    attempts += [asyncio.ensure_future(attempt(b"other%d" % number, "worse")) for number in range(6)]
    attempts.append(asyncio.ensure_future(attempt(PASSWORD, "good")))
    await asyncio.sleep(0)
    resume.set()
    await asyncio.gather(*attempts)
    assert ended[:2] == ["bad", "good"], "the first was with the thread"
    assert ended[2:] == ["bad"] * 4 + ["worse"] * 6


async def test_login_of_the_most_failing_address_is_displaced_at_the_limit(
    logins: Logins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PENDING_MAX", 4)
    resume = stand_still(logins, monkeypatch)
    guesses = [asyncio.ensure_future(logins.login("root", b"%d" % number, "bad")) for number in range(4)]
    await asyncio.sleep(0)
    good = asyncio.ensure_future(logins.login("tenant", PASSWORD, "good"))
    await asyncio.sleep(0)
    assert logins.statistics()["logins_pending"] == 4
    resume.set()
    assert (await good).name == "tenant"
    found = await asyncio.gather(*guesses, return_exceptions=True)
    assert [type(each) for each in found] == [NotAuthenticated] * 3 + [Overloaded], "the last that came"
    assert logins._failures["bad"].times == 3
    assert (logins._waiting, logins._pending) == ([], {})


async def test_logins_without_a_thread_are_refused_and_the_next_is_checked(
    logins: Logins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a process that cannot start a thread for a moment: no login waits for a thread that never started."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", start)
        for _ in range(3):
            with pytest.raises(Overloaded, match="can't start new thread"):
                await asyncio.wait_for(logins.login("tenant", PASSWORD, "a"), PATIENCE_S)
    assert (logins._waiting, logins._pending, logins._times("a")) == ([], {}, 0), "it was no failed login"
    assert logins.statistics()["logins_limited_total"] == 3
    assert (await asyncio.wait_for(logins.login("tenant", PASSWORD, "a"), PATIENCE_S)).name == "tenant"


async def test_login_without_memory_is_refused_and_waiting_ones_are_checked(
    logins: Logins, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Password.is_right

    def is_right(hashed: Password, password: bytes) -> bool:
        if password == b"unlucky":
            raise MemoryError
        return right(hashed, password)

    monkeypatch.setattr(Password, "is_right", is_right)
    unlucky = asyncio.ensure_future(logins.login("root", b"unlucky", "a"))
    other = asyncio.ensure_future(logins.login("tenant", PASSWORD, "b"))
    with pytest.raises(Overloaded, match="MemoryError"):
        await unlucky
    assert (await other).name == "tenant"
    assert logins._times("a") == 0


async def test_logins_are_checked_when_niceness_cannot_be_set(logins: Logins, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: int) -> None:
        raise PermissionError("a sandbox")

    monkeypatch.setattr(os, "setpriority", refuse)
    assert (await asyncio.wait_for(logins.login("tenant", PASSWORD, "a"), PATIENCE_S)).name == "tenant"


async def test_login_thread_has_lower_priority(logins: Logins) -> None:
    await logins.login("tenant", PASSWORD, "a")
    assert logins._thread is not None
    nice = logins._thread.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
    assert nice == module.NICENESS


async def test_user_without_password_authenticates_only_by_certificate(logins: Logins, access: Access) -> None:
    for password in (b"", b"secret"):
        with pytest.raises(NotAuthenticated):
            await logins.login("certified", password, "a")
    shown = {"subject": ((("organizationName", "x"),), (("commonName", "certified"),))}
    found = access.of_certificate(common_names(shown))
    assert found is not None
    found.check(Right.READ, b"", b"", "a test")
    assert access.of_certificate(common_names(None)) is None
    assert access.of_certificate(["nobody", "n1"]) is None


async def test_audit_line_of_a_refused_login_has_no_secret(logins: Logins, access: Access, lines: KeptLines) -> None:
    with pytest.raises(NotAuthenticated):
        await logins.login("an\nna", b"guessed", "ipv4:10.0.0.7")
    access.refused("anna", "10.0.0.7:1", "get", PermissionDenied("user anna lacks the right read"))
    one, two = lines.documents()
    assert (one["who"], one["from"], one["call"], one["outcome"]) == (
        "'an\\nna'", "10.0.0.7", "login", "NOT_AUTHENTICATED",
    )  # fmt: skip
    assert two == {
        "time": 5,
        "who": "anna",
        "from": "10.0.0.7:1",
        "call": "get",
        "outcome": "PERMISSION_DENIED",
        "why": "user anna lacks the right read",
    }
    assert "guessed" not in "".join(lines.lines)


def test_undecodable_access_table_refuses_everyone(access: Access) -> None:
    tenant = access.identity_or_none("tenant")
    assert tenant is not None
    access.shut()
    assert access.is_on
    assert tenant.is_gone
    assert isinstance(tenant.refusal_or_none(Get(b"t/a")), NotAuthenticated)
    assert isinstance(access.nobody.refusal_or_none(Get(b"t/a")), NotAuthenticated)
    access.take(table(Switch(False)))
    assert access.nobody.refusal_or_none(Get(b"t/a")) is None


def test_login_failures_are_counted_by_network() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::2") != network_of("2001:db9::1")
    assert network_of("10.0.0.1") != network_of("10.0.0.2")


@pytest.mark.parametrize(
    ("address", "caller"),
    [
        ("10.0.0.9:51112", "10.0.0.9"),
        ("ipv4:10.0.0.9:51112", "10.0.0.9"),
        ("10.0.0.9", "10.0.0.9"),
        (network_of("10.0.0.9"), "10.0.0.9"),
        (network_of("::ffff:10.0.0.9"), "10.0.0.9"),
        ("[::ffff:10.0.0.9]:1", "10.0.0.9"),
        ("[2001:db8::1]:51112", "2001:db8::/64"),
        ("ipv6:[2001:db8::2]:51112", "2001:db8::/64"),
        ("2001:db8::3", "2001:db8::/64"),
        (network_of("2001:db8::4"), "2001:db8::/64"),
        ("?", "?"),
    ],
)
def test_audit_counts_a_client_as_one_address_at_all_endpoints(address: str, caller: str) -> None:
    assert caller_of(address) == caller


async def test_audit_keeps_lines_of_other_addresses_during_a_login_flood(access: Access, lines: KeptLines) -> None:
    nursery = TaskNursery("test")
    audit = AuditLog(lambda: 0.0, lambda: 5, lines)
    logins = Logins(env_of(nursery), access, audit)
    for _ in range(3 * LINES_MAX):
        with pytest.raises(NotAuthenticated):
            await logins.login("root", b"", network_of("10.0.0.1"))
    lines.lines.clear()
    with pytest.raises(NotAuthenticated):
        await logins.login("root", b"", network_of("10.0.0.2"))
    (line,) = lines.documents()
    assert line["from"] == "10.0.0.2"
    audit._forget("10.0.0.1")
    logins.close()
    await nursery.close()
