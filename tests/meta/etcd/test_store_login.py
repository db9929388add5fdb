"""Users and passwords of etcd. A real server that requires them."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.devcluster.etcd import EtcdProcess, find_etcd, restart, start_standalone
from kvstore.errors import MetadataDenied, MetadataError, MetadataUnavailable
from kvstore.meta.connect import connect
from kvstore.meta.etcd import EtcdStore
from kvstore.meta.login import MetadataLogin
from kvstore.meta.store import SessionState
from tests.meta.drivers import States
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.needs_etcd

OURS = MetadataLogin("kvstore", b"s3cret")
TOKEN_TTL_S = 1


def etcdctl(address: str, *arguments: str) -> None:
    tool = find_etcd().with_name("etcdctl")
    patience = (f"--command-timeout={PATIENCE_S:g}s", f"--dial-timeout={PATIENCE_S:g}s")  # its own environment is small
    command = [str(tool), f"--endpoints=http://{address}", *patience, *arguments]
    environ = os.environ | {"ETCDCTL_API": "3"}
    subprocess.run(command, check=True, capture_output=True, timeout=2 * PATIENCE_S, env=environ)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdProcess]:
    """A server where the user kvstore may do everything below /kv, and nothing elsewhere."""
    process = start_standalone(tmp_path / "etcd", settings=("--auth-token-ttl", str(TOKEN_TTL_S)))
    for arguments in (
        ("user", "add", "root:admin"),
        ("user", "grant-role", "root", "root"),
        ("role", "add", "kvstore"),
        ("role", "grant-permission", "kvstore", "--prefix=true", "readwrite", "/kv/"),
        ("user", "add", "kvstore:s3cret"),
        ("user", "grant-role", "kvstore", "kvstore"),
        ("auth", "enable"),
    ):
        etcdctl(process.address, *arguments)
    yield process
    process.kill()


async def opened(process: EtcdProcess, login: MetadataLogin | None, prefix: str = "kv") -> EtcdStore:
    store = await connect(f"etcd://{process.address}/{prefix}", login=login, timeout_s=PATIENCE_S)
    assert isinstance(store, EtcdStore)
    return store


async def test_wrong_password_user_and_prefix_are_refused_at_once(guarded: EtcdProcess) -> None:
    for login, prefix in ((MetadataLogin("kvstore", b"wrong"), "kv"), (None, "kv"), (OURS, "elsewhere")):
        with pytest.raises(MetadataDenied, match="etcd refuses"):
            await opened(guarded, login, prefix)


async def test_session_does_everything_as_its_user(guarded: EtcdProcess) -> None:
    store, other = await opened(guarded, OURS), await opened(guarded, OURS)
    try:
        seen = asyncio.Event()
        other.watch("/a", seen.set)
        await store.create("/a", b"1", ephemeral=True)
        async with asyncio.timeout(PATIENCE_S):
            await seen.wait()
        assert await store.create("/n-", sequential=True) == "/n-0000000001"
        assert await other.children("/") == ["a", "n-0000000001"]
        session, states = store.session, States(store)
        store.break_connection()
        await states.wait_for(SessionState.CONNECTED)
        assert store.session == session
        await store.set("/a", b"2", 0)
        await store.close()

        async def is_over() -> bool:
            """At once, unless etcd takes longer than a close waits; then with the lease."""
            return await other.children("/") == ["n-0000000001"]

        await wait_until(is_over, what="the session's node is gone")
    finally:
        await store.close()
        await other.close()


async def test_forgotten_token_is_replaced_by_the_call_that_finds_out(
    guarded: EtcdProcess,
) -> None:
    store = await opened(guarded, OURS)
    try:
        link = store._session.link
        assert link is not None
        link._carried = (("token", "forgotten.1"),)
        await store.create("/a", b"1")
        assert link._carried != (("token", "forgotten.1"),)
        assert store._session.link is link
        etcdctl(guarded.address, "--user=root:admin", "role", "add", "another")  # another revision of its users
        assert (await store.get("/a"))[0] == b"1"
        assert store._session.link is link
    finally:
        await store.close()


async def test_user_that_loses_its_role_gets_an_error_and_recovers_with_it(guarded: EtcdProcess) -> None:
    store = await opened(guarded, OURS)
    try:
        await store.create("/a", b"1")
        etcdctl(guarded.address, "--user=root:admin", "user", "revoke-role", "kvstore", "kvstore")
        with pytest.raises(MetadataDenied):
            await store.get("/a")
        etcdctl(guarded.address, "--user=root:admin", "user", "grant-role", "kvstore", "kvstore")

        async def may_read() -> bool:
            with suppress(MetadataDenied, MetadataUnavailable):
                return (await store.get("/a"))[0] == b"1"
            return False

        await wait_until(may_read, what="it may read again")
    finally:
        await store.close()


async def test_session_continues_when_the_server_restarts_without_tokens(guarded: EtcdProcess) -> None:
    store = await opened(guarded, OURS)
    try:
        await store.create("/a", b"1")
        states = States(store)
        guarded.kill()
        await states.wait_for(SessionState.SUSPENDED)
        again = States(store)
        running = await asyncio.to_thread(restart, guarded)
        try:
            await again.wait_for(SessionState.CONNECTED)
            with suppress(MetadataError):
                assert (await store.get("/a"))[0] == b"1"
            await store.create("/b", b"2")
        finally:
            await store.close()
            running.kill()
    finally:
        await store.close()
