"""`kvstore token`: credentials for programs that replace a user's password until they expire. Tokens are made by the
command and printed once; servers keep only a hash."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Annotated

import typer

from kvstore.cli.access.namespaces import TIMES_MS, number_of
from kvstore.cli.access.users import UserName, change_access, read_access
from kvstore.cli.cluster import LOCAL, ClusterOptions, Json
from kvstore.cli.output import as_json, as_table

Ttl = Annotated[str, typer.Option(help="Lifetime, for example 90s, 30m, 8h or 7d; at most one year")]
TokenId = Annotated[str, typer.Argument(metavar="id", help="Id of the token, as shown by `token list`")]


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    token = typer.Typer(no_args_is_help=True, help="Manage tokens: credentials that programs use until they expire")
    token.command("add")(add)
    token.command("list")(list_)
    token.command("revoke")(revoke)
    app.add_typer(token, name="token")


def add(
    name: UserName,
    ttl: Ttl = "8h",
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Print a new token for a user. It cannot be shown again, so store it in a file that nobody else can read.

    A token has its user's permissions. It becomes invalid when it expires, when it is revoked, when the user is removed
    and when the user's password changes.
    """
    from kvstore.access.tokens import ID_BYTES, SECRET_BYTES, hash_of, id_or_none, made

    ttl_ms = number_of("--ttl", ttl, TIMES_MS)
    word = made(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))
    id_ = id_or_none(word)
    asked = {"id": id_, "user": name, "token_hash": hash_of(word), "ttl_ms": ttl_ms}
    table = change_access(cluster, add_token=asked)
    expires_ms = next(each.expires_ms for each in table.tokens if each.id == id_)
    text = word.decode()
    print(as_json({"id": id_, "user": name, "token": text, "expires": shown_time(expires_ms)}) if json else text)


def list_(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """List all tokens, without their secrets. Expired tokens are listed until another token is added."""
    rows = [
        {"id": each.id, "user": each.user, "expires": shown_time(each.expires_ms)}
        for each in read_access(cluster).tokens
    ]
    print(as_json(rows) if json else as_table(rows) if rows else "no tokens")


def revoke(
    token: TokenId,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Revoke a token. Connections that used it are closed; the user stays."""
    change_access(cluster, remove_token=token)
    print(as_json({"revoked": token}) if json else f"token {token} is revoked")


def shown_time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
