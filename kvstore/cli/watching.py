"""`kvstore watch`: the change feed on a terminal, or as lines of JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from json import JSONDecodeError, dumps, loads
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.cluster import LOCAL, ClusterOptions, Json
from kvstore.cli.data import as_bytes, exact
from kvstore.cli.endpoints import config_of
from kvstore.cli.output import printable

if TYPE_CHECKING:
    from kvstore.client import Change
    from kvstore.client.core.config import ClientConfig

OLDEST = "oldest"
TIMEOUT_S = 60.0
"""Timeout in seconds during an outage of the cluster."""

Start = Annotated[
    str,
    typer.Option(
        "--from", help=f'Where to start: "{OLDEST}", or a position that an earlier watch has printed; default: now'
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(watch)


def watch(
    key: Annotated[str | None, typer.Argument(help="The key, as UTF-8; default: all keys")] = None,
    prefix: Annotated[str, typer.Option(help="Only keys with this prefix")] = "",
    start: Start = "",
    state: Annotated[bool, typer.Option("--state", help="Print the current state first, then changes")] = False,
    limit: Annotated[
        int, typer.Option(help="Number of changes after which the command ends; 0 means never", min=0)
    ] = 0,
    keys_only: Annotated[bool, typer.Option("--keys-only", help="Print no values")] = False,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Print each put and delete as it happens, once and in order, also across failures and moves.

    With --json, each line is one document. At the end the command prints its position on standard error. Pass it to
    --from to continue without gaps.
    """
    print_changes(
        config_of(cluster, TIMEOUT_S),
        key=as_bytes(key) if key is not None else None,
        prefix=as_bytes(prefix),
        start=start,
        with_state=state,
        limit=limit,
        keys_only=keys_only,
        line=line_of if json else for_people,
    )


def print_changes(
    config: ClientConfig,
    *,
    key: bytes | None,
    prefix: bytes,
    start: str,
    limit: int,
    keys_only: bool,
    line: Callable[[Change], str],
    with_state: bool = False,
) -> None:
    """Print changes until interrupted. Raises StoreError; BadParameter if `start` is not a position, or is given with
    `with_state`."""
    from kvstore.client import Client

    if start and with_state:
        raise typer.BadParameter(
            "expected --from or --state, got both; --from continues after a state that was printed before"
        )
    after = _positions_of(config, start)
    with (
        Client(config) as client,
        client.watch(key, prefix=prefix, after=after, with_state=with_state, keys_only=keys_only) as changes,
    ):
        try:
            for count, change in enumerate(changes, 1):
                print(line(change), flush=True)
                if count == limit:
                    break
        except KeyboardInterrupt:
            pass
        finally:
            going_on = (
                f"--from '{dumps(changes.position)}'"
                if changes.has_state
                else "--state  # the state was not printed completely"
            )
            print(going_on, file=sys.stderr)


def _positions_of(config: ClientConfig, start: str) -> Mapping[str, int] | None:
    if not start:
        return None
    if start == OLDEST:
        from kvstore.client import FeedReader

        with FeedReader(config) as feed:
            return {each.partition: each.oldest_watch for each in feed.positions() if not each.gone}
    try:
        found: Any = loads(start)
    except JSONDecodeError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, int) and each >= 0 for each in found.values()):
        raise typer.BadParameter(f'expected "{OLDEST}" or a position like {{"p1": 17, "p2": 4}}, got {start!r}')
    return found


def for_people(change: Change) -> str:
    """Return a change as one line of text."""
    gone = "expired" if change.expired else "deleted"
    what = gone if change.item is None else f"= {printable(change.item.value)}"
    return f"{change.partition}/{change.version} {printable(change.key)} {what}"


def line_of(change: Change) -> str:
    """Return a change as one line of JSON."""
    shown: dict[str, Any] = {"partition": change.partition, "version": change.version, **exact("key", change.key)}
    if change.item is None:
        shown |= {"deleted": True, "expired": change.expired}
    else:
        shown |= {**exact("value", change.item.value), "created": change.item.created}
        if change.item.expires_ms:
            shown["expires_ms"] = change.item.expires_ms
    if change.transaction:
        shown |= {"transaction": change.transaction, "transaction_keys": change.transaction_keys}
    return dumps({**shown, "time_ms": change.time_ms}, ensure_ascii=False)
