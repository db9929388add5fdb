"""`kvstore user`, `kvstore role` and `kvstore access`: users, roles and permissions. Passwords are read from standard
input or a prompt, never from an option."""

from __future__ import annotations

import getpass
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.admin import ask_admin
from kvstore.cli.cluster import LOCAL, ClusterOptions, DataDir, Json, Metadata, Tools, confirm, with_tools
from kvstore.cli.output import as_json, as_table, shown_prefix
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.proto import admin_pb2

UserName = Annotated[str, typer.Argument(help="Name of the user")]
RoleName = Annotated[str, typer.Argument(help="Name of the role")]
RightName = Annotated[str, typer.Argument(help="The right: read, write, watch, admin or backup")]
Prefix = Annotated[str, typer.Argument(help="Key prefix; write arbitrary bytes as \\xNN. Empty means all keys")]
PasswordStdin = Annotated[
    bool, typer.Option("--password-stdin", help="Read the password from the first line of standard input")
]
NoPassword = Annotated[
    bool,
    typer.Option("--no-password", help="The user can only log in with a client certificate that has this common name"),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    user = typer.Typer(no_args_is_help=True, help="Manage users and their roles")
    user.command("add")(add_user)
    user.command("passwd")(passwd)
    user.command("remove")(remove_user)
    user.command("list")(list_users)
    user.command("grant")(grant_role)
    user.command("revoke")(revoke_role)
    app.add_typer(user, name="user")
    role = typer.Typer(no_args_is_help=True, help="Manage roles: named sets of rights on key prefixes")
    role.command("add")(add_role)
    role.command("remove")(remove_role)
    role.command("list")(list_roles)
    role.command("grant")(grant_right)
    role.command("revoke")(revoke_right)
    app.add_typer(role, name="role")
    access = typer.Typer(no_args_is_help=True, help="Manage access control of the cluster")
    access.command("found")(found)
    access.command("on")(switch_on)
    access.command("off")(switch_off)
    access.command("show")(show)
    app.add_typer(access, name="access")


def add_user(
    name: UserName,
    password_stdin: PasswordStdin = False,
    no_password: NoPassword = False,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Add a user without a role. The first user of a cluster gets the role admin."""
    if no_password and password_stdin:
        raise typer.BadParameter("expected --password-stdin or --no-password, got both")
    hashed = "" if no_password else _hashed(_password(password_stdin))
    table = change_access(cluster, add_user={"name": name, "password_hash": hashed})
    _print_user(table, name, json, "is added")


def passwd(
    name: UserName,
    password_stdin: PasswordStdin = False,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Change a user's password. Open connections of the user are closed."""
    hashed = _hashed(_password(password_stdin))
    table = change_access(cluster, set_password={"name": name, "password_hash": hashed})
    _print_user(table, name, json, "has a new password")


def remove_user(
    name: UserName,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Remove a user. Open connections of the user are closed."""
    change_access(cluster, remove_user=name)
    print(as_json({"removed": name}) if json else f"user {name} is removed")


def list_users(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """List all users with their roles"""
    rows = [
        {
            "name": each.name,
            "comes_by": "password" if each.has_password else "certificate",
            "roles": list(each.roles) if json else " ".join(each.roles),
        }
        for each in read_access(cluster).users
    ]
    print(as_json(rows) if json else as_table(rows) if rows else "no users")


def grant_role(
    name: UserName,
    role: RoleName,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Give a user a role"""
    table = change_access(cluster, grant_role={"user": name, "role": role})
    _print_user(table, name, json, f"has the role {role}")


def revoke_role(
    name: UserName,
    role: RoleName,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Take a role from a user"""
    table = change_access(cluster, revoke_role={"user": name, "role": role})
    _print_user(table, name, json, f"no longer has the role {role}")


def add_role(
    name: RoleName,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Add a role without any rights"""
    change_access(cluster, add_role=name)
    print(as_json({"added": name}) if json else f"role {name} is added")


def remove_role(
    name: RoleName,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Remove a role. All users lose it."""
    change_access(cluster, remove_role=name)
    print(as_json({"removed": name}) if json else f"role {name} is removed")


def list_roles(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """List all roles with their rights, without the built-in role admin"""
    roles = read_access(cluster).roles
    rows: list[dict[str, str | None]] = [
        {"role": role.name, "right": grant.right, "prefix": shown_prefix(grant.prefix)}
        for role in roles
        for grant in role.grants
    ]
    rows += [{"role": role.name, "right": None, "prefix": None} for role in roles if not role.grants]
    print(as_json(rows) if json else as_table(rows) if rows else "no roles except the built-in admin")


def grant_right(
    role: RoleName,
    right: RightName,
    prefix: Prefix = "",
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Give a role a right on all keys with a prefix"""
    asked = {"role": role, "right": right, "prefix": prefix_of(prefix)}
    change_access(cluster, grant_right=asked)
    print(
        as_json({"role": role, "right": right, "prefix": prefix})
        if json
        else f"role {role} may {right} {_keys(prefix)}"
    )


def revoke_right(
    role: RoleName,
    right: RightName,
    prefix: Prefix = "",
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Take a right from a role. Name the same prefix with which it was granted."""
    asked = {"role": role, "right": right, "prefix": prefix_of(prefix)}
    change_access(cluster, revoke_right=asked)
    said = f"role {role} may no longer {right} {_keys(prefix)}"
    print(as_json({"role": role, "right": right, "prefix": prefix}) if json else said)


def _keys(prefix: str) -> str:
    """Return a name for the keys of a right. An empty prefix, perhaps an unset shell variable, is shown as every
    key."""
    return repr(prefix) if prefix else "every key"


def found(
    name: UserName,
    password_stdin: PasswordStdin = False,
    replace_lost: Annotated[
        bool,
        typer.Option(
            "--replace-lost", help="Proceed although access control is on, because every administrator password is lost"
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation of --replace-lost")] = False,
    data_dir: DataDir = Path("data"),
    metadata: Metadata = None,
    json: Json = False,
) -> None:
    """Create the first administrator and enable access control in one step, directly in the metadata store. Nodes that
    other machines can reach refuse all clients before. Roles and other users stay; an existing user of this name gets
    the new password."""
    from kvstore.access import FoundAdmin
    from kvstore.server.access.cluster_names import change_access

    if replace_lost and not yes:
        confirm(f"Give {name} a new password and the role admin, in a cluster that may already have an administrator")
    change = FoundAdmin(name, _hashed(_password(password_stdin)), replace_lost)

    async def work(tools: Tools) -> None:
        await change_access(tools.store, change)

    with_tools(ClusterOptions(data_dir, metadata), work)
    said = (
        f"access control is on; user {name} is an administrator: `export KVSTORE_USER={name}` and KVSTORE_PASSWORD_FILE"
    )
    print(as_json({"on": True, "admin": name}) if json else said)


def switch_on(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """Enable access control: from now on every client must log in, also those that are connected. Requires a user with
    a password and the role admin."""
    change_access(cluster, switch_on=True)
    print(as_json({"on": True}) if json else "access control is on: clients need a user and a password")


def switch_off(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """Disable access control: everybody may do everything. Users and roles stay."""
    change_access(cluster, switch_on=False)
    print(as_json({"on": False}) if json else "access control is off: everybody may do everything")


def show(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """Show if access control is on, and the numbers of users and roles"""
    table = read_access(cluster)
    found = {"on": table.on, "users": len(table.users), "roles": len(table.roles)}
    print(as_json(found) if json else as_table([found]))


def read_access(cluster: ClusterOptions) -> admin_pb2.AccessResponse:
    from kvstore.proto import admin_pb2

    request = admin_pb2.AccessRequest()
    return ask_admin(cluster, lambda stub, timeout_s: stub.Access(request, timeout=timeout_s))


def change_access(cluster: ClusterOptions, **change: Any) -> admin_pb2.AccessResponse:
    from kvstore.proto import admin_pb2

    request = admin_pb2.ChangeAccessRequest(**change)
    return ask_admin(cluster, lambda stub, timeout_s: stub.ChangeAccess(request, timeout=timeout_s))


def _print_user(table: admin_pb2.AccessResponse, name: str, json: bool, what: str) -> None:
    roles = next((list(each.roles) for each in table.users if each.name == name), [])
    print(
        as_json({"name": name, "roles": roles}) if json else f"user {name} {what}; roles: {' '.join(roles) or 'none'}"
    )


def _password(is_piped: bool) -> bytes:
    """Read the password from standard input or the terminal. Raises InvalidRequest."""
    if is_piped:
        return sys.stdin.buffer.readline().rstrip(b"\r\n")
    if not sys.stdin.isatty():
        raise typer.BadParameter("standard input is not a terminal; use --password-stdin")
    said, again = getpass.getpass("password: "), getpass.getpass("again: ")
    if said != again:
        raise InvalidRequest("the two passwords differ")
    return said.encode()


def _hashed(password: bytes) -> str:
    """Hash the password here and not in a server, so that it is never sent. Raises InvalidRequest."""
    from kvstore.access import encoded

    try:
        return encoded(password, secrets.token_bytes(16))
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def prefix_of(text: str) -> bytes:
    """Return a prefix as bytes. Raises InvalidRequest."""
    try:
        return text.encode().decode("unicode_escape").encode("latin-1") if "\\" in text else text.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"expected a prefix with bytes as \\xNN, got {text[:80]!r}: {error}") from None
