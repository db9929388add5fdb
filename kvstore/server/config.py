"""The settings of a node. Decides only; `kvstore.config` reads them from TOML. All other numbers are constants beside
their use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.bookie.config import StorageConfig, is_address_id
from kvstore.env.log_config import LogOutput
from kvstore.env.networks import is_loopback
from kvstore.env.tls import Tls
from kvstore.meta.address import MetadataKind, address_fault, parse
from kvstore.meta.login import Acl, Mechanism, MetadataLogin, metadata_login
from kvstore.partition.config import PartitionConfig
from kvstore.ranges import BYTES_MAX, COUNT_MAX, MS_MAX, SECONDS_MAX, WrongSettings, between, range_faults
from kvstore.server.balance_config import BalanceConfig
from kvstore.server.tracing_config import TracingConfig
from kvstore.wal.config import BookieKind, LogConfig

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}(\.([2-9]|[1-9][0-9]))?")
_WILDCARDS = ("0.0.0.0", "[::]", "::")
_HOST = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]")
STATES = "partitions"
"""Directory of the replicas' states below the data directory."""
BOOKIE_CONNECTIONS_MIN = 16
"""Minimum because every other node of the cluster keeps a connection to the bookie, and stores no copies there if it is
refused."""
ORPHAN_LEASES_MIN = 2
"""Minimum age of an orphaned ledger in lease times. A new leader creates its ledger, waits until the former leader's
lease has ended, and only then lists the ledger."""


class Role(StrEnum):
    BOOKIE = "bookie"
    """Stores ledger entries."""
    SERVER = "server"
    """Hosts partition replicas and serves clients."""


PROCESSES_MAX = 32
"""Maximum number of processes of a machine: each keeps a connection to every other one of the cluster."""
CARRIED_FILES = 3
"""Open files of one gRPC connection with TLS: the client's connection, and both ends of the connection to the gRPC
server behind it (kvstore/rpc/front.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits after which a server refuses more work. All limits are per process."""

    connections_max: Annotated[int, between(1, COUNT_MAX)] = 10_000
    """Maximum number of RESP connections. A further connection is closed with an error."""
    grpc_connections_max: Annotated[int, between(1, COUNT_MAX)] = 2_500
    """Maximum number of gRPC connections. When a further client connects, the server closes the oldest connection of
    the network with the most connections if TLS is on, otherwise the new connection."""
    http_connections_max: Annotated[int, between(1, COUNT_MAX)] = 4096
    """Maximum number of HTTP connections. When a further client connects, the connection that has been idle longest is
    closed."""
    bookie_connections_max: Annotated[int, between(BOOKIE_CONNECTIONS_MIN, COUNT_MAX)] = 1_024
    """Maximum number of connections to the bookie. When a further client connects, the oldest connection without a
    request is closed, or else the new one. Every other node of the cluster keeps one connection."""
    output_bytes_max: Annotated[int, between(1, BYTES_MAX)] = 128 << 20
    """Maximum bytes of replies buffered for all RESP connections together, including reserved space."""
    waiting_max: Annotated[int, between(1, COUNT_MAX)] = 10_000
    """Maximum number of operations that wait because their partition has no known leader."""
    forwarded_max: Annotated[int, between(1, COUNT_MAX)] = 20_000
    """Maximum number of unanswered operations forwarded to one other server."""

    def __post_init__(self) -> None:
        if faults := range_faults(self):
            raise WrongSettings(*faults)

    def within(self, files: int) -> Limits:
        """Return these limits with the connections reduced so that `files` open files leave enough for journals and
        engines."""
        return replace(
            self,
            connections_max=min(self.connections_max, files // 2),
            grpc_connections_max=min(self.grpc_connections_max, files // 8 // CARRIED_FILES),
            http_connections_max=min(self.http_connections_max, files // 8),
            bookie_connections_max=min(self.bookie_connections_max, files // 8),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the server's handling of operations."""

    slow_ms: Annotated[int, between(0, MS_MAX)] = 100
    """Duration in ms after which an operation is written to the slow log, with a breakdown of its time. 0 turns the
    slow log off."""
    snapshot_age_max_s: Annotated[float, between(0, SECONDS_MAX)] = 0.0
    """Maximum age of the last snapshot in seconds. If it is older, or if there is none, the cluster is degraded. The
    smallest limit of all nodes counts. 0: no limit."""
    redis_flush: bool = False
    """Allow the Redis commands FLUSHDB and FLUSHALL to delete all keys of the store. Otherwise they are refused."""

    def __post_init__(self) -> None:
        if faults := range_faults(self):
            raise WrongSettings(*faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    """Settings of the Redis port."""

    transactions_across_slots: bool = False
    """Allow EXEC, MSETNX, RENAME, RENAMENX and COPY on keys of several partitions, as one transaction. Otherwise they
    are refused with CROSSSLOT, which clients in cluster mode expect. Set it on all nodes or on none. Requires cluster
    version 3."""
    redirects: bool = False
    """Answer MOVED to a command whose keys are in a slot that another node leads, so that clients of Redis Cluster
    refresh their table of slots. Other clients report MOVED as an error. Otherwise the command is forwarded. INFO and
    HELLO then report a cluster. Without effect unless the cluster's key hash is `slots`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataConfig:
    """The connection to the metadata store."""

    uri: str = ""
    """Address: `etcd://host:port,host:port/prefix` or `zookeeper://host:port,host:port/chroot`."""
    tls: Tls | None = None
    """TLS files for a metadata store with TLS: `ca`, and `cert` and `key` if it requires client certificates. None:
    plain TCP."""
    user: str = ""
    """User name for the login to the metadata store. Empty: the name in KVSTORE_METADATA_USER, or no login."""
    password_file: Path | None = None
    """File with the password on its first line. Only the node may be able to read it."""
    auth: Mechanism = Mechanism.DIGEST
    """Login method for ZooKeeper: `digest` or `sasl` (DIGEST-MD5). etcd has its own method."""
    acl: Acl = Acl.CREATOR
    """Users that may change the nodes this node creates in ZooKeeper: `creator` (only this user) or `open`
    (everyone)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node: a process that stores ledgers, hosts partitions, or both."""

    id: str
    """The node's id, unique in the cluster. It stays with the data directory."""
    data_dir: Path
    """Directory for everything the node stores, except directories that `storage` places elsewhere. Locked while the
    node runs."""
    secret_file: Path
    """File with the cluster's secret, identical on all nodes (kvstore/env/secret.py). Only the node may be able to read
    it."""
    zookeeper: str = ""
    """Address of a ZooKeeper as the metadata store: `host:port,host:port/chroot`. Alternative to `metadata.uri`."""
    metadata: MetadataConfig = field(default_factory=MetadataConfig)
    """The metadata store, ZooKeeper or etcd."""
    processes: Annotated[int, between(1, PROCESSES_MAX)] = 1
    """Number of processes on this machine, each a node. Process 2 has the id `n1.2`, the ports above by one, the data
    directory `process-2` below that of the first process, and `-2` after its absolute `[storage]` directories. The
    processes share `partition.memory_bytes`, `storage.scrub_bytes_per_s`, `storage.rewrite_bytes_per_s` and
    `autorecovery.bytes_per_s`; each reserves `storage.reserve_bytes`."""
    roles: tuple[Role, ...] | None = None
    """Roles of the node. None: both, or only server if `log.bookies` is external."""
    zone: str = ""
    """Failure domain of the machine. Replicas and copies are placed in distinct zones if there are any. With several
    processes, the default is the machine's name."""
    bookie: str = "127.0.0.1:3181"
    """Listening address of the bookie (BookKeeper protocol)."""
    bookie_id: str = ""
    """Id of the bookie as `host:port`, for Apache clients and tools that require this form. Empty: the node's id and an
    incarnation. It cannot be changed once the bookie has stored something."""
    bookie_clients: tuple[str, ...] = ()
    """Certificate names that may connect to the bookie if `[tls] verify_clients` is set: common or alternative names
    such as `n1` or `*.kv.internal`. List the names of all nodes and of the tools that read ledgers. Empty: every
    certificate that does not name a user."""
    resp: str = "127.0.0.1:6401"
    """Listening address for Redis clients and other servers."""
    grpc: str = "127.0.0.1:7401"
    """Listening address for gRPC clients."""
    http: str = "127.0.0.1:8401"
    """Listening address for health pages, metrics, the HTTP gateway and the dashboard."""
    advertise: str = ""
    """Host that the node announces to clients and other nodes, with the ports above. Required if the listeners use a
    wildcard address or are behind address translation. Empty: the hosts above."""
    log_dir: Path | None = None
    """Directory for rotating log files. None: standard error."""
    log_output: LogOutput = field(default_factory=LogOutput)
    """Format and level of the log."""
    insecure: bool = False
    """Allow listeners beyond loopback that have no TLS or only prefer it, and serve every client while access control
    is off."""
    tls: Tls = field(default_factory=Tls)
    """With a certificate, all listeners and all connections to other nodes use TLS. Set it on all nodes or on none."""
    zookeeper_tls: Tls | None = None
    """TLS files for a ZooKeeper with TLS: `ca`, and `cert` and `key` if it requires client certificates. None: plain
    TCP."""
    repair_after_s: Annotated[float, between(0, SECONDS_MAX)] = 600.0
    """Seconds after which the replicas of an absent server are recreated on other servers. 0: never."""
    retired_keep_s: Annotated[float, between(0, SECONDS_MAX)] = 86_400.0
    """Seconds of running time for which the state of a replica that has left this server is kept. 0: not at all; 1e9:
    until an operator removes it."""
    limits: Limits = field(default_factory=Limits)
    """Limits after which the server refuses more work."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """Slow log, age of snapshots and Redis options."""
    redis: RedisConfig = field(default_factory=RedisConfig)
    """Transactions of Redis clients."""
    storage: StorageConfig = field(default_factory=StorageConfig)
    """Storage of the bookie. `bookie` above is its address."""
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    """Partitions that the node hosts."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logs of the partitions that the node leads."""
    autorecovery: AutorecoveryConfig = field(default_factory=AutorecoveryConfig)
    """The node's part in repairing ledgers."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """Balancing of the cluster. Set it on all nodes alike."""
    tracing: TracingConfig = field(default_factory=TracingConfig)
    """Spans of sampled operations."""

    RETIRED: ClassVar[Mapping[str, str]] = {
        "unsafe": "has no effect and never had; remove it. `[log] unsafe` allows one acknowledgement"
    }
    """Settings of earlier releases that are ignored, and why. A node must start with such files."""

    def __post_init__(self) -> None:
        faults = range_faults(self)
        if fault := id_fault(self.id):
            faults.append(f"id: {fault}")
        if self.storage.segment_bytes < 1 << 20:
            faults.append(f"storage.segment_bytes: expected 1 MiB to 2 GiB, got {self.storage.segment_bytes}")
        least_s = ORPHAN_LEASES_MIN * self.partition.listed_lease_ms / 1000
        if self.log.orphan_age_s < least_s:
            faults.append(
                f"log.orphan_age_s: expected at least {least_s:g}, {ORPHAN_LEASES_MIN} times partition.lease_ms and "
                f"hidden_pause_ms together, got {self.log.orphan_age_s:g}; a shorter age deletes the ledgers of new "
                "leaders while they wait for the former lease to end"
            )
        if self.roles is not None and not self.roles:
            faults.append("roles: expected at least one of bookie, server, got none")
        if self.is_external and self.plays != (Role.SERVER,):
            faults.append(
                f'roles: expected server alone, or no roles, because log.bookies is "external", '
                f"got {', '.join(self.plays)}"
            )
        faults += self._faults_of_metadata()
        if self.tls.ca is not None and not self.tls.serves:
            faults.append("tls: expected cert and key beside ca, got neither")
        if self.bookie_id and not is_address_id(self.bookie_id):
            faults.append(f"bookie_id: expected host:port, got {self.bookie_id!r}")
        if self.advertise and not _HOST.fullmatch(self.advertise):
            faults.append(f"advertise: expected a host without port, got {self.advertise!r}")
        for name, address in self.listeners().items():
            if name != "http" and not self.advertise and address.rpartition(":")[0] in _WILDCARDS:
                faults.append(
                    f"{name}: other machines cannot connect to {address}; set advertise to the host that they can reach"
                )
            faults += [
                f"{name}: {fault}" for fault in _address_faults(address, is_open=self.insecure or self._requires_tls)
            ]
        if self.bookie_clients and not self.tls.verify_clients:
            faults.append(
                "bookie_clients: expected [tls] verify_clients as well, because otherwise clients show no certificate"
            )
        if "bookie" in self.beyond and not self.tls.verify_clients and self.tls.serves:
            faults.append(
                f"bookie: {self.bookie} is not loopback, and a bookie knows no users: any client that reaches it can "
                "read every entry; set [tls] verify_clients with a ca, use a loopback address, or set insecure"
            )
        if faults:
            raise WrongSettings(*faults)

    def _faults_of_metadata(self) -> list[str]:
        if bool(self.zookeeper) == bool(self.metadata.uri):
            what = "both" if self.zookeeper else "neither"
            return [f"metadata.uri: expected either metadata.uri or zookeeper, got {what}"]
        name = "zookeeper" if self.zookeeper else "metadata.uri"
        faults = [f"{name}: {fault}" for fault in [address_fault(self.metadata_address)] if fault]
        if self.zookeeper and not faults and parse(self.zookeeper).kind is not MetadataKind.ZOOKEEPER:
            faults.append(f"zookeeper: expected a ZooKeeper, got {self.zookeeper}; set it as metadata.uri")
        if bool(self.metadata.user) != (self.metadata.password_file is not None):
            faults.append("metadata: expected user and password_file together, or neither")
        for place, tls in (("zookeeper_tls", self.zookeeper_tls), ("metadata.tls", self.metadata.tls)):
            if tls is not None and tls.admits_plain:
                faults.append(f"{place}: expected no mode; the metadata store configures its own listeners")
            if tls is not None and tls.ca is None:
                faults.append(f"{place}: expected ca, the file of the CA that signed the metadata store's certificate")
        return faults

    @property
    def is_external(self) -> bool:
        """True if the bookies are not nodes of this cluster."""
        return self.log.bookies is BookieKind.EXTERNAL

    @property
    def plays(self) -> tuple[Role, ...]:
        """The roles of this node."""
        if self.roles is not None:
            return self.roles
        return (Role.SERVER,) if self.is_external else (Role.BOOKIE, Role.SERVER)

    @property
    def metadata_address(self) -> str:
        """The address of the metadata store, in the form that `kvstore.meta.connect` takes."""
        return self.metadata.uri or self.zookeeper

    @property
    def metadata_tls(self) -> Tls | None:
        return self.metadata.tls or self.zookeeper_tls

    def metadata_login(self) -> MetadataLogin | None:
        """Return the node's login at the metadata store, from its settings or the environment. Reads the password file.
        Raises ConfigError."""
        found = self.metadata
        return metadata_login(found.user, found.password_file, found.auth, found.acl)

    @property
    def _requires_tls(self) -> bool:
        return self.tls.serves and not self.tls.admits_plain

    @property
    def beyond(self) -> list[str]:
        """The listeners that other machines can reach without `insecure`."""
        if self.insecure:
            return []
        return [name for name, each in self.listeners().items() if not is_loopback(each.rpartition(":")[0])]

    @property
    def wants_access_control(self) -> bool:
        """True if other machines can reach a client listener, so that no client is served until access control is on.
        The bookie's listener does not count, because bookies check certificates and know no users."""
        return any(name != "bookie" for name in self.beyond)

    @property
    def outside(self) -> list[Path]:
        """The bookie's directories outside the data directory."""
        places = (*self.storage.directories, *self.storage.lost_dirs, self.storage.index_dir)
        return [Path(each) for each in dict.fromkeys(places) if each.startswith("/")]

    def advertised(self, address: str) -> str:
        """Return one of this node's addresses in the form announced to other machines."""
        return f"{self.advertise}:{address.rpartition(':')[2]}" if self.advertise else address

    def listeners(self) -> dict[str, str]:
        """Return the listening addresses of a node with these roles."""
        names = ["http"]
        if Role.BOOKIE in self.plays:
            names.append("bookie")
        if Role.SERVER in self.plays:
            names += ["resp", "grpc"]
        return {name: getattr(self, name) for name in names}


def id_fault(text: str) -> str:
    """Return what is wrong with a node's id; empty if it is valid."""
    if _ID.fullmatch(text):
        return ""
    return (
        "expected lower-case letters, digits and dashes, at most 63, and .2 to .99 for a further process of a machine, "
        f"got {text!r}"
    )


def _address_faults(address: str, *, is_open: bool) -> list[str]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        return [f"expected host:port, got {address!r}"]
    if is_open or is_loopback(host):
        return []
    danger = "any client that reaches it can read and write every key"
    how = "set cert and key in [tls] with mode require, or set insecure"
    return [f"{address} is not loopback and accepts connections without TLS: {danger}; {how}"]
