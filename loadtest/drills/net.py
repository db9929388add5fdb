"""A local cluster whose nodes and ZooKeeper have a network each, so that any direction between any two can be cut.

Each member has a network namespace with one end of a pair of virtual links; the other ends are ports of one bridge.
Each member has two addresses: it listens at the first one, and its own connections begin at the second one. Fixed
neighbour entries decide who reaches whom. A direction is cut by giving the receiver a link address that nobody has. A
member is hidden if the others have the wrong link address for its first address alone: it reaches them, and they do not
reach it, as with a wrong `advertise`. Packets then vanish as in a broken network: no reset, no error. Clients are in
the namespace of the caller.

Needs Linux, root, `ip` and `tc` of iproute2, and mkfs.ext4 and fsfreeze; no packet filter.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kvstore import config as toml
from kvstore.devcluster import layout, zookeeper
from kvstore.devcluster.layout import ClusterFile, NodePlace, UpOptions
from kvstore.devcluster.local import LocalCluster
from kvstore.env.secret import make_secret
from kvstore.server.config import NodeConfig
from loadtest.drills.struck_node import write_ahead, write_block
from tests.cluster.harness import Cluster

CLIENTS, ZOOKEEPER = "clients", "zookeeper"
DISK_BYTES = 3000 << 20
"""Size of each node's own file system, which can be filled and frozen."""
INODES = 4_000
"""Inodes of each node's own file system, few enough to use up."""
RETENTION_S, ROLL_S, ROLL_BYTES = 120, 60.0, 32 << 20
BRIDGE = "kvbr"
NETWORKS_MAX = 240
TOOLS = ("ip", "tc", "mount", "mkfs.ext4", "fsfreeze")
_NOBODY = "02:4b:56:ff:ff:ff"
_CLONE_NEWNET = 0x4000_0000
_LIBC = ctypes.CDLL(None, use_errno=True)

Cut = tuple[str, str]
"""A direction: the sender and the receiver."""


def is_possible() -> bool:
    """Return True if this process may create networks."""
    return os.geteuid() == 0 and all(shutil.which(each) for each in TOOLS)


class Network:
    """Namespaces on a bridge. The constructor creates the bridge and so claims a name that no other run has. `make`
    creates everything else, and `close` removes it."""

    def __init__(self, members: Sequence[str]) -> None:
        self.members = [CLIENTS, *members]
        number = _claimed_number(self._mac(CLIENTS))
        self._bridge = f"{BRIDGE}{number}"
        self._prefix = f"10.213.{number}"
        self._cut: set[Cut] = set()
        self._hidden: set[str] = set()

    def ip(self, member: str) -> str:
        """Return the address at which the member listens."""
        return f"{self._prefix}.{self.members.index(member) + 1}"

    def cut(self, cuts: Iterable[Cut], hidden: Iterable[str] = ()) -> None:
        """Cut exactly these directions, and hide exactly these members."""
        before = self._cut, self._hidden
        self._cut, self._hidden = set(cuts), set(hidden)
        changed = self._cut ^ before[0]
        changed |= {(each, member) for member in self._hidden ^ before[1] for each in self.members if each != member}
        for source, target in sorted(changed):
            self._set_neighbours(source, target)

    def slow(self, member: str, rate: str | None) -> None:
        """Let the member send no more than `rate` (as `tc` reads it); None: as much as it likes."""
        with suppress(subprocess.CalledProcessError):
            self._in(member, "tc", "qdisc", "del", "dev", "eth0", "root")
        if rate is not None:
            shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
            self._in(member, "tc", "qdisc", "add", "dev", "eth0", "root", *shape)

    @contextmanager
    def inside(self, member: str) -> Iterator[None]:
        """Put processes that this thread starts meanwhile into the member's network."""
        with Path("/proc/thread-self/ns/net").open() as own, Path("/run/netns", self._space(member)).open() as other:
            _enter(other.fileno())
            try:
                yield
            finally:
                _enter(own.fileno())

    def close(self) -> None:
        for place, member in enumerate(self.members[1:], 1):
            # A namespace ends some time after its name, and would keep the name of the bridge's port until then.
            _run("ip", "link", "del", self._port(place), check=False)
            _run("ip", "netns", "del", self._space(member), check=False)
        _run("ip", "link", "del", self._bridge, check=False)

    def make(self) -> None:
        """Create the networks. After a failure, `close` removes what was made. Raises CalledProcessError."""
        _run("ip", "address", "add", f"{self.ip(CLIENTS)}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for place, member in enumerate(self.members[1:], 1):
            port, space = self._port(place), self._space(member)
            _run("ip", "netns", "add", space)
            peer = ["peer", "name", "eth0", "address", self._mac(member), "netns", space]
            _run("ip", "link", "add", port, "type", "veth", *peer)
            _run("ip", "link", "set", port, "master", self._bridge, "up")
            for address in (self.ip(member), self._outgoing_ip(member)):
                self._in(member, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._in(member, "ip", "link", "set", device, "up")
            route = [f"{self._prefix}.0/24", "dev", "eth0", "src", self._outgoing_ip(member)]
            self._in(member, "ip", "route", "replace", *route)
        for source, target in itertools.permutations(self.members, 2):
            self._set_neighbours(source, target)

    def _set_neighbours(self, source: str, target: str) -> None:
        is_cut, device = (source, target) in self._cut, self._bridge if source == CLIENTS else "eth0"
        ways = [(self.ip(target), is_cut or target in self._hidden)]
        if target != CLIENTS:
            ways.append((self._outgoing_ip(target), is_cut))
        for address, is_lost in ways:
            link = _NOBODY if is_lost else self._mac(target)
            self._in(source, "ip", "neigh", "replace", address, "lladdr", link, "nud", "permanent", "dev", device)

    def _outgoing_ip(self, member: str) -> str:
        """Return the address at which the member's own connections begin."""
        return f"{self._prefix}.{self.members.index(member) + 101}"

    def _in(self, member: str, *command: str) -> None:
        inside = () if member == CLIENTS else ("ip", "netns", "exec", self._space(member))
        _run(*inside, *command)

    def _port(self, place: int) -> str:
        return f"{self._bridge}p{place}"

    def _space(self, member: str) -> str:
        return f"{self._bridge}-{member}"

    def _mac(self, member: str) -> str:
        return f"02:4b:56:00:00:{self.members.index(member) + 1:02x}"


class _Local(LocalCluster):
    """Starts each process inside its own network."""

    def __init__(self, data_dir: Path, network: Network) -> None:
        super().__init__(data_dir)
        self._network = network

    def start_node(self, name: str) -> int:
        with self._network.inside(name):
            return super().start_node(name)

    def _command(self, node: NodePlace) -> list[str]:
        """Run the node so that a drill can set its wall clock and block its event loop."""
        _, _, *rest = super()._command(node)
        return [sys.executable, "-m", "loadtest.drills.struck_node", str(date_file(self.data_dir, node.id)), *rest[1:]]

    def start_zookeeper(self) -> int:
        cluster = self.load()
        port = int(cluster.zookeeper.partition("/")[0].rpartition(":")[2])
        with self._network.inside(ZOOKEEPER):
            everywhere = "clientPortAddress=0.0.0.0\n"
            started = zookeeper.start_standalone(self._store_dir(cluster), port, detached=True, settings=everywhere)
        self._record.save(replace(cluster, zookeeper_pid=started.pid))
        return started.pid

    def _refuse_taken_ports(self, cluster: ClusterFile) -> None:
        """Refuse no ports, because the networks are the cluster's own."""


class WiredCluster(Cluster):
    """A cluster on its own network. Each node's data is on a file system of its own too."""

    def __init__(self, directory: Path, network: Network) -> None:
        super().__init__(directory)
        self.network = network
        self.local = _Local(directory / "data", network)

    def start(self) -> None:
        """Start the cluster, or the parts of it that are down, and wait until it serves."""
        if not (self.local.data_dir / "cluster.json").exists():
            self._found()
        super().start()

    def fill_disk(self, node: str) -> None:
        """Leave no free bytes on the node's file system."""
        home = Path(self.file.node(node).data_dir)
        free = os.statvfs(home)
        with (home / "filler").open("wb") as filler, suppress(OSError):
            os.posix_fallocate(filler.fileno(), 0, free.f_bavail * free.f_bsize)

    def free_disk(self, node: str) -> None:
        (Path(self.file.node(node).data_dir) / "filler").unlink(missing_ok=True)

    def use_up_inodes(self, node: str) -> None:
        """Leave no free inode on the node's file system."""
        fillers = self._fillers(node)
        fillers.mkdir()
        with suppress(OSError):
            for number in itertools.count():
                (fillers / str(number)).touch()

    def free_inodes(self, node: str) -> None:
        shutil.rmtree(self._fillers(node), ignore_errors=True)

    def _fillers(self, node: str) -> Path:
        return Path(self.file.node(node).data_dir) / "fillers"

    def freeze_disk(self, node: str) -> None:
        """Make every write to the node's file system wait, without an error, until `thaw_disk`."""
        _run("fsfreeze", "--freeze", self.file.node(node).data_dir)

    def thaw_disk(self, node: str) -> None:
        _run("fsfreeze", "--unfreeze", self.file.node(node).data_dir, check=False)

    def replace_metadata(self, copy: str | None, kept_as: str | None) -> None:
        """Kill ZooKeeper, keep its data under the name `kept_as`, put the data that were kept as `copy` in their place,
        and start it again. None: keep nothing, or leave the data as they are."""
        self.kill_zookeeper()
        data = self.local.data_dir / "zookeeper" / "data"
        if kept_as is not None:
            shutil.copytree(data, data.with_name(kept_as))
        if copy is not None:
            shutil.rmtree(data)
            data.with_name(copy).rename(data)
        self.start_zookeeper()

    def block_loop(self, node: str, seconds: float) -> None:
        """Block the node's event loop; its other threads keep running."""
        write_block(date_file(self.local.data_dir, node), seconds)
        os.kill(self.pid(node), signal.SIGUSR2)

    def set_date(self, node: str, ahead_s: float) -> None:
        """Set how far the node's wall clock is ahead from now on, also after a restart."""
        write_ahead(date_file(self.local.data_dir, node), ahead_s)

    def wipe(self, node: str) -> None:
        """Empty the disk of a node that is down, except for its configuration."""
        config = Path(self.file.node(node).config)
        for each in Path(self.file.node(node).data_dir).iterdir():
            if each.is_dir():
                shutil.rmtree(each)
            elif each != config:
                each.unlink()

    def end(self) -> None:
        try:
            super().end()
        finally:
            for home in self.local.data_dir.glob("n[0-9]*"):
                _run("fsfreeze", "--unfreeze", str(home), check=False)
                _run("umount", "--lazy", str(home), check=False)

    def _found(self) -> None:
        data_dir = self.local.data_dir
        wish = UpOptions(data_dir=data_dir, zookeeper=f"{self.network.ip(ZOOKEEPER)}:{layout.ZOOKEEPER_PORT}/kvstore")
        planned = replace(layout.plan(wish, None), own_zookeeper=True)
        nodes = []
        for node in planned.nodes:
            there = {what: self._moved(getattr(node, what), node.id) for what in layout.PORTS}
            nodes.append(replace(node, **there))
        cluster = replace(planned, nodes=tuple(nodes))
        data_dir.mkdir(parents=True)
        make_secret(Path(cluster.secret_file))
        for node in cluster.nodes:
            home = Path(node.data_dir)
            home.mkdir(parents=True)
            _mount_disk(data_dir.parent / f"{node.id}.ext4", home)
            config = _with_a_short_log(layout.node_config(planned, planned.node(node.id), data_dir))
            there = {what: getattr(node, what) for what in layout.PORTS}
            Path(node.config).write_text(toml.to_toml(replace(config, insecure=True, **there)))
        (data_dir / "cluster.json").write_text(json.dumps(cluster.document()))

    def _moved(self, address: str, node: str) -> str:
        return f"{self.network.ip(node)}:{address.rpartition(':')[2]}"


def _mount_disk(image: Path, home: Path) -> None:
    """Make a file system in a sparse file and mount it. Raises CalledProcessError."""
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    _run("mkfs.ext4", "-q", "-m", "0", "-N", str(INODES), str(image))
    _run("mount", "-o", "loop", str(image), str(home))


def _with_a_short_log(config: NodeConfig) -> NodeConfig:
    """Change the settings so that the log is rolled and trimmed all the time during faults. Then a long drill does
    not fill its disks, and readers and copiers of the log meet its beginning."""
    return replace(
        config,
        partition=replace(config.partition, retention_ms=RETENTION_S * 1000),
        log=replace(config.log, roll_age_s=ROLL_S, roll_bytes=ROLL_BYTES),
    )


@contextmanager
def wired_cluster(directory: Path) -> Iterator[WiredCluster]:
    """Run three nodes that serve. Processes, networks and file systems are removed at the end."""
    network = Network(["n1", "n2", "n3", ZOOKEEPER])
    try:
        network.make()
        cluster = WiredCluster(directory, network)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.end()
    finally:
        network.close()


def date_file(data_dir: Path, node: str) -> Path:
    """Return the file in which a node's process finds how far its wall clock is ahead."""
    return data_dir / f"{node}.ahead"


def _claimed_number(address: str) -> int:
    """Return the first number without a bridge. Creating the bridge is the claim: if two processes try at once, one
    fails."""
    for number in range(NETWORKS_MAX):
        try:
            _run("ip", "link", "add", f"{BRIDGE}{number}", "address", address, "type", "bridge")
        except subprocess.CalledProcessError as error:
            if b"File exists" not in error.stderr:
                raise
        else:
            return number
    raise OSError(f"{NETWORKS_MAX} networks are there; a run that was killed leaves its own: ip link del {BRIDGE}0")


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True)


def _enter(space: int) -> None:
    if _LIBC.setns(space, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
