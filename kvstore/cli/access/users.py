"""`kvstore user`, `kvstore role` and `kvstore access`: who may do what. Passwords come on standard input or are asked
for, never as an option."""

from __future__ import annotations

import getpass
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.admin import ask_admin
from kvstore.cli.cluster import DataDir, Json, Server, Tools, ZooKeeper, confirm, with_tools
from kvstore.cli.output import as_json, as_table, shown_prefix
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.proto import admin_pb2

UserName = Annotated[str, typer.Argument(help="The user.")]
RoleName = Annotated[str, typer.Argument(help="The role.")]
RightName = Annotated[str, typer.Argument(help="read, write, watch, admin or backup.")]
Prefix = Annotated[str, typer.Argument(help="How the keys begin; bytes as \\xNN. Empty: all keys.")]
PasswordStdin = Annotated[
    bool, typer.Option("--password-stdin", help="Read the password from the first line of standard input.")
]
NoPassword = Annotated[
    bool, typer.Option("--no-password", help="The user comes by a client's certificate of this common name alone.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    user = typer.Typer(no_args_is_help=True, help="Users: who may log in, and with which roles.")
    user.command("add")(add_user)
    user.command("passwd")(passwd)
    user.command("remove")(remove_user)
    user.command("list")(list_users)
    user.command("grant")(grant_role)
    user.command("revoke")(revoke_role)
    app.add_typer(user, name="user")
    role = typer.Typer(no_args_is_help=True, help="Roles: names for rights on prefixes of keys.")
    role.command("add")(add_role)
    role.command("remove")(remove_role)
    role.command("list")(list_roles)
    role.command("grant")(grant_right)
    role.command("revoke")(revoke_right)
    app.add_typer(role, name="role")
    access = typer.Typer(no_args_is_help=True, help="Whether the cluster asks who its clients are.")
    access.command("found")(found)
    access.command("on")(switch_on)
    access.command("off")(switch_off)
    access.command("show")(show)
    app.add_typer(access, name="access")


def add_user(
    name: UserName,
    password_stdin: PasswordStdin = False,
    no_password: NoPassword = False,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Add a user without a role; the first one of a cluster gets the role admin."""
    if no_password and password_stdin:
        raise typer.BadParameter("want --password-stdin or --no-password, not both")
    hashed = "" if no_password else _hashed(_password(password_stdin))
    table = change_access(data_dir, zookeeper, server, add_user={"name": name, "password_hash": hashed})
    _print_user(table, name, json, "is added")


def passwd(
    name: UserName,
    password_stdin: PasswordStdin = False,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Give a user another password. Connections that he has are closed."""
    hashed = _hashed(_password(password_stdin))
    table = change_access(data_dir, zookeeper, server, set_password={"name": name, "password_hash": hashed})
    _print_user(table, name, json, "has another password")


def remove_user(
    name: UserName,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Remove a user. Connections that he has are closed."""
    change_access(data_dir, zookeeper, server, remove_user=name)
    print(as_json({"removed": name}) if json else f"user {name} is removed")


def list_users(
    data_dir: DataDir = Path("data"), zookeeper: ZooKeeper = None, server: Server = None, json: Json = False
) -> None:
    """List all users with their roles."""
    rows = [
        {
            "name": each.name,
            "comes_by": "password" if each.has_password else "certificate",
            "roles": list(each.roles) if json else " ".join(each.roles),
        }
        for each in read_access(data_dir, zookeeper, server).users
    ]
    print(as_json(rows) if json else as_table(rows) if rows else "no users")


def grant_role(
    name: UserName,
    role: RoleName,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Give a user a role."""
    table = change_access(data_dir, zookeeper, server, grant_role={"user": name, "role": role})
    _print_user(table, name, json, f"has the role {role}")


def revoke_role(
    name: UserName,
    role: RoleName,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Take a role from a user."""
    table = change_access(data_dir, zookeeper, server, revoke_role={"user": name, "role": role})
    _print_user(table, name, json, f"has no longer the role {role}")


def add_role(
    name: RoleName,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Add a role without a right."""
    change_access(data_dir, zookeeper, server, add_role=name)
    print(as_json({"added": name}) if json else f"role {name} is added")


def remove_role(
    name: RoleName,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Remove a role; all users lose it."""
    change_access(data_dir, zookeeper, server, remove_role=name)
    print(as_json({"removed": name}) if json else f"role {name} is removed")


def list_roles(
    data_dir: DataDir = Path("data"), zookeeper: ZooKeeper = None, server: Server = None, json: Json = False
) -> None:
    """List all roles with their rights; the built-in role admin is not among them."""
    roles = read_access(data_dir, zookeeper, server).roles
    rows: list[dict[str, str | None]] = [
        {"role": role.name, "right": grant.right, "prefix": shown_prefix(grant.prefix)}
        for role in roles
        for grant in role.grants
    ]
    rows += [{"role": role.name, "right": None, "prefix": None} for role in roles if not role.grants]
    print(as_json(rows) if json else as_table(rows) if rows else "no roles but the built-in admin")


def grant_right(
    role: RoleName,
    right: RightName,
    prefix: Prefix = "",
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Give a role a right on all keys that begin with a prefix."""
    asked = {"role": role, "right": right, "prefix": prefix_of(prefix)}
    change_access(data_dir, zookeeper, server, grant_right=asked)
    print(
        as_json({"role": role, "right": right, "prefix": prefix})
        if json
        else f"role {role} may {right} {_keys(prefix)}"
    )


def revoke_right(
    role: RoleName,
    right: RightName,
    prefix: Prefix = "",
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Take a right from a role, as it was granted: on exactly this prefix."""
    asked = {"role": role, "right": right, "prefix": prefix_of(prefix)}
    change_access(data_dir, zookeeper, server, revoke_right=asked)
    said = f"role {role} may no longer {right} {_keys(prefix)}"
    print(as_json({"role": role, "right": right, "prefix": prefix}) if json else said)


def _keys(prefix: str) -> str:
    """Those of a right. An empty prefix is every key, and may be a shell's variable that was not set."""
    return repr(prefix) if prefix else "every key"


def found(
    name: UserName,
    password_stdin: PasswordStdin = False,
    replace_lost: Annotated[
        bool,
        typer.Option(
            "--replace-lost", help="Where access control is on, too: nobody knows an administrator's password any more."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask about --replace-lost.")] = False,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    json: Json = False,
) -> None:
    """Make the first administrator and switch access control on, in one step, in the metadata store itself: nodes that
    other machines reach serve nobody before. Roles and other users stay; a user of this name gets this password."""
    from kvstore.access import FoundAdmin
    from kvstore.server.access.cluster_names import change_access

    if replace_lost and not yes:
        confirm(f"give {name} another password and the role admin, in a cluster that may have an administrator")
    change = FoundAdmin(name, _hashed(_password(password_stdin)), replace_lost)

    async def work(tools: Tools) -> None:
        await change_access(tools.store, change)

    with_tools(data_dir, zookeeper, work)
    said = (
        f"access control is on; user {name} is an administrator: `export KVSTORE_USER={name}` and KVSTORE_PASSWORD_FILE"
    )
    print(as_json({"on": True, "admin": name}) if json else said)


def switch_on(
    data_dir: DataDir = Path("data"), zookeeper: ZooKeeper = None, server: Server = None, json: Json = False
) -> None:
    """Ask every client who he is from now on, those that are connected too. Wants a user with a password and the role
    admin."""
    change_access(data_dir, zookeeper, server, switch_on=True)
    print(as_json({"on": True}) if json else "access control is on: clients need a user and a password")


def switch_off(
    data_dir: DataDir = Path("data"), zookeeper: ZooKeeper = None, server: Server = None, json: Json = False
) -> None:
    """Ask nobody any more: everybody may do everything. Users and roles stay."""
    change_access(data_dir, zookeeper, server, switch_on=False)
    print(as_json({"on": False}) if json else "access control is off: everybody may do everything")


def show(
    data_dir: DataDir = Path("data"), zookeeper: ZooKeeper = None, server: Server = None, json: Json = False
) -> None:
    """Show whether access control is on, and how many users and roles there are."""
    table = read_access(data_dir, zookeeper, server)
    found = {"on": table.on, "users": len(table.users), "roles": len(table.roles)}
    print(as_json(found) if json else as_table([found]))


def read_access(data_dir: Path, zookeeper: str | None, server: str | None) -> admin_pb2.AccessResponse:
    from kvstore.proto import admin_pb2

    request = admin_pb2.AccessRequest()
    found: admin_pb2.AccessResponse = ask_admin(
        data_dir, zookeeper, server, lambda stub, timeout_s: stub.Access(request, timeout=timeout_s)
    )
    return found


def change_access(data_dir: Path, zookeeper: str | None, server: str | None, **change: Any) -> admin_pb2.AccessResponse:
    from kvstore.proto import admin_pb2

    request = admin_pb2.ChangeAccessRequest(**change)
    done: admin_pb2.AccessResponse = ask_admin(
        data_dir, zookeeper, server, lambda stub, timeout_s: stub.ChangeAccess(request, timeout=timeout_s)
    )
    return done


def _print_user(table: admin_pb2.AccessResponse, name: str, json: bool, what: str) -> None:
    roles = next((list(each.roles) for each in table.users if each.name == name), [])
    print(
        as_json({"name": name, "roles": roles}) if json else f"user {name} {what}; roles: {' '.join(roles) or 'none'}"
    )


def _password(is_piped: bool) -> bytes:
    """Raises InvalidRequest."""
    if is_piped:
        return sys.stdin.buffer.readline().rstrip(b"\r\n")
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask for a password on: give --password-stdin")
    said, again = getpass.getpass("password: "), getpass.getpass("again: ")
    if said != again:
        raise InvalidRequest("the two passwords differ")
    return said.encode()


def _hashed(password: bytes) -> str:
    """Here and not in a server: the password does not travel. Raises InvalidRequest."""
    from kvstore.access import encoded

    try:
        return encoded(password, secrets.token_bytes(16))
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def prefix_of(text: str) -> bytes:
    """Raises InvalidRequest."""
    try:
        return text.encode().decode("unicode_escape").encode("latin-1") if "\\" in text else text.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"want a prefix with bytes as \\xNN, got {text[:80]!r}: {error}") from None
