"""The options of `kvstore snapshot`. What is no moment or no sequence is wrong usage, before anything is begun."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, NamedTuple

import typer


class Compression(StrEnum):
    """The codec of Parquet files."""

    zstd = "zstd"
    snappy = "snappy"
    lz4 = "lz4"
    gzip = "gzip"
    none = "none"


class UpTo(NamedTuple):
    """A cut of one partition's log."""

    partition: str
    sequence: int


class SparkSetting(NamedTuple):
    """A setting of Spark."""

    name: str
    value: str


def moment(text: str) -> datetime:
    """Without a zone it is UTC. Raises BadParameter."""
    try:
        found = datetime.fromisoformat(text)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"want a moment like 2026-11-20T20:15:00Z, got {text!r}") from None


def up_to(text: str) -> UpTo:
    """Raises BadParameter."""
    partition, _, number = text.rpartition("=")
    if not partition or not number.isdecimal() or len(number) > 19:
        raise typer.BadParameter(f"want PARTITION=SEQUENCE, got {text!r}")
    return UpTo(partition, int(number))


def setting(text: str) -> SparkSetting:
    """Raises BadParameter."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"want NAME=VALUE, got {text!r}")
    return SparkSetting(name, value)


Where = Annotated[str, typer.Argument(help="The directory or URL of snapshots, or one snapshot's folder.")]
To = Annotated[
    str, typer.Option("--to", help="The directory of snapshots, which driver and executors share, or its URL.")
]
SnapshotId = Annotated[str | None, typer.Argument(metavar="[ID]", help="Which snapshot; default: the newest.")]
Master = Annotated[
    str,
    typer.Option(
        help="Spark's master: local[*], spark://HOST:PORT, k8s://… or yarn. auto: local[*], but little work is done "
        "without Spark; none: without Spark, however much it is."
    ),
]
Conf = Annotated[
    list[SparkSetting] | None,
    typer.Option("--conf", parser=setting, metavar="NAME=VALUE", help="A setting for Spark. May be repeated."),
]
At = Annotated[
    datetime | None,
    typer.Option(
        "--at", parser=moment, metavar="MOMENT", help="As it was at this moment, for example 2026-11-20T20:15:00Z."
    ),
]
Upto = Annotated[
    list[UpTo] | None,
    typer.Option(
        "--position", parser=up_to, metavar="PARTITION=SEQUENCE", help="Up to this sequence. May be repeated."
    ),
]
Nice = Annotated[int, typer.Option("--nice", min=0, max=19, help="How far Spark on this machine gives way to others.")]
Rate = Annotated[float, typer.Option("--rate", min=0, help="At most so many MiB of records a second; 0: no limit.")]
Examples = Annotated[int, typer.Option("--show", min=0, help="How many differing keys to name.")]
