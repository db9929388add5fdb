"""Changes of the access table, and the rights that result."""

from dataclasses import replace

import pytest

from kvstore.access import (
    ADMIN,
    AccessTable,
    AddRole,
    AddUser,
    Change,
    FoundAdmin,
    Grant,
    GrantRight,
    GrantRole,
    RemoveRole,
    RemoveUser,
    RevokeRight,
    RevokeRole,
    Right,
    SetPassword,
    Switch,
    Token,
    User,
    applied,
    encoded,
    parsed,
    permissions_of,
)
from kvstore.errors import InvalidRequest

HASH = encoded(b"secret", bytes(16), p=1)
OTHER = encoded(b"other", bytes(16), p=1)


def table_of(*changes: Change) -> AccessTable:
    table = AccessTable()
    for change in changes:
        table = applied(table, change)
        if not isinstance(change, RemoveUser | RemoveRole | RevokeRight | RevokeRole):
            assert applied(table, change) == table, "a change that is tried again finds its work done"
    return table


FOUNDED = (AddUser("root", HASH), Switch(True))
TENANT = (
    *FOUNDED,
    AddUser("anna", HASH),
    AddRole("tenant"),
    GrantRight("tenant", Right.READ, b"a/"),
    GrantRight("tenant", Right.WRITE, b"a/"),
    GrantRole("anna", "tenant"),
)


def test_founding_creates_admin_and_enables_access_control_in_one_step() -> None:
    table = table_of(
        AddUser("anna", OTHER), AddUser("root"), AddRole("r"), GrantRole("root", "r"), FoundAdmin("root", HASH)
    )
    assert table.is_on
    assert table.user_or_none("root") == User("root", HASH, ("admin", "r"))
    assert table_of(FoundAdmin("root", HASH)).user_or_none("root") == User("root", HASH, ("admin",))
    for again in (FoundAdmin("root", OTHER), FoundAdmin("other", HASH), FoundAdmin("anna", OTHER)):
        with pytest.raises(InvalidRequest, match="already on"):
            applied(table if again.name != "anna" else table_of(*TENANT, SetPassword("anna", OTHER)), again)
    with pytest.raises(InvalidRequest, match="hash, got none"):
        applied(AccessTable(), FoundAdmin("root", ""))


def test_replace_lost_replaces_lost_administrator_and_keeps_the_rest() -> None:
    table = table_of(*TENANT, SetPassword("anna", OTHER), FoundAdmin("root", HASH))
    found = applied(table, FoundAdmin("root", OTHER, replaces_lost=True))
    assert found.user_or_none("root") == User("root", OTHER, ("admin",))
    assert (found.user_or_none("anna"), found.roles, found.is_on) == (table.user_or_none("anna"), table.roles, True)
    assert applied(found, FoundAdmin("root", OTHER, replaces_lost=True)) == found
    tokens = (Token("ab" * 6, "anna", "cd" * 32, 5), Token("ef" * 6, "root", "cd" * 32, 5))
    with_tokens = applied(replace(table, tokens=tokens), FoundAdmin("root", OTHER, replaces_lost=True))
    assert with_tokens.tokens == tokens[:1], "as with any other password of his"


def rights_of(table: AccessTable, name: str) -> set[Right]:
    user = table.user_or_none(name)
    assert user is not None
    return {right for right in Right if permissions_of(table, user).may_some(right)}


def test_first_user_is_administrator_without_read_right() -> None:
    table = table_of(AddUser("root", HASH))
    assert rights_of(table, "root") == {Right.ADMIN}
    assert rights_of(table_of(*FOUNDED, AddUser("anna", HASH)), "anna") == set()


def test_enabling_access_control_requires_admin_with_password() -> None:
    for changes in ((), (AddUser("root"),), (AddUser("root", HASH), RevokeRole("root", ADMIN))):
        table = table_of(*changes)
        with pytest.raises(InvalidRequest, match="role admin"):
            applied(table, Switch(True))


@pytest.mark.parametrize("change", [RemoveUser("root"), RevokeRole("root", ADMIN)])
def test_last_administrator_cannot_be_removed_while_access_control_is_on(change: Change) -> None:
    table = table_of(*FOUNDED)
    with pytest.raises(InvalidRequest, match="role admin"):
        applied(table, change)
    applied(applied(table, Switch(False)), change)


def test_rights_apply_only_to_their_prefix() -> None:
    table = table_of(*TENANT)
    user = table.user_or_none("anna")
    assert user is not None
    mine = permissions_of(table, user)
    assert mine.may(Right.READ, b"a/1")
    assert not mine.may(Right.READ, b"b/1")
    assert not mine.may(Right.WATCH, b"a/1")
    assert not mine.is_admin
    assert mine.may_all(Right.READ, b"a/", b"a0")
    assert not mine.may_all(Right.READ, b"a/", b"")
    assert "secret" not in str(mine.refused(Right.WATCH, "key 'a/1'"))
    assert "anna" in str(mine.refused(Right.WATCH, "key 'a/1'"))
    assert "watch" in str(mine.refused(Right.WATCH, "key 'a/1'"))


def test_revoked_and_removed_entries_are_gone() -> None:
    table = table_of(*TENANT)
    assert rights_of(applied(table, RevokeRight("tenant", Right.READ, b"a/")), "anna") == {Right.WRITE}
    assert rights_of(applied(table, RevokeRole("anna", "tenant")), "anna") == set()
    without = applied(table, RemoveRole("tenant"))
    assert rights_of(without, "anna") == set()
    assert rights_of(applied(without, AddRole("tenant")), "anna") == set()  # a new one of that name is another one
    assert applied(table, RemoveUser("anna")).user_or_none("anna") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (AddUser("root", OTHER), "already exists"),
        (AddUser("no body", HASH), "user of 1 to 63 letters"),
        (AddUser("x", "plain"), "hash"),
        (SetPassword("anna", ""), "hash"),
        (SetPassword("nobody", HASH), "no user 'nobody'"),
        (GrantRole("anna", "none"), "no role 'none'"),
        (GrantRight("none", Right.READ), "no role 'none'"),
        (GrantRight("tenant", Right.ADMIN, b"a"), "no prefix"),
        (GrantRight(ADMIN, Right.READ), "built in"),
        (RemoveRole(ADMIN), "built in"),
        (AddRole(ADMIN), "built in"),
        (RevokeRole("anna", "admin"), "does not have the role admin"),
        (RevokeRight("tenant", Right.READ, b"b/"), "exactly"),
        (RemoveUser("nobody"), "no user"),
    ],
)
def test_refused_change_names_its_reason(change: Change, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as raised:
        applied(table_of(*TENANT), change)
    assert "scrypt$1" not in str(raised.value)


def test_invalid_table_is_refused() -> None:
    with pytest.raises(ValueError, match="sorted"):
        AccessTable(users=(User("b"), User("a")))
    with pytest.raises(ValueError, match="prefix"):
        Grant(Right.READ, bytes(2000))


def test_password_is_recognized_and_never_shown() -> None:
    hashed = parsed(HASH)
    assert hashed.is_right(b"secret")
    assert not hashed.is_right(b"secret ")
    assert HASH.split("$")[-1] not in repr(hashed) + repr(User("root", HASH)) + repr(AddUser("root", HASH))
    assert encoded(b"secret", b"\1" * 16, p=1) != HASH


@pytest.mark.parametrize(
    "text", ["", "scrypt$1048576$8$1$" + "0" * 32 + "$" + "0" * 64, HASH[:-1], HASH + "0", "x" + HASH]
)
def test_hash_that_is_invalid_or_too_expensive_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parsed(text)


def test_new_password_keeps_roles() -> None:
    table = applied(table_of(*TENANT), SetPassword("anna", OTHER))
    assert table.user_or_none("anna") == replace(User("anna", OTHER), roles=("tenant",))
