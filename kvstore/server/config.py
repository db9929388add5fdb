"""The settings of a node. Decides only; `kvstore.config` reads it from TOML. Every other number is a constant beside
its use."""

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
from kvstore.meta.address import Kind, address_fault, parse
from kvstore.meta.login import Acl, Mechanism, MetadataLogin, metadata_login
from kvstore.partition.config import PartitionConfig
from kvstore.ranges import BYTES_MAX, COUNT_MAX, MS_MAX, SECONDS_MAX, WrongSettings, between, range_faults
from kvstore.server.tracing_config import TracingConfig
from kvstore.wal.config import BookieKind, LogConfig

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_WILDCARDS = ("0.0.0.0", "[::]", "::")
_HOST = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]")
STATES = "partitions"
"""Where the states of replicas are below the data directory."""
BOOKIE_CONNECTIONS_MIN = 16
"""Every other node of the cluster holds a connection to the bookie, and stores no copies there if it is refused."""
ORPHAN_LEASES_MIN = 2
"""How many times the lease an orphan's age must be: a new leader makes its ledger, then waits out the former leader's
lease, and lists the ledger only then."""


class Role(StrEnum):
    BOOKIE = "bookie"
    """Stores ledger entries."""
    SERVER = "server"
    """Hosts partition replicas and answers clients."""


CARRIED_FILES = 3
"""Open files of one gRPC connection with TLS: the caller's, and the two ends of the one behind it
(kvstore/rpc/front.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a server takes on before it refuses. All of them are per process."""

    connections_max: Annotated[int, between(1, COUNT_MAX)] = 10_000
    """RESP connections; one more is closed with an error."""
    grpc_connections_max: Annotated[int, between(1, COUNT_MAX)] = 2_500
    """gRPC connections; for one more, with TLS the oldest of the network that has the most is closed, else the new
    one."""
    http_connections_max: Annotated[int, between(1, COUNT_MAX)] = 512
    """HTTP connections; for one more the one on which nothing has been asked for the longest time is closed."""
    bookie_connections_max: Annotated[int, between(BOOKIE_CONNECTIONS_MIN, COUNT_MAX)] = 1_024
    """Connections to the bookie; for one more the oldest that has never asked for anything is closed, or the new. Every
    other node of the cluster holds one."""
    output_bytes_max: Annotated[int, between(1, BYTES_MAX)] = 128 << 20
    """Replies that RESP connections hold, and room reserved for others; over all of them."""
    waiting_max: Annotated[int, between(1, COUNT_MAX)] = 10_000
    """Operations that wait because their partition's leader is not known."""
    forwarded_max: Annotated[int, between(1, COUNT_MAX)] = 20_000
    """Operations sent to one other server and not yet answered."""

    def __post_init__(self) -> None:
        if faults := range_faults(self):
            raise WrongSettings(*faults)

    def within(self, files: int) -> Limits:
        """The same with no more connections than leave room, among so many open files, for journals and engines."""
        return replace(
            self,
            connections_max=min(self.connections_max, files // 2),
            grpc_connections_max=min(self.grpc_connections_max, files // 8 // CARRIED_FILES),
            http_connections_max=min(self.http_connections_max, files // 16),
            bookie_connections_max=min(self.bookie_connections_max, files // 8),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of a server's operations."""

    slow_ms: Annotated[int, between(0, MS_MAX)] = 100
    """Operations that took longer are in the slow log, with where the time went; 0: none is."""
    redis_flush: bool = False
    """Whether Redis' FLUSHDB and FLUSHALL delete all keys of the store; else they are refused."""

    def __post_init__(self) -> None:
        if faults := range_faults(self):
            raise WrongSettings(*faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataConfig:
    """The metadata store."""

    uri: str = ""
    """`etcd://host:port,host:port/prefix`, or `zookeeper://host:port,host:port/chroot`."""
    tls: Tls | None = None
    """How to reach one that speaks TLS: `ca`, and `cert` and `key` if it asks for them. None: plain TCP."""
    user: str = ""
    """The user as which the node logs in there. Empty: the one that KVSTORE_METADATA_USER names, or none."""
    password_file: Path | None = None
    """A file with its password on the first line, which nobody but the node may read."""
    auth: Mechanism = Mechanism.DIGEST
    """How ZooKeeper learns of it: `digest`, or `sasl` (DIGEST-MD5). etcd has a way of its own."""
    acl: Acl = Acl.CREATOR
    """The users that may change the nodes that it makes in ZooKeeper: `creator`, its own alone; or `open`, all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node: one process that stores ledgers, hosts partitions, or both."""

    id: str
    """Unique in the cluster; stays with the data directory."""
    data_dir: Path
    """Where all that the node keeps is, but for directories that `storage` names elsewhere; locked while it runs."""
    secret_file: Path
    """The cluster's secret, the same on all nodes (kvstore/env/secret.py). Nobody but the node may read it."""
    zookeeper: str = ""
    """`host:port,host:port/chroot`: the metadata store, if it is a ZooKeeper; or say so in `metadata`."""
    metadata: MetadataConfig = field(default_factory=MetadataConfig)
    """The metadata store, of either kind."""
    roles: tuple[Role, ...] | None = None
    """None: both, or server alone where `log.bookies` is external."""
    zone: str = ""
    """Where the machine stands; replicas and copies go to distinct zones where there are any."""
    bookie: str = "127.0.0.1:3181"
    """Where its bookie listens (BookKeeper's protocol)."""
    bookie_id: str = ""
    """The id of its bookie as `host:port`, where Apache's clients and tools want it so; empty: the node's id and an
    incarnation. Of a bookie that has stored something it cannot be changed."""
    bookie_clients: tuple[str, ...] = ()
    """Whom its bookie lets in where `[tls] verify_clients` holds, by names of their certificates, common or
    alternative: `n1`, `*.kv.internal`. Give it the names of all nodes, and of the tools that read ledgers. Empty:
    everybody whose certificate names no user."""
    resp: str = "127.0.0.1:6401"
    """Where Redis clients, and other servers, connect."""
    grpc: str = "127.0.0.1:7401"
    """Where gRPC clients connect."""
    http: str = "127.0.0.1:8401"
    """Where health pages, metrics and the dashboard are."""
    advertise: str = ""
    """The host that clients and other nodes are told, with the ports above: where these listen on all interfaces, or
    behind an address that is translated. Empty: the hosts above."""
    log_dir: Path | None = None
    """Where log files go and rotate; None: standard error."""
    log_output: LogOutput = field(default_factory=LogOutput)
    """As what they are written, and from which level on."""
    insecure: bool = False
    """Allow listeners beyond loopback without TLS, or that only prefer it, and serve every client while access control
    is off."""
    tls: Tls = field(default_factory=Tls)
    """With a certificate all listeners, and the connections to other nodes, are TLS. Of all nodes or of none."""
    zookeeper_tls: Tls | None = None
    """How to reach a ZooKeeper that speaks TLS: `ca`, and `cert` and `key` if it asks for them. None: plain TCP."""
    repair_after_s: Annotated[float, between(0, SECONDS_MAX)] = 600.0
    """A server that is away for longer gets no second chance: its replicas are made anew on others. 0: never."""
    retired_keep_s: Annotated[float, between(0, SECONDS_MAX)] = 86_400.0
    """How long the state of a replica that has left is kept, set aside: as time that the node runs. 0: not at all; 1e9:
    until somebody removes it."""
    limits: Limits = field(default_factory=Limits)
    """How much it takes on before it refuses."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """What it notes of its operations."""
    storage: StorageConfig = field(default_factory=StorageConfig)
    """Of its bookie; `bookie` above is where that listens."""
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    """Of the partitions that it hosts."""
    log: LogConfig = field(default_factory=LogConfig)
    """Of the logs of those that it leads."""
    autorecovery: AutorecoveryConfig = field(default_factory=AutorecoveryConfig)
    """Of its part in repairing ledgers."""
    tracing: TracingConfig = field(default_factory=TracingConfig)
    """Of spans of sampled operations."""

    RETIRED: ClassVar[Mapping[str, str]] = {
        "unsafe": "has no effect, and never had: leave it out; [log] unsafe is what one acknowledgement wants"
    }
    """Names that files of earlier releases may have, and why they are read no more: a node must start with them."""

    def __post_init__(self) -> None:
        faults = range_faults(self)
        if fault := id_fault(self.id):
            faults.append(f"id: {fault}")
        if self.storage.segment_bytes < 1 << 20:
            faults.append(f"storage.segment_bytes: want 1 MiB to 2 GiB, got {self.storage.segment_bytes}")
        least_s = ORPHAN_LEASES_MIN * self.partition.listed_lease_ms / 1000
        if self.log.orphan_age_s < least_s:
            faults.append(
                f"log.orphan_age_s: expected at least {least_s:g}, {ORPHAN_LEASES_MIN} times partition.lease_ms and "
                f"hidden_pause_ms together, got {self.log.orphan_age_s:g}; a shorter age deletes the ledgers of new "
                "leaders while they wait for the former lease to end"
            )
        if self.roles is not None and not self.roles:
            faults.append("roles: want at least one of bookie, server")
        if self.is_external and self.plays != (Role.SERVER,):
            faults.append(
                'roles: want server alone, or none named, where log.bookies is "external" (a node without a bookie of '
                f"its own), got {', '.join(self.plays)}"
            )
        faults += self._faults_of_metadata()
        if self.tls.ca is not None and not self.tls.serves:
            faults.append("tls: want cert and key beside ca")
        if self.bookie_id and not is_address_id(self.bookie_id):
            faults.append(f"bookie_id: want host:port, got {self.bookie_id!r}")
        if self.advertise and not _HOST.fullmatch(self.advertise):
            faults.append(f"advertise: want a host without port, got {self.advertise!r}")
        for name, address in self.listeners().items():
            if name != "http" and not self.advertise and address.rpartition(":")[0] in _WILDCARDS:
                faults.append(
                    f"{name}: others cannot connect to {address}; set advertise to the host that they connect to"
                )
            faults += [
                f"{name}: {fault}" for fault in _address_faults(address, is_open=self.insecure or self._requires_tls)
            ]
        if self.bookie_clients and not self.tls.verify_clients:
            faults.append("bookie_clients: want [tls] verify_clients, which has clients show a certificate at all")
        if "bookie" in self.beyond and not self.tls.verify_clients and self.tls.serves:
            faults.append(
                f"bookie: {self.bookie} is not loopback and knows no users: whoever reaches it reads every entry; want "
                "[tls] verify_clients with a ca, a loopback address, or insecure"
            )
        if faults:
            raise WrongSettings(*faults)

    def _faults_of_metadata(self) -> list[str]:
        if bool(self.zookeeper) == bool(self.metadata.uri):
            what = "both" if self.zookeeper else "neither"
            return [f"metadata.uri: want it, or zookeeper in its place, got {what}"]
        name = "zookeeper" if self.zookeeper else "metadata.uri"
        faults = [f"{name}: {fault}" for fault in [address_fault(self.metadata_address)] if fault]
        if self.zookeeper and not faults and parse(self.zookeeper).kind is not Kind.ZOOKEEPER:
            faults.append(f"zookeeper: {self.zookeeper} is none; name it as metadata.uri")
        if bool(self.metadata.user) != (self.metadata.password_file is not None):
            faults.append("metadata: want user and password_file, or neither")
        for place, tls in (("zookeeper_tls", self.zookeeper_tls), ("metadata.tls", self.metadata.tls)):
            if tls is not None and tls.admits_plain:
                faults.append(f"{place}: want no mode: the metadata store's doors are its own")
            if tls is not None and tls.ca is None:
                faults.append(f"{place}: want ca, the file of who signed the metadata store's certificate")
        return faults

    @property
    def is_external(self) -> bool:
        """Whether the bookies are no nodes of this cluster."""
        return self.log.bookies is BookieKind.EXTERNAL

    @property
    def plays(self) -> tuple[Role, ...]:
        """The roles of this node."""
        if self.roles is not None:
            return self.roles
        return (Role.SERVER,) if self.is_external else (Role.BOOKIE, Role.SERVER)

    @property
    def metadata_address(self) -> str:
        """Where the metadata store is, as `kvstore.meta.connect` wants it."""
        return self.metadata.uri or self.zookeeper

    @property
    def metadata_tls(self) -> Tls | None:
        return self.metadata.tls or self.zookeeper_tls

    def metadata_login(self) -> MetadataLogin | None:
        """Return the node's login at the metadata store, by its settings or the environment. Reads the password's
        file. Raises ConfigError."""
        found = self.metadata
        return metadata_login(found.user, found.password_file, found.auth, found.acl)

    @property
    def _requires_tls(self) -> bool:
        return self.tls.serves and not self.tls.admits_plain

    @property
    def beyond(self) -> list[str]:
        """The listeners that other machines reach, unless `insecure` says that they may."""
        if self.insecure:
            return []
        return [name for name, each in self.listeners().items() if not is_loopback(each.rpartition(":")[0])]

    @property
    def wants_access_control(self) -> bool:
        """Whether a door for clients is open to other machines, so that nobody is served until the cluster asks who its
        clients are. The bookie's door is no such: it knows no users, but certificates."""
        return any(name != "bookie" for name in self.beyond)

    @property
    def outside(self) -> list[Path]:
        """The directories of its bookie that are not below the data directory."""
        places = (*self.storage.directories, *self.storage.lost_dirs, self.storage.index_dir)
        return [Path(each) for each in dict.fromkeys(places) if each.startswith("/")]

    def told(self, address: str) -> str:
        """Return what others are told for one of our addresses."""
        return f"{self.advertise}:{address.rpartition(':')[2]}" if self.advertise else address

    def listeners(self) -> dict[str, str]:
        """The addresses that a node of these roles listens on."""
        names = ["http"]
        if Role.BOOKIE in self.plays:
            names.append("bookie")
        if Role.SERVER in self.plays:
            names += ["resp", "grpc"]
        return {name: getattr(self, name) for name in names}


def id_fault(text: str) -> str:
    """Describe the flaw of a node's id; empty if nothing is."""
    return "" if _ID.fullmatch(text) else f"want lower-case letters, digits and dashes, at most 63, got {text!r}"


def _address_faults(address: str, *, is_open: bool) -> list[str]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        return [f"want host:port, got {address!r}"]
    if is_open or is_loopback(host):
        return []
    danger = "anybody who reaches it can read and write every key"
    how = "give [tls] a cert and key, and no mode but require, or set insecure"
    return [f"{address} is not loopback and has no TLS, or takes what comes without: {danger}; {how}"]
