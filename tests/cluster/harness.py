"""A real cluster for tests: its processes run in a directory and are killed, paused and restarted by pid.

Everything waits for a condition with a deadline instead of sleeping. Processes that a test leaves running are killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import orjson
import psutil
import redis

from kvstore import config as toml
from kvstore import versions
from kvstore.devcluster import zookeeper
from kvstore.devcluster.layout import ClusterFile, UpOptions, node_config
from kvstore.devcluster.local import LocalCluster
from kvstore.devcluster.processes import is_alive
from kvstore.devcluster.settings import parse
from kvstore.errors import ConfigError, Unavailable
from kvstore.meta.address import MetadataKind
from kvstore.ring.hashing import KeyHashName
from kvstore.rpc.login import without_login
from kvstore.types import PartitionId
from kvstore.wal.config import BookieKind
from tests import forked
from tests.commands import Done, kvstore
from tests.waiting import wait_until_blocking
from tests.zookeeper_classes import use_archive

OFFSETS = range(20_000, 24_000, 100)
TIMEOUT_S = 90.0
ANSWER_S = 30.0
"""Timeout of a page that a test needs: its process may be delayed for a moment."""
LOOK_S = 3.0
"""Timeout of a page that is requested repeatedly: a paused node must not delay the others."""
KEEP = "KVSTORE_TESTS_KEEP"
"""Environment variable that keeps the nodes' data after a test, to find out what went wrong."""

Written = Callable[[str, str], str]
"""Returns the text of a node's file from its id and the text that `up` would write."""


class _Forked(LocalCluster):
    """A cluster whose nodes are forked from a process that has loaded their code."""

    def _spawn(self, name: str, command: list[str]) -> int:
        if not forked.fits(command):
            return super()._spawn(name, command)
        logs = self.data_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return forked.start(name, command, without_login(os.environ), logs / f"{name}.out")


class _Written(_Forked):
    """A cluster whose nodes begin with other files than `up` writes."""

    def __init__(self, data_dir: Path, written: Written) -> None:
        super().__init__(data_dir)
        self._written = written

    def start_node(self, name: str) -> int:
        cluster = self.load()
        node = cluster.node(name)
        config = Path(node.config)
        if not config.exists():
            config.parent.mkdir(parents=True, exist_ok=True)
            config.write_text(self._written(name, toml.to_toml(node_config(cluster, node, self.data_dir))))
        return super().start_node(name)

    def wait_ready(self, timeout_s: float = TIMEOUT_S) -> None:
        pass

    def _probe(self, cluster: ClusterFile, keys: dict[PartitionId, bytes]) -> None:
        pass

    def _wait_until_settled(self, cluster: ClusterFile) -> None:
        pass


class Cluster:
    """Nodes by id ("n1", …). Made by `running_cluster`. Several `zookeepers` are an ensemble. In this class, ZooKeeper
    means the metadata store of any kind. `settings` have the form of `kvstore up --set`."""

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = 3,
        partitions: int = 3,
        replicas: int = 3,
        zookeepers: int = 1,
        metadata: MetadataKind = MetadataKind.ZOOKEEPER,
        external_at: str = "",
        settings: Sequence[str] = (),
        secure: bool = False,
        key_hash: KeyHashName | None = None,
        written: Written | None = None,
    ) -> None:
        """`external_at` is the address of a metadata store whose bookies are used. `settings` have the form of `up
        --set`. `written` is the text of the nodes' files; the start does not wait for such nodes, because their
        listeners may be different."""
        self.directory = directory
        self.local = _Forked(directory / "data") if written is None else _Written(directory / "data", written)
        self._wish: dict[str, Any] = {"nodes": nodes, "partitions": partitions, "replicas": replicas}
        self._wish["settings"] = tuple(map(parse, settings))
        self._wish["secure"] = secure or None
        self._wish["key_hash"] = key_hash
        if external_at:
            self._wish |= {"zookeeper": external_at, "bookies": BookieKind.EXTERNAL}
        elif zookeepers == 1:
            self._wish["metadata"] = metadata
        self._claim: int | None = None
        self._zookeepers = zookeepers
        self.ensemble: list[zookeeper.ZooKeeperProcess] = []

    @property
    def file(self) -> ClusterFile:
        return self.local.load()

    @property
    def ids(self) -> list[str]:
        return [node.id for node in self.file.nodes]

    def start(self) -> None:
        """Start the cluster, or its processes that are down, and wait until it serves."""
        if self._wish.get("metadata") is not MetadataKind.ETCD:
            use_archive()
        if (self.directory / "data" / "cluster.json").exists():
            self.local.up(UpOptions(data_dir=self.local.data_dir))
            return
        if self._zookeepers > 1:
            self.ensemble = zookeeper.start_ensemble(self.directory / "ensemble", self._zookeepers)
            addresses = ",".join(member.address for member in self.ensemble)
            self._wish["zookeeper"] = f"{addresses}/kvstore"
        for offset in OFFSETS:
            claim = claim_ports(offset)
            if claim is None:
                continue
            try:
                self.local.up(UpOptions(data_dir=self.local.data_dir, port_offset=offset, **self._wish))
                claim, self._claim = None, claim
                return
            except ConfigError as error:
                if "taken by another process" not in str(error):
                    raise
            except Unavailable as error:
                if "address already in use" not in str(error).lower():
                    raise
                self._kill_all()  # somebody who claims nothing took a port after it was looked at
                shutil.rmtree(self.directory / "data")
            finally:
                if claim is not None:
                    os.close(claim)
        raise AssertionError("no free ports")

    def end(self) -> None:
        """Kill every process in any state."""
        try:
            self._kill_all()
        finally:
            for member in self.ensemble:
                member.kill()
            if self._claim is not None:
                os.close(self._claim)
                self._claim = None

    def free(self) -> None:
        """Remove the nodes' data, 400 MB for a new cluster: a run of all tests would need 25 GB. Logs stay."""
        for stored in ("bookie", "partitions"):
            for folder in self.local.data_dir.glob(f"n*/{stored}"):
                shutil.rmtree(folder)

    def _kill_all(self) -> None:
        try:
            found = self.file
        except ConfigError:
            return
        for pid in [*(node.pid for node in found.nodes), found.zookeeper_pid]:
            if pid is not None and str(self.directory) in _command_line(pid):
                os.kill(pid, signal.SIGKILL)
                wait_until_blocking(lambda pid=pid: not is_alive(pid), what=f"end of {pid}")

    # ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def pid(self, node: str) -> int:
        pid = self.file.node(node).pid
        assert pid is not None, f"{node} has never run"
        return pid

    def is_running(self, node: str) -> bool:
        return is_alive(self.pid(node))

    def kill(self, node: str) -> None:
        """Kill the node with SIGKILL, and wait until the process is gone."""
        pid = self.pid(node)
        os.kill(pid, signal.SIGKILL)
        wait_until_blocking(lambda: not is_alive(pid), what=f"end of {node}")

    def terminate(self, node: str) -> None:
        """Stop the node gracefully, and wait until it has ended."""
        pid = self.pid(node)
        os.kill(pid, signal.SIGTERM)
        wait_until_blocking(lambda: not is_alive(pid), timeout_s=TIMEOUT_S, what=f"end of {node}")

    def pause(self, node: str) -> None:
        os.kill(self.pid(node), signal.SIGSTOP)

    def resume(self, node: str) -> None:
        os.kill(self.pid(node), signal.SIGCONT)

    def start_node(self, node: str) -> None:
        """Start a node that is down, without waiting until it serves."""
        self.local.start_node(node)

    def kill_zookeeper(self) -> None:
        pid = self.file.zookeeper_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until_blocking(lambda: not is_alive(pid), what="end of ZooKeeper")

    def kill_zookeeper_leader(self) -> int:
        """Kill the ensemble's leader with SIGKILL. Return its place for `restart_zookeeper`."""
        wait_until_blocking(lambda: self._leading_zookeeper() is not None, what="a leader of the ensemble")
        place = self._leading_zookeeper()
        assert place is not None
        self.ensemble[place].kill()
        return place

    def _leading_zookeeper(self) -> int | None:
        said = [zookeeper.four_letters(member.address, "srvr") for member in self.ensemble]
        return next((place for place, words in enumerate(said) if "Mode: leader" in words), None)

    def restart_zookeeper(self, place: int) -> None:
        """Restart a killed member of the ensemble, and wait until it serves."""
        self.ensemble[place] = zookeeper.restart(self.ensemble[place])
        self.ensemble[place].wait_ready()

    def pause_zookeeper(self) -> None:
        os.kill(self.file.zookeeper_pid or 0, signal.SIGSTOP)

    def resume_zookeeper(self) -> None:
        os.kill(self.file.zookeeper_pid or 0, signal.SIGCONT)

    def start_zookeeper(self) -> None:
        """Restart ZooKeeper with its data, and wait until it serves."""
        self.local.start_zookeeper()

    def kill_everything(self) -> None:
        """Kill all nodes and ZooKeeper at once."""
        pids = [*(self.pid(node) for node in self.ids), self.file.zookeeper_pid or 0]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until_blocking(lambda: not any(map(is_alive, pids)), what="end of everything")

    # ── what it says ──────────────────────────────────────────────────────────────────────────────────────────────────

    def address(self, node: str, endpoint: str) -> tuple[str, int]:
        """Return host and port of a node's `resp`, `grpc`, `http` or `bookie` listener."""
        host, _, port = getattr(self.file.node(node), endpoint).rpartition(":")
        return host, int(port)

    @property
    def url(self) -> str:
        """The URL of the cluster for kvstore.client."""
        return "kv://" + ",".join(node.grpc for node in self.file.nodes)

    def redis(self, node: str, **options: Any) -> redis.Redis:
        """Return a redis-py client of one node without its own retries, which are unsafe for writes."""
        host, port = self.address(node, "resp")
        settings: dict[str, Any] = {"retry": None, "socket_timeout": 10, **options}
        return redis.Redis(host=host, port=port, **settings)

    def status(self, node: str, *, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Return the node's status page. Raises OSError."""
        found: dict[str, Any] = orjson.loads(self.http(node, "/", timeout_s=timeout_s))
        return found

    def http(self, node: str, path: str, *, timeout_s: float = ANSWER_S) -> bytes:
        """Return a page of the node. Raises OSError."""
        host, port = self.address(node, "http")
        with urlopen(f"http://{host}:{port}{path}", timeout=timeout_s) as answer:
            data: bytes = answer.read()
        return data

    def wait_log_version(self) -> None:
        """Wait until every log allows what this release can write, for example transactions. A new log begins with the
        first version."""

        def have_risen() -> bool:
            tables = [self.status(node)["partitions"] for node in self.ids]
            return {each.get("log_version") for table in tables for each in table.values()} == {versions.LATEST}

        self.wait_until(have_risen, "every log has the latest version")

    def is_ready(self, node: str) -> bool:
        try:
            return self.http(node, "/clusterz", timeout_s=LOOK_S) == b"ok\n"
        except (URLError, OSError):
            return False

    def wait_ready(self, *nodes: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until these nodes (default: all) report that they are ready and that every partition has a leader."""
        for node in nodes or self.ids:
            self.wait_until(lambda node=node: self.is_ready(node), f"{node} is ready", timeout_s)

    def leaders(self) -> dict[str, str]:
        """Return the leader of each partition, as the leaders themselves report; partitions without one are absent."""
        found: dict[str, str] = {}
        for node in self.ids:
            try:
                partitions = self.status(node, timeout_s=LOOK_S).get("partitions", {})
            except OSError:
                continue
            found |= {name: node for name, replica in partitions.items() if replica["role"] == "serving"}
        return found

    def wait_led(self, *, by_other_than: str = "", timeout_s: float = TIMEOUT_S) -> dict[str, str]:
        """Wait until every partition has a leader, and return the leaders."""
        wanted = self.file.partitions
        leaders: dict[str, str] = {}

        def led() -> bool:
            nonlocal leaders
            leaders = self.leaders()
            return len(leaders) == wanted and by_other_than not in leaders.values()

        self.wait_until(led, "every partition is led", timeout_s)
        return leaders

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the condition holds. Raises TimeoutError with the last lines of every log."""
        try:
            wait_until_blocking(condition, timeout_s=timeout_s, what=what)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.last_words()}") from None

    def wait_succeeds(self, *words: str) -> Done:
        """Return the output of a `kvstore` command on this cluster once it exits with 0. Raises TimeoutError with its
        last output. Health and fsck need this after a start: a bookie registers, and the auditor is elected, a moment
        after the partitions are led."""
        last = Done(0, "", "")

        def succeeds() -> bool:
            nonlocal last
            last = kvstore(*words, "--data-dir", str(self.local.data_dir))
            return last.returncode == 0

        try:
            wait_until_blocking(succeeds, timeout_s=TIMEOUT_S, what=f"kvstore {' '.join(words)} exits with 0")
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{last.stdout}{last.stderr}\n{self.last_words()}") from None
        return last

    def last_words(self, lines: int = 15) -> str:
        """Return the last lines of every log."""
        logs = sorted((self.directory / "data" / "logs").glob("*.log"))
        return "\n".join(f"── {log.name}\n" + "\n".join(log.read_text().splitlines()[-lines:]) for log in logs)


@contextmanager
def running_cluster(directory: Path, **options: Any) -> Iterator[Cluster]:
    """Run a cluster that serves, and kill it at the end. `options` are those of Cluster."""
    cluster = Cluster(directory, **options)
    try:
        try:
            cluster.start()
        except Unavailable as error:
            raise AssertionError(f"{error}\n{cluster.last_words()}") from error
        yield cluster
    finally:
        cluster.end()
        if not os.environ.get(KEEP):
            cluster.free()


def claim_ports(offset: int) -> int | None:
    """Open a lock file that reserves these ports on this machine; None if another process has it.

    A port that is free now may be chosen by another test run at the same moment.
    """
    claim = os.open(Path(tempfile.gettempdir()) / f"kvstore-test-ports-{offset}.lock", os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(claim)
        return None
    return claim


def _command_line(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""
