"""HTTP pages of the nodes of a local cluster, requested without the user's proxies and logins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvstore.devcluster import pages
from kvstore.devcluster.pages import http_ok, is_login_rejected
from kvstore.devcluster.secure_folder import SecureFolder
from tests.beside import served
from tests.waiting import PATIENCE_S


@contextmanager
def answering(code: int, folder: SecureFolder | None = None) -> Iterator[str]:
    """The address of a server with one answer."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log requests."""

    server = HTTPServer(("127.0.0.1", 0), Pages)
    if folder is not None:
        context = folder.of_node("n1").server_context()
        assert context is not None
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with served(server):
        yield f"127.0.0.1:{server.server_port}"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is a thread of this process, which can be delayed by two seconds."""
    monkeypatch.setattr(pages, "_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def folder(tmp_path: Path) -> SecureFolder:
    made = SecureFolder(tmp_path, has_own_zookeeper=False)
    made.make(["n1"], is_new=True)
    return made


@pytest.mark.parametrize("is_secure", [False, True])
def test_no_proxy_of_the_environment_is_used(
    folder: SecureFolder, monkeypatch: pytest.MonkeyPatch, is_secure: bool
) -> None:
    """The proxy's loopback address is on another machine."""
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    own = folder if is_secure else None
    with answering(200, own) as address:
        assert http_ok(address, "/clusterz", own)


@pytest.mark.parametrize(("code", "is_one"), [(401, True), (403, False), (503, False), (200, False)])
def test_login_with_a_wrong_password_is_rejected(folder: SecureFolder, code: int, is_one: bool) -> None:
    with answering(code, folder) as address:
        assert is_login_rejected(address, folder) is is_one
