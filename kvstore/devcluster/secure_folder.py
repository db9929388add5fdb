"""Keys of a local cluster that is secure, beside its nodes: certificates, passwords, and what clients need. Blocking.

    <data-dir>/secure/           0700; every file in it 0600
      ca.pem  ca.key             the authority (kvstore/devcluster/authority.py)
      n1.pem …  client.pem       a key and its certificate: of each node, and one for clients of the front ends
      bookie-tools.pem           the same for commands that read bookies, which accept no client's certificate
      admin.password             of the user admin, on one line
      metadata.password          of the nodes' user in a ZooKeeper of the cluster's own
      client.env                 for a shell: `. client.env` lets what it starts in
      netrc                      the same for curl

Made once, and what is missing or about to expire once more, by each `kvstore up`; but for what would fit nothing: an
authority of certificates that are there, and a password by which the metadata is closed.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from kvstore.env.files.private import private_folder, write_private
from kvstore.env.tls import Tls
from kvstore.errors import ConfigError
from kvstore.extras import install_hint
from kvstore.meta.login import MetadataLogin
from kvstore.rpc.login import Login, password_in

FOLDER = "secure"
ADMIN = "admin"
"""The user whom `up` makes; the client's certificate names another, so that it alone lets nobody in as him."""
CLIENT = "client"
TOOLS = "bookie-tools"
"""The certificate of the operator's commands. Bookies know no users, so they accept only nodes and this certificate."""
METADATA_USER = "kvstore"
HOSTS = ("127.0.0.1", "localhost")
"""By which nodes of a local cluster are reached."""
_SECRET_BYTES = 24


class SecureFolder:
    """The folder of the local cluster in one data directory."""

    def __init__(self, data_dir: Path, *, has_own_zookeeper: bool) -> None:
        self.path = data_dir / FOLDER
        self.has_own_zookeeper = has_own_zookeeper
        self.ca, self.client = self.path / "ca.pem", self.path / f"{CLIENT}.pem"
        self.tools = self.path / f"{TOOLS}.pem"
        self.environment, self.netrc = self.path / "client.env", self.path / "netrc"
        self.password_file, self.metadata_password = self.path / "admin.password", self.path / "metadata.password"

    def make(self, nodes: Sequence[str], *, is_new: bool) -> None:
        """Make what is missing, for nodes of these ids. Raises ConfigError, also for what only a new cluster can have
        made, OSError."""
        try:
            from kvstore.devcluster.authority import (
                CertificateAuthority,
            )  # the only one to want what comes with the local extra
        except ImportError as error:
            raise ConfigError(f"--secure: {error}: {install_hint('local')}") from None
        if self.has_own_zookeeper and not is_new and not self.metadata_password.exists():
            raise ConfigError(
                f"{self.metadata_password} is missing: bring it back. The cluster's metadata are closed to everybody "
                "who does not know it, and another one does not open them"
            )
        private_folder(self.path)
        authority = CertificateAuthority(self.path)
        for node in nodes:
            authority.issue(node, HOSTS)
        authority.issue(CLIENT, ())
        authority.issue(TOOLS, ())
        for password in (self.password_file, *([self.metadata_password] if self.has_own_zookeeper else [])):
            if not password.exists():
                write_private(password, f"{secrets.token_urlsafe(_SECRET_BYTES)}\n".encode())
        write_private(self.environment, self._environment().encode())
        password_text = self.login().password.decode()
        write_private(self.netrc, f"machine 127.0.0.1 login {ADMIN} password {password_text}\n".encode())

    def of_node(self, node: str) -> Tls:
        """Of a node's listeners, and of its connections to others."""
        own = self.path / f"{node}.pem"
        return Tls(cert=own, key=own, ca=self.ca, verify_clients=True)

    @property
    def tls(self) -> Tls:
        """Of a client."""
        return Tls(cert=self.client, key=self.client, ca=self.ca)

    def login(self) -> Login:
        """The administrator's, as `up` has made it. Raises ConfigError."""
        return Login(ADMIN, password_in(self.password_file))

    def metadata_login(self) -> MetadataLogin | None:
        """The nodes' at the metadata store; None where that is not the cluster's own ZooKeeper. Raises ConfigError."""
        if not self.has_own_zookeeper:
            return None
        return MetadataLogin(METADATA_USER, password_in(self.metadata_password))

    def url(self, addresses: Sequence[str]) -> str:
        """By which a Python client reaches servers, of these gRPC addresses; who it is stands in its environment."""
        ca, own = quote(str(self.ca)), quote(str(self.client))
        return f"kvs://{','.join(addresses)}?ca={ca}&cert={own}&key={own}"

    def _environment(self) -> str:
        names = {
            "KVSTORE_TLS_CA": self.ca,
            "KVSTORE_TLS_CERT": self.tools,
            "KVSTORE_TLS_KEY": self.tools,
            "KVSTORE_USER": ADMIN,
            "KVSTORE_PASSWORD_FILE": self.password_file,
        }
        if self.has_own_zookeeper:
            names |= {"KVSTORE_METADATA_USER": METADATA_USER, "KVSTORE_METADATA_PASSWORD_FILE": self.metadata_password}
        lines = [f"export {name}={shlex.quote(str(value))}" for name, value in names.items()]
        return "\n".join(["# Lets whatever this shell starts into the local cluster: . client.env", *lines, ""])
