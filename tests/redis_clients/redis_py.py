"""The tests in redis-py's published package, run against a cluster of three nodes.

`python -m tests.redis_clients.redis_py` fetches the package's sources, starts a cluster and runs them, sync and async.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.cluster.harness import running_cluster
from tests.redis_clients.judge import PLACE, TIMEOUT_S, judge

FILES = ("commands", "connection_pool", "encoding", "lock", "pipeline", "scripting")

EXCUSED = {
    "::test_bitfield_operations": "is about bitmaps, and asks for a second database after that",
    "::test_client_kill_filter_by_laddr": "is about other clients' connections",
    "::test_client_setinfo": "connects to port 6379 whatever address it is told",
    "::test_client_setinfo_with_driver_info": "connects to port 6379 whatever address it is told",
    "::test_command": "wants a hundred commands",
    "::test_command_count": "wants a hundred commands",
    "::test_command_list": "wants three hundred commands",
    "::test_config_get": "wants ten settings of a Redis",
    "::test_config_get_multi_params": "wants settings of a Redis",
    "::test_copy_to_another_database": "there is one database",
    "::test_large_responses": "stores 5 MB; a value has at most 1 MiB",
    "::test_max_connections": "connects to port 6379 whatever address it is told",
    "::test_module": "wants a second Redis, with modules",
    "::test_module_loadex": "wants a second Redis, with modules",
    "::test_mset_on_cluster_multiple_slots": "is for clusters; one partition holds all slots here",
    "::test_multiple_connections": "connects to port 6379 whatever address it is told",
    "::test_psync": "wants a second Redis",
    "::test_readonly_invalid_cluster_state": "is for a server without a cluster, and READONLY is known here",
    "::test_reuse_previously_released_connection": "connects to port 6379 whatever address it is told",
    "::test_select": "there is one database",
    "::test_slowlog_get": "wants a setting of a Redis",
    "::test_slowlog_get_limit": "wants a setting of a Redis",
    "::test_slowlog_length": "wants a setting of a Redis",
}


def sources() -> Path:
    """Return the package's sources of the installed version, fetched if they are missing."""
    name = f"redis-{version('redis')}"
    if not (PLACE / name).is_dir():
        PLACE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            fetch = ["download", "--no-binary", ":all:", "--no-deps", "--no-build-isolation", "-q", "-d", folder]
            subprocess.run([sys.executable, "-m", "pip", *fetch, name.replace("-", "==")], check=True)
            shutil.unpack_archive(Path(folder) / f"{name}.tar.gz", PLACE)
    return PLACE / name


def run(place: Path, address: str, report: Path) -> None:
    """Run the tests against a server. The report has JUnit's format."""
    files = [f"tests/{folder}test_{file}.py" for folder in ("", "test_asyncio/") for file in FILES]
    options = ["-q", "--tb=line", "--timeout=60", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "asyncio_mode=auto"]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", f"--redis-url=redis://{address}/0"]
    subprocess.run([*command, *files], cwd=place, timeout=TIMEOUT_S, check=False, stdout=subprocess.DEVNULL)


def main() -> None:
    place = sources()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        settings = ("server.redis_flush=true",)
        with running_cluster(Path(folder) / "cluster", partitions=1, settings=settings) as cluster:
            run(place, cluster.file.nodes[0].resp, report)
        sys.exit(judge(place.name, report, EXCUSED))


if __name__ == "__main__":
    main()
