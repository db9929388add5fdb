"""The settings of a node's tracing. Decides only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from kvstore.ranges import WrongSettings, between, range_faults


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Export of the spans of sampled operations. Off without an endpoint."""

    endpoint: str = ""
    """Collector for OTLP over gRPC: `http://host:port`, or `https://host:port` with TLS. Empty: tracing is off."""
    sample_ratio: Annotated[float, between(0, 1)] = 0.01
    """Fraction of operations to sample, from 0 to 1. Operations that the caller marks as sampled are sampled as
    well."""
    ca: Path | None = None
    """File with the CA certificate of the collector. None: the CAs that this machine trusts."""

    def __post_init__(self) -> None:
        faults = range_faults(self)
        if self.endpoint and not _is_endpoint(self.endpoint):
            faults.append(f"endpoint: expected http://host:port or https://host:port, got {self.endpoint!r}")
        if self.ca is not None and not self.endpoint.startswith("https:"):
            faults.append(f"ca: expected an endpoint with https://, got {self.endpoint!r}")
        if faults:
            raise WrongSettings(*faults)


def _is_endpoint(text: str) -> bool:
    try:
        found = urlsplit(text)
        has_port = found.port is not None
    except ValueError:
        return False
    return found.scheme in ("http", "https") and bool(found.hostname) and has_port and found.path in ("", "/")
