"""The options of `kvstore snapshot`. A malformed moment or sequence is wrong usage, reported before anything starts."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kvstore.cli.cluster import checked_path


class Compression(StrEnum):
    """The codec of Parquet files."""

    zstd = "zstd"
    snappy = "snappy"
    lz4 = "lz4"
    gzip = "gzip"
    none = "none"


class UpTo(NamedTuple):
    """The end of one partition's log for a snapshot."""

    partition: str
    sequence: int


class SparkSetting(NamedTuple):
    """A Spark setting given on the command line."""

    name: str
    value: str


def moment(text: str) -> datetime:
    """Parse a moment; UTC without a time zone. Raises BadParameter."""
    try:
        found = datetime.fromisoformat(text)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"expected a moment like 2026-11-20T20:15:00Z, got {text!r}") from None


def up_to(text: str) -> UpTo:
    """Parse PARTITION=SEQUENCE. Raises BadParameter."""
    partition, _, number = text.rpartition("=")
    if not partition or not number.isdecimal() or len(number) > 19:
        raise typer.BadParameter(f"expected PARTITION=SEQUENCE, got {text!r}")
    return UpTo(partition, int(number))


def setting(text: str) -> SparkSetting:
    """Parse NAME=VALUE. Raises BadParameter."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"expected NAME=VALUE, got {text!r}")
    return SparkSetting(name, value)


Where = Annotated[str, typer.Argument(help="Directory or URL of snapshots, or the folder of one snapshot")]
To = Annotated[str, typer.Option("--to", help="Directory of snapshots that driver and executors share, or its URL")]
SnapshotId = Annotated[str | None, typer.Argument(metavar="[ID]", help="Id of the snapshot; default: the newest")]
Master = Annotated[
    str,
    typer.Option(
        help="Spark's master: local[*], spark://HOST:PORT, k8s://… or yarn. auto: local[*], or no Spark for small "
        "work; none: never use Spark"
    ),
]
Conf = Annotated[
    list[SparkSetting] | None,
    typer.Option("--conf", parser=setting, metavar="NAME=VALUE", help="A setting of Spark; may be repeated"),
]
At = Annotated[
    datetime | None,
    typer.Option(
        "--at", parser=moment, metavar="MOMENT", help="State as of this moment, for example 2026-11-20T20:15:00Z"
    ),
]
Upto = Annotated[
    list[UpTo] | None,
    typer.Option(
        "--position",
        parser=up_to,
        metavar="PARTITION=SEQUENCE",
        help="State of a partition up to this sequence; may be repeated",
    ),
]
Nice = Annotated[int, typer.Option("--nice", min=0, max=19, help="Niceness of Spark processes on this machine")]
PinMinutes = Annotated[
    int, typer.Option("--pin-minutes", min=1, max=1440, help="Minutes within which a killed job can be resumed")
]
HoldHours = Annotated[
    float,
    typer.Option("--hold-hours", min=0, max=168, help="Hours to retain the logs for the next incremental snapshot"),
]
Rate = Annotated[float, typer.Option("--rate", min=0, help="Maximum MiB of records per second; 0 means no limit")]
Examples = Annotated[int, typer.Option("--show", min=0, help="Maximum number of differing keys to show")]
Daily = Annotated[int, typer.Option("--daily", min=0, help="Number of days of which to keep the newest snapshot")]
Weekly = Annotated[int, typer.Option("--weekly", min=0, help="Number of weeks of which to keep the newest snapshot")]
Monthly = Annotated[int, typer.Option("--monthly", min=0, help="Number of months of which to keep the newest snapshot")]
MetricsFile = Annotated[
    Path | None,
    typer.Option(
        callback=checked_path, help="Write the state of the directory to this file, *.prom, for node_exporter"
    ),
]
