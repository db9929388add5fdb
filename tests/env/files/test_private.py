"""Secrets in files: each reader refuses a file that other accounts can use, and folders are closed to them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import trustme

from kvstore.devcluster.authority import CertificateAuthority
from kvstore.env.certificates import Certificates
from kvstore.env.files.private import open_private, private_folder, private_opener, read_private, write_private
from kvstore.env.secret import make_secret, read_secret
from kvstore.env.tls import Tls
from kvstore.errors import ConfigError
from kvstore.meta.login import Acl, Mechanism, metadata_login
from kvstore.rpc.login import login_of_environment

REFUSED = "other accounts can use this secret: expected mode 0600, got 0644"
NUMBERS = count()
Reader = Callable[[Path], object]


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """Create a folder with one file of each kind of secret, of mode 0600."""
    issued = trustme.CA().issue_cert("127.0.0.1")
    write_private(tmp_path / "own.pem", issued.private_key_and_cert_chain_pem.bytes())
    write_private(tmp_path / "password", b"word\n")
    make_secret(tmp_path / "cluster.secret")
    private_folder(tmp_path / "authority")
    CertificateAuthority(tmp_path / "authority")
    return tmp_path


def tls_of(folder: Path) -> Tls:
    return Tls(cert=folder / "own.pem", key=folder / "own.pem")


READERS: dict[str, tuple[str, Reader]] = {
    "cluster secret": ("cluster.secret", lambda it: read_secret(it / "cluster.secret")),
    "client password": (
        "password",
        lambda it: login_of_environment({"KVSTORE_USER": "a", "KVSTORE_PASSWORD_FILE": str(it / "password")}),
    ),
    "metadata password": ("password", lambda it: metadata_login("a", it / "password", Mechanism.DIGEST, Acl.CREATOR)),
    "key of a server": ("own.pem", lambda it: tls_of(it).server_context()),
    "key of a client": ("own.pem", lambda it: tls_of(it).client_context()),
    "key for gRPC": ("own.pem", lambda it: tls_of(it).contents()),
    "key of a node": ("own.pem", lambda it: Certificates(tls_of(it))),
    "key of the authority": (
        "authority/ca.key",
        lambda it: CertificateAuthority(it / "authority").issue(f"n{next(NUMBERS)}", ()),
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_secret_file_is_refused_when_other_accounts_can_read_it(secrets: Path, kind: str) -> None:
    name, read = READERS[kind]
    read(secrets)
    (secrets / name).chmod(0o644)
    with pytest.raises((ConfigError, OSError), match=REFUSED) as caught:
        read(secrets)
    assert f"chmod 600 {secrets / name}" in str(caught.value)


def test_new_key_that_others_can_read_does_not_replace_the_old_one(secrets: Path) -> None:
    certificates = Certificates(tls_of(secrets))
    before = certificates.contents
    write_private(secrets / "own.pem", trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.bytes())
    (secrets / "own.pem").chmod(0o640)
    assert not certificates.poll()
    assert (certificates.is_failing, certificates.contents) == (True, before)
    (secrets / "own.pem").chmod(0o600)
    assert certificates.poll()


def test_secret_of_root_may_be_readable_by_its_group_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a file of root's")
    path = tmp_path / "secret"
    write_private(path, b"x")
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    path.chmod(0o440)
    assert read_private(path) == b"x"
    for mode in (0o444, 0o460, 0o404):
        path.chmod(mode)
        with pytest.raises(PermissionError, match=f"got {mode:04o}"):
            open_private(path)


def test_files_and_folders_are_created_for_their_owner_with_any_umask(tmp_path: Path) -> None:
    private_folder(tmp_path / "parent" / "folder")
    write_private(tmp_path / "file", b"x")
    with open(tmp_path / "opened", "wb", opener=private_opener):
        pass
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("parent/folder", "file", "opened")]
    assert modes == [0o700, 0o600, 0o600]


def test_existing_folder_is_closed_unless_everybody_may_write_to_it(tmp_path: Path) -> None:
    own, sticky = tmp_path / "own", tmp_path / "sticky"
    own.mkdir(0o755)
    sticky.mkdir()
    sticky.chmod(0o1777)
    private_folder(own)
    private_folder(sticky)
    assert (stat.S_IMODE(own.stat().st_mode), stat.S_IMODE(sticky.stat().st_mode)) == (0o700, 0o1777)
