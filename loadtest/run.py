"""`make loadtest`: two minutes of load, headless, on the local cluster if it runs, else on one of its own.

    python -m loadtest.run [--data-dir DIR] [--processes N] [any option of `kvstore-loadtest`] [GrpcUser|RespUser]

A cluster of its own lives in a scratch folder and is ended afterwards; a --data-dir that is named must serve. The
report is reports/loadtest.html. Exit codes: see kvstore/loadtest/run.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.devcluster.local import LocalCluster
from kvstore.errors import ConfigError
from kvstore.loadtest.generator.options import Options, add_options
from kvstore.loadtest.run import checked, run_locust
from loadtest.bench import peers
from tests.cluster.harness import running_cluster

FOLDER = Path(__file__).parent
PROFILE = (
    *("--workload", "ycsb-a,ycsb-b,hot-reads,cas", "--shape", "steady"),
    *("--rate", "250", "--seconds", "105", "--warmup", "10", "--keys", "10000"),
    *("--achieved-min", "0.99", "--p99-ms", "250", "--baseline", str(FOLDER / "baseline.json")),
)
"""Options for two minutes, including the time to load the records and to write the report. Options on the command
line take precedence."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=0, help="Locust workers; 0: one process does it all")
    add_options(parser)
    given = [*PROFILE, *sys.argv[1:]]
    options = checked(parser, given)
    is_named = _names_data_dir(sys.argv[1:])
    with peers.scratch() as folder, _cluster(options, folder, is_named=is_named) as data_dir:
        sys.exit(run_locust([*given, "--data-dir", str(data_dir)]))


@contextmanager
def _cluster(options: Options, folder: Path, *, is_named: bool) -> Iterator[Path]:
    """Yield the directory of the cluster to load. If the command line names a directory, no other cluster replaces
    it."""
    if options.store or options.resp:
        yield options.data_dir
        return
    if _serves(options.data_dir):
        print(f"loadtest: on the cluster of {options.data_dir}", file=sys.stderr)
        yield options.data_dir
        return
    if is_named:
        print(
            f"loadtest: --data-dir: no cluster serves in {options.data_dir}: `kvstore up` starts one", file=sys.stderr
        )
        sys.exit(2)
    print("loadtest: no cluster runs here; starting one in a scratch folder", file=sys.stderr)
    with running_cluster(folder) as cluster:
        yield cluster.local.data_dir


def _serves(data_dir: Path) -> bool:
    try:
        nodes = LocalCluster(data_dir).status()["nodes"]
    except ConfigError:
        return False
    return all(node["ready"] for node in nodes)


def _names_data_dir(words: Sequence[str]) -> bool:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data-dir")
    return parser.parse_known_args(words)[0].data_dir is not None


if __name__ == "__main__":
    main()
