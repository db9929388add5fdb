"""No output of a node contains a secret. Distinctive secrets are set in a real node with TLS, users and a ZooKeeper
login, and then every output is searched for them. Only administrators see connection strings."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import psutil
import pytest
import redis
import trustme
from kazoo.client import KazooClient

from kvstore.client import Client
from kvstore.errors import StoreError
from kvstore.meta import ledger_metadata
from kvstore.types import LedgerId
from tests.cluster.test_zookeeper_acl import KVSTORE, USER, Place
from tests.commands import kvstore
from tests.waiting import wait_until_blocking
from tests.zookeeper_fixture import zookeeper, zookeeper_chroot

__all__ = ["zookeeper", "zookeeper_chroot"]

pytestmark = [pytest.mark.cluster]
ROOT_PASSWORD, READER_PASSWORD = "root-Zq7/hush@1", "reader-Xw9/hush@2"
METADATA_PASSWORD, WRONG = "metadata-Vk3/hush@3", "wrong-Pm5/hush@4"
"""Passwords with characters that a URL must escape. The second is a mistyped password, which is as secret."""
ADMIN_PAGES = ("/", "/metrics", "/ui", "/ui/node", "/ui/ledgers?partition=p1", "/ui/users", "/ui/ui.js")
PAGES = (*ADMIN_PAGES, "/healthz", "/readyz", "/clusterz", "/ui/ledgers?partition=p9", "/nothing")
COMMANDS = (
    *("status", "status --json", "ring show", "ring status", "partition list --json", "partition show p1 --json"),
    *(
        "ledger list --json",
        "bookie list --json",
        "autorecovery status",
        "autorecovery list",
        "fsck",
        "user list --json",
    ),
    *("role list", "partition pins", "partition show p9", "ledger show 99999", "node drain n9"),
)


class Kept:
    """A node's outputs, by source."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.outputs: dict[str, bytes] = {}
        self.to_others: dict[str, bytes] = {}
        """Outputs for users who are not administrators."""
        self.ca, self.key, self.cert = (place.folder / name for name in ("ca.pem", "key.pem", "cert.pem"))
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.ca))
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(str(self.key))
        issued.cert_chain_pems[0].write_to_path(str(self.cert))

    def keep(self, where: str, what: bytes | str, *, is_admins: bool = True) -> None:
        data = what.encode() if isinstance(what, str) else what
        self.outputs[where] = self.outputs.get(where, b"") + data
        if not is_admins:
            self.to_others[where] = self.to_others.get(where, b"") + data

    def run(self, words: str, environ: Mapping[str, str], *, is_admins: bool = True, stdin: str = "") -> int:
        """Run a command and keep its output."""
        done = kvstore(*words.split(), environ={"KVSTORE_TLS_CA": str(self.ca), **environ}, stdin=stdin)
        self.keep(f"kvstore {words} ({', '.join(environ)})", done.stdout + done.stderr, is_admins=is_admins)
        return done.returncode

    def run_as_process(self, words: str, environ: Mapping[str, str], stdin: str) -> int:
        """Run a command as a process, and keep its output and the arguments that a list of processes shows."""
        line = [*KVSTORE, *words.split()]
        tls = {"KVSTORE_TLS_CA": str(self.ca)}
        with subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **tls, **environ},
        ) as process:
            self.keep("process list", " ".join(psutil.Process(process.pid).cmdline()))
            told, _ = process.communicate(stdin.encode(), timeout=100)
        self.keep(f"kvstore {words} ({', '.join(environ)})", told)
        return process.returncode

    def page(self, path: str, user: str, password: str) -> int:
        request = Request(f"https://127.0.0.1:{self.place.ports['http']}{path}")
        if user:
            login = base64.b64encode(f"{user}:{password}".encode()).decode()
            request.add_header("Authorization", f"Basic {login}")
        context = ssl.create_default_context(cafile=str(self.ca))
        try:
            with urlopen(request, timeout=20, context=context) as answer:
                status, body, headers = answer.status, answer.read(), answer.headers
        except HTTPError as error:
            status, body, headers = error.code, error.read(), error.headers
        self.keep(f"{path} of {user or 'nobody'}", str(headers).encode() + body, is_admins=user == "root")
        return int(status)

    def redis(self, **options: str) -> redis.Redis:
        port = self.place.ports["resp"]
        return redis.Redis(port=port, ssl=True, ssl_ca_certs=str(self.ca), retry=None, socket_timeout=20, **options)

    @property
    def server(self) -> str:
        return f"127.0.0.1:{self.place.ports['grpc']}"


def login_of(user: str, password: str) -> dict[str, str]:
    return {"KVSTORE_USER": user, "KVSTORE_PASSWORD": password}


def secrets_of(kept: Kept) -> dict[str, bytes]:
    """Return every secret of the cluster in each form in which it could be shown."""
    place = kept.place
    lines = kept.key.read_text().splitlines()
    found = {
        "the TLS key": lines[len(lines) // 2].encode(),
        "the cluster's secret": place.secret.read_text().strip().encode(),
        "root's password": ROOT_PASSWORD.encode(),
        "reader's password": READER_PASSWORD.encode(),
        "the metadata store's password": METADATA_PASSWORD.encode(),
        "a mistyped password": WRONG.encode(),
    }
    owner = KazooClient(place.zookeeper, auth_data=[("digest", f"{USER}:{METADATA_PASSWORD}")])
    owner.start()
    try:
        data, _ = owner.get(f"{place.chroot}/access")
        found["the beginning of a password's hash"] = b"scrypt$"
        assert found["the beginning of a password's hash"] in data
        ledger = f"{place.chroot}/ledgers/00/0000/L0000"
        data, _ = owner.get(ledger)
        password = ledger_metadata.decode(LedgerId(0), data).password
        assert len(password) >= 16
        found["a ledger's password"] = password
    finally:
        owner.stop()
        owner.close()
    forms: dict[str, bytes] = {}
    for name, secret in found.items():
        forms |= {
            name: secret,
            f"{name}, quoted": quote(secret, safe="").encode(),
            f"{name}, in hex": secret.hex().encode(),
            f"{name}, in base 64": base64.b64encode(secret).rstrip(b"="),
            f"{name}, by repr": repr(secret)[2:-1].encode(),
            f"{name}, in JSON": json.dumps(secret.decode("latin-1"))[1:-1].encode(),
        }
    return forms


@contextmanager
def running(kept: Kept) -> Iterator[None]:
    """Run the node, founded with an administrator and a reader."""
    place = kept.place
    logs = place.folder / "logs"
    with (place.folder / "n1.log").open("wb") as output:
        line = [*KVSTORE, "node", "run", "--config", str(place.config)]
        process = subprocess.Popen(line, stdout=output, stderr=output)
    try:
        wait_until_blocking(lambda: is_ready(kept), timeout_s=90, what="the node leads")
        kept.keep("process list", " ".join(psutil.Process(process.pid).cmdline()))
        yield
    finally:
        process.terminate()
        assert process.wait(timeout=90) == 0
        for path in (place.folder / "n1.log", *logs.iterdir()):
            kept.keep(path.name, path.read_bytes())


def is_ready(kept: Kept) -> bool:
    try:
        return kept.page("/clusterz", "", "") == 200
    except OSError:
        return False


@pytest.fixture
def kept(zookeeper: str, zookeeper_chroot: str, tmp_path: Path) -> Kept:
    place = Place(zookeeper, zookeeper_chroot, tmp_path)
    place.file.write_text(f"{METADATA_PASSWORD}\n")
    made = Kept(place)
    place.found(place.login + f'[tls]\ncert = "{made.cert}"\nkey = "{made.key}"\nca = "{made.ca}"\n')
    text = place.config.read_text()
    place.config.write_text(f'log_dir = "{tmp_path / "logs"}"\n{text}')
    return made


def found_users(kept: Kept) -> None:
    of_store = {"KVSTORE_METADATA_USER": USER, "KVSTORE_METADATA_PASSWORD_FILE": str(kept.place.file)}
    founding = f"access found root --password-stdin --metadata {kept.place.address}"
    assert kept.run_as_process(founding, of_store, ROOT_PASSWORD) == 0
    wait_until_blocking(lambda: kept.page("/ui", "root", ROOT_PASSWORD) == 200, what="root is known")
    root, server = login_of("root", ROOT_PASSWORD), f"--server {kept.server}"
    assert kept.run(f"user add reader --password-stdin {server}", root, stdin=READER_PASSWORD) == 0
    for words in ("role add reading", "role grant reading read", "user grant reader reading"):
        assert kept.run(f"{words} {server}", root) == 0


def use_commands(kept: Kept) -> None:
    server = f"--server {kept.server}"
    of_store = {"KVSTORE_METADATA_USER": USER, "KVSTORE_METADATA_PASSWORD_FILE": str(kept.place.file)}
    for words in COMMANDS:
        kept.run(f"{words} {server}", login_of("root", ROOT_PASSWORD) | of_store)
    for words in ("status", "ledger list", "user list", "get k"):
        assert (
            kept.run(f"{words} {server}", login_of("reader", READER_PASSWORD), is_admins=False) != 0 or words == "get k"
        )
        assert kept.run(f"{words} {server}", login_of("root", WRONG), is_admins=False) != 0
        assert kept.run(f"{words} {server}", {}, is_admins=False) != 0
    kept.run(
        f"bookie list --metadata {kept.place.address}",
        {"KVSTORE_METADATA_USER": USER, "KVSTORE_METADATA_PASSWORD": WRONG},
    )


def use_endpoints(kept: Kept) -> None:
    for path in PAGES:
        kept.page(path, "root", ROOT_PASSWORD)
        for user, password in (("reader", READER_PASSWORD), ("root", WRONG), ("", "")):
            status = kept.page(path, user, password)
            assert status in (401, 403) or path not in ADMIN_PAGES or (path, user) == ("/metrics", "reader")
    for user, password in (("root", ROOT_PASSWORD), ("reader", READER_PASSWORD), ("root", WRONG)):
        for words in (
            ("INFO",),
            ("CLIENT", "LIST"),
            ("ACL", "WHOAMI"),
            ("GET", "k"),
            ("SET", "k", "v"),
            ("DBSIZE",),
        ):
            try:
                told = repr(kept.redis(username=user, password=password).execute_command(*words))
            except redis.RedisError as error:
                told = str(error)
            kept.keep(f"{' '.join(words)} of {user}", told, is_admins=(user, password) == ("root", ROOT_PASSWORD))


def use_urls(kept: Kept) -> None:
    """Collect errors and the representations of objects."""
    for password, rest in ((READER_PASSWORD, ""), (WRONG, ""), (WRONG, "&unknown=1")):
        url = f"kvs://reader:{quote(password, safe='')}@{kept.server}?ca={kept.ca}{rest}"
        try:
            with Client(url) as client:
                kept.keep("a client's repr", repr(client) + repr(vars(client)), is_admins=False)
                client.put(b"k", b"v")
        except (StoreError, ValueError) as error:
            kept.keep("a client's errors", f"{error!r} {error}", is_admins=False)
    for url in (f"kv://reader:{WRONG}@{kept.server}", f"kv://reader:{quote(WRONG, safe='')}@nohost:x"):
        try:
            Client(url)
        except ValueError as error:
            kept.keep("a client's errors", f"{error!r} {error}", is_admins=False)


def test_outputs_have_no_secret_and_show_metadata_address_to_admins_only(kept: Kept) -> None:
    with running(kept):
        found_users(kept)
        use_endpoints(kept)
        use_commands(kept)
        use_urls(kept)
    assert b'"who":"root"' in kept.outputs["n1.audit.jsonl"].replace(b" ", b""), "the audit log is searched, too"
    [shown] = [told for where, told in kept.outputs.items() if where.startswith("kvstore partition show p1")]
    assert b"epoch" in shown, "commands have said something"
    leaks = [
        f"{name}: {where}"
        for name, secret in secrets_of(kept).items()
        for where, told in kept.outputs.items()
        if secret in told
    ]
    address = kept.place.zookeeper.encode()
    assert address in kept.outputs["/ui of root"], "an administrator is told"
    shown_to_others = [where for where, told in kept.to_others.items() if address in told]
    assert (leaks, shown_to_others) == ([], [])
