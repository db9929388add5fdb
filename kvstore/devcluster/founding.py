"""The first user of a secure local cluster: an administrator who may also read and write every key."""

from __future__ import annotations

import secrets

from kvstore.access import AddRole, AddUser, FoundAdmin, GrantRight, GrantRole, Right, SetPassword, encoded
from kvstore.meta.store import MetadataStore
from kvstore.meta.tables.access import AccessStore
from kvstore.rpc.login import Login
from kvstore.server.access.cluster_names import change_access

ROLE = "everything"
"""The role with all rights to all keys; the role admin has none of these rights."""


async def found_access(store: MetadataStore, login: Login) -> bool:
    """Create the user and enable access control. Return True if this was necessary. Access control is enabled last, so
    an interrupted call is repeated. If it is already on, nothing changes, because the user's password may have
    changed."""
    access = AccessStore(store)
    table = await access.read()
    if table.is_on:
        return False
    hashed = encoded(login.password, secrets.token_bytes(16))
    known = table.user_or_none(login.user)
    rights = [GrantRight(ROLE, right) for right in Right if right is not Right.ADMIN]
    user = AddUser(login.user, hashed) if known is None else SetPassword(login.user, hashed)
    for change in (AddRole(ROLE), *rights, user, GrantRole(login.user, ROLE), FoundAdmin(login.user, hashed)):
        await change_access(store, change)
    return True
