"""The settings of a node's traces. Decides only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from kvstore.ranges import WrongSettings, between, range_faults


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Where spans of sampled operations go. Off until there is an endpoint."""

    endpoint: str = ""
    """A collector that takes OTLP over gRPC: `http://host:port`, or `https://host:port` with TLS. Empty: no traces."""
    sample_ratio: Annotated[float, between(0, 1)] = 0.01
    """Share of the operations that are sampled, from 0 to 1, beside those whose caller says that they are."""
    ca: Path | None = None
    """The file with the certificate of the CA that signed the collector's. None: the CAs that this machine trusts."""

    def __post_init__(self) -> None:
        faults = range_faults(self)
        if self.endpoint and not _is_endpoint(self.endpoint):
            faults.append(f"endpoint: want http://host:port or https://host:port, got {self.endpoint!r}")
        if self.ca is not None and not self.endpoint.startswith("https:"):
            faults.append(f"ca: want an endpoint with https:// beside it, got {self.endpoint!r}")
        if faults:
            raise WrongSettings(*faults)


def _is_endpoint(text: str) -> bool:
    try:
        found = urlsplit(text)
        has_port = found.port is not None
    except ValueError:
        return False
    return found.scheme in ("http", "https") and bool(found.hostname) and has_port and found.path in ("", "/")
