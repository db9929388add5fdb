"""The names by which this machine's own browsers and tools may call its HTTP port while nobody is asked who he is.
Decides only.

A web page may have its own name point to 127.0.0.1 once it is loaded (DNS rebinding). Its browser then takes this port
for the page's own server, and lets its script read the answers. The name in `Host` gives it away: the page's owner
chooses it, and can have none of a machine that is not his. Calls from other machines are not looked at: such a listener
wants access control, or the word `insecure`; and probes and scrapers call it by what names they like.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from kvstore.env.networks import is_loopback
from kvstore.errors import PermissionDenied

LOCAL_DOMAIN = ".localhost"
"""Names below it are this machine's, and nobody's who could register one (RFC 6761)."""


def check_name(said: str | None, caller: str, own: Collection[str]) -> None:
    """Raise PermissionDenied for a call from this machine, by the address `caller`, that takes it for a machine of
    another name. `said`: the header Host; None, and none has been said. `own`: names by which the node is known."""
    if said is None or not is_loopback(caller):
        return
    try:
        host = (urlsplit(f"//{said}").hostname or "").removesuffix(".")
    except ValueError:
        host = ""
    if is_loopback(host) or _is_address(host) or host.endswith(LOCAL_DOMAIN) or host in own:
        return
    raise PermissionDenied(
        "want this machine's address, localhost or the node's own name in Host while access control is off, "
        f"got {said[:60]!r}"
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
