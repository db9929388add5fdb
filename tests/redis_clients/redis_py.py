"""The tests of redis-py that its published package brings along, against a cluster of three nodes.

`python -m tests.redis_clients.redis_py` fetches the package's sources, starts a cluster and runs them, sync and async.
What fails has to fail because of a command that the store does not have (`ABSENT`), or to be named with its reason
(`EXCUSED`): all else is a fault of ours, and so is a reason that is not needed any more.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.cluster.harness import running_cluster

ROOT = Path(__file__).parent.parent.parent
PLACE = ROOT / ".interop"
FILES = ("commands", "connection_pool", "encoding", "lock", "pipeline", "scripting")
TIMEOUT_S = 1800

ABSENT = {
    "lists": "RPUSH LPUSH LPUSHX RPUSHX BRPOP",
    "sets": "SADD",
    "sorted sets": "ZADD ZMSCORE",
    "hashes": "HSET HMSET HSETNX HINCRBY HINCRBYFLOAT HRANDFIELD",
    "streams": "XADD XGROUP XACK XDEL XLEN XTRIM",
    "places": "GEOADD GEOPOS",
    "hyperloglogs": "PFADD",
    "bitmaps": "SETBIT GETBIT BITCOUNT BITPOS BITOP BITFIELD",
    "channels": "SUBSCRIBE",
    "scripts, but those of locks": "EVAL EVAL_RO",
    "values written elsewhere, and their likeness": "DUMP LCS",
    "users by Redis' commands": "ACL",
    "other clients' connections": "CLIENT",
    "the server's own matters": (
        "BGSAVE COMMAND CONFIG DEBUG LASTSAVE LATENCY LOLWUT MEMORY MODULE MONITOR REPLICAOF ROLE"
    ),
}
"""Commands that the store does not have, by what they are about."""

EXCUSED = {
    "test_bitfield_operations": "is about bitmaps, and asks for a second database after that",
    "test_client_kill_filter_by_laddr": "is about other clients' connections",
    "test_client_setinfo": "connects to port 6379 whatever address it is told",
    "test_client_setinfo_with_driver_info": "connects to port 6379 whatever address it is told",
    "test_command": "wants a hundred commands",
    "test_command_count": "wants a hundred commands",
    "test_command_list": "wants three hundred commands",
    "test_config_get": "wants ten settings of a Redis",
    "test_config_get_multi_params": "wants settings of a Redis",
    "test_copy_to_another_database": "there is one database",
    "test_large_responses": "stores 5 MB; a value has at most 1 MiB",
    "test_max_connections": "connects to port 6379 whatever address it is told",
    "test_module": "wants a second Redis, with modules",
    "test_module_loadex": "wants a second Redis, with modules",
    "test_mset_on_cluster_multiple_slots": "is for clusters; one partition holds all slots here",
    "test_multiple_connections": "connects to port 6379 whatever address it is told",
    "test_psync": "wants a second Redis",
    "test_readonly_invalid_cluster_state": "is for a server without a cluster, and READONLY is known here",
    "test_reuse_previously_released_connection": "connects to port 6379 whatever address it is told",
    "test_select": "there is one database",
    "test_slowlog_get": "wants a setting of a Redis",
    "test_slowlog_get_limit": "wants a setting of a Redis",
    "test_slowlog_length": "wants a setting of a Redis",
}
_KINDS = {name: kind for kind, names in ABSENT.items() for name in names.split()}
_REFUSALS = (
    re.compile(r"unknown command '(\w+)'"),
    re.compile(r"unknown subcommand.*? (ACL|CLIENT|COMMAND) has"),
    re.compile(r"(CONFIG) can only GET here"),
    re.compile(r"Command # \d+ \((\w+) .* caused error: .*(?:unknown command|unknown subcommand)"),
)
_SCRIPT = re.compile(r"scripts are not run here|No matching script")


class Outcome(NamedTuple):
    """One test; `failure` is empty if it passed, None if redis-py itself skipped it."""

    name: str
    failure: str | None


def sources() -> Path:
    """The package's sources, of the version that is installed here; fetched if they are not there yet."""
    name = f"redis-{version('redis')}"
    if not (PLACE / name).is_dir():
        PLACE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            fetch = ["download", "--no-binary", ":all:", "--no-deps", "--no-build-isolation", "-q", "-d", folder]
            subprocess.run([sys.executable, "-m", "pip", *fetch, name.replace("-", "==")], check=True)
            shutil.unpack_archive(Path(folder) / f"{name}.tar.gz", PLACE)
    return PLACE / name


def run(place: Path, address: str, report: Path) -> None:
    """Run the tests against a server; the report is JUnit's."""
    files = [f"tests/{folder}test_{file}.py" for folder in ("", "test_asyncio/") for file in FILES]
    options = ["-q", "--tb=line", "--timeout=60", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "asyncio_mode=auto"]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", f"--redis-url=redis://{address}/0"]
    subprocess.run([*command, *files], cwd=place, timeout=TIMEOUT_S, check=False, stdout=subprocess.DEVNULL)


def outcomes(report: Path) -> Iterator[Outcome]:
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
        bad = [found for found in (case.find("failure"), case.find("error")) if found is not None]
        if bad:
            yield Outcome(name, f"{bad[0].get('message')}\n{bad[0].text}")
        else:
            yield Outcome(name, None if case.find("skipped") is not None else "")


def reason(outcome: Outcome) -> str:
    """Why a test may fail; empty if it may not."""
    failure = outcome.failure or ""
    name = outcome.name.rpartition("::")[2].partition("[")[0]
    if name in EXCUSED:
        return f"{name}: {EXCUSED[name]}"
    if _SCRIPT.search(failure):
        return _KINDS["EVAL"]
    found = next((match for each in _REFUSALS if (match := each.search(failure))), None)
    return _KINDS.get(found[1], "") if found else ""


def main() -> None:
    place = sources()
    with tempfile.TemporaryDirectory() as folder:
        root, report = Path(folder), Path(folder) / "report.xml"
        settings = ("server.redis_flush=true",)
        with running_cluster(root / "cluster", partitions=1, settings=settings) as cluster:
            run(place, cluster.file.nodes[0].resp, report)
        found = list(outcomes(report))
    failed = [each for each in found if each.failure]
    reasons = Counter(map(reason, failed))
    ours = [each for each in failed if not reason(each)]
    needless = EXCUSED.keys() - {each.partition(":")[0] for each in reasons}
    for why, count in sorted(reasons.items(), key=lambda item: (":" in item[0], -item[1])):
        if why:
            print(f"{count:5} not here: {why}")
    for each in ours:
        print(f"FAILED {each.name}\n{each.failure}")
    for name in sorted(needless):
        print(f"NEEDLESS reason for {name}: it passes")
    passed = sum(each.failure == "" for each in found)
    skipped = sum(each.failure is None for each in found)
    print(f"{version('redis')}: {passed} passed, {skipped} skipped by redis-py, {len(failed) - len(ours)} not here")
    sys.exit(1 if ours or needless or not passed else 0)


if __name__ == "__main__":
    main()
