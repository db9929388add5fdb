"""Clients of a cluster that requires logins: both clients, over both kinds of connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.access import RemoveUser, RevokeRole, SetPassword, Switch
from kvstore.client import AsyncClient, Client
from kvstore.client.core import address_backoff
from kvstore.errors import NotAuthenticated, PermissionDenied, StoreError, Unavailable
from kvstore.server.access.identities import Access
from tests.client.model import ModelCluster
from tests.client.serving import PATIENT, Servers, serving, serving_in_a_thread
from tests.server.access.tables import OTHER_HASH, table
from tests.waiting import PATIENCE_S, wait_until


def access() -> Access:
    return Access(table())


def url_of(servers: Servers, user: str, password: str = "secret") -> str:
    return servers.url.replace("kv://", f"kv://{user}:{password}@") + PATIENT


@pytest.fixture(params=[True, False], ids=["streams", "grpc"])
async def servers(request: pytest.FixtureRequest) -> AsyncIterator[Servers]:
    async with serving(ModelCluster(), has_streams=request.param, access=access) as running:
        yield running


async def test_user_may_do_what_his_permissions_allow_and_no_more(servers: Servers) -> None:
    async with AsyncClient(url_of(servers, "tenant")) as client:
        await client.put(b"t/a", b"1")
        found = await client.get(b"t/a")
        assert found is not None
        assert found.value == b"1"
        for call in (client.get(b"x"), client.put(b"x", b"1"), client.delete(b"x"), client.count()):
            with pytest.raises(PermissionDenied, match=r"user tenant lacks the right (read|write) for"):
                await call
        assert [key async for key, _ in client.scan(prefix=b"t/")] == [b"t/a"]
        with pytest.raises(PermissionDenied, match="keys from"):
            _ = [key async for key, _ in client.scan()]
    async with AsyncClient(url_of(servers, "reader")) as client:
        assert await client.get(b"x") is None
        with pytest.raises(PermissionDenied):
            await client.put(b"t/a", b"2")
        with pytest.raises(PermissionDenied):
            await client.put(b"t/a", b"2")


@pytest.mark.parametrize(("user", "password"), [("tenant", "wrong"), ("nobody", "secret"), ("", "")])
async def test_unauthenticated_client_is_refused_at_once(servers: Servers, user: str, password: str) -> None:
    url = url_of(servers, user, password) if user else servers.patient_url
    with pytest.raises(NotAuthenticated):
        async with AsyncClient(url):
            pass


async def test_environment_names_the_user(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_USER", "tenant")
    monkeypatch.setenv("KVSTORE_PASSWORD", "secret")
    async with AsyncClient(servers.patient_url) as client:
        await client.put(b"t/a", b"1")


@pytest.mark.parametrize("change", [RemoveUser("tenant"), SetPassword("tenant", OTHER_HASH)])
async def test_removed_user_is_disconnected(servers: Servers, change: RemoveUser | SetPassword) -> None:
    async with AsyncClient(url_of(servers, "tenant")) as client:
        await client.put(b"t/a", b"1")
        for each in servers.access.values():
            each.take(table(change))
        with pytest.raises(NotAuthenticated):
            await client.get(b"t/a")

        async def none_is_open() -> bool:
            return not any(streams._open for streams in servers.streams.values())

        await wait_until(none_is_open, what="the user's sessions have ended")


async def test_revoked_permission_applies_to_open_sessions(servers: Servers) -> None:
    async with AsyncClient(url_of(servers, "tenant")) as client:
        await client.put(b"t/a", b"1")
        for each in servers.access.values():
            each.take(table(RevokeRole("tenant", "owns")))
        with pytest.raises(PermissionDenied):
            await client.get(b"t/a")


async def test_sessions_outlive_the_switch_when_their_client_has_a_login(servers: Servers) -> None:
    for each in servers.access.values():
        each.take(table(Switch(False)))
    async with AsyncClient(url_of(servers, "tenant")) as known, AsyncClient(servers.patient_url) as stranger:
        await known.put(b"t/a", b"1")
        await stranger.put(b"t/b", b"1")
        for each in servers.access.values():
            each.take(table())
        found = await known.get(b"t/a")
        assert found is not None
        with pytest.raises(StoreError):
            await stranger.get(b"t/b", timeout_s=1.0)


async def test_many_clients_of_one_user_cost_one_hash_at_each_server(servers: Servers) -> None:
    clients = [AsyncClient(url_of(servers, "tenant")) for _ in range(12)]
    await asyncio.gather(*(each.open() for each in clients))
    await asyncio.gather(*(each.put(b"t/%d" % number, b"") for number, each in enumerate(clients)))
    await asyncio.gather(*(each.close() for each in clients))
    assert all(each.hashes <= 1 for each in servers.logins.values())


async def test_too_many_failed_logins_are_refused_without_a_hash(servers: Servers) -> None:
    async def attempt(number: int) -> None:
        with pytest.raises(StoreError):
            async with AsyncClient(url_of(servers, "root", f"guess{number}")):
                pass

    await asyncio.gather(*map(attempt, range(24)))
    assert all(each.hashes <= 10 for each in servers.logins.values())
    assert sum(each.limited for each in servers.logins.values()) > 0


@pytest.fixture
def threaded() -> Iterator[Servers]:
    with serving_in_a_thread(ModelCluster(), access) as running:
        yield running


def test_blocking_client_logs_in(threaded: Servers) -> None:
    with Client(url_of(threaded, "tenant")) as client:
        client.put(b"t/a", b"1")
        assert client.get_many([b"t/a", b"t/b"]).keys() == {b"t/a"}
        for call in (lambda: client.get(b"x"), lambda: client.put(b"x", b"1")):
            with pytest.raises(PermissionDenied):
                call()
    for url in (threaded.patient_url, url_of(threaded, "tenant", "wrong")):
        with pytest.raises(NotAuthenticated), Client(url):
            pass


def key_led_by(servers: Servers, id: str) -> bytes:
    """Return a key of the tenant that this server leads."""
    cluster = servers.cluster
    owned = (b"t/%d" % number for number in range(10_000))
    return next(key for key in owned if cluster.leaders[cluster.ring.partition_of(key)] == id)


def test_server_that_does_not_know_the_user_fails_no_call(threaded: Servers) -> None:
    """Its table is old or unreadable. It is asked first for the topology."""
    key, lost = key_led_by(threaded, "n2"), list[object]()

    def lose_the_first_answer(op: object, answer: object) -> bool:
        lost.append(op)
        return len(lost) == 1

    threaded.access[threaded.cluster.ids[0]].take(table(RemoveUser("tenant")))
    with Client(url_of(threaded, "tenant") + "&silence=100ms") as client:
        assert client._engine is not None
        client._engine._read_at = -1e9  # ten seconds later
        client.put(key, b"1")
        threaded.cluster.servers[1].intercept = lose_the_first_answer
        client.put(key, b"2")
        assert len(lost) >= 2, "more often if an answer takes longer than the client waits"
    assert threaded.cluster.doubly_applied() == []


def test_calls_for_a_leader_that_does_not_know_the_user_are_forwarded(threaded: Servers) -> None:
    with Client(url_of(threaded, "tenant")) as client:
        client.put(key_led_by(threaded, "n1"), b"1")
        threaded.access[threaded.cluster.ids[0]].take(table(RemoveUser("tenant")))
        client.put(key_led_by(threaded, "n1"), b"2")
        assert client.put_many(dict.fromkeys([key_led_by(threaded, each) for each in threaded.cluster.ids], b"3"))
        for each in threaded.access.values():
            each.take(table(RemoveUser("tenant")))
        with pytest.raises(NotAuthenticated):
            client.get(key_led_by(threaded, "n1"))
        for id, each in threaded.access.items():
            each.take(table(*(() if id == "n3" else (RemoveUser("tenant"),))))
        client.put(key_led_by(threaded, "n1"), b"5")


def test_late_caller_learns_that_the_only_server_rejects_the_login(
    threaded: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MIN_S", "MAX_S"):  # or a server that is down may be tried last, and its error counts
        monkeypatch.setattr(address_backoff, name, PATIENCE_S)
    with Client(url_of(threaded, "tenant")) as client:
        threaded.access[threaded.cluster.ids[0]].take(table(RemoveUser("tenant")))
        for id in threaded.cluster.ids[1:]:
            threaded.kill_from_outside(id)

        def get_late() -> None:
            for timeout_s in (2.0, 8.0, PATIENCE_S):  # the server that is up may be too slow for the short ones
                with suppress(Unavailable):
                    client.get(key_led_by(threaded, "n1"), timeout_s=timeout_s)

        with pytest.raises(NotAuthenticated):
            get_late()


async def test_late_asyncio_caller_learns_that_the_only_server_rejects_the_login(servers: Servers) -> None:
    servers.access[servers.cluster.ids[0]].take(table(RemoveUser("tenant")))
    async with AsyncClient(url_of(servers, "tenant")) as client:
        await client.put(key_led_by(servers, "n2"), b"1")


@pytest.fixture
def password_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tenant's login, as clients without a login of their own get it."""
    file = tmp_path / "password"
    file.write_text("secret")
    monkeypatch.setenv("KVSTORE_USER", "tenant")
    monkeypatch.setenv("KVSTORE_PASSWORD_FILE", str(file))
    return file


def replace_login(servers: Servers, file: Path) -> None:
    """The login is replaced at all servers at once, and in time in the file, like a token that expires."""
    file.write_text("another")
    for each in servers.access.values():
        servers.loop.call_soon_threadsafe(each.take, table(SetPassword("tenant", OTHER_HASH)))


@pytest.mark.parametrize("count", [1, 3])
def test_calls_continue_with_the_present_login(password_file: Path, count: int) -> None:
    with serving_in_a_thread(ModelCluster(count, count), access) as servers, Client(servers.patient_url) as client:
        keys = [key_led_by(servers, each) for each in servers.cluster.ids]
        client.put_many(dict.fromkeys(keys, b"1"))
        engine = client._engine
        assert engine is not None
        assert len(engine._links) == count
        replace_login(servers, password_file)
        for key in keys:
            client.put(key, b"2")
        for each in servers.access.values():
            servers.loop.call_soon_threadsafe(each.take, table(RemoveUser("tenant")))
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), servers.loop).result()
        with pytest.raises(NotAuthenticated):
            client.get(keys[0])  # a put that has reached a closing connection has an unknown outcome


def test_refused_topology_ends_the_connection_of_an_old_login(threaded: Servers, password_file: Path) -> None:
    with Client(threaded.patient_url) as client:
        engine = client._engine
        assert engine is not None
        before = dict(engine._links)
        replace_login(threaded, password_file)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), threaded.loop).result()
        engine._read_topology()
        assert not any(engine._links.get(address) is link for address, link in before.items())
