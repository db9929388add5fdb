"""`kvstore namespace`: named key prefixes with limits, and their usage."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.access.users import prefix_of
from kvstore.cli.admin import ask_admin
from kvstore.cli.cluster import LOCAL, ClusterOptions, Json
from kvstore.cli.output import as_json, as_table
from kvstore.cli.status.views import namespace_document

if TYPE_CHECKING:
    from kvstore.proto import admin_pb2

Name = Annotated[str, typer.Argument(help="Name of the namespace")]
Prefix = Annotated[str, typer.Argument(help="Prefix of the namespace's keys; write arbitrary bytes as \\xNN")]
Keys = Annotated[
    str | None, typer.Option("--keys", help="Maximum number of keys, for example 5000 or 2M; 0 means no limit")
]
Size = Annotated[
    str | None,
    typer.Option("--bytes", help="Maximum bytes of keys and values, for example 500M or 2G; 0 means no limit"),
]
Ops = Annotated[
    str | None, typer.Option("--ops", help="Maximum operations per second of all clients; 0 means no limit")
]
Burst = Annotated[
    str | None,
    typer.Option("--burst", help="Maximum operations at once after an idle time; 0 means those of one second"),
]
Ttl = Annotated[
    str | None,
    typer.Option(
        "--ttl",
        help="Lifetime of records that are written without one, for example 90s, 12h or 30d; 0 means no expiry",
    ),
]
NUMBER_MAX = 1 << 53
"""Upper bound of any limit. Servers report lower bounds themselves."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
TIMES_MS = {"": 1000, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    namespace = typer.Typer(no_args_is_help=True, help="Manage namespaces: key prefixes with their own quotas and TTL")
    namespace.command("add")(add)
    namespace.command("set")(change)
    namespace.command("list")(list_all)
    namespace.command("show")(show)
    namespace.command("remove")(remove)
    app.add_typer(namespace, name="namespace")


def add(
    name: Name,
    prefix: Prefix,
    keys: Keys = None,
    size: Size = None,
    ops: Ops = None,
    burst: Burst = None,
    ttl: Ttl = None,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Add a namespace. Existing keys count against its quotas; above a quota they stay, but none can be added."""
    asked = {"name": name, "prefix": prefix_of(prefix), "limits": _limits(keys, size, ops, burst, ttl)}
    _print(_change(cluster, add=asked), name, json)


def change(
    name: Name,
    keys: Keys = None,
    size: Size = None,
    ops: Ops = None,
    burst: Burst = None,
    ttl: Ttl = None,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Change limits of a namespace. Limits that are not named stay; existing records keep their expiry."""
    asked = {"name": name, "limits": _limits(keys, size, ops, burst, ttl)}
    _print(_change(cluster, set=asked), name, json)


def list_all(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """List all namespaces with their limits and usage"""
    rows = [namespace_document(each) for each in _read(cluster).namespaces]
    print(as_json(rows) if json else as_table([_short(row) for row in rows]) if rows else "no namespaces")


def show(
    name: Name,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Show a namespace: its limits, its usage, and what servers have refused since they started"""
    _print(_read(cluster), name, json)


def remove(
    name: Name,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Remove a namespace. Its keys stay, with their expiry times."""
    _change(cluster, remove=name)
    print(as_json({"removed": name}) if json else f"namespace {name} is removed; its keys are unchanged")


def _read(cluster: ClusterOptions) -> admin_pb2.NamespacesResponse:
    from kvstore.proto import admin_pb2

    request = admin_pb2.NamespacesRequest()
    return ask_admin(cluster, lambda stub, timeout_s: stub.Namespaces(request, timeout=timeout_s))


def _change(cluster: ClusterOptions, **asked: Any) -> admin_pb2.NamespacesResponse:
    from kvstore.proto import admin_pb2

    request = admin_pb2.ChangeNamespacesRequest(**asked)
    return ask_admin(cluster, lambda stub, timeout_s: stub.ChangeNamespaces(request, timeout=timeout_s))


def _limits(
    keys: str | None, size: str | None, ops: str | None, burst: str | None, ttl: str | None
) -> dict[str, int | None]:
    return {
        "keys_max": number_of("--keys", keys, _COUNTS),
        "bytes_max": number_of("--bytes", size, _UNITS),
        "ops_per_s": number_of("--ops", ops, _COUNTS),
        "burst": number_of("--burst", burst, _COUNTS),
        "ttl_ms": number_of("--ttl", ttl, TIMES_MS),
    }


def number_of(option: str, text: str | None, units: dict[str, int]) -> int | None:
    """Parse a number with its unit. Return None if the option was not given."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,18}) ?([a-zA-Z]*)", text.strip())
    unit = next((each for each in units if match is not None and each.lower() == match[2].lower()), None)
    if match is None or unit is None:
        shown = ", ".join(each for each in units if each)
        raise typer.BadParameter(
            f"expected a whole number, optionally followed by one of {shown}, got {text[:40]!r}", param_hint=option
        )
    number = int(match[1]) * units[unit]
    if number > NUMBER_MAX:
        raise typer.BadParameter(f"expected at most {NUMBER_MAX}, got {number}", param_hint=option)
    return number


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "refused": sum(row["refused"].values())}


def _print(found: admin_pb2.NamespacesResponse, name: str, json: bool) -> None:
    row = next((namespace_document(each) for each in found.namespaces if each.name == name), None)
    if row is None:
        raise typer.BadParameter(f"no namespace {name!r}; list them with `kvstore namespace list`")
    row["counting"] = list(found.uncounted)
    if json:
        print(as_json(row))
        return
    refused = row.pop("refused")
    counting = row.pop("counting")
    rows = [{"what": what.replace("_", " "), "is": value} for what, value in row.items()]
    rows += [{"what": f"refused: {quota}", "is": count} for quota, count in refused.items()]
    print(as_table(rows))
    if counting:
        print(f"not counted yet (usage is the last known value): {', '.join(counting)}")
