"""`kvstore up --secure`: the printed commands work word for word with real programs and processes, and every listener
refuses unauthenticated peers."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from http.client import HTTPSConnection
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import redis
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from kazoo.security import OPEN_ACL_UNSAFE

from kvstore.access import AddUser
from kvstore.client import Client
from kvstore.devcluster import authority
from kvstore.devcluster.authority import CertificateAuthority
from kvstore.devcluster.local import secure_folder
from kvstore.devcluster.secure_folder import HOSTS, SecureFolder
from kvstore.env.files.private import write_private
from kvstore.errors import StoreError
from kvstore.meta.connect import connect
from kvstore.meta.tables.access import AccessStore
from kvstore.proto import bookkeeper as wire
from tests.cluster.harness import Cluster, running_cluster
from tests.commands import Done, kvstore
from tests.source import ROOT
from tests.stand_ins import ensure_programs

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    umask = os.umask(0)  # `up` must make its files private by itself
    try:
        with running_cluster(tmp_path_factory.mktemp("up secure"), secure=True) as started:
            yield started
    finally:
        os.umask(umask)


def folder_of(cluster: Cluster) -> SecureFolder:
    found = secure_folder(cluster.file)
    assert found is not None
    return found


def environment(cluster: Cluster) -> dict[str, str]:
    """Return the environment of a shell that has sourced the file that `up` writes."""
    told = subprocess.run(
        ["sh", "-c", f'. "{folder_of(cluster).environment}"; env -0'],
        capture_output=True, text=True, timeout=60, check=True, env={"PATH": os.environ["PATH"]},
    ).stdout  # fmt: skip
    return dict(each.split("=", 1) for each in told.split("\0") if each.startswith("KVSTORE_"))


def on(cluster: Cluster, *arguments: str, let_in: bool = True, stdin: str = "") -> Done:
    """Run a command with the environment file that `up` has written, or without it."""
    environ = environment(cluster) if let_in else None
    return kvstore(*arguments, "--data-dir", str(cluster.local.data_dir), environ=environ, stdin=stdin)


def printed(cluster: Cluster) -> str:
    """Return the output of `up` for a running cluster."""
    answer = on(cluster, "up", "--detach", let_in=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def shell(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script with a minimal environment."""
    return subprocess.run(
        ["sh", "-e", "-c", script],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def commands_in(text: str) -> list[str]:
    """Return the commands in a text; Python code is passed to Python."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    heads = {line: line.removeprefix("Python: ") for line in lines}
    return [
        line if line == body else f"{sys.executable} - <<'EOF'\nimport kvstore.client\n{body}\nEOF"
        for line, body in heads.items()
    ]


def test_printed_commands_work_and_show_no_password(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_programs(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    text = printed(cluster)
    assert folder_of(cluster).login().password.decode() not in text
    commands = commands_in(text)
    programs = [".", "kvstore", "kvstore", "kvstore", "redis-cli", "curl", sys.executable]
    assert [program for program, line in zip(programs, commands, strict=True) if program not in line] == []
    enters, *others = commands
    assert enters.startswith(". ")
    said = []
    for each in others:
        answer = shell(f"{enters}\n{each}")
        assert answer.returncode == 0, f"{each}: {answer.stdout} {answer.stderr}"
        said.append(answer.stdout)
        refused = shell(each)
        assert refused.returncode != 0 or "NOAUTH" in refused.stdout, f"{each}: done without what lets in"
    put, locate, fsck, set_by_redis, page, _ = said
    assert put.strip() == "hello"
    assert locate.split()[:3] == ["TOKEN", "PARTITION", "LEADER"]
    assert "Healthy" in fsck or "No data is lost" in fsck
    assert set_by_redis == "OK\n"
    assert json.loads(page)["id"] == "n1"
    assert shell(f"{enters}\n{commands[1].split('&&')[1].replace('greeting', 'answer')}").stdout == "42"


def test_commands_on_its_folder_work_and_name_missing_files(cluster: Cluster) -> None:
    looks: list[Done] = []

    def are_ready() -> bool:
        looks.append(on(cluster, "status", "--json"))
        found = json.loads(looks[-1].stdout)
        return looks[-1].returncode < 2 and all(node["ready"] and node["python"] for node in found["nodes"])

    cluster.wait_until(are_ready, "all nodes are told as ready")
    found = json.loads(looks[-1].stdout)
    assert [node["id"] for node in found["nodes"]] == ["n1", "n2", "n3"]
    assert found["access_on"] is True
    for command in (("partition", "list"), ("bookie", "list"), ("ledger", "list"), ("user", "list"), ("ring", "show")):
        answer = on(cluster, *command)
        assert answer.returncode == 0, f"{command}: {answer.stderr}"
        without = on(cluster, *command, let_in=False)
        assert without.returncode == 1
        assert "client.env" in without.stderr, without.stderr


def test_up_keeps_every_file_from_other_accounts(cluster: Cluster) -> None:
    found = {path: path.lstat().st_mode for path in cluster.local.data_dir.rglob("*")}
    readable = [f"{stat.S_IMODE(mode):04o} {path}" for path, mode in found.items() if stat.S_IMODE(mode) & 0o077]
    assert readable == []
    names = {path.name for path in found}
    assert {"snapshot.0", "log.1", "n1.audit.jsonl", "LOCK", "client.pem", "cluster.json"} <= names


def test_bookies_accept_the_tools_certificate_and_no_clients(cluster: Cluster) -> None:
    ledger = int(json.loads(on(cluster, "ledger", "list", "--json").stdout)[0]["id"])
    folder = folder_of(cluster)
    answers = {}
    for name in ("client.pem", "bookie-tools.pem", "n2.pem"):
        context = ssl.create_default_context(cafile=str(folder.ca))
        context.load_cert_chain(folder.path / name)
        asked = wire.encode_read(1, ledger, wire.LAST_ENTRY)
        answers[name] = {heard(cluster.address(node, "bookie"), context, asked) != b"" for node in ("n1", "n2", "n3")}
    assert answers == {"client.pem": {False}, "bookie-tools.pem": {True}, "n2.pem": {True}}


def verified(cluster: Cluster, node: str = "n1", **options: str) -> redis.Redis:
    folder = folder_of(cluster)
    own = {"ssl_certfile": str(folder.client), "ssl_keyfile": str(folder.client)}
    return cluster.redis(node, ssl=True, ssl_ca_certs=str(folder.ca), **own, **options)


def test_endpoints_refuse_plaintext_and_clients_without_a_certificate(cluster: Cluster) -> None:
    folder = folder_of(cluster)
    with pytest.raises(redis.RedisError):
        cluster.redis("n1").ping()
    with pytest.raises(StoreError), Client(cluster.url) as client:
        client.get(b"answer")
    own = f"ca={folder.ca}".replace(" ", "%20")
    nobody = "kvs://{}:{}?{}".format(*cluster.address("n1", "grpc"), own)
    with pytest.raises(StoreError), Client(nobody) as client:
        client.get(b"answer")
    for kind in ("resp", "grpc", "bookie"):
        assert heard(cluster.address("n1", kind), ssl.create_default_context(cafile=str(folder.ca))) == b"", kind


def heard(address: tuple[str, int], context: ssl.SSLContext, said: bytes = b"*1\r\n$4\r\nPING\r\n") -> bytes:
    """Return what a listener answers; nothing if it closes the connection."""
    with (
        suppress(OSError),
        socket.create_connection(address, timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=address[0]) as connection,
    ):
        connection.sendall(said)
        return connection.recv(100)
    return b""


def test_certificate_without_the_right_password_reads_nothing(cluster: Cluster) -> None:
    login = folder_of(cluster).login()
    with pytest.raises(redis.RedisError, match="already authenticated"):
        verified(cluster).get("answer")
    with pytest.raises(redis.RedisError, match="invalid"):
        verified(cluster, username="admin", password="guessed").get("answer")
    assert verified(cluster, username=login.user, password=login.password.decode()).ping() is True


def test_gateway_accepts_the_same_users_as_other_endpoints(cluster: Cluster) -> None:
    folder, (host, port) = folder_of(cluster), cluster.address("n1", "http")
    known = ssl.create_default_context(cafile=str(folder.ca))
    known.load_cert_chain(folder.client)

    def status(method: str, password: str = "", context: ssl.SSLContext = known) -> int:
        word = base64.b64encode(f"admin:{password}".encode()).decode()
        headers = {"Authorization": f"Basic {word}"} if password else {}
        connection = HTTPSConnection(host, port, timeout=30, context=context)
        with closing(connection):
            connection.request(method, "/v1/keys/of%20http", b"v" if method == "PUT" else None, headers)
            return connection.getresponse().status

    password = folder.login().password.decode()
    for method in ("PUT", "GET", "DELETE"):
        assert status(method) == status(method, "guessed") == 401, "a certificate alone is nobody"
        assert status(method, password, ssl.create_default_context(cafile=str(folder.ca))) == 403, "no certificate"
        assert status(method, password) == 200


def test_zookeeper_shows_nothing_to_other_users(cluster: Cluster) -> None:
    of_metadata = ("KVSTORE_METADATA_USER", "KVSTORE_METADATA_PASSWORD_FILE")
    files = {name: value for name, value in environment(cluster).items() if name not in of_metadata}
    assert len(files) == len(environment(cluster)) - len(of_metadata)
    answer = kvstore("ledger", "list", "--metadata", cluster.file.zookeeper, environ=files)
    assert answer.returncode == 1
    assert "ZooKeeper denies access" in answer.stderr


def test_zookeeper_lets_other_users_create_nothing_beside_the_root(cluster: Cluster) -> None:
    with closing_kazoo(cluster.file.zookeeper.partition("/")[0]) as other:
        assert "kvstore" in other.get_children("/")
        with pytest.raises(NoAuthError):
            other.create("/beside", b"")
        with pytest.raises(NoAuthError):
            other.set_acls("/", OPEN_ACL_UNSAFE)


@contextmanager
def closing_kazoo(address: str) -> Iterator[KazooClient]:
    client = KazooClient(address)
    client.start(timeout=60)
    try:
        yield client
    finally:
        client.stop()
        client.close()


def test_secure_cluster_is_the_same_after_down_and_up(cluster: Cluster) -> None:
    folder = folder_of(cluster)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    login = folder.login()
    own = {"username": login.user, "password": login.password.decode()}
    verified(cluster, **own).set("kept", "over a restart")
    assert on(cluster, "down", let_in=False).returncode == 0
    text = printed(cluster)
    assert "client.env" in text
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    assert verified(cluster, **own).get("kept") == b"over a restart"
    with pytest.raises(redis.RedisError):
        cluster.redis("n1").ping()


async def add_users(cluster: Cluster, names: Sequence[str]) -> None:
    """Add users to the table without a node that could refuse them, as an earlier release did."""
    store = await connect(cluster.file.zookeeper, login=folder_of(cluster).metadata_login())
    try:
        for name in names:
            await AccessStore(store).change(AddUser(name))
    finally:
        await store.close()


def test_cluster_restarts_when_users_have_the_names_of_its_nodes(cluster: Cluster) -> None:
    asyncio.run(add_users(cluster, cluster.ids))
    assert on(cluster, "down", let_in=False).returncode == 0
    printed(cluster)
    login = folder_of(cluster).login()
    verified(cluster, username=login.user, password=login.password.decode()).set("after", "the restart")
    text = "user n1: it has the name of a node or a bookie"
    cluster.wait_until(lambda: text in on(cluster, "status").stdout, "status names the user")
    for node in cluster.ids:
        assert on(cluster, "user", "remove", node).returncode == 0
        refused = on(cluster, "user", "add", node.upper(), "--password-stdin", stdin="a long password\n")
        assert (refused.returncode != 0, "the name of a node" in refused.stderr) == (True, True), refused.stderr
    cluster.wait_until(lambda: on(cluster, "status").returncode == 0, "all is well again")


def readyz(cluster: Cluster) -> tuple[int, str]:
    """Return n1's answer to a probe that does not verify the certificate."""
    host, port = cluster.address("n1", "http")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urlopen(f"https://{host}:{port}/readyz", timeout=10, context=context) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def replace_certificate(cluster: Cluster, days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give n1 a certificate that expires in this many days."""
    folder = folder_of(cluster)
    monkeypatch.setattr(authority, "ISSUED_DAYS", days)
    monkeypatch.setattr(authority, "_BEFORE", timedelta(days=3))
    write_private(folder.path / "n1.pem", CertificateAuthority(folder.path)._issued("n1", HOSTS))
    os.kill(cluster.pid("n1"), signal.SIGHUP)


def test_expiring_certificate_is_reported_and_expired_one_is_not_ready(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.wait_until(lambda: readyz(cluster) == (200, "ok\n"), "n1 is ready")
    cluster.wait_until(lambda: on(cluster, "status").returncode == 0, "all is well, and no ledger owes a copy")
    replace_certificate(cluster, 10, monkeypatch)

    def told() -> str:
        return on(cluster, "status").stdout

    cluster.wait_until(lambda: "node n1: its certificate expires in 9 days" in told(), "status tells it")
    cluster.wait_until(lambda: readyz(cluster)[0] == 200, "n1 is ready all the same")
    replace_certificate(cluster, -1, monkeypatch)

    def has_expired() -> bool:
        status, text = readyz(cluster)
        return status == 503 and "n1.pem expired at" in text

    cluster.wait_until(has_expired, "n1 is not ready, and says why")
    replace_certificate(cluster, 365, monkeypatch)
    cluster.wait_until(lambda: readyz(cluster)[0] == 200, "n1 is ready again")
    cluster.wait_until(lambda: on(cluster, "status").returncode == 0, "all is well again")


def test_changed_password_stays_changed(cluster: Cluster) -> None:
    """`up` creates an administrator only if there is none, so it cannot bypass existing administrators."""
    changed = on(cluster, "user", "passwd", "admin", "--password-stdin", stdin="another one\n")
    assert changed.returncode == 0, changed.stderr

    def is_known() -> bool:
        with suppress(redis.RedisError):
            return all(verified(cluster, node, username="admin", password="another one").ping() for node in cluster.ids)
        return False

    cluster.wait_until(is_known, "each node has heard of the new password")
    answer = on(cluster, "up", "--detach", let_in=False)
    assert (answer.returncode, "admin.password does not hold the current password" in answer.stderr) == (1, True), (
        answer.stderr
    )
    assert verified(cluster, username="admin", password="another one").ping() is True
    with pytest.raises(redis.RedisError):
        verified(cluster, username="admin", password=folder_of(cluster).login().password.decode()).ping()


def test_up_refuses_to_switch_a_cluster_between_plain_and_secure(cluster: Cluster, tmp_path: Path) -> None:
    document = json.loads((cluster.local.data_dir / "cluster.json").read_text())
    assert document["secure"] is True
    text = json.dumps(document | {"secure": False}).replace(str(cluster.local.data_dir), str(tmp_path))
    (tmp_path / "cluster.json").write_text(text)
    answer = kvstore("up", "--secure", "--detach", "--data-dir", str(tmp_path))
    assert (answer.returncode, "was created without it" in answer.stderr) == (1, True)
