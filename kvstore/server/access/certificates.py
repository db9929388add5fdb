"""Whom a client's certificate names. Decides only; that it was verified is the door's part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def common_names(certificate: Mapping[str, Any] | None) -> list[str]:
    """The common names of its subject, as `ssl.SSLSocket.getpeercert` gives it; none of one that was not verified."""
    if not certificate:
        return []
    return [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
