"""Checks whether a certificate belongs to the server that presents it (docs/protocol.md H8). Decides only.

A certificate belongs to a server if it names the server's id, its machine (H15), or the host at which the server is or
was registered in the metadata store. The certificate of a client names neither, although the same CA signed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvstore.server.access.certificates import common_names
from kvstore.types import machine_of

Certificate = Mapping[str, Any]
"""The form of `ssl.SSLSocket.getpeercert`."""


def certificate_fault(certificate: Certificate | None, server: str, host: str | None) -> str:
    """Return the reason why the certificate does not belong to the server. Empty if it belongs to the server, or if
    the listener required no certificate."""
    if not certificate:
        return ""
    names = list(_names(certificate))
    wanted = list(dict.fromkeys((server, machine_of(server), *(() if host is None else (host,)))))
    if any(_covers(name, each) for name in names for each in wanted):
        return ""
    return f"expected a certificate of {' or '.join(wanted)}, got one of {', '.join(names) or 'no name'}"


def is_named(certificate: Certificate | None, wanted: Iterable[str]) -> bool:
    """Return True if a common name or alternative name of the certificate is in `wanted`. `*.kv.internal` in
    `wanted` matches every name one label below it."""
    names = [value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    names += common_names(certificate)
    return any(_covers(each, name) for each in wanted for name in names)


def host_of(address: str) -> str:
    """Return the host of `host:port`."""
    return address.rpartition(":")[0].strip("[]")


def _names(certificate: Certificate) -> Iterator[str]:
    """Yield the alternative names of the certificate, or its common name if there are none, as for hosts."""
    alternative = [name for kind, name in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    if alternative:
        yield from alternative
        return
    for part in certificate.get("subject", ()):
        yield from (value for kind, value in part if kind == "commonName")


def _covers(name: str, wanted: str) -> bool:
    name, wanted = name.lower(), wanted.lower()
    if name.startswith("*."):
        return "." in wanted and wanted.partition(".")[2] == name[2:]
    return name == wanted
