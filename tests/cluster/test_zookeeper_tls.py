"""A node and the commands use a ZooKeeper that accepts only TLS, and the node advertises a configured address. Real
processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.devcluster.zookeeper import free_ports
from tests.commands import kvstore
from tests.meta.zookeeper.test_store_tls import Secured, secured
from tests.waiting import wait_until_blocking

__all__ = ["secured"]

pytestmark = [pytest.mark.cluster]
KVSTORE = [sys.executable, "-m", "kvstore"]


def test_node_joins_by_its_advertised_host_and_commands_use_tls_files(secured: Secured, tmp_path: Path) -> None:
    tls = secured.client()
    files = {"CA": tls.ca, "CERT": tls.cert, "KEY": tls.key}
    environ = {f"KVSTORE_ZOOKEEPER_TLS_{name}": str(path) for name, path in files.items()}

    def command(*arguments: str) -> str:
        answer = kvstore(*arguments, "--zookeeper", secured.address, "--json", environ=environ)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    secret = tmp_path / "cluster.secret"
    init = ("cluster", "init", "--unsafe", "--node", "n1", "--replicas", "1", "--secret-file", str(secret))
    assert json.loads(command(*init))["founded"]
    ports = dict(zip(("bookie", "resp", "grpc", "http"), free_ports(4), strict=True))
    config = tmp_path / "node.toml"
    config.write_text(
        f'id = "n1"\nzookeeper = "{secured.address}"\ndata_dir = "{tmp_path / "n1"}"\nadvertise = "localhost"\n'
        f'secret_file = "{secret}"\n'
        + "".join(f'{name} = "127.0.0.1:{port}"\n' for name, port in ports.items())
        + "[zookeeper_tls]\n"
        + "".join(f'{name.lower()} = "{path}"\n' for name, path in files.items())
    )
    found: list[str] = []

    def there() -> list[str]:  # where those are that have a session
        found[:] = [each["address"] for each in json.loads(command("bookie", "list")) if each["address"]]
        return found

    process = subprocess.Popen([*KVSTORE, "node", "run", "--config", str(config)], stderr=subprocess.DEVNULL)
    try:
        wait_until_blocking(lambda: there() != [], timeout_s=90, what="a bookie registers")
        assert found == [f"localhost:{ports['bookie']}"]
    finally:
        process.terminate()
        assert process.wait(timeout=90) == 0
