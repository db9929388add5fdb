"""The first user of a secure local cluster, in the metadata store."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.access import ADMIN, Change, Right, SetPassword, Switch, encoded, parsed, permissions_of
from kvstore.devcluster.founding import ROLE, found_access
from kvstore.devcluster.secure_folder import SecureFolder
from kvstore.meta.memory import MemoryStore
from kvstore.meta.tables.access import AccessStore
from kvstore.rpc.login import Login

LOGIN = Login("admin", b"a long one")


async def test_first_user_may_do_everything_and_has_the_password() -> None:
    store = MemoryStore()
    assert await found_access(store, LOGIN)
    table = await AccessStore(store).read()
    assert table.is_on
    (user,) = table.users
    assert (user.name, user.roles) == ("admin", tuple(sorted((ADMIN, ROLE))))
    assert parsed(user.password).is_right(b"a long one")
    (role,) = table.roles
    assert {grant.right for grant in role.grants} == set(Right) - {Right.ADMIN}
    assert {grant.prefix for grant in role.grants} == {b""}


async def test_where_access_control_is_on_nothing_is_changed() -> None:
    store = MemoryStore()
    await found_access(store, LOGIN)
    access = AccessStore(store)
    await access.change(SetPassword("admin", encoded(b"another one", bytes(16))))
    before = await access.read()
    assert not await found_access(store, LOGIN)
    assert await access.read() == before


async def test_after_authentication_was_disabled_the_file_password_applies_again() -> None:
    store = MemoryStore()
    await found_access(store, LOGIN)
    access = AccessStore(store)
    await access.change(SetPassword("admin", encoded(b"another one", bytes(16))))
    await access.change(Switch(False))
    assert await found_access(store, LOGIN)
    table = await access.read()
    assert table.is_on
    assert parsed(table.users[0].password).is_right(b"a long one")


class Crash(Exception):
    """The process ends here."""


@pytest.mark.parametrize("after", range(8))
async def test_interrupted_founding_admits_no_user_early_and_can_be_repeated(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, done = MemoryStore(), 0
    real = AccessStore.change

    async def change(self: AccessStore, wanted: Change) -> object:
        nonlocal done
        if done == after:
            raise Crash
        done += 1
        return await real(self, wanted)

    monkeypatch.setattr(AccessStore, "change", change)
    with pytest.raises(Crash):
        await found_access(store, LOGIN)
    monkeypatch.setattr(AccessStore, "change", real)
    assert not (await AccessStore(store).read()).is_on
    assert await found_access(store, LOGIN)
    table = await AccessStore(store).read()
    assert table.is_on
    assert set(table.users[0].roles) == {ADMIN, ROLE}
    assert permissions_of(table, table.users[0]).is_admin


def test_folders_login_is_one_that_the_table_takes(tmp_path: Path) -> None:
    folder = SecureFolder(tmp_path, has_own_zookeeper=False)
    folder.make(["n1"], is_new=True)
    encoded(folder.login().password, bytes(16))
