"""The layout of the local cluster: the addresses and directories of each node. Decides only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvstore import config as toml
from kvstore.config import Setting
from kvstore.devcluster.secure_folder import METADATA_USER, TOOLS, SecureFolder
from kvstore.env.tls import Tls
from kvstore.errors import ConfigError
from kvstore.meta.address import Address, MetadataKind, address_fault, parse
from kvstore.ring.hashing import KeyHashName
from kvstore.server.config import MetadataConfig, NodeConfig
from kvstore.types import Quorum
from kvstore.wal.config import BookieKind, LogConfig

ZOOKEEPER_PORT = 2181
ETCD_PORT = 2379
"""Client port of a local etcd. Members use the next port for each other."""
STORE_PORTS = {MetadataKind.ZOOKEEPER: ZOOKEEPER_PORT, MetadataKind.ETCD: ETCD_PORT}
PORTS = {"bookie": 3180, "resp": 6400, "grpc": 7400, "http": 8400}
"""Node i of the local cluster listens on these ports plus i."""
NODES_MAX = 99
SECRET_NAME = "cluster.secret"
SAFE_NODES_MIN = 3
"""Minimum number of nodes that survives the loss of a bookie, because two bookies must acknowledge each entry."""
OFFSET_SMALL_MAX = 99
OFFSET_LARGE_MIN = 20_000
OFFSET_LARGE_MAX = 56_900


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node of the local cluster, as recorded in `cluster.json`."""

    id: str
    pid: int | None
    grpc: str
    resp: str
    http: str
    bookie: str
    """Not used if the bookies are external."""
    data_dir: str
    config: str


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """The document in `<data-dir>/cluster.json`."""

    zookeeper: str
    """The address of the metadata store of either kind: host:port/chroot, or etcd://host:port/prefix."""
    zookeeper_pid: int | None
    """Pid of the metadata store; None if `up` does not start it."""
    nodes: tuple[NodePlace, ...]
    partitions: int = 3
    replicas: int = 3
    port_offset: int = 0
    own_zookeeper: bool = True
    """True if `up` starts the metadata store."""
    unsafe: bool = False
    bookies: BookieKind = BookieKind.NODES
    secret_file: str = ""
    """Empty only until `up` has created the secret, which it does once."""
    secure: bool = False
    """True if its endpoints require TLS and users, with the files of `secure_folder.py`."""
    key_hash: KeyHashName = KeyHashName.MURMUR3
    """The key hash with which the cluster is founded. The default is that of files written before 0.2.0."""
    instance: str = ""
    """The cluster's id from its creation. Commands check it, because another cluster may use these addresses while this
    one is down. Empty until `up` has seen it."""

    @property
    def data_dir(self) -> Path:
        """The folder of the whole cluster."""
        return Path(self.nodes[0].data_dir).parent

    @property
    def has_own_zookeeper(self) -> bool:
        """True if `up` starts the metadata store and it is a ZooKeeper."""
        return self.own_zookeeper and self.store.kind is MetadataKind.ZOOKEEPER

    @property
    def store(self) -> Address:
        """The metadata store."""
        return parse(self.zookeeper)

    @property
    def store_port(self) -> int:
        return int(self.store.hosts[0].rpartition(":")[2])

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_document(cls, document: Any) -> ClusterFile:
        """Parse the document of `cluster.json`. Raises ConfigError with all faults if it is not a cluster file."""
        if not isinstance(document, dict):
            raise ConfigError(f"expected an object, got {type(document).__name__}")
        return toml.from_table(document, cls)

    def node(self, name: str) -> NodePlace:
        """Return a node. Raises ConfigError."""
        for node in self.nodes:
            if node.id == name:
                return node
        raise ConfigError(f"no node {name!r}; expected one of {', '.join(node.id for node in self.nodes)}")

    def with_pid(self, name: str, pid: int) -> ClusterFile:
        """Return a copy of the cluster with another process for one node."""
        nodes = tuple(replace(node, pid=pid) if node.id == name else node for node in self.nodes)
        return replace(self, nodes=nodes)

    def with_pids(self, pids: dict[str, int | None], zookeeper_pid: int | None) -> ClusterFile:
        """Return a copy of the cluster with other processes."""
        nodes = tuple(replace(node, pid=pids.get(node.id)) for node in self.nodes)
        return replace(self, nodes=nodes, zookeeper_pid=zookeeper_pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The options of `kvstore up`; None for options that were not given."""

    data_dir: Path
    nodes: int | None = None
    partitions: int | None = None
    replicas: int | None = None
    port_offset: int | None = None
    zookeeper: str | None = None
    """The address of an existing metadata store to use instead of a local one."""
    metadata: MetadataKind | None = None
    """The kind of a local metadata store. None means a ZooKeeper, or the recorded kind."""
    bookies: BookieKind | None = None
    """Where ledgers are stored. None means on the nodes, or as recorded."""
    key_hash: KeyHashName | None = None
    """How keys become tokens. None means by slots, or as recorded."""
    unsafe: bool = False
    secure: bool | None = None
    """True if endpoints require TLS and users. None means no, or as recorded."""
    settings: tuple[Setting, ...] = ()
    """Settings for every node's file."""


def plan(wish: UpOptions, found: ClusterFile | None) -> ClusterFile:
    """Return the cluster to run: the recorded cluster, perhaps on other ports, or a new one. Raises ConfigError for
    invalid options."""
    if found is not None:
        _refuse_changes(wish, found)
        return found if wish.port_offset in (None, found.port_offset) else _moved(found, wish.port_offset)
    count = 3 if wish.nodes is None else wish.nodes
    offset = wish.port_offset or 0
    _check_offset(offset)
    if not 1 <= count <= NODES_MAX:
        raise ConfigError(f"--nodes: expected 1 to {NODES_MAX}, got {count}")
    if count < SAFE_NODES_MIN and not wish.unsafe:
        raise ConfigError(
            f"--nodes {count}: fewer than {SAFE_NODES_MIN} nodes cannot lose one and continue; pass --unsafe to allow "
            "it"
        )
    bookies = wish.bookies or BookieKind.NODES
    if bookies is BookieKind.EXTERNAL and wish.zookeeper is None:
        raise ConfigError("--bookies external: expected --metadata, the address of the store in which they register")
    if wish.zookeeper is not None and (fault := address_fault(wish.zookeeper)):
        raise ConfigError(f"--metadata: {fault}")
    if wish.secure and bookies is BookieKind.EXTERNAL:
        raise ConfigError(
            "--secure: expected the nodes' own bookies, got --bookies external, which bring their own certificates"
        )
    replicas = min(3, count) if wish.replicas is None else wish.replicas
    partitions = 3 if wish.partitions is None else wish.partitions
    if not 1 <= replicas <= count:
        raise ConfigError(f"--replicas: expected 1 to {count}, at most one per node, got {replicas}")
    if not 1 <= partitions <= 1024:
        raise ConfigError(f"--partitions: expected 1 to 1024, got {partitions}")
    return ClusterFile(
        zookeeper=wish.zookeeper or _own_store(wish.metadata or MetadataKind.ZOOKEEPER, offset),
        zookeeper_pid=None,
        nodes=tuple(_node(i, offset, wish.data_dir) for i in range(1, count + 1)),
        partitions=partitions,
        replicas=replicas,
        port_offset=offset,
        own_zookeeper=wish.zookeeper is None,
        bookies=bookies,
        unsafe=wish.unsafe,
        secret_file=str(wish.data_dir / SECRET_NAME),
        secure=bool(wish.secure),
        key_hash=wish.key_hash or KeyHashName.SLOTS,
    )


def _moved(found: ClusterFile, offset: int) -> ClusterFile:
    """Return a copy of the cluster on other ports."""
    _check_offset(offset)
    places = [_node(number, offset, Path(node.data_dir).parent) for number, node in enumerate(found.nodes, 1)]
    nodes = tuple(replace(place, pid=node.pid) for place, node in zip(places, found.nodes, strict=True))
    address = _own_store(found.store.kind, offset) if found.own_zookeeper else found.zookeeper
    return replace(found, nodes=nodes, zookeeper=address, port_offset=offset)


def free_offset(cluster: ClusterFile, is_free: Callable[[str], bool]) -> int | None:
    """Return the lowest large offset with which `is_free` returns True for every port of the cluster, or None."""
    for offset in range(OFFSET_LARGE_MIN, OFFSET_LARGE_MAX + 1, 100):
        moved = _moved(cluster, offset)
        needed = list(listeners(moved, {node.id for node in moved.nodes}))
        if moved.own_zookeeper:
            needed += store_listeners(moved)
        if all(is_free(address) for _, address in needed):
            return offset
    return None


def addresses(cluster: ClusterFile, node: NodePlace) -> Iterator[Setting]:
    """Yield the recorded addresses as settings of the node's file."""
    for name in PORTS:
        yield Setting(name, getattr(node, name))
    yield Setting("zookeeper" if cluster.store.kind is MetadataKind.ZOOKEEPER else "metadata.uri", cluster.zookeeper)


def node_config(cluster: ClusterFile, node: NodePlace, data_dir: Path) -> NodeConfig:
    """Return the configuration of the node's process."""
    bookies, log = len(cluster.nodes), LogConfig(bookies=cluster.bookies)
    if cluster.bookies is BookieKind.NODES and bookies < SAFE_NODES_MIN:
        log = LogConfig(quorum=Quorum(bookies, bookies, bookies), unsafe=True)
    tls, metadata = Tls(), MetadataConfig(uri=cluster.zookeeper if cluster.store.kind is MetadataKind.ETCD else "")
    if cluster.secure:
        folder = SecureFolder(data_dir, has_own_zookeeper=cluster.has_own_zookeeper)
        tls = folder.of_node(node.id)
        if cluster.has_own_zookeeper:
            metadata = replace(metadata, user=METADATA_USER, password_file=folder.metadata_password)
    return NodeConfig(
        id=node.id,
        zookeeper=cluster.zookeeper if cluster.store.kind is MetadataKind.ZOOKEEPER else "",
        metadata=metadata,
        tls=tls,
        data_dir=Path(node.data_dir),
        secret_file=Path(cluster.secret_file),
        bookie=node.bookie,
        bookie_clients=bookie_clients(cluster),
        resp=node.resp,
        grpc=node.grpc,
        http=node.http,
        log_dir=data_dir / "logs",
        log=log,
    )


def bookie_clients(cluster: ClusterFile) -> tuple[str, ...]:
    """Return the certificate names that a secure cluster's bookies accept: those of the nodes and of the tools."""
    return (*(node.id for node in cluster.nodes), TOOLS) if cluster.secure else ()


def store_listeners(cluster: ClusterFile) -> Iterator[tuple[str, str]]:
    """Yield (purpose, address) of each port that our own metadata store needs."""
    first = cluster.store.hosts[0]
    yield cluster.store.kind.shown, first
    if cluster.store.kind is MetadataKind.ETCD:
        yield "etcd's members", f"{first.rpartition(':')[0]}:{cluster.store_port + 1}"


def listeners(cluster: ClusterFile, ids: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (purpose, address) of each port that these nodes need."""
    for node in cluster.nodes:
        if node.id in ids:
            for name in PORTS:
                if name == "bookie" and cluster.bookies is BookieKind.EXTERNAL:
                    continue
                yield f"{name} of node {node.id}", getattr(node, name)


def _node(number: int, offset: int, data_dir: Path) -> NodePlace:
    name = f"n{number}"
    ports = {what: f"127.0.0.1:{base + number + offset}" for what, base in PORTS.items()}
    home = data_dir / name
    return NodePlace(id=name, pid=None, data_dir=str(home), config=str(home / "node.toml"), **ports)


def _own_store(kind: MetadataKind, offset: int) -> str:
    address = f"127.0.0.1:{STORE_PORTS[kind] + offset}/kvstore"
    return address if kind is MetadataKind.ZOOKEEPER else f"{kind}://{address}"


def _check_offset(offset: int) -> None:
    if 0 <= offset <= OFFSET_SMALL_MAX:
        return
    if not (OFFSET_LARGE_MIN <= offset <= OFFSET_LARGE_MAX and offset % 100 == 0):
        raise ConfigError(
            f"--port-offset: expected 0 to {OFFSET_SMALL_MAX}, or a multiple of 100 from {OFFSET_LARGE_MIN} to "
            f"{OFFSET_LARGE_MAX} (with others, ports of nodes would collide), got {offset}"
        )


def _refuse_changes(wish: UpOptions, found: ClusterFile) -> None:
    recorded = {
        "nodes": len(found.nodes),
        "partitions": found.partitions,
        "replicas": found.replicas,
        "zookeeper": found.zookeeper,
        "metadata": found.store.kind,
        "bookies": found.bookies,
        "secure": found.secure,
        "key_hash": found.key_hash,
    }
    for name, value in recorded.items():
        wanted = getattr(wish, name)
        if wanted is not None and wanted != value:
            option = name.replace("_", "-")
            if name == "secure":
                raise ConfigError(
                    f"--secure: the cluster in {wish.data_dir} was created without it; choose another --data-dir, or "
                    "secure it by hand, node by node (docs/how-to/switch-on-tls.md)"
                )
            raise ConfigError(
                f"--{option} {wanted}: the cluster in {wish.data_dir} was created with {value}; omit the option, or "
                f"choose another --data-dir"
            )
