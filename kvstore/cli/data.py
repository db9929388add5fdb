"""`kvstore get|put|del|scan|count|delete-prefix` and `load-tree|verify-tree`: keys and values from a shell."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import chain, repeat
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kvstore.cli.cluster import LOCAL, TIMEOUT_S_MAX, ClusterOptions, Json, checked_path, confirm
from kvstore.cli.endpoints import config_of, run
from kvstore.cli.output import as_json, as_table, printable
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.client import AsyncClient, Deleted, Item
    from kvstore.proto.page_token import PageToken

T = TypeVar("T")
Key = Annotated[str, typer.Argument(help="The key, as UTF-8")]
Timeout = Annotated[
    float,
    typer.Option(help="Timeout of each operation in seconds, including retries", min=0.001, max=TIMEOUT_S_MAX),
]
Folder = Annotated[Path, typer.Argument(callback=checked_path, help="The folder", exists=True, file_okay=False)]
Prefix = Annotated[str, typer.Option(help="Prefix of the keys, before the path below DIR")]
PageTokenOption = Annotated[str | None, typer.Option("--token", help="Continue where an earlier call ended")]
TREE_TIMEOUT_S = 60.0


class Freshness(StrEnum):
    linearizable = "linearizable"
    strict = "strict"
    session = "session"
    stale = "stale"


Level = Annotated[Freshness, typer.Option(help="Consistency level of the read")]


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    app.command()(get)
    app.command()(put)
    app.command("del")(delete)
    app.command()(scan)
    app.command()(count)
    app.command("delete-prefix")(delete_prefix)
    app.command("load-tree")(load_tree)
    app.command("verify-tree")(verify_tree)


def get(
    key: Key,
    level: Level = Freshness.linearizable,
    timeout: Timeout = 5.0,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Print a value. On a terminal, bytes that are not text are escaped. Exit code 1 if the key is absent."""

    async def work(client: AsyncClient) -> Item | None:
        from kvstore.client import Level

        return await client.get(as_bytes(key), level=Level[level.name.upper()])

    found = _with_client(config_of(cluster, timeout), work)
    if found is None:
        if json:
            print(as_json({"key": key, "found": False}))
        else:
            print(f"kvstore: {key!r} is absent", file=sys.stderr)
        raise typer.Exit(1)
    if json:
        print(as_json({**_shown_key(as_bytes(key)), "found": True, **_shown(found)}))
        return
    if sys.stdout.isatty():
        print("\n".join(map(printable, found.value.split(b"\n"))))
    else:
        sys.stdout.buffer.write(found.value)
        sys.stdout.buffer.flush()


def put(
    key: Key,
    value: Annotated[str | None, typer.Argument(help="The value, as UTF-8; standard input if omitted")] = None,
    file: Annotated[
        Path | None, typer.Option(callback=checked_path, help="Read the value from this file", exists=True)
    ] = None,
    ttl: Annotated[float | None, typer.Option(help="Seconds until the key expires", min=0.001)] = None,
    if_absent: Annotated[bool, typer.Option("--if-absent", help="Write only if the key is absent")] = False,
    if_version: Annotated[
        int | None, typer.Option(help="Write only if the key has this version; 0 means absent", min=0)
    ] = None,
    timeout: Timeout = 5.0,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Write a value; pass '' for an empty one. Exit code 1 if a condition is not met."""
    if value is not None and file is not None:
        raise typer.BadParameter("expected a value or --file, got both")
    content = _content(value, file)

    async def work(client: AsyncClient) -> int:
        return await client.put(as_bytes(key), content, ttl_s=ttl, if_absent=if_absent, if_version=if_version)

    version = _with_client(config_of(cluster, timeout), work)
    if json:
        print(as_json({**_shown_key(as_bytes(key)), "version": version}))


def delete(
    keys: Annotated[list[str], typer.Argument(help="The keys, as UTF-8")],
    timeout: Timeout = 5.0,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Delete keys, each on its own, and print how many existed"""

    async def work(client: AsyncClient) -> int:
        return sum([bool(await client.delete(as_bytes(key))) for key in keys])

    count = _with_client(config_of(cluster, timeout), work)
    print(as_json({"deleted": count}) if json else count)


def scan(
    prefix: Annotated[str, typer.Option(help="Only keys with this prefix")] = "",
    start: Annotated[str, typer.Option(help="First key, inclusive")] = "",
    end: Annotated[str, typer.Option(help="Last key, exclusive")] = "",
    limit: Annotated[int, typer.Option(help="Maximum number of keys to list; 0 means all", min=0)] = 100,
    keys: Annotated[bool, typer.Option("--keys", help="Print only keys, one per line")] = False,
    null: Annotated[
        bool, typer.Option("--null", "-0", help="Print only keys, unescaped, each followed by a NUL byte")
    ] = False,
    reverse: Annotated[bool, typer.Option("--reverse", help="List in descending order")] = False,
    token: PageTokenOption = None,
    level: Level = Freshness.linearizable,
    timeout: Timeout = 5.0,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """List keys in order over all partitions. Backslashes and bytes that are not text are escaped.

    If there are more keys than --limit, standard error says so and prints the --token that continues there.
    """
    if null and json:
        raise typer.BadParameter("expected --json or --null, got both")
    from kvstore.client.core.scanning import Bounds
    from kvstore.proto.page_token import PageToken

    bounds = Bounds.of(as_bytes(start), as_bytes(end), as_bytes(prefix))
    left = PageToken(*bounds, reverse) if token is None else bounds.rest(token)

    async def work(client: AsyncClient) -> str | None:
        last = b""
        with _writer(keys=keys, null=null, json=json) as write:
            number = 0
            async for key, item in _found(client, left, limit + 1 if limit else 0, keys or null, level):
                if limit and number == limit:
                    return left.behind(last).encode()
                write(key, item)
                number, last = number + 1, key
        return None

    if (rest := _with_client(config_of(cluster, timeout), work)) is not None:
        print(
            f"kvstore: there are more than {limit} keys; list all with --limit 0, or continue with --token {rest}",
            file=sys.stderr,
        )


async def _found(
    client: AsyncClient, left: PageToken, limit: int, bare: bool, level: Freshness
) -> AsyncIterator[tuple[bytes, Item]]:
    """Yield keys with their items; with `bare`, with empty items."""
    from kvstore.client import Item, Level

    start, end, reverse = left
    if not bare:
        async for found in client.scan(start, end, limit=limit, reverse=reverse, level=Level[level.name.upper()]):
            yield found
        return
    nothing = Item(b"", 0, 0, 0, 0)
    async for key in client.keys(start, end, limit=limit, reverse=reverse, level=Level[level.name.upper()]):
        yield key, nothing


def count(
    prefix: Annotated[str, typer.Option(help="Only keys with this prefix")] = "",
    start: Annotated[str, typer.Option(help="First key, inclusive")] = "",
    end: Annotated[str, typer.Option(help="Last key, exclusive")] = "",
    timeout: Timeout = 5.0,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Print the number of keys. The servers count and send no keys."""

    async def work(client: AsyncClient) -> int:
        return await client.count(as_bytes(start), as_bytes(end), prefix=as_bytes(prefix))

    number = _with_client(config_of(cluster, timeout), work)
    print(as_json({"keys": number}) if json else number)


def delete_prefix(
    prefix: Annotated[str, typer.Argument(help="Prefix of the keys, as UTF-8; at least one byte")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
    token: PageTokenOption = None,
    timeout: Timeout = 30.0,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Delete all keys with a prefix, each on its own, and print how many existed.

    The command first counts the keys and asks for confirmation. It reports progress on standard error. After an
    interrupt or error, continue with the last reported --token.
    """
    config = config_of(cluster, timeout)
    wanted = as_bytes(prefix)
    if not wanted:  # before the question, which would name no prefix
        raise InvalidRequest("expected a prefix of at least one byte, got an empty one, which matches every key")
    there = _with_client(config, lambda client: client.count(prefix=wanted))
    if not yes:
        confirm(f"Delete {there} keys that begin with {printable(wanted)}")

    def print_progress(progress: Deleted) -> None:
        rest = "" if progress.token is None else f"; continue with --token {progress.token}"
        print(f"kvstore: {progress.total} of {there} keys deleted{rest}", file=sys.stderr)

    deleted = _with_client(config, lambda client: client.delete_prefix(wanted, token=token, on_progress=print_progress))
    print(as_json({"deleted": deleted}) if json else deleted)


@contextmanager
def _writer(*, keys: bool, null: bool, json: bool) -> Iterator[Callable[[bytes, Item], object]]:
    """Write each result when it arrives. Only a table waits for its last row."""
    if null:
        yield lambda key, _: sys.stdout.buffer.write(key + b"\0")
    elif json:
        heads = chain(["["], repeat(","))
        yield lambda key, item: print(
            next(heads) + indent("\n" + as_json(_shown_key(key) | ({} if keys else _shown(item))), "  "), end=""
        )
        print("[]" if next(heads) == "[" else "\n]")
    elif keys:
        yield lambda key, _: print(printable(key))
    else:
        rows: list[dict[str, Any]] = []
        yield lambda key, item: rows.append(
            {"key": key, "bytes": len(item.value), "version": item.version, "value": _brief(item.value)}
        )
        print(as_table(rows, ("key", "bytes", "version", "value")))


def load_tree(
    folder: Folder,
    prefix: Prefix = "",
    chunk_bytes: Annotated[int, typer.Option(help="Split files larger than this", min=1, max=1 << 20)] = 256 << 10,
    timeout: Timeout = TREE_TIMEOUT_S,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Store every file below DIR: the path is the key, the content is the value. `kvstore get PATH` returns it.

    Large files are split, and their key holds a manifest. Symbolic links are stored as links. Failing nodes do not stop
    the command.
    """
    from kvstore.cli.trees import load

    config = config_of(cluster, timeout)
    found = run(lambda: load(config, folder, as_bytes(prefix), chunk_bytes))
    _report(found, json)


def verify_tree(
    folder: Folder,
    prefix: Prefix = "",
    timeout: Timeout = TREE_TIMEOUT_S,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Compare every file below DIR with the stored value, byte for byte. Exit code 1 if anything differs."""
    from kvstore.cli.trees import verify

    config = config_of(cluster, timeout)
    found = run(lambda: verify(config, folder, as_bytes(prefix)))
    _report(found, json)


def _report(found: dict[str, Any], json: bool) -> None:
    if json:
        print(as_json(found))
    else:
        for problem in found["problems"]:
            print(f"{problem['path']}: {problem['what']}", file=sys.stderr)
        done = {name: value for name, value in found.items() if name != "problems"}
        print(as_table([{**done, "problems": len(found["problems"])}]))
    if found["problems"]:
        raise typer.Exit(1)


def _with_client(config: Any, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
    from kvstore.client import AsyncClient

    async def main() -> T:
        async with AsyncClient(config) as client:
            return await work(client)

    return run(main)


def _content(value: str | None, file: Path | None) -> bytes:
    if value is not None:
        return as_bytes(value)
    if file is not None:
        return file.read_bytes()
    if sys.stdin.isatty():
        print("kvstore: reading the value from the terminal; Ctrl-D ends it", file=sys.stderr)
    content = sys.stdin.buffer.read()
    if not content:
        raise InvalidRequest(
            "expected a value, got empty standard input; to store an empty value, run: kvstore put KEY ''"
        )
    return content


def as_bytes(text: str) -> bytes:
    """Return the bytes as typed, even if they are not UTF-8."""
    return os.fsencode(text)


def _brief(value: bytes) -> str:
    return printable(value) if len(value) <= 60 else f"{printable(value[:60])}…"


def _shown_key(key: bytes) -> dict[str, str]:
    return exact("key", key)


def _shown(item: Item) -> dict[str, Any]:
    return {
        **exact("value", item.value),
        "version": item.version,
        "created": item.created,
        "written_ms": item.written_ms,
        "expires_ms": item.expires_ms,
    }


def exact(name: str, data: bytes) -> dict[str, str]:
    """Return bytes for JSON without loss: as text if they are UTF-8, else in base64 under another name."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}
