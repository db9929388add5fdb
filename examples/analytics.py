"""Show the size of a store by prefix, its growth and its most written prefixes: a Spark job and a page of charts.

    kvstore up --detach && kvstore load-tree /usr/lib/python3.11 --prefix lib/
    kvstore snapshot create --to snapshots
    ...
    kvstore snapshot create --to snapshots
    python examples/analytics.py --data-dir data --snapshots snapshots --out report.html

Sizes are those of the store now (`spark.read`). Growth is the difference of the two newest snapshots. The hottest
prefixes have the most changes in the logs, as far back as the logs reach (`spark.readStream`). A prefix consists of a
key's first `--depth` parts between slashes, at most 64 bytes, because each key without slashes would be its own prefix.
Bytes that are not text are shown as \\xNN, so that no two prefixes look alike.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from kvstore.errors import StoreError
from kvstore.places import fault_of
from kvstore.spark.cluster import find
from kvstore.spark.pins import hold
from kvstore.spark.session import open_session
from kvstore.spark.snapshots.chains import Cut, chain_of, in_order
from kvstore.spark.snapshots.fold import folded
from kvstore.spark.snapshots.places import store_at

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PREFIX_BYTES_MAX = 64
NAME_SHOWN = 48
"""Characters of a prefix in the page; all of it is in its tooltip."""
Bars = list[tuple[str, float]]
SHOWN = 20
LOG_FROM = 1000
"""Ratio of the largest to the smallest bar from which bars are logarithms: smaller ones would have no length."""
OTHERS = "all others"
SETTINGS = {"spark.sql.shuffle.partitions": "8"}
"""Prefixes are few; a stream keeps a state for each partition, 200 of them otherwise."""
STYLE = """:root{color-scheme:light dark;--ink:#222;--paper:#fff;--quiet:#667;--more:#3b6ea5;--less:#c2564b;
--rest:#98a2ad}
@media (prefers-color-scheme:dark){:root{--ink:#e4e6e8;--paper:#16181b;--quiet:#9aa3ad;--more:#6fa3dc;--less:#e5867c;
--rest:#5d6670}}
body{font:15px/1.5 system-ui,sans-serif;margin:3rem auto;max-width:60rem;padding:0 1rem;color:var(--ink);
background:var(--paper)}
table{border-collapse:collapse;width:100%;table-layout:fixed}td{padding:.15rem .5rem;white-space:nowrap}
td:first-child{width:34%;overflow:hidden;text-overflow:ellipsis}td:nth-child(2){text-align:right;width:16%}
td:last-child{width:50%}i{display:block;height:1em;background:var(--more)}i.less{background:var(--less)}
i.rest{background:var(--rest)}h2{margin-top:2.5rem}small{color:var(--quiet);font-weight:normal}
dl{display:flex;flex-wrap:wrap;gap:.5rem 2.5rem}dt{color:var(--quiet)}dd{margin:0;font-size:1.6rem}
@media (max-width:40rem){body{margin:1rem auto}td:first-child{width:46%}td:nth-child(2){width:30%}
td:last-child{width:24%}}"""


def prefix_of(depth: int) -> Column:
    """The first parts of a key, a character for each byte: two that differ in a byte stay two."""
    parts = F.split(F.decode(F.col("key"), "ISO-8859-1"), "/")
    return F.substring(F.array_join(F.slice(parts, 1, depth), "/"), 1, PREFIX_BYTES_MAX)


def named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with prefixes as text that people can read."""
    return [{**row, "prefix": text_of(row["prefix"].encode("latin-1"))} for row in rows]


def text_of(data: bytes) -> str:
    """Bytes as UTF-8 where that can be shown, and as \\xNN elsewhere. No two are the same."""
    text = data.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() else escaped(each) for each in text)


def escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


def short(name: str) -> str:
    """A name that fits: of a long one its ends."""
    half = (NAME_SHOWN - 1) // 2
    return name if len(name) <= NAME_SHOWN else f"{name[:half]}…{name[-half:]}"


def sizes(rows: DataFrame, depth: int) -> list[dict[str, Any]]:
    """Keys and bytes by prefix, the largest first."""
    grouped = rows.groupBy(prefix_of(depth).alias("prefix")).agg(
        F.count("*").alias("keys"), F.sum(F.length("key") + F.length("value")).alias("bytes")
    )
    return named([row.asDict() for row in grouped.orderBy(F.desc("bytes"), "prefix").limit(SHOWN).collect()])


def totals(rows: DataFrame, depth: int) -> dict[str, int]:
    """Keys, bytes and prefixes of all rows, of which the page shows a part."""
    found = rows.agg(
        F.count("*").alias("keys"),
        F.coalesce(F.sum(F.length("key") + F.length("value")), F.lit(0)).alias("bytes"),
        F.countDistinct(prefix_of(depth)).alias("prefixes"),
    )
    return dict(found.collect()[0].asDict())


def value_sizes(rows: DataFrame) -> list[dict[str, Any]]:
    """How many values have up to 1, 2, 4 … bytes."""
    power = F.ceil(F.log2(F.greatest(F.length("value"), F.lit(1)))).cast("int")
    grouped = rows.groupBy(power.alias("power")).count().orderBy("power")
    return [{"up_to_bytes": 1 << row.power, "values": row["count"]} for row in grouped.collect()]


def growth(session: SparkSession, directory: Path, prefix: str, depth: int) -> dict[str, Any] | None:
    """By prefix, what the newest snapshot of the same cluster has more than the one before it; None if there are no
    two."""
    store, _ = store_at(str(directory))
    catalogue = store.load_all()
    ordered = in_order(catalogue)
    newest = [each for each in ordered if each.cluster == ordered[-1].cluster][-2:]
    if len(newest) < 2:
        return None
    size = F.sum(F.length("key") + F.length("value"))
    before, after = (
        folded(session, store, chain_of(catalogue, each.id), Cut())
        .where(F.startswith("key", F.lit(prefix.encode())))
        .groupBy(prefix_of(depth).alias("prefix"))
        .agg(F.count("*").alias("keys"), size.alias("bytes"))
        for each in newest
    )
    both = before.alias("b").join(after.alias("a"), "prefix", "full")

    def more(name: str) -> Column:
        return (F.coalesce(f"a.{name}", F.lit(0)) - F.coalesce(f"b.{name}", F.lit(0))).alias(name)

    found = both.select("prefix", more("keys"), more("bytes")).where("bytes != 0 or keys != 0").cache()
    total = found.agg(F.coalesce(F.sum("bytes"), F.lit(0)).alias("bytes")).collect()[0].bytes
    rows = found.orderBy(F.desc(F.abs("bytes")), "prefix").limit(SHOWN).collect()
    prefixes = named([row.asDict() for row in rows])
    return {"from": newest[0].id, "to": newest[1].id, "bytes": total, "prefixes": prefixes}


def hottest(session: SparkSession, where: dict[str, str], depth: int) -> tuple[list[dict[str, Any]], int]:
    """The prefixes with the most changes in the logs, and the number of all changes."""
    stream = (
        session.readStream.format("kvstore")
        .options(**where, columns="key,kind", startingPosition="earliest", holdTtl="1m")  # no later run continues it
        .load()
    )
    counted = stream.groupBy(prefix_of(depth).alias("prefix")).agg(
        F.count("*").alias("changes"), F.count_if(F.col("kind").isin("deleted", "expired")).alias("deletes")
    )
    with tempfile.TemporaryDirectory(prefix="kvstore-analytics-") as checkpoint:
        query = (
            counted.writeStream.format("memory")
            .queryName("hottest")
            .outputMode("complete")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        counts = session.table("hottest")
        rows = counts.orderBy(F.desc("changes"), "prefix").limit(SHOWN).collect()
        total = counts.agg(F.coalesce(F.sum("changes"), F.lit(0)).alias("changes")).collect()[0].changes
    return named([row.asDict() for row in rows]), total


def everything(session: SparkSession, where: dict[str, str], snapshots: Path | None, depth: int) -> dict[str, Any]:
    """All that the page shows. Raises StoreError, and what Spark raises."""
    with hold(where) as pin:  # both of one moment
        rows = session.read.format("kvstore").options(**pin.options, columns="key,value").load()
        of_now = {"totals": totals(rows, depth), "sizes": sizes(rows, depth), "value_sizes": value_sizes(rows)}
    changed, changes = hottest(session, where, depth)
    return {
        **of_now,
        "hottest": changed,
        "changes": changes,
        "growth": growth(session, snapshots, where["prefix"], depth) if snapshots else None,
    }


# ── the page ──


def page(found: dict[str, Any]) -> str:
    """All charts, in one file without scripts."""
    grown, all_of = found["growth"], found["totals"]
    sized = [(row["prefix"], row["bytes"]) for row in found["sizes"]]
    counted = [(row["prefix"], row["keys"]) for row in found["sizes"]]
    changed = [(row["prefix"], row["changes"]) for row in found["hottest"]]
    charts = [
        chart("Bytes by prefix", sized, "bytes", all_of["bytes"]),
        chart("Keys by prefix", counted, "count", all_of["keys"]),
        chart(
            "Values by size, up to",
            [(human(row["up_to_bytes"], "bytes"), row["values"]) for row in found["value_sizes"]],
        ),
        chart("Changes in the logs by prefix", changed, "count", found["changes"]),
    ]
    if grown is not None:
        title = f"Growth in bytes, {grown['from']} to {grown['to']}"
        charts.append(
            chart(title, [(row["prefix"], row["bytes"]) for row in grown["prefixes"]], "bytes", grown["bytes"])
        )
    facts = {
        "keys": human(all_of["keys"]),
        "bytes": human(all_of["bytes"], "bytes"),
        "prefixes": human(all_of["prefixes"]),
        "changes in the logs": human(found["changes"]),
    }
    if grown is not None:
        facts["growth"] = human(grown["bytes"], "bytes")
    summary = "".join(f"<div><dt>{name}<dd>{value}</div>" for name, value in facts.items())
    head = (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>kvstore</title><style>{STYLE}</style>"
    )
    return f"{head}<h1>kvstore</h1><dl>{summary}</dl>{''.join(charts)}"


def human(value: float, unit: str = "count") -> str:
    """A number in three digits with its unit: 1.5 MiB, 12.3 k; exact below a thousand."""
    step, names = (
        (1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB")) if unit == "bytes" else (1000, ("", "k", "M", "G", "T"))
    )
    size, at = abs(value), 0
    while size >= step and at < len(names) - 1:
        size, at = size / step, at + 1
    digits = f"{size:.0f}" if at == 0 or size >= 100 else f"{size:.1f}"
    return f"{'-' if value < 0 else ''}{digits} {names[at]}".strip()


def chart(title: str, bars: Bars, unit: str = "count", total: float | None = None) -> str:
    """One bar for each; those below 0 in another colour, and what `total` has more than all in the last row."""
    rest = 0 if total is None else total - sum(value for _, value in bars)
    lengths = [abs(value) for _, value in [*bars, (OTHERS, rest)] if value]
    most = max(lengths, default=1)
    is_log = bool(lengths) and most >= LOG_FROM * min(lengths)

    def row(name: str, value: float, kind: str) -> str:
        share = math.log1p(abs(value)) / math.log1p(most) if is_log else abs(value) / most
        return (
            f'<tr><td title="{html.escape(name)}">{html.escape(short(name)) or "(none)"}'
            f'<td title="{value:,.0f}">{human(value, unit)}<td><i class="{kind}" style="width:{100 * share:.1f}%"></i>'
        )

    rows = [row(name, value, "less" if value < 0 else "") for name, value in bars]
    rows += [row(OTHERS, rest, "rest")] if rest else []
    scale = " <small>logarithmic scale</small>" if is_log else ""
    return f"<h2>{html.escape(title)}{scale}</h2><table>{''.join(rows) or '<tr><td>nothing'}</table>"


def path_word(word: str) -> Path:
    if fault := fault_of(word):
        raise argparse.ArgumentTypeError(fault)
    return Path(word)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=path_word, default="data", help="of the local cluster")
    parser.add_argument("--servers", help="of any other cluster: HOST:PORT,...")
    parser.add_argument("--prefix", default="", help="only keys that begin so")
    parser.add_argument("--depth", type=int, default=2, help="parts of a key that make its prefix")
    parser.add_argument("--snapshots", type=path_word, help="where `kvstore snapshot create` puts them")
    parser.add_argument("--master", default="local[*]", help="of Spark")
    parser.add_argument("--out", type=path_word, default=Path("report.html"))
    wanted = parser.parse_args(arguments)
    where = {"servers": wanted.servers} if wanted.servers else {"dataDir": wanted.data_dir}
    where["prefix"] = wanted.prefix
    if wanted.depth < 1:
        parser.error(f"--depth: expected 1 or more, got {wanted.depth}")
    if not wanted.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no directory {wanted.out.absolute().parent}")
    try:  # Spark would start first, and tell the same in pages of two stacks
        find(where)
        if wanted.snapshots:
            store_at(str(wanted.snapshots))
    except StoreError as error:
        sys.exit(f"analytics: {error}")
    try:
        session = open_session("kvstore analytics", master=wanted.master, settings=SETTINGS)
        session.sparkContext.setLogLevel("ERROR")
        try:
            found = everything(session, where, wanted.snapshots, wanted.depth)
        finally:
            session.stop()
        wanted.out.write_text(page(found), encoding="utf-8")
    except (StoreError, OSError) as error:
        sys.exit(f"analytics: {error}")
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write(f"\n{wanted.out}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
