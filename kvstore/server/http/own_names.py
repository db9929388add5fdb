"""The names by which browsers and tools on this machine may address its HTTP port while access control is off. Decides
only.

A web page can let its own name resolve to 127.0.0.1 after it is loaded (DNS rebinding). The browser then takes this
port for the page's own server and lets its script read the responses. The name in `Host` reveals the attack, because
the page's owner can only use names that the owner controls. Calls from other machines are not checked: such a listener
requires access control, or the setting `insecure`, and probes and scrapers use whatever names they like.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from kvstore.env.dns.names import is_address
from kvstore.env.networks import is_loopback
from kvstore.errors import PermissionDenied

LOCAL_DOMAIN = ".localhost"
"""Names below it belong to this machine, and nobody can register one (RFC 6761)."""


def check_name(host_header: str | None, caller: str, own: Collection[str]) -> None:
    """Raise PermissionDenied if a call from this machine, according to the address `caller`, names another host.
    `host_header` is the Host header or None, and `own` contains the names by which the node is known."""
    if host_header is None or not is_loopback(caller):
        return
    try:
        host = (urlsplit(f"//{host_header}").hostname or "").removesuffix(".")
    except ValueError:
        host = ""
    if is_loopback(host) or is_address(host) or host.endswith(LOCAL_DOMAIN) or host in own:
        return
    raise PermissionDenied(
        "expected this machine's address, localhost or the node's name in Host while access control is off, "
        f"got {host_header[:60]!r}"
    )
