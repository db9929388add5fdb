"""Keys of a secure local cluster, beside its nodes: certificates, passwords, and files for clients. Blocking.

    <data-dir>/secure/           0700; every file in it 0600
      ca.pem  ca.key             the authority (kvstore/devcluster/authority.py)
      n1.pem …  client.pem       a key and its certificate: of each node, and one for clients of the front ends
      bookie-tools.pem           the same for commands that read bookies, which accept no client certificates
      admin.password             of the user admin, on one line
      metadata.password          of the nodes' user in the cluster's own ZooKeeper
      client.env                 environment for a shell: `. client.env` gives its commands access
      netrc                      the same for curl

Each `kvstore up` creates what is missing and renews what is about to expire. Two files are never created again, because
new ones would not fit: the authority of existing certificates, and the password that protects the metadata.
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
"""The user that `up` creates. The client certificate has another name, so that it alone does not log in as admin."""
CLIENT = "client"
TOOLS = "bookie-tools"
"""The certificate of operators' commands. Bookies have no users, so they accept only nodes and this certificate."""
METADATA_USER = "kvstore"
HOSTS = ("127.0.0.1", "localhost")
"""The names by which nodes of a local cluster are reached."""
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
        """Create what is missing, for nodes with these ids. Raises OSError. Raises ConfigError, including for
        missing files that can only be created with a new cluster."""
        try:
            from kvstore.devcluster.authority import (
                CertificateAuthority,
            )  # needs a package of the `local` extra
        except ImportError as error:
            raise ConfigError(f"--secure: {error}: {install_hint('local')}") from None
        if self.has_own_zookeeper and not is_new and not self.metadata_password.exists():
            raise ConfigError(
                f"{self.metadata_password} is missing; restore it. The cluster's metadata is protected with this "
                "password, and a new one does not open it"
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
        """Return the TLS files of a node's listeners, and of its connections to others."""
        own = self.path / f"{node}.pem"
        return Tls(cert=own, key=own, ca=self.ca, verify_clients=True)

    @property
    def tls(self) -> Tls:
        """The TLS files of a client."""
        return Tls(cert=self.client, key=self.client, ca=self.ca)

    def login(self) -> Login:
        """Return the login of the administrator that `up` created. Raises ConfigError."""
        return Login(ADMIN, password_in(self.password_file))

    def metadata_login(self) -> MetadataLogin | None:
        """Return the nodes' login at the metadata store; None if that is not the cluster's own ZooKeeper. Raises
        ConfigError."""
        if not self.has_own_zookeeper:
            return None
        return MetadataLogin(METADATA_USER, password_in(self.metadata_password))

    def url(self, addresses: Sequence[str]) -> str:
        """Return the URL for a Python client of servers with these gRPC addresses. The login is in its environment."""
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
        return "\n".join(["# Gives commands of this shell access to the local cluster: . client.env", *lines, ""])
