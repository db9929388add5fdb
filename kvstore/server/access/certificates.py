"""The names in a client's certificate. Decides only; the listener has verified the certificate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def common_names(certificate: Mapping[str, Any] | None) -> list[str]:
    """Return the common names of the certificate's subject, in the form of `ssl.SSLSocket.getpeercert`. An
    unverified certificate has none."""
    if not certificate:
        return []
    return [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
