"""Logins and ACLs in ZooKeeper: only the creator of a node may use it. Real servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kazoo.security import make_digest_acl

from kvstore.devcluster.zookeeper import ZooKeeperProcess, start_standalone
from kvstore.errors import MetadataDenied, NodeExists
from kvstore.meta.login import Acl, Mechanism, MetadataLogin
from kvstore.meta.store import Create, Delete, SessionState, SetData
from kvstore.meta.zookeeper.acls import set_acls
from kvstore.meta.zookeeper.store import ZooKeeperStore
from tests.meta.drivers import SESSION_S, States
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs_zookeeper

OURS = MetadataLogin("kvstore", b"s3cret")
OTHERS = MetadataLogin("mallory", b"guess")
NOT_YET = MetadataLogin("kvstore", b"s3cret", acl=Acl.OPEN)
JAAS = """\
Server {{
    org.apache.zookeeper.server.auth.DigestLoginModule required user_kvstore="s3cret";
}};
"""


@asynccontextmanager
async def connected(address: str, login: MetadataLogin | None) -> AsyncIterator[ZooKeeperStore]:
    store = await ZooKeeperStore.connect(address, login=login, session_timeout_s=SESSION_S)
    try:
        yield store
    finally:
        await store.close()


async def test_other_user_cannot_connect_to_the_creators_tree(zookeeper_chroot: str) -> None:
    async with connected(zookeeper_chroot, OURS) as store:
        await store.create("/a", b"1")
        for login in (None, OTHERS, MetadataLogin("kvstore", b"wrong")):
            with pytest.raises(MetadataDenied, match="ACL names another user"):
                await ZooKeeperStore.connect(zookeeper_chroot, login=login)


async def test_every_way_to_create_a_node_restricts_it(zookeeper: str, zookeeper_chroot: str) -> None:
    chroot = zookeeper_chroot.removeprefix(zookeeper)
    async with connected(zookeeper_chroot, OURS) as store, connected(zookeeper, None) as stranger:
        made = [
            await store.create("/plain"),
            await store.create("/ephemeral", ephemeral=True),
            await store.create("/numbered-", sequential=True),
            await store.create("/both-", ephemeral=True, sequential=True),
        ]
        await store.multi([Create("/in-one"), Create("/in-one-ephemeral", ephemeral=True)])
        for path in ("", *made, "/in-one", "/in-one-ephemeral"):
            for refused in (
                stranger.get(chroot + path),
                stranger.children(chroot + path),
                stranger.set(chroot + path, b"", 0),
                stranger.create(f"{chroot}{path}/below"),
                stranger.multi([SetData(chroot + path, b"", 0)]),
            ):
                with pytest.raises(MetadataDenied):
                    await refused
        for path in (*made, "/in-one"):
            for refused in (stranger.delete(chroot + path, 0), stranger.multi([Delete(chroot + path, -1)])):
                with pytest.raises(MetadataDenied):
                    await refused


async def test_session_logs_in_on_every_connection(zookeeper_chroot: str) -> None:
    async with connected(zookeeper_chroot, OURS) as store, connected(zookeeper_chroot, OURS) as other:
        await store.create("/a", b"1")
        seen = asyncio.Event()
        store.watch("/a", seen.set)
        session, states = store.session, States(store)
        store.break_connection()
        await states.wait_for(SessionState.CONNECTED)
        assert store.session == session
        assert (await store.get("/a"))[0] == b"1"
        seen.clear()
        await other.set("/a", b"2", 0)
        async with asyncio.timeout(PATIENCE_S):
            await seen.wait()


async def test_parent_of_another_user_need_not_be_created(zookeeper: str, zookeeper_chroot: str) -> None:
    chroot = zookeeper_chroot.removeprefix(zookeeper)
    async with connected(zookeeper, OTHERS) as admin:
        await admin.create(chroot)
        await admin.create(f"{chroot}/ours")
        await admin.set_acl(f"{chroot}/ours", [make_digest_acl("kvstore", "s3cret", all=True)])
    async with connected(f"{zookeeper_chroot}/ours", OURS) as store:
        await store.create("/a")
    with pytest.raises(MetadataDenied):
        await ZooKeeperStore.connect(f"{zookeeper_chroot}/mine", login=OURS)


async def test_open_tree_is_closed_while_in_use_and_opened_again(zookeeper_chroot: str) -> None:
    async with connected(zookeeper_chroot, None) as before:
        for number in range(100):
            await before.create(f"/{number}")
            await before.create(f"/{number}/below")
    async with connected(zookeeper_chroot, NOT_YET) as running, connected(zookeeper_chroot, OURS) as store:
        await running.create("/running", ephemeral=True)
        outcome = await set_acls(store, Acl.CREATOR)
        assert (outcome.nodes, outcome.changed, outcome.denied) == (202, 202, [])
        assert (await set_acls(store, Acl.CREATOR)).changed == 0
        with pytest.raises(MetadataDenied):
            await ZooKeeperStore.connect(zookeeper_chroot)
        await running.set("/7/below", b"x", 0)
        with pytest.raises(NodeExists):
            await running.create("/running")

        assert (await set_acls(store, Acl.OPEN)).changed == 202
    async with connected(zookeeper_chroot, None) as after:
        assert (await after.get("/7/below"))[0] == b"x"
        await after.delete("/8/below", 0)


async def test_node_created_open_during_the_first_pass_is_closed_by_the_second(
    zookeeper_chroot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(zookeeper_chroot, NOT_YET) as running, connected(zookeeper_chroot, OURS) as store:
        await running.create("/a")
        set_one, is_made = store.set_acl, False

        async def set_and_meanwhile(path: str, acl: list[object]) -> None:
            nonlocal is_made
            await set_one(path, acl)  # type: ignore[arg-type]
            if path == "/a" and not is_made:
                is_made = True
                children = store.children

                async def late(path: str) -> list[str]:
                    found = await children(path)
                    if path == "/a":
                        await running.create("/a/late")
                        monkeypatch.setattr(store, "children", children)
                    return found

                monkeypatch.setattr(store, "children", late)

        monkeypatch.setattr(store, "set_acl", set_and_meanwhile)
        outcome = await set_acls(store, Acl.CREATOR)
        assert outcome.nodes == 3
        with pytest.raises(MetadataDenied):
            async with connected(f"{zookeeper_chroot}/a/late", None):
                pass


async def test_nodes_of_another_user_are_named_and_left(zookeeper_chroot: str) -> None:
    async with connected(zookeeper_chroot, None) as anybody:
        await anybody.create("/theirs")
        await anybody.create("/ours")
    async with connected(f"{zookeeper_chroot}/theirs", OTHERS) as theirs:
        await set_acls(theirs, Acl.CREATOR)
    async with connected(zookeeper_chroot, OURS) as store:
        outcome = await set_acls(store, Acl.CREATOR)
        assert (outcome.denied, outcome.changed) == (["/theirs"], 2)


@pytest.fixture
def sasl_zookeeper(tmp_path: Path) -> Iterator[ZooKeeperProcess]:
    """A server that accepts only logins by SASL."""
    pytest.importorskip("puresasl", reason="the extra sasl is not installed")
    jaas = tmp_path / "jaas.conf"
    jaas.write_text(JAAS.format())
    process = start_standalone(
        tmp_path / "zookeeper",
        settings=(
            "authProvider.1=org.apache.zookeeper.server.auth.SASLAuthenticationProvider\n"
            "enforce.auth.enabled=true\nenforce.auth.schemes=sasl\n"
        ),
        environ=os.environ | {"JAVA_TOOL_OPTIONS": f"-Djava.security.auth.login.config={jaas}"},
    )
    yield process
    process.kill()


async def test_sasl_logs_in_again_on_reconnect_and_owns_its_nodes(sasl_zookeeper: ZooKeeperProcess) -> None:
    address = f"{sasl_zookeeper.address}/kv"
    login = MetadataLogin("kvstore", b"s3cret", Mechanism.SASL)
    async with connected(address, login) as store:
        await store.create("/a", b"1", ephemeral=True)
        session, states = store.session, States(store)
        store.break_connection()
        await states.wait_for(SessionState.CONNECTED)
        assert store.session == session
        assert (await store.get("/a"))[0] == b"1"
        (acl,) = await store.acl("/a")
        assert (acl.id.scheme, acl.id.id) == ("sasl", "kvstore")


async def test_login_that_sasl_refuses_is_reported_at_once(sasl_zookeeper: ZooKeeperProcess) -> None:
    address, wrong = f"{sasl_zookeeper.address}/kv", MetadataLogin("kvstore", b"wrong", Mechanism.SASL)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(MetadataDenied, match="refuses the login"):
            await ZooKeeperStore.connect(address, login=wrong, connect_timeout_s=2 * PATIENCE_S)
        with pytest.raises(MetadataDenied, match="requires a login"):
            await ZooKeeperStore.connect(address, connect_timeout_s=2 * PATIENCE_S)
