"""Certificates as a gRPC server takes them: what holds now, and at each handshake what has come since."""

from __future__ import annotations

from typing import Any

import grpc

from kvstore.env.certificates import Certificates


class Handshakes:
    """Goes by the newest of a process's certificates."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates, self._known = certificates, certificates.reads

    def credentials(self) -> grpc.ServerCredentials:
        """For a port."""
        verifies = self._certificates.tls.verify_clients
        return grpc.dynamic_ssl_server_credentials(self._configuration(), self._newer_or_none, verifies)

    def _newer_or_none(self) -> Any:
        """Give what has come since the last handshake; None: nothing. gRPC calls it in a thread of its own."""
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
