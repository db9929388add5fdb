"""Libraries and frameworks that use Redis, against clusters of three nodes.

`python -m tests.redis_clients.libraries` installs the pinned versions into a separate environment. It starts a cluster
with the default settings and one with `SETTINGS`, tries each use of probes.py and probes.cjs at both, and writes
docs/reference/redis-libraries.md. It fails if a use does not end as `USES` says. It needs Node.js.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.pages import table
from tests.cluster.harness import running_cluster
from tests.redis_clients.judge import PLACE

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "reference" / "redis-libraries.md"
TIMEOUT_S = 180
SETTINGS = ("redis.transactions_across_slots=true", "server.redis_flush=true")
SHOWN = "`transactions_across_slots`", "`redis_flush`"

PYTHON = {
    "aiocache": "0.12.3",
    "celery": "5.7.0",
    "channels_redis": "4.3.0",
    "Django": "5.2.19",
    "django-redis": "7.0.0",
    "dogpile.cache": "1.5.0",
    "dramatiq": "2.2.1",
    "Flask-Caching": "2.5.1",
    "Flask-Limiter": "4.1.1",
    "Flask-Session": "0.8.0",
    "huey": "3.5.4",
    "limits": "5.8.0",
    "msgpack": "1.2.4",
    "pottery": "3.0.1",
    "python-redis-lock": "4.0.1",
    "python-socketio": "5.18.1",
    "redis": "8.1.0",
    "redlock-py": "1.0.8",
    "rq": "3.0.0",
}
NODE = {"bullmq": "6.7.0", "ioredis": "6.0.0", "redis": "6.3.1", "redlock": "4.2.0"}

CROSSSLOT, FLUSH = "don't hash to the same slot", "FLUSHDB is disabled"
LISTS, SETS, SORTED, HASHES = "lists are not", "sets are not", "sorted sets are not", "hashes are not"
SCRIPT = "only the scripts of some libraries"
REASONS = {
    LISTS: "needs lists",
    SETS: "needs sets",
    SORTED: "needs sorted sets",
    HASHES: "needs hashes",
    SCRIPT: "needs Lua scripts that are not known here",
    "The operation timed out": "needs lists, in a script",
}
NEEDS = {CROSSSLOT: SHOWN[0], FLUSH: SHOWN[1]}


class Use(NamedTuple):
    """One use of a library."""

    library: str
    what: str
    probe: str
    default: str = ""
    """A part of the error with the default settings; empty if the use works."""
    allowed: str = ""
    """A part of the error with `SETTINGS`; empty if the use works."""

    @property
    def is_node(self) -> bool:
        return self.probe.startswith("node_")

    @property
    def version(self) -> str:
        return (NODE if self.is_node else PYTHON)[self.library]

    @property
    def name(self) -> str:
        return f"{self.library} for Node.js" if self.is_node and self.library in PYTHON else self.library


USES = (
    Use("Django", "`RedisCache`: `get`, `set`, `add`, `incr`, `touch`, `get_many`", "django"),
    Use("Django", "`RedisCache`: `set_many`", "django_set_many", CROSSSLOT),
    Use("Django", "`RedisCache`: `clear`", "django_clear", FLUSH),
    Use("django-redis", "`get`, `set`, `incr`, `ttl`, `delete_pattern`, `lock`", "django_redis"),
    Use("django-redis", "`set_many`", "django_redis_set_many", CROSSSLOT),
    Use("django-redis", "`clear`", "django_redis_clear", FLUSH),
    Use("Flask-Caching", "`get`, `set`, `add`, `memoize`, `clear` of a prefix", "flask_caching"),
    Use("Flask-Caching", "`set_many`, `get_many`, `delete_many`", "flask_caching_set_many"),
    Use("Flask-Session", "sessions", "flask_session"),
    Use("Flask-Limiter", "limits with fixed windows", "flask_limiter"),
    Use("limits", "fixed windows", "limits_fixed_window"),
    Use("limits", "sliding windows", "limits_sliding_window", SCRIPT, SCRIPT),
    Use("limits", "moving windows", "limits_moving_window", SCRIPT, SCRIPT),
    Use("celery", "result backend: results, errors, `forget`", "celery_results"),
    Use("celery", "result backend: groups", "celery_groups"),
    Use("celery", "result backend: chords", "celery_chords", "The operation timed out", "The operation timed out"),
    Use("celery", "broker", "celery_broker", LISTS, LISTS),
    Use("rq", "queues", "rq", SETS, SETS),
    Use("huey", "queues", "huey", LISTS, LISTS),
    Use("dramatiq", "broker", "dramatiq", SCRIPT, SCRIPT),
    Use("aiocache", "`get`, `set`, `multi_get`, `increment`, `clear` of a namespace, `RedLock`", "aiocache"),
    Use("aiocache", "`multi_set` with a TTL", "aiocache_multi_set", CROSSSLOT),
    Use("aiocache", "`OptimisticLock`", "aiocache_optimistic_lock"),
    Use("dogpile.cache", "regions, `set_multi`, distributed locks", "dogpile_cache"),
    Use("redis", "`Lock`: acquire, extend, reacquire, release", "redis_py_lock"),
    Use("redis", "`pubsub()`: channels and patterns", "redis_py_pubsub"),
    Use("redlock-py", "locks", "redlock_py"),
    Use("pottery", "`Redlock`: acquire, locked, extend, release", "pottery_redlock"),
    Use("python-redis-lock", "locks", "python_redis_lock", SCRIPT, SCRIPT),
    Use("channels_redis", "`RedisPubSubChannelLayer`: groups", "channels_redis_pubsub"),
    Use("channels_redis", "`RedisChannelLayer`", "channels_redis_core", SORTED, SORTED),
    Use("python-socketio", "`AsyncRedisManager` between servers", "python_socketio"),
    Use("ioredis", "strings, pipelines, `multi` on one tag, scan streams, channels", "node_ioredis"),
    Use("redis", "strings, `multi` on one tag, scans, channels", "node_redis"),
    Use("redlock", "locks over ioredis: lock, extend, unlock", "node_redlock"),
    Use("bullmq", "queues", "node_bullmq", SCRIPT, SCRIPT),
)

_CLUSTER_MODE = (
    "clients of the same protocol, also in [cluster mode](../how-to/use-a-redis-client.md#use-a-cluster-client)"
)
_SPRING = (
    "`opsForValue`, the cache and listeners of channels send commands that work; `opsForHash`, repositories and Spring "
    "Session need hashes"
)
KNOWN = (
    ("go-redis", "143 of its tests pass (`make redis-clients`)"),
    ("redsync (Go)", "its scripts are known"),
    ("Jedis, Lettuce", _CLUSTER_MODE),
    ("Spring Data Redis", _SPRING),
    ("Redisson", "buckets and topics send commands that work; its locks, maps and queues need Lua scripts on hashes"),
    ("Sidekiq, Resque", "need lists and sets"),
    ("redis_exporter", "`INFO` and `SLOWLOG` answer; a node's own [metrics](metrics.md) say more"),
    ("memtier_benchmark, redis-benchmark", "`SET` and `GET` work"),
    ("YCSB", "its Redis binding needs hashes; `kvstore-loadtest` has [YCSB's workloads](load-tests.md)"),
)

HEAD = """# Libraries and frameworks on the Redis port

This page is for application developers who already use a library with Redis: it says which uses work here, tried with
these versions against a cluster of three nodes. `make redis-clients` tries them and writes this page: do not edit it
here.

"With" names the [settings](configuration.md) that a use needs. `[redis] transactions_across_slots` is for libraries
that change several keys together without a common `{tag}`. `[server] redis_flush` is for those that delete all keys of
the store, and is meant for test stores. Switch off every library's retries:
[use a Redis client](../how-to/use-a-redis-client.md#know-what-happened) says why.

"""


def tried(python: Path, uses: Sequence[Use], address: str) -> list[str]:
    """Return the error of each use at the node with this address; empty if it works."""
    found = []
    for use in uses:
        program = ["node", str(HERE / "probes.cjs")] if use.is_node else [str(python), str(HERE / "probes.py")]
        with tempfile.TemporaryDirectory() as folder:
            command = [*program, use.probe, *address.rsplit(":", 1)]
            environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "NODE_PATH": str(PLACE / "libraries" / "node_modules")}
            try:
                done = subprocess.run(
                    command, cwd=folder, env=environ, timeout=TIMEOUT_S, capture_output=True, check=False
                )
            except subprocess.TimeoutExpired:
                found.append(f"took more than {TIMEOUT_S} s")
                continue
        found.append("" if done.returncode == 0 else (done.stderr or b"no error").decode("utf-8", "replace"))
    return found


def installed() -> Path:
    """Return the Python of the environment with the libraries, made if it is missing or has other versions."""
    place = PLACE / "libraries"
    wanted = [f"{name}=={version}" for name, version in PYTHON.items()]
    packages = [f"{name}@{version}" for name, version in NODE.items()]
    mark, python = place / "installed.txt", place / "bin" / "python"
    if not mark.exists() or mark.read_text() != "\n".join([*wanted, *packages]):
        venv.create(place, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-cache-dir", *wanted], check=True)
        subprocess.run(["npm", "install", "--silent", "--no-save", "--prefix", str(place), *packages], check=True)
        mark.write_text("\n".join([*wanted, *packages]))
    return python


def differs(expected: str, error: str) -> bool:
    return not error if expected else bool(error)


def page(uses: Sequence[Use]) -> str:
    """Return the page about the uses, which ended as expected."""
    rows = []
    for use in uses:
        works = "no" if use.allowed else "with " + NEEDS[use.default] if use.default else "yes"
        rows.append((use.name, use.version, use.what, works, REASONS[use.allowed] if use.allowed else ""))
    heads = ("library", "version", "use", "works", "why not")
    text = HEAD + table(heads, sorted(rows, key=lambda row: row[0].lower()))
    text += "\n## Not tried by this run\n\n" + table(("program", "what is known"), KNOWN)
    text += (
        "\nQueues of jobs need lists. The Python clients have a [queue](../how-to/coordinate-processes.md) instead.\n"
    )
    return text


def main() -> None:
    python = installed()
    faults = []
    for settings, expected in (((), "default"), (SETTINGS, "allowed")):
        with (
            tempfile.TemporaryDirectory() as folder,
            running_cluster(Path(folder) / "cluster", settings=settings) as cluster,
        ):
            if settings:
                cluster.wait_log_version()
            for use, error in zip(USES, tried(python, USES, cluster.file.nodes[0].resp), strict=True):
                wanted = getattr(use, expected)
                is_fault = differs(wanted, error) or (wanted and not re.search(re.escape(wanted), error))
                print("FAILED" if is_fault else "ok    ", expected, use.probe, wanted)
                if is_fault:
                    faults.append(use.probe)
                    print(error[-2000:])
    if not faults:
        PAGE.write_text(page(USES))
    print(f"{len(USES)} uses at two clusters, {len(faults)} not as expected")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
