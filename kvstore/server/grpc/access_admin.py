"""Administration of users, roles and rights. Converts messages to changes of the access table and back."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.access import (
    AccessTable,
    AddRole,
    AddToken,
    AddUser,
    Change,
    GrantRight,
    GrantRole,
    RemoveRole,
    RemoveToken,
    RemoveUser,
    RevokeRight,
    RevokeRole,
    Right,
    SetPassword,
    Switch,
)
from kvstore.errors import InvalidRequest
from kvstore.meta.store import MetadataStore
from kvstore.meta.tables.access import AccessStore
from kvstore.proto import admin_pb2
from kvstore.server.access.cluster_names import change_access
from kvstore.server.access.identities import Access


class AccessAdmin:
    """Reads and changes the access table. Methods raise StoreError."""

    def __init__(
        self, store: MetadataStore, access: Access, date_ms: Callable[[], int], passed_ms: Callable[[], int]
    ) -> None:
        """`date_ms` returns the time at which a new token becomes valid. `passed_ms` returns the time by which other
        tokens count as expired. Both are in milliseconds."""
        self._store, self._access, self._here = store, AccessStore(store), access
        self._date_ms, self._passed_ms = date_ms, passed_ms

    async def read(self) -> admin_pb2.AccessResponse:
        return response_of(await self._access.read())

    async def change(self, request: admin_pb2.ChangeAccessRequest) -> admin_pb2.AccessResponse:
        change = change_of(request, self._date_ms(), self._passed_ms())
        if self._here.is_wanted and change == Switch(False):
            raise InvalidRequest(
                "other machines can reach this node, so without access control it would serve no client; set insecure "
                "= true in the nodes' files first, or use loopback addresses"
            )
        return response_of(await change_access(self._store, change, self._here.cluster_names))


def change_of(request: admin_pb2.ChangeAccessRequest, now_ms: int, passed_ms: int) -> Change:
    """Return the change that a request asks for. Raises InvalidRequest."""
    match request.WhichOneof("change"):
        case "switch_on":
            return Switch(request.switch_on)
        case "add_user":
            return AddUser(request.add_user.name, request.add_user.password_hash)
        case "remove_user":
            return RemoveUser(request.remove_user)
        case "set_password":
            return SetPassword(request.set_password.name, request.set_password.password_hash)
        case "grant_role":
            return GrantRole(request.grant_role.user, request.grant_role.role)
        case "revoke_role":
            return RevokeRole(request.revoke_role.user, request.revoke_role.role)
        case "add_role":
            return AddRole(request.add_role)
        case "remove_role":
            return RemoveRole(request.remove_role)
        case "grant_right":
            return GrantRight(request.grant_right.role, _right(request.grant_right.right), request.grant_right.prefix)
        case "revoke_right":
            asked = request.revoke_right
            return RevokeRight(asked.role, _right(asked.right), asked.prefix)
        case "add_token":
            token = request.add_token
            return AddToken(token.id, token.user, token.token_hash, token.ttl_ms, now_ms, passed_ms)
        case "remove_token":
            return RemoveToken(request.remove_token)
        case _:
            raise InvalidRequest("expected a change of users, roles or tokens, got one that this server does not know")


def response_of(table: AccessTable) -> admin_pb2.AccessResponse:
    """Return the access table as a message. The message contains no hashes."""
    response = admin_pb2.AccessResponse(on=table.is_on)
    for user in table.users:
        response.users.add(name=user.name, has_password=bool(user.password), roles=user.roles)
    for role in table.roles:
        shown = response.roles.add(name=role.name)
        for grant in role.grants:
            shown.grants.add(role=role.name, right=str(grant.right), prefix=grant.prefix)
    for token in table.tokens:
        response.tokens.add(id=token.id, user=token.user, expires_ms=token.expires_ms)
    return response


def _right(text: str) -> Right:
    try:
        return Right(text)
    except ValueError:
        raise InvalidRequest(f"expected one of the rights {', '.join(Right)}, got {text[:32]!r}") from None
