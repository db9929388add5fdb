"""A real etcd process: it is found, stopped and killed, and refused if it is too old or missing."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from kvstore.devcluster import etcd as module
from kvstore.devcluster.etcd import EtcdProcess, find_etcd, find_running, restart, start_standalone
from kvstore.errors import ConfigError


def program(folder: Path, says: str) -> Path:
    path = folder / "etcd"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_program_without_output_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = program(tmp_path, "")
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "_ASK_TIMEOUT_S", 0.2)
    with pytest.raises(ConfigError, match=r"etcd --version did not answer within 0\.2 s"):
        find_etcd()


def test_without_etcd_the_error_names_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"no etcd on the PATH; install it .* run `make setup`"):
        find_etcd()
    beside = program(tmp_path, "etcd Version: 3.5.1")
    assert find_etcd() == beside


@pytest.mark.parametrize("says", ["etcd Version: 3.3.25", "etcd Version: 2.3.8", "something else", ""])
def test_etcd_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    program(tmp_path, says)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=r"expected etcd 3\.4 or newer, got"):
        find_etcd()


def test_reused_process_id_is_not_mistaken_for_a_server(tmp_path: Path) -> None:
    assert find_running(tmp_path) is None
    (tmp_path / "etcd.pid").write_text(f"{os.getpid()} 127.0.0.1:1\n")
    assert find_running(tmp_path) is None
    EtcdProcess(tmp_path, "127.0.0.1:1", os.getpid()).kill()


@pytest.mark.needs_etcd
def test_server_is_found_by_its_directory_until_it_is_stopped(tmp_path: Path) -> None:
    started = start_standalone(tmp_path)
    try:
        found = find_running(tmp_path)
        assert found is not None
        assert (found.pid, found.address) == (started.pid, started.address)
        found.wait_ready()
        found.stop()
        assert find_running(tmp_path) is None
        assert not started.is_running()
        assert restart(started).address == started.address
    finally:
        again = find_running(tmp_path)
        if again is not None:
            again.kill()


@pytest.mark.needs_etcd
@pytest.mark.parametrize("text", [None, "", "1 127.0.0.1:1\n"], ids=["missing", "empty", "of an earlier one"])
def test_server_is_found_whose_number_was_not_written_down(tmp_path: Path, text: str | None) -> None:
    """Its starter was just killed; a second etcd would wait for its data in vain."""
    server = start_standalone(tmp_path)
    try:
        (tmp_path / "etcd.pid").unlink()
        if text is not None:
            (tmp_path / "etcd.pid").write_text(text)
        found = find_running(tmp_path)
        assert found is not None
        assert (found.pid, found.address) == (server.pid, server.address)
    finally:
        server.kill()
    assert find_running(tmp_path) is None


@pytest.mark.needs_etcd
def test_server_does_not_inherit_the_logins_of_its_starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVSTORE_PASSWORD", "KVSTORE_METADATA_PASSWORD"):
        monkeypatch.setenv(name, "s3cret")
    process = start_standalone(tmp_path)
    try:
        assert "s3cret" not in psutil.Process(process.pid).environ().values()
    finally:
        process.kill()
