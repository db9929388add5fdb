"""The tests in go-redis's published module, run against a cluster of three nodes.

`python -m tests.redis_clients.go_redis` fetches the module, builds its tests, which takes minutes, starts a cluster and
runs the tests about a single server's strings, keys, scans and transactions. It needs Go.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cluster.harness import running_cluster
from tests.redis_clients.judge import PLACE, TIMEOUT_S, judge

VERSION = "v9.23.0"
CHOSEN = "[ ^]Commands (server|keys|scanning|strings|marshaling|json marshaling|Eval)|[ ^]Tx |[ ^]pipelining "
NOT_CHOSEN = "Cluster|Ring|TLS"
"""Tests that need several servers, at their own ports."""

EXCUSED = {
    "should Wait": "wants no replica to have a write; here two have it",
    "should Select": "there is one database",
    "should Save": "there is nothing to save",
    "should Command [": "wants the flag `fast`",
    "should Command Tips": "wants hints for a cluster's proxies",
    "should return all command names": "wants two hundred commands",
    "should filter commands by": "COMMAND LIST has no filter here",
    "should Object": "how often a key is read is not counted",
    "10 MiB payload": "a value has at most 1 MiB",
    "should fail module loadex": "there are no modules",
    "should exec bulks": "a transaction has at most 4,096 commands",
}


def built() -> Path:
    """Return the folder of the module with its test program, built if it is missing."""
    place = PLACE / f"go-redis-{VERSION}"
    program = place / "suite.test"
    if not program.exists():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "go.mod").write_text("module fetch\n")
            fetch = ["go", "mod", "download", "-json", f"github.com/redis/go-redis/v9@{VERSION}"]
            told = subprocess.run(fetch, cwd=folder, check=True, stdout=subprocess.PIPE)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(json.loads(told.stdout)["Dir"], place)
        subprocess.run(["chmod", "-R", "u+w", str(place)], check=True)  # a module's files are read-only
        subprocess.run(["go", "test", "-c", "-o", program.name, "."], cwd=place, check=True)
    return place


def run(place: Path, address: str, report: Path) -> None:
    """Run the tests against a server. The report has JUnit's format."""
    host, _, port = address.rpartition(":")
    config = report.with_name("endpoints.json")
    config.write_text(json.dumps({"store": {"raw_endpoints": [{"dns_name": host, "port": int(port)}]}}))
    environ = os.environ | {"RE_CLUSTER": "true", "REDIS_ENDPOINTS_CONFIG_PATH": str(config), "REDIS_VERSION": "7.0"}
    options = ["-test.run=TestGinkgoSuite", f"-ginkgo.focus={CHOSEN}", f"-ginkgo.skip={NOT_CHOSEN}"]
    command = [str(place / "suite.test"), *options, f"-ginkgo.junit-report={report}"]
    subprocess.run(command, cwd=place, env=environ, timeout=TIMEOUT_S, check=False, stdout=subprocess.DEVNULL)


def main() -> None:
    place = built()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        settings = ("server.redis_flush=true",)
        with running_cluster(Path(folder) / "cluster", partitions=1, settings=settings) as cluster:
            run(place, cluster.file.nodes[0].resp, report)
        sys.exit(judge(place.name, report, EXCUSED))


if __name__ == "__main__":
    main()
