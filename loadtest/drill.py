"""Run counted faults against a real cluster and check each run: no acknowledged write lost, no stale read, short gaps.

    python -m loadtest.drill [--quick] [--only TEXT] [--metadata zookeeper|etcd] [--out reports/results.json]
    python -m loadtest.drill --nemesis [--seed N] [--minutes M]      # faults by seed: rounds.py
    python -m loadtest.drill --repairs [--quick] [--only TEXT]       # faults of copies, each on its own cluster

The drill starts a three-node cluster in a scratch folder and prints each figure beside its limit. It writes all figures
to a file, with the time of each phase of a change of leader according to the nodes' logs. The exit code is 1 if a
safety promise is broken: an acknowledged write is lost, a read was stale, or fsck finds an error. Figures that are only
too high are marked, because they depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from kvstore.cli.output import as_table
from kvstore.loadtest.generator.options import path_word
from kvstore.meta.address import MetadataKind
from loadtest.bench import peers
from loadtest.drills import net, rounds, spans
from loadtest.drills.faults import SCENARIOS
from loadtest.drills.nemesis import FAULTS
from loadtest.drills.repair_stage import RepairStage
from loadtest.drills.repairs import SCENES
from loadtest.drills.stage import QUICK, Counts, Report, Stage
from tests.cluster.harness import running_cluster

MINUTES_MAX = 7 * 24 * 60


def run_drill(*, counts: Counts, only: str, metadata: MetadataKind, out: Path) -> bool:
    """Run the drill, print it, and write it. Return False if a safety promise is broken."""
    report, changes = Report(), []
    with peers.scratch() as folder:
        try:
            with running_cluster(folder, metadata=metadata) as cluster:
                for name, scenario in SCENARIOS.items():
                    if only in name:
                        print(f"\n{name}", file=sys.stderr, flush=True)
                        asyncio.run(scenario(Stage(cluster, counts, report)))
        finally:
            keep_logs(folder, out.parent / "logs")
            changes = _changes_of_leader(out.parent / "logs")
            report.write(out, changes_of_leader=changes)
    print(report.table(), as_table(changes), report.verdict, sep="\n")
    return report.is_safe


def run_repairs(*, counts: Counts, only: str, metadata: MetadataKind, out: Path) -> bool:
    """Run the drill that damages copies. Return False if a safety promise is broken."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clusters would stay
    report = Report()
    for name, scene in SCENES.items():
        if only not in name:
            continue
        print(f"\n{name}", file=sys.stderr, flush=True)
        with peers.scratch() as folder:
            options = {"nodes": scene.nodes, "partitions": scene.partitions, "settings": scene.settings}
            try:
                with running_cluster(folder, metadata=metadata, **options) as cluster:
                    asyncio.run(scene.play(RepairStage(cluster, counts, report)))
            finally:
                keep_logs(folder, out.parent / "repair-logs" / name.replace(" ", "-"))
                report.write(out.with_name("repairs.json"))
    print(report.table(), report.verdict, sep="\n")
    return report.is_safe


def run_nemesis(*, seed: int, minutes: float, only: str, out: Path) -> bool:
    """Run the drill of faults by seed. Return False if a safety promise is broken."""
    if not net.is_possible():
        print("this drill makes networks: it needs Linux, root, and iproute2 (ip, tc)", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # networks and file systems would stay
    report = Report()
    with peers.scratch() as folder:
        try:
            with net.wired_cluster(folder) as cluster:
                asyncio.run(rounds.rounds(cluster, report, seed=seed, minutes=minutes, only=only))
        finally:
            keep_logs(folder, out.parent / "nemesis-logs")
            report.write(out.with_name("nemesis.json"))
    print(Report([row for row in report.rows if not row["met"]]).table())
    print(f"seed {seed}, {report.verdict}")
    return report.is_safe


def _changes_of_leader(logs: Path) -> list[dict[str, Any]]:
    found = spans.spans(spans.read_logs(logs))
    return [row for kind in (spans.HAND_OVER, spans.TAKEOVER) for row in spans.summary(found, kind)]


def keep_logs(folder: Path, kept: Path) -> None:
    """Copy the nodes' logs out of a cluster's folder."""
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder / "data" / "logs", kept)
    print(f"the nodes' logs are in {kept}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each fault once or twice")
    parser.add_argument(
        "--only", default="", help="only scenarios whose name holds this; of accidents, one of several, comma-separated"
    )
    parser.add_argument(
        "--metadata", type=MetadataKind, default=MetadataKind.ZOOKEEPER, help="zookeeper or etcd, for counted faults"
    )
    parser.add_argument("--out", type=path_word, default=Path("reports/results.json"))
    parser.add_argument("--nemesis", action="store_true", help="accidents by seed instead of counted ones")
    parser.add_argument("--repairs", action="store_true", help="accidents to copies instead, on clusters of their own")
    parser.add_argument("--seed", type=int, default=1, help="of the accidents")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long accidents go on")
    arguments = parser.parse_args()
    if not 0 <= arguments.minutes <= MINUTES_MAX:
        parser.error(f"--minutes: expected 0 (one round) to {MINUTES_MAX:,} (a week), got {arguments.minutes:g}")
    wanted = arguments.only.split(",") if arguments.nemesis else [arguments.only]
    known = sorted(FAULTS if arguments.nemesis else SCENES if arguments.repairs else SCENARIOS)
    if not any(part in name for part in wanted for name in known):  # nothing would be done, and nothing be broken
        parser.error(f"--only: expected a part of {', '.join(known)}, got {arguments.only!r}")
    if arguments.nemesis:
        if arguments.metadata is not MetadataKind.ZOOKEEPER:
            parser.error("--metadata: accidents by seed need ZooKeeper")
        seed, minutes = arguments.seed, arguments.minutes
        sys.exit(0 if run_nemesis(seed=seed, minutes=minutes, only=arguments.only, out=arguments.out) else 1)
    counts = QUICK if arguments.quick else Counts()
    drill = run_repairs if arguments.repairs else run_drill
    is_safe = drill(counts=counts, only=arguments.only, metadata=arguments.metadata, out=arguments.out)
    sys.exit(0 if is_safe else 1)


if __name__ == "__main__":
    main()
