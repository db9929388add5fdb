"""The files of a secure local cluster: created once, renewed in time, and private to the owner."""

from __future__ import annotations

import socket
import ssl
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.devcluster import authority
from kvstore.devcluster.authority import CertificateAuthority
from kvstore.devcluster.secure_folder import SecureFolder
from kvstore.env.certificates import Certificates, expiry_of
from kvstore.errors import ConfigError

NODES = ["n1", "n2", "n3"]


@pytest.fixture
def folder(tmp_path: Path) -> SecureFolder:
    made = SecureFolder(tmp_path, has_own_zookeeper=True)
    made.make(NODES, is_new=True)
    return made


def contents(folder: SecureFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.path.iterdir()}


def test_only_the_owner_can_read_the_files(folder: SecureFolder) -> None:
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()}
    assert set(modes.values()) == {0o600}
    assert set(modes) == {
        *("ca.pem", "ca.key", "client.pem", "bookie-tools.pem", "n1.pem", "n2.pem", "n3.pem"),
        *("admin.password", "metadata.password", "client.env", "netrc"),
    }


def test_existing_files_are_kept_and_missing_ones_are_created(folder: SecureFolder) -> None:
    before = contents(folder)
    folder.make(NODES, is_new=True)
    assert contents(folder) == before
    (folder.path / "n2.pem").unlink()
    folder.make(NODES, is_new=True)
    after = contents(folder)
    assert {name for name in before if before[name] != after[name]} == {"n2.pem"}


def test_expiring_certificate_is_replaced_and_its_authority_stays(
    folder: SecureFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(folder)
    monkeypatch.setattr(authority, "RENEW_DAYS", authority.ISSUED_DAYS)
    folder.make(NODES, is_new=True)
    after = contents(folder)
    assert {name for name in before if before[name] != after[name]} == {
        "client.pem",
        "bookie-tools.pem",
        "n1.pem",
        "n2.pem",
        "n3.pem",
    }
    assert expiry_of(after["n1.pem"]) >= expiry_of(before["n1.pem"])


def test_incomplete_authority_is_created_again(tmp_path: Path) -> None:
    (tmp_path / "ca.key").write_text("half of a")
    made = CertificateAuthority(tmp_path).issue("n1", ("127.0.0.1",))
    assert made.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")


@pytest.mark.parametrize("spoil", ["gone", "another", "Dear Sir"])
def test_authority_without_its_key_reports_that_it_issues_nothing(tmp_path: Path, spoil: str) -> None:
    made, key = CertificateAuthority(tmp_path), tmp_path / "ca.key"
    made.issue("n1", ("127.0.0.1",))
    if spoil == "gone":
        key.unlink()
    elif spoil == "another":
        (tmp_path / "other").mkdir()
        CertificateAuthority(tmp_path / "other")
        key.write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    else:
        key.write_text(spoil)
    CertificateAuthority(tmp_path).issue("n1", ("127.0.0.1",))  # a certificate exists
    with pytest.raises(ConfigError, match=str(tmp_path)):
        CertificateAuthority(tmp_path).issue("n2", ("127.0.0.1",))
    assert not (tmp_path / "n2.pem").exists()


def greeted(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> tuple[dict[str, object], dict[str, object]]:
    """Exchange the certificates of a server and a client. Raises SSLError."""
    ours, theirs = socket.socketpair()

    def serve() -> dict[str, object]:
        with server.wrap_socket(ours, server_side=True) as connection:
            shown = connection.getpeercert()
            connection.sendall(b"x")
            return shown

    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(serve)
        with client.wrap_socket(theirs, server_hostname=host) as connection:
            assert connection.recv(1) == b"x"
            shown = connection.getpeercert()
        return serving.result(), shown


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "n1"])
def test_nodes_and_clients_know_each_other_by_them(folder: SecureFolder, host: str) -> None:
    node = Certificates(folder.of_node("n1"))
    client, server = greeted(node.serving, folder.tls.client_context(), host)
    assert client["subject"] == ((("commonName", "client"),),)
    assert server["subject"] == ((("commonName", "n1"),),)
    names = [value for _, value in client["subjectAltName"]]  # type: ignore[attr-defined]
    assert names == ["client"], "no name of a node: it would be let in as one"
    greeted(node.serving, Certificates(folder.of_node("n2")).calling, host)


def test_another_folder_with_a_partition_name_is_unknown(folder: SecureFolder, tmp_path: Path) -> None:
    other = SecureFolder(tmp_path / "other", has_own_zookeeper=True)
    other.make(["n1"], is_new=True)
    with pytest.raises((ssl.SSLError, OSError, AssertionError)):
        greeted(Certificates(folder.of_node("n1")).serving, other.tls.client_context(), "127.0.0.1")


def test_openssl_itself_finds_nothing_amiss(folder: SecureFolder) -> None:
    for name in ("n1", "client"):
        command = ["openssl", "verify", "-x509_strict", "-CAfile", folder.ca, folder.path / f"{name}.pem"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr


def test_client_files_name_the_user_and_paths_and_not_the_password(folder: SecureFolder) -> None:
    login = folder.login()
    assert login.user == "admin"
    assert len(login.password) >= 32
    said = subprocess.run(
        ["sh", "-c", f". {folder.environment}; env"], capture_output=True, text=True, check=True, env={}
    ).stdout
    assert f"KVSTORE_TLS_CA={folder.ca}\n" in said
    assert f"KVSTORE_PASSWORD_FILE={folder.path}/admin.password\n" in said
    assert login.password.decode() not in said
    assert login.password.decode() in folder.netrc.read_text()


def test_passwords_differ_from_cluster_to_cluster(folder: SecureFolder, tmp_path: Path) -> None:
    other = SecureFolder(tmp_path / "other", has_own_zookeeper=False)
    other.make(NODES, is_new=True)
    own = folder.metadata_login()
    assert own is not None
    assert len({folder.login().password, other.login().password, own.password}) == 3
    assert other.metadata_login() is None


def test_path_with_signs_of_a_shell_or_a_url_is_still_one(tmp_path: Path) -> None:
    odd = SecureFolder(tmp_path / "a &b's", has_own_zookeeper=False)
    odd.make(["n1"], is_new=True)
    said = subprocess.run(
        ["sh", "-c", f'. "{odd.environment}"; printf %s "$KVSTORE_TLS_CA"'], capture_output=True, text=True, check=True
    )
    assert said.stdout == str(odd.ca)
    from kvstore.client.core.config import parse_url

    assert parse_url(odd.url(["127.0.0.1:1"])).tls == odd.tls


@pytest.mark.parametrize("damaged", ["", "-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n"])
def test_damaged_certificate_of_the_authority_is_named(folder: SecureFolder, damaged: str) -> None:
    (folder.path / "ca.pem").write_text(damaged)
    with pytest.raises(ConfigError, match=r"ca\.pem: expected a certificate, got .*; restore it"):
        folder.make(NODES, is_new=False)


def test_no_authority_takes_the_place_of_one_whose_certificates_are_there(folder: SecureFolder) -> None:
    """Running nodes would load it and refuse each other's certificates."""
    (folder.path / "ca.pem").unlink()
    before = contents(folder)
    with pytest.raises(
        ConfigError, match=r"ca\.pem is missing, but it issued bookie-tools\.pem, client\.pem, n1\.pem, .* restore it"
    ):
        folder.make(NODES, is_new=False)
    assert contents(folder) == before
    for each in [*folder.path.glob("*.pem"), folder.path / "ca.key"]:
        each.unlink()
    folder.make(NODES, is_new=False)
    greeted(Certificates(folder.of_node("n1")).serving, folder.tls.client_context(), "127.0.0.1")


def test_no_other_password_is_made_for_metadata_that_are_closed_by_one(folder: SecureFolder) -> None:
    folder.metadata_password.unlink()
    with pytest.raises(ConfigError, match=r"metadata\.password is missing; restore it"):
        folder.make(NODES, is_new=False)
    assert not folder.metadata_password.exists()
