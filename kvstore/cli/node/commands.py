"""Commands that ask one node about itself: `kvstore node log-level`, `slow-log`, `profile`; and `check` of its file."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kvstore.cli.admin import TIMEOUT_S, ask_admin
from kvstore.cli.cluster import LOCAL, ClusterOptions, Json, checked_path
from kvstore.cli.groups import group_of
from kvstore.cli.node import flame
from kvstore.cli.node.check import check
from kvstore.cli.output import as_json, as_table
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.proto.admin_pb2_grpc import AdminStub

T = TypeVar("T")
Node = Annotated[str, typer.Argument(help="Id of the node, for example n1")]
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DEFAULT = "DEFAULT"
HOTTEST = 10


class Picture(StrEnum):
    """The output format of `kvstore node profile`."""

    SVG = "svg"
    SPEEDSCOPE = "speedscope"
    FOLDED = "folded"


def register(app: typer.Typer) -> None:
    """Add commands to `kvstore node`."""
    node = group_of(app, "node")
    node.command("log-level")(log_level)
    node.command("slow-log")(slow_log)
    node.command("profile")(profile)
    node.command("check")(check)


def log_level(
    node: Node,
    level: Annotated[
        str,
        typer.Argument(
            help="DEBUG, INFO, WARNING, ERROR, CRITICAL, or DEFAULT for the level at start; omit to show the levels"
        ),
    ] = "",
    logger: Annotated[
        str, typer.Option(help="A package or module, for example kvstore.wal; applies to everything below it")
    ] = "",
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Show a node's log levels, or set one until the node is restarted"""
    from kvstore.proto.admin_pb2 import LogLevelRequest

    wanted = level.upper()
    if wanted and wanted not in (*LEVELS, DEFAULT):
        raise typer.BadParameter(f"expected {', '.join(LEVELS)} or {DEFAULT}, got {level!r}", param_hint="LEVEL")
    if logger and not wanted:
        raise typer.BadParameter("expected a LEVEL with --logger, got none", param_hint="--logger")
    request = LogLevelRequest()
    if wanted:
        request.logger, request.level = logger or "kvstore", "" if wanted == DEFAULT else wanted
    answer = ask_node(node, cluster, lambda stub, within: stub.LogLevel(request, timeout=within))
    levels = dict(sorted(answer.levels.items()))
    rows = [{"logger": name, "level": each} for name, each in levels.items()]
    print(as_json({"node": node, "levels": levels}) if json else as_table(rows))


def slow_log(
    node: Node,
    count: Annotated[int, typer.Option(help="Maximum number of operations to show", min=1, max=1_000_000)] = 20,
    key: Annotated[str, typer.Option(help="Show only operations on this key; only its hash is sent")] = "",
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Show a node's latest slow operations, newest first, and where their time went"""
    from kvstore.env.slow_log import hash_of
    from kvstore.proto.admin_pb2 import SlowLogRequest

    request = SlowLogRequest(count=count, key=hash_of(key.encode()) if key else "")
    answer = ask_node(node, cluster, lambda stub, within: stub.SlowLog(request, timeout=within))
    found: list[dict[str, Any]] = [
        {
            "date": datetime.fromtimestamp(each.date_ms / 1000, UTC).isoformat(timespec="milliseconds"),
            "at": each.at,
            "operation": each.operation,
            "key": each.key,
            "partition": each.partition,
            "took_ms": round(each.took_ms, 1),
            "parts_ms": {name: round(part, 1) for name, part in sorted(each.parts.items())},
            "operations": each.operations,
            "starved": round(each.starved, 2),
        }
        for each in answer.operations
    ]
    if json:
        print(as_json({"node": node, "slow_ms": answer.slow_ms, "total": answer.total, "operations": found}))
    elif not answer.slow_ms:
        print(f"{node} keeps no slow log because [server] slow_ms is 0")
    else:
        print(f"{node}: {answer.total} operations took longer than {answer.slow_ms} ms since its start")
        for row in found:
            row["parts_ms"] = " ".join(f"{name} {part}" for name, part in row["parts_ms"].items())
        if found:
            print(as_table(found))


def profile(
    node: Node,
    seconds: Annotated[float, typer.Option(help="Length of the profile in seconds", min=0.1, max=60)] = 10,
    rate: Annotated[int, typer.Option(help="Samples per second", min=1, max=200)] = 100,
    out: Annotated[
        Path | None, typer.Option(callback=checked_path, help="Output file; default: NODE-profile.svg")
    ] = None,
    format: Annotated[
        Picture, typer.Option(help="An SVG, a document for speedscope.app, or folded lines")
    ] = Picture.SVG,
    wall: Annotated[
        bool, typer.Option("--wall", help="Weigh by elapsed time, including idle time; default: by processor time")
    ] = False,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Profile a running node and write a flame graph of its threads to a file"""
    from kvstore.proto.admin_pb2 import ProfileRequest

    request = ProfileRequest(seconds=seconds, rate=rate)
    within = seconds + TIMEOUT_S
    answer = ask_node(node, cluster, lambda stub, timeout_s: stub.Profile(request, timeout=timeout_s), within)
    unit = "samples" if wall else "microseconds"
    stacks = [
        flame.Stack(
            (each.thread, *(answer.frames[place] for place in each.frames)), each.samples if wall else each.cpu_us
        )
        for each in answer.stacks
    ]
    stacks = [each for each in stacks if each.weight]
    title = f"{node}, {answer.took_s:.1f} s, {answer.samples} samples, by {'time' if wall else 'processor time'}"
    match format:
        case Picture.SVG:
            text, ending = flame.svg(title, unit, stacks), "svg"
        case Picture.SPEEDSCOPE:
            text, ending = flame.speedscope(title, "none" if wall else unit, stacks), "json"
        case Picture.FOLDED:
            text, ending = flame.folded(stacks), "txt"
    file = out or Path(f"{node}-profile.{ending}")
    file.write_text(text, encoding="utf-8")
    total = max(1, sum(each.weight for each in stacks))
    rows = [
        {"function": name, "share": f"{100 * weight / total:.1f} %"} for name, weight in flame.hottest(stacks, HOTTEST)
    ]
    if json:
        print(
            as_json(
                {"node": node, "file": str(file), "looks": answer.samples, "took_s": answer.took_s, "hottest": rows}
            )
        )
    else:
        print(as_table(rows))
        print(f"{title}: {file}")


def why_unasked(node: str, servers: list[str], bookies: list[str]) -> str:
    """Return why a node that is not a server cannot be asked. A node that is only a bookie has no gRPC endpoint."""
    want = f"expected one of {', '.join(servers)}"
    own = next((each for each in bookies if node and node in (each, each.rpartition("-")[0])), None)
    if own is None:
        return f"no server {node!r}: {want}"
    return (
        f"{node} is only a bookie ({own}) and has no gRPC endpoint: {want}; to change its log, set [log_output] in "
        "its node.toml and restart it; read its metrics at /metrics of its HTTP port"
    )


def ask_node(
    node: str,
    cluster: ClusterOptions,
    work: Callable[[AdminStub, float], T],
    timeout_s: float = TIMEOUT_S,
) -> T:
    """Return the answer of one node. Raises StoreError; ConfigError with the names of the nodes if `node` is none of
    them."""
    from kvstore.proto.admin_pb2 import BookiesRequest, StatusRequest

    status = ask_admin(cluster, lambda stub, within: stub.Status(StatusRequest(), timeout=within))
    grpc = {each.id: each.grpc for each in status.nodes}
    if node not in grpc:
        found = ask_admin(cluster, lambda stub, within: stub.Bookies(BookiesRequest(), timeout=within))
        raise ConfigError(why_unasked(node, sorted(grpc), [each.id for each in found.bookies]))
    if not grpc[node]:
        raise ConfigError(f"expected a running node, got {node}, which is not up according to {status.server}")
    return ask_admin(ClusterOptions(server=grpc[node]), work, timeout_s)
