"""The address of a cluster's metadata, as users write it. Decides only.

etcd://host:port,host:port/prefix
zookeeper://host:port,host:port/chroot         or without zookeeper://
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_HOST = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]")


class MetadataKind(StrEnum):
    ZOOKEEPER = "zookeeper"
    ETCD = "etcd"

    @property
    def shown(self) -> str:
        """Name of the store as people write it, for messages."""
        return "ZooKeeper" if self is MetadataKind.ZOOKEEPER else "etcd"


@dataclass(frozen=True, slots=True)
class Address:
    """The servers of one metadata store, and the part of the store that belongs to the cluster."""

    kind: MetadataKind
    hosts: tuple[str, ...]
    """`host:port` of each server."""
    place: str
    """Chroot or prefix, without slashes at its ends."""

    @property
    def connection(self) -> str:
        """`host:port,host:port/place`, as the drivers expect it."""
        return "/".join((",".join(self.hosts), self.place)).rstrip("/")


def parse(text: str) -> Address:
    """Parse an address. Raises ValueError, whose message omits the text if it may contain a password."""
    if "@" in text:
        raise ValueError(
            "expected no user or password in the address of a metadata store; set metadata.user and "
            "metadata.password_file, or KVSTORE_METADATA_USER and KVSTORE_METADATA_PASSWORD_FILE in the "
            "environment"
        )
    scheme, separator, rest = text.rpartition("://")
    if separator and scheme not in set(MetadataKind):
        raise ValueError(f"expected etcd://host:port,host:port/prefix or zookeeper://host:port/chroot, got {text!r}")
    hosts, _, place = rest.partition("/")
    for each in hosts.split(","):
        host, _, port = each.rpartition(":")
        if not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"expected host:port,host:port/chroot, or etcd:// before it, got {text!r}")
    return Address(
        MetadataKind(scheme) if separator else MetadataKind.ZOOKEEPER, tuple(hosts.split(",")), place.strip("/")
    )


def address_fault(text: str) -> str:
    """Return why the text is not a valid address; empty if it is valid."""
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    return ""
