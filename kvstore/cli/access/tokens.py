"""`kvstore token`: what stands for a user's password in programs, until a date. It is made where the command runs, and
printed once; servers keep a hash."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.access.users import UserName, change_access, read_access
from kvstore.cli.cluster import DataDir, Json, Server, ZooKeeper
from kvstore.cli.output import as_json, as_table
from kvstore.errors import InvalidRequest

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_TTL = re.compile(r"(\d{1,9})([smhd])")

Ttl = Annotated[str, typer.Option(help="How long it lives: 90s, 30m, 8h or 7d; a year at most.")]
TokenId = Annotated[str, typer.Argument(metavar="id", help="The token's id, as `token list` shows it.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    token = typer.Typer(no_args_is_help=True, help="Tokens: what programs log in with, until a date.")
    token.command("add")(add)
    token.command("list")(list_)
    token.command("revoke")(revoke)
    app.add_typer(token, name="token")


def add(
    name: UserName,
    ttl: Ttl = "8h",
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Print a new token of a user. Nobody can show it again: have it in a file that nobody else reads.

    It may what its user may, and ends with him, with another password, by `token revoke`, and with its time.
    """
    from kvstore.access.tokens import ID_BYTES, SECRET_BYTES, hash_of, id_or_none, made

    ttl_ms = ttl_ms_of(ttl)
    word = made(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))
    id_ = id_or_none(word)
    asked = {"id": id_, "user": name, "token_hash": hash_of(word), "ttl_ms": ttl_ms}
    table = change_access(data_dir, zookeeper, server, add_token=asked)
    expires_ms = next(each.expires_ms for each in table.tokens if each.id == id_)
    text = word.decode()
    print(as_json({"id": id_, "user": name, "token": text, "expires": shown_time(expires_ms)}) if json else text)


def list_(
    data_dir: DataDir = Path("data"), zookeeper: ZooKeeper = None, server: Server = None, json: Json = False
) -> None:
    """List all tokens, without their secrets; those that have expired are among them until another is added."""
    rows = [
        {"id": each.id, "user": each.user, "expires": shown_time(each.expires_ms)}
        for each in read_access(data_dir, zookeeper, server).tokens
    ]
    print(as_json(rows) if json else as_table(rows) if rows else "no tokens")


def revoke(
    token: TokenId,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Revoke a token. Connections that came with it are closed; its user stays."""
    change_access(data_dir, zookeeper, server, remove_token=token)
    print(as_json({"revoked": token}) if json else f"token {token} is revoked")


def ttl_ms_of(text: str) -> int:
    """Raises InvalidRequest."""
    found = _TTL.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"--ttl: want a number and s, m, h or d, for example 8h, got {text[:32]!r}")
    return int(found[1]) * _UNITS_S[found[2]] * 1_000


def shown_time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
