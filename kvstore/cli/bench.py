"""`kvstore bench`: generates load on a cluster and prints latency percentiles."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.cluster import LOCAL, ClusterOptions, Json, checked_path
from kvstore.cli.data import Freshness, Level, Timeout
from kvstore.cli.endpoints import config_of, run
from kvstore.cli.output import as_json, as_table

if TYPE_CHECKING:
    from kvstore.loadtest.loads import LoadResult, LoadSpec


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    bench = typer.Typer(no_args_is_help=True, help="Generate load on a cluster and measure latencies")
    bench.command("run")(run_load)
    bench.command()(suite)
    app.add_typer(bench, name="bench")


def run_load(
    in_flight: Annotated[int, typer.Option(help="Number of operations in flight", min=1, max=100_000)] = 64,
    rate: Annotated[
        float, typer.Option(help="Operations to start per second (open loop); 0 means as many as possible", min=0)
    ] = 0.0,
    seconds: Annotated[float, typer.Option(help="Length of the measurement in seconds", min=0.1)] = 10.0,
    warmup: Annotated[float, typer.Option(help="Length of the warm-up in seconds; not counted", min=0)] = 1.0,
    mix: Annotated[str, typer.Option(help="Operations and weights: get, put, increment, delete")] = "get=50,put=50",
    keys: Annotated[int, typer.Option(help="Number of different keys, drawn evenly", min=1)] = 100_000,
    value_bytes: Annotated[int, typer.Option(help="Size of values in bytes", min=0, max=1 << 20)] = 100,
    prefix: Annotated[str, typer.Option(help="Prefix of all keys. A {tag} puts them into one partition")] = "bench-",
    level: Level = Freshness.linearizable,
    seed: Annotated[int, typer.Option(help="Seed for keys and values")] = 1,
    timeout: Timeout = 5.0,
    cluster: ClusterOptions = LOCAL,
    resp: Annotated[str, typer.Option(help="Send plain commands to this Redis endpoint (host:port)")] = "",
    json: Json = False,
) -> None:
    """Run one load with the Python client, or through a Redis endpoint.

    With --rate, latency is measured from when an operation should have started; service time from when it did start.
    Ctrl-C ends the load early and still prints results. Exit code 1 if every operation failed.
    """
    from kvstore.client import AsyncClient
    from kvstore.client import Level as Freshness_
    from kvstore.loadtest import loads
    from kvstore.loadtest.resp import RespCallers

    load = loads.LoadSpec(
        seconds=seconds,
        warmup_s=warmup,
        in_flight=in_flight,
        rate=rate,
        mix=loads.parse_mix(mix),
        keys=keys,
        value_bytes=value_bytes,
        prefix=prefix.encode(),
        level=Freshness_[level.name.upper()],
        seed=seed,
    )
    config = None if resp else config_of(cluster, timeout)

    async def main() -> loads.LoadResult:
        if config is not None:
            async with AsyncClient(config) as client:
                return await loads.run_load(client, load)
        callers = RespCallers(resp, load, timeout)
        try:
            await callers.open(in_flight)
            return await loads.Generator(load, callers.calls()).run()
        finally:
            callers.close()

    found = run(main)
    _print(found.document(), json=json)
    _judge(found, load)


def _judge(found: LoadResult, load: LoadSpec) -> None:
    """Report why the figures of a load are unusable. Raises Exit."""
    if found.is_interrupted:
        print(f"kvstore: interrupted after {found.took_s:.1f} s of {load.seconds:g}", file=sys.stderr)
        raise typer.Exit(130)
    if not found.operations and found.errors:
        print("kvstore: every operation failed", file=sys.stderr)
        raise typer.Exit(1)
    if load.rate and found.rate < 0.99 * load.rate:
        print(
            f"kvstore: {found.rate:.0f}/s instead of {load.rate:g}/s: the store or this machine is saturated",
            file=sys.stderr,
        )


def suite(
    data_dir: Annotated[
        Path | None, typer.Option(callback=checked_path, help="Use this running local cluster; default: start one")
    ] = None,
    runs: Annotated[int, typer.Option(help="Number of runs per benchmark; the median counts", min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="Length of each run in seconds", min=0.1)] = 2.0,
    only: Annotated[str, typer.Option(help="Run only benchmarks whose name contains this text")] = "",
    etcd: Annotated[str, typer.Option(help="Program of the etcd to compare with")] = "etcd",
    out: Annotated[Path, typer.Option(callback=checked_path, help="File for the results")] = Path("reports/bench.json"),
    add: Annotated[bool, typer.Option("--add", help="Add to the results in the file")] = False,
) -> None:
    """Run the benchmark suite of a source checkout, and etcd and Redis for comparison if they are installed"""
    try:
        module: Any = importlib.import_module("loadtest.bench.suite")
    except ModuleNotFoundError as error:
        if error.name not in ("loadtest", "loadtest.bench.suite"):
            raise
        print("kvstore: the suite is part of a source checkout; run this command there", file=sys.stderr)
        raise typer.Exit(2) from None
    module.run_suite(data_dir=data_dir, runs=runs, seconds=seconds, only=only, etcd=etcd, out=out, is_adding=add)


def _print(document: dict[str, Any], *, json: bool) -> None:
    if json:
        print(as_json(document))
        return
    print(as_table(document["latencies"]))
    errors = ", ".join(f"{count} {name}" for name, count in sorted(document["errors"].items())) or "none"
    print(f"\n{document['per_s']}/s over {document['seconds']} s; errors: {errors}")
