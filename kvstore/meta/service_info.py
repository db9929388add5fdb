"""Encodes and decodes a bookie's registration, which contains its address and its zone. A bookie's id contains
neither. Decides only."""

from __future__ import annotations

import re

from google.protobuf.message import DecodeError

from kvstore.errors import Corrupted
from kvstore.proto.bookkeeper_metadata_pb2 import BookieServiceInfoFormat
from kvstore.types import BookieId

_ENDPOINT = "bookie"
_PROTOCOL = "bookie-rpc"
"""The protocol that clients look for among a registration's endpoints."""
_PORTS = 1 << 16
_ZONE = "zone"
"""The property that names the zone. Apache's clients ignore it."""
_BOOKIE_ID = re.compile(r"[a-zA-Z0-9:-_.\-]+")
_LEGACY_ADDRESS = re.compile(r"[^:]+:\d{1,5}")


def check_bookie_id(bookie: BookieId) -> None:
    """Raise ValueError for an id that Apache BookKeeper's clients would refuse."""
    if not _BOOKIE_ID.fullmatch(bookie) or bookie.lower() == "readonly":
        raise ValueError(f"expected a bookie id of letters, digits, colons, dashes and dots, got {bookie!r}")


def encode_service_info(address: str, zone: str = "") -> bytes:
    """Encode the registration of a bookie that listens on `address` (`host:port`). An empty `zone` is omitted."""
    host, _, port = address.rpartition(":")
    info = BookieServiceInfoFormat()
    info.endpoints.add(id=_ENDPOINT, port=int(port), host=host.strip("[]"), protocol=_PROTOCOL)
    if zone:
        info.properties[_ZONE] = zone
    return info.SerializeToString(deterministic=True)


def decode_service_info(bookie: BookieId, data: bytes) -> str | None:
    """Return the bookie's `host:port`, or None if the registration has no valid address. An empty registration means
    that the id is the address.

    Raises Corrupted if the bytes are not a registration.
    """
    if not data:
        is_address = _LEGACY_ADDRESS.fullmatch(bookie) and 0 < int(bookie.rpartition(":")[2]) < _PORTS
        return str(bookie) if is_address else None
    for endpoint in _parsed(bookie, data).endpoints:
        if endpoint.protocol == _PROTOCOL and endpoint.host and 0 < endpoint.port < _PORTS:
            return f"[{endpoint.host}]:{endpoint.port}" if ":" in endpoint.host else f"{endpoint.host}:{endpoint.port}"
    return None


def decode_zone(bookie: BookieId, data: bytes) -> str:
    """Return the zone in the bookie's registration, or an empty string if it names none. Raises Corrupted if the
    bytes are not a registration."""
    return _parsed(bookie, data).properties.get(_ZONE, "")


def _parsed(bookie: BookieId, data: bytes) -> BookieServiceInfoFormat:
    try:
        return BookieServiceInfoFormat.FromString(data)
    except DecodeError as error:
        raise Corrupted(f"bookie {bookie}: its registration is malformed: {error}") from error
