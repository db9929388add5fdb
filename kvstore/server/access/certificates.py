"""The names in a client's certificate. Decides only; the listener has verified the certificate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def common_names(certificate: Mapping[str, Any] | None) -> list[str]:
    """Return the common names of a certificate's subject. The certificate has the form that
    `ssl.SSLSocket.getpeercert` returns. An unverified certificate is empty, so it has no names."""
    if not certificate:
        return []
    return [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
