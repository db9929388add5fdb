"""Access control: users, roles, rights on key prefixes, access tokens, and the table that holds them."""

from kvstore.access.changes import (
    ADMIN,
    AddRole,
    AddToken,
    AddUser,
    Change,
    FoundAdmin,
    GrantRight,
    GrantRole,
    RemoveRole,
    RemoveToken,
    RemoveUser,
    RevokeRight,
    RevokeRole,
    SetPassword,
    Switch,
    applied,
)
from kvstore.access.passwords import PASSWORD_BYTES_MAX, Password, encoded, parsed
from kvstore.access.permissions import EVERYTHING, NOTHING, Permissions, permissions_of
from kvstore.access.ranges import Ranges, end_of_prefix
from kvstore.access.table import AccessTable, Grant, Right, Role, User
from kvstore.access.tokens import Token

__all__ = [
    "ADMIN",
    "EVERYTHING",
    "NOTHING",
    "PASSWORD_BYTES_MAX",
    "AccessTable",
    "AddRole",
    "AddToken",
    "AddUser",
    "Change",
    "FoundAdmin",
    "Grant",
    "GrantRight",
    "GrantRole",
    "Password",
    "Permissions",
    "Ranges",
    "RemoveRole",
    "RemoveToken",
    "RemoveUser",
    "RevokeRight",
    "RevokeRole",
    "Right",
    "Role",
    "SetPassword",
    "Switch",
    "Token",
    "User",
    "applied",
    "encoded",
    "end_of_prefix",
    "parsed",
    "permissions_of",
]
