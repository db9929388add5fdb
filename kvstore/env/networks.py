"""The networks that clients call from, as limits count them: an IPv4 address, or the /64 network of an IPv6 address,
because one machine may own every address of such a network. Decides only."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import unquote

NETWORKS_MAX = 4_096
"""Maximum number of known networks that a process remembers. One more replaces the least recently confirmed one."""
_IPV6_PREFIX = 64


class KnownNetworks:
    """Networks whose connections unauthenticated peers from elsewhere cannot displace. A network is known if this
    process has connected to it, as a node does to other nodes, or if a client from it has authenticated."""

    def __init__(self) -> None:
        self._networks: dict[str, None] = {}
        self.added = 0
        """Number of networks that have become known."""
        self.clients_authenticate = True
        """False while access control is off: then the networks of clients do not become known, and listeners must not
        treat clients as unauthenticated peers."""

    def __contains__(self, network: str) -> bool:
        return network in self._networks

    def note(self, network: str) -> None:
        """Remember a network, as `network_of` or `address_of` names it."""
        self.added += network not in self._networks
        self._networks.pop(network, None)
        self._networks[network] = None
        if len(self._networks) > NETWORKS_MAX:
            del self._networks[next(iter(self._networks))]


def network_of(host: str) -> str:
    """Return the network of an address without a port."""
    return address_of(f"ipv6:[{host}]:0" if ":" in host else f"ipv4:{host}:0")


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def address_of(peer: str) -> str:
    """Return the network of a peer as gRPC names it, for example `ipv4:10.0.0.9:51112`."""
    address, _, _ = peer.rpartition(":")
    return _network(address) if address.startswith("ipv6:") else address


@lru_cache(maxsize=1024)
def _network(address: str) -> str:
    host = unquote(address.removeprefix("ipv6:")).strip("[]").partition("%")[0]
    try:
        found = ipaddress.IPv6Address(host)
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return f"ipv4:{found.ipv4_mapped}"
    return str(ipaddress.ip_network((int(found), _IPV6_PREFIX), strict=False))
