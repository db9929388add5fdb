"""Warnings about settings of a node that are valid but unsafe or odd. Decides only."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.config import Fault
from kvstore.env.log_config import LogLevel
from kvstore.env.networks import is_loopback
from kvstore.meta.address import parse
from kvstore.meta.login import Acl
from kvstore.server.config import NodeConfig, Role
from kvstore.types import DigestType

RESTART_S = 30
"""Seconds that a restart may take. A node that is away for less should not count as lost."""


def advice(config: NodeConfig) -> list[Fault]:
    """Return the warnings about a configuration, each with its consequence."""
    return [
        *_of_endpoints(config),
        *_of_metadata(config),
        *_of_bookie(config),
        *_of_partitions(config),
        *_of_rest(config),
    ]


def _of_endpoints(config: NodeConfig) -> Iterator[Fault]:
    exposed = [name for name, each in config.listeners().items() if not is_loopback(each.rpartition(":")[0])]
    if config.insecure and exposed:
        yield Fault(
            "insecure",
            f"anyone who reaches {', '.join(exposed)} can read and write every key; keep these ports on a private "
            "network, or set [tls] and run `kvstore access found`",
        )
    elif config.insecure:
        yield Fault("insecure", "no address here needs it; remove it")
    if config.tls.admits_plain:
        yield Fault(
            "tls.mode", '"prefer" does not stop an attacker between the nodes; set "require" once all nodes have TLS'
        )
    if config.advertise and is_loopback(config.advertise) and exposed:
        yield Fault("advertise", f"{config.advertise} is loopback, so other machines would connect to themselves")
    for name, address in config.listeners().items():
        if address.endswith(":0"):
            yield Fault(name, "port 0 changes with each start, so clients cannot find it")


def _of_metadata(config: NodeConfig) -> Iterator[Fault]:
    name = "metadata.uri" if config.metadata.uri else "zookeeper"
    hosts = parse(config.metadata_address).hosts
    if len(hosts) % 2 == 0:
        yield Fault(name, f"{len(hosts)} servers tolerate no more losses than {len(hosts) - 1}; use an odd number")
    if len(hosts) == 1 and not is_loopback(hosts[0].rpartition(":")[0]):
        yield Fault(name, "one server: while it is down, there are no elections and no repairs; use three or five")
    is_near = all(is_loopback(each.rpartition(":")[0]) for each in hosts)
    if config.metadata.user and config.metadata_tls is None and not is_near:
        yield Fault("metadata.user", "logs in without TLS, so the password can be intercepted; set metadata.tls")
    if config.metadata.user and config.metadata.acl is Acl.OPEN:
        yield Fault("metadata.acl", '"open" lets everybody change what the node stores there; set "creator"')


def _of_bookie(config: NodeConfig) -> Iterator[Fault]:
    if Role.BOOKIE not in config.plays:
        return
    storage = config.storage
    if storage.admit_raw_adds:
        yield Fault(
            "storage.admit_raw_adds", "anyone who reaches the port can fill the disk; never set this in production"
        )
    if not storage.scrub_bytes_per_s:
        yield Fault("storage.scrub_bytes_per_s", "damage on the disk is found too late; set more than 0")
    if storage.reserve_bytes < 2 * storage.segment_bytes:
        yield Fault(
            "storage.reserve_bytes", "less than two segments, so a full disk leaves too little space for a restart"
        )
    if storage.lost_dirs:
        yield Fault(
            "storage.lost_dirs", "the data on these disks is abandoned; remove the setting once the node has started"
        )


def _of_partitions(config: NodeConfig) -> Iterator[Fault]:
    partition, log = config.partition, config.log
    if log.quorum.ack < 2:
        yield Fault("log.quorum.ack", "the loss of one disk loses acknowledged writes; set 2")
    elif log.quorum.write == log.quorum.ack:
        yield Fault("log.quorum", f"a write waits for all {log.quorum.write} disks, so the slowest one decides")
    if log.unsafe and log.quorum.ack >= 2:
        yield Fault("log.unsafe", "the quorum here does not need it; remove it")
    if log.digest is DigestType.DUMMY:
        yield Fault("log.digest", "entries have no checksum, so damage is not noticed; set 3")
    if partition.lease_ms and not partition.hidden_pause_ms:
        yield Fault(
            "partition.hidden_pause_ms", "a machine that was paused can answer a read with an old value; set 250"
        )
    if not partition.lease_ms:
        yield Fault("partition.lease_ms", "every read waits for an append")
    if not partition.expiry_sweep_s:
        yield Fault("partition.expiry_sweep_s", "expired keys that are not read are never removed")
    if partition.write_buffer_bytes > partition.memory_bytes // 2:
        yield Fault("partition.write_buffer_bytes", "more than half of memory_bytes, above which all are flushed")


def _of_rest(config: NodeConfig) -> Iterator[Fault]:
    recovery = config.autorecovery
    if recovery.lost_bookie_delay_s < RESTART_S:
        yield Fault("autorecovery.lost_bookie_delay_s", "less than a restart takes, so ledgers are copied needlessly")
    if not recovery.check_interval_s:
        yield Fault("autorecovery.check_interval_s", "copies that disappeared unnoticed are never found")
    if 0 < config.repair_after_s < RESTART_S:
        yield Fault("repair_after_s", "less than a restart takes, so replicas are rebuilt needlessly")
    for name in ("data_dir", "secret_file", "log_dir"):
        place = getattr(config, name)
        if place is not None and not place.is_absolute():
            yield Fault(
                name, f"{place} is relative to the directory in which the node is started; use an absolute path"
            )
    if config.log_output.level is LogLevel.DEBUG:
        yield Fault(
            "log_output.level",
            "DEBUG slows the node and fills the disk; set it temporarily with `kvstore node log-level`",
        )
