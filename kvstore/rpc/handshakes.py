"""The certificates of a gRPC server. Renewed certificates are used from the next handshake on."""

from __future__ import annotations

from typing import Any

import grpc

from kvstore.env.certificates import Certificates


class Handshakes:
    """Gives gRPC the newest certificates of the process for each handshake."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates, self._known = certificates, certificates.reads

    def credentials(self) -> grpc.ServerCredentials:
        """Return gRPC credentials for opening a port."""
        verifies = self._certificates.tls.verify_clients
        return grpc.dynamic_ssl_server_credentials(self._configuration(), self._newer_or_none, verifies)

    def _newer_or_none(self) -> Any:
        """Return the certificates that were renewed since the last handshake, or None if there are none. gRPC calls
        this function in its own thread."""
        if self._known == self._certificates.reads:
            return None
        self._known = self._certificates.reads
        return self._configuration()

    def _configuration(self) -> Any:
        ca, key, cert = self._certificates.contents
        assert key is not None, "a server has a certificate"
        assert cert is not None, "a server has a certificate"
        verifies = self._certificates.tls.verify_clients
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca if verifies else None)
