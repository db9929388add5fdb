"""The first user of a local cluster that is secure: an administrator who may also read and write every key."""

from __future__ import annotations

import secrets

from kvstore.access import AddRole, AddUser, FoundAdmin, GrantRight, GrantRole, Right, SetPassword, encoded
from kvstore.meta.store import MetadataStore
from kvstore.meta.tables.access import AccessStore
from kvstore.rpc.login import Login
from kvstore.server.access.cluster_names import change_access

ROLE = "everything"
"""All rights to all keys, which the role admin holds none of."""


async def found_access(store: MetadataStore, login: Login) -> bool:
    """Make the user and switch access control on; returns whether that was to be done. It is switched on last, so what
    was interrupted is done again. Where it is on nothing is changed: the user may have another password by now."""
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
