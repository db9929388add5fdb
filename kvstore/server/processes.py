"""Derives the configurations of the processes of one machine from its file. Decides only.

The first process is the node that the file describes. The ids, ports and directories of further nodes follow from it
by number. So a machine can get more processes later, and lose the last ones again, without a change of the others.
Every other setting holds for each process, with these exceptions:

- Budgets of the machine are divided: memory of the engines, and the rates of scrubs, rewrites and repairs.
- The reserve of the disk is multiplied, because each process can use its own reserve of the disk that they share.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.bookie.config import StorageConfig
from kvstore.config import Fault
from kvstore.errors import ConfigError
from kvstore.partition.config import PartitionConfig
from kvstore.ranges import WrongSettings
from kvstore.server.config import NodeConfig
from kvstore.types import machine_of

BOTH = "both wildcards"
"""Stands for gRPC's [::], which also accepts IPv4. Other listeners accept only IPv6 there."""
PORT_MAX = 65_535
LISTENERS = ("bookie", "resp", "grpc", "http")


def configs_of(config: NodeConfig) -> list[NodeConfig]:
    """Return the configuration of each process of the machine, the first process first. Raises ConfigError with all
    faults: listeners that share an address, ports above 65535, and budgets that are too small to divide."""
    found, faults = split(config)
    if faults:
        raise ConfigError(*map(str, faults))
    return found


def split(config: NodeConfig) -> tuple[list[NodeConfig], list[Fault]]:
    """Return the configuration of each process, and all faults of the set. There are no configurations if a process
    cannot be derived."""
    faults = [*_faults_of_names(config), *_faults_of_ports(config)]
    shared: dict[str, Any] = {"processes": 1, "zone": config.zone or (config.id if config.processes > 1 else "")}
    for name, build in (("partition", _partition), ("storage", _storage), ("autorecovery", _autorecovery)):
        try:
            shared[name] = build(config)
        except (ConfigError, WrongSettings) as error:
            several = f" for each of {config.processes} processes" if config.processes > 1 else ""
            parts = [text.partition(": ") for text in error.faults]
            faults += [Fault(f"{name}.{setting}", why + several) for setting, _, why in parts]
    if faults:
        return [], [*faults, *clashes([config])]
    found = [_process(config, shared, number) for number in range(1, config.processes + 1)]
    return found, clashes(found)


def clashes(configs: Sequence[NodeConfig]) -> list[Fault]:
    """Return the listeners whose address another listener uses. The process would not start."""
    taken: list[tuple[str, str]] = []
    found = []
    for number, config in enumerate(configs, 1):
        whose = f" of process {number}" if number > 1 else ""
        for name, address in config.listeners().items():
            bound = address.replace("[::]", BOTH) if name == "grpc" else address
            other = next(((other, theirs) for other, theirs in taken if _meet(bound, theirs)), None)
            if other is not None:
                what = f"{other[0]} uses, too" if other[1] == address else f"{other[0]} covers with {other[1]}"
                found.append(Fault(name, f"expected an unused address{whose}, got {address}, which {what}"))
            taken.append((name + whose, address))
    return found


def _faults_of_names(config: NodeConfig) -> Iterator[Fault]:
    if config.processes == 1:
        return
    if machine_of(config.id) != config.id:
        yield Fault("id", f"expected the machine's id without the number of a process, got {config.id!r}")
    if config.bookie_id:
        yield Fault(
            "bookie_id",
            f"expected none with several processes, because bookie ids name machines, got {config.bookie_id}",
        )


def _faults_of_ports(config: NodeConfig) -> Iterator[Fault]:
    for name in config.listeners():
        last = _port(getattr(config, name), config.processes).rpartition(":")[2]
        if int(last) > PORT_MAX:
            yield Fault(name, f"expected a port of at most {PORT_MAX} for process {config.processes}, got {last}")


def _partition(config: NodeConfig) -> PartitionConfig:
    return replace(config.partition, memory_bytes=config.partition.memory_bytes // config.processes)


def _storage(config: NodeConfig) -> StorageConfig:
    storage, count = config.storage, config.processes
    return replace(
        storage,
        reserve_bytes=storage.reserve_bytes * count,
        scrub_bytes_per_s=storage.scrub_bytes_per_s // count,
        rewrite_bytes_per_s=storage.rewrite_bytes_per_s // count,
    )


def _autorecovery(config: NodeConfig) -> AutorecoveryConfig:
    return replace(config.autorecovery, bytes_per_s=config.autorecovery.bytes_per_s // config.processes)


def _process(config: NodeConfig, shared: dict[str, Any], number: int) -> NodeConfig:
    if number == 1:
        return replace(config, **shared)
    storage: StorageConfig = shared["storage"]
    own: dict[str, Any] = {
        "id": process_id(config.id, number),
        "data_dir": config.data_dir / f"process-{number}",
        "storage": replace(
            storage,
            journal_dir=_beside(storage.journal_dir, number),
            index_dir=_beside(storage.index_dir, number),
            journal_dirs=tuple(_beside(each, number) for each in storage.journal_dirs),
            lost_dirs=tuple(_beside(each, number) for each in storage.lost_dirs),
        ),
    }
    ports = {name: _port(getattr(config, name), number) for name in LISTENERS}
    return replace(config, **{**shared, **own, **ports})


def process_id(machine: str, number: int) -> str:
    """Return the node id of a process of a machine (docs/protocol.md, H15)."""
    return machine if number == 1 else f"{machine}.{number}"


def _port(address: str, number: int) -> str:
    """Return the address of a process. Port 0, which takes a free port, is the same for all."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + number - 1 if int(port) else 0}"


def _beside(directory: str, number: int) -> str:
    """Return a directory of a process. One that is relative to the data directory is the same for all."""
    return f"{directory}-{number}" if directory.startswith("/") else directory


def _meet(one: str, other: str) -> bool:
    """Return True if two listeners conflict: they have the same port and share a host. A wildcard means every host of
    its family; localhost means both loopbacks."""
    (host, _, port), (theirs, _, their_port) = one.rpartition(":"), other.rpartition(":")
    if port != their_port or not port.strip("0"):
        return False
    mine, their = _hosts(host), _hosts(theirs)
    return bool(mine & their) or _takes(mine, their) or _takes(their, mine)


def _takes(hosts: set[str], others: set[str]) -> bool:
    """Return True if `hosts` contains the wildcard of a family that `others` has an address of. A name counts as IPv4,
    because most machines have an IPv4 address."""
    return ("0.0.0.0" in hosts and any(":" not in each for each in others)) or (
        "::" in hosts and any(":" in each for each in others)
    )


def _hosts(host: str) -> set[str]:
    """Return the addresses of a host's name, as far as they are known without a lookup."""
    if host == "localhost":
        return {"127.0.0.1", "::1"}
    if host == BOTH:
        return {"0.0.0.0", "::"}
    try:
        return {str(ipaddress.ip_address(host.strip("[]")))}
    except ValueError:
        return {host.lower()}
