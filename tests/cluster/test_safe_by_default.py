"""A cluster whose nodes other machines could reach serves no client until access control is set up. Then its
certificates are replaced under load. Real processes. The address that is no loopback by its text is 127.1, so that
none is reached."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import redis

from kvstore.client import Client
from kvstore.client.core.config import parse_url
from kvstore.errors import NotAuthenticated
from kvstore.rpc.login import Login
from tests.beside import beside
from tests.cluster.test_tls import Secured, secured_cluster
from tests.commands import Done, kvstore
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.cluster]
PASSWORD = "a long one"
REST_S = 0.05
"""Pause of each worker between two rounds in seconds, because each TLS handshake of a round takes some milliseconds
of two processors."""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_cluster(tmp_path_factory.mktemp("safe"), "n3", addressed=for_others) as found:
        yield found


def for_others(text: str) -> str:
    """Return a node's file with a Redis address that is not loopback by its text."""
    found = text.replace('resp = "127.0.0.1:', 'advertise = "127.0.0.1"\nresp = "127.1:')
    assert "127.1:" in found
    return found


def redis_of(secured: Secured, node: str, **options: str) -> redis.Redis:
    own = str(secured.of_client)
    return secured.cluster.redis(
        node, ssl=True, ssl_ca_certs=str(secured.ca), ssl_certfile=own, ssl_keyfile=own, **options
    )


def root_of(secured: Secured, node: str) -> redis.Redis:
    return redis_of(secured, node, username="root", password=PASSWORD)


def url_of(secured: Secured) -> str:
    return secured.url("n1", "n2", "n3") + f"&cert={secured.of_client}&key={secured.of_client}"


def serial_of(secured: Secured, node: str, endpoint: str) -> str:
    """Return the serial number of the certificate that a listener presents."""
    context = ssl.create_default_context(cafile=str(secured.ca))
    context.load_cert_chain(secured.of_client)
    context.set_alpn_protocols(["h2" if endpoint == "grpc" else "http/1.1"])
    host, port = secured.cluster.address(node, endpoint)
    with (
        socket.create_connection((host, port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return str((connection.getpeercert() or {})["serialNumber"])


def command(secured: Secured, *words: str) -> Done:
    """Run a command as root."""
    own = {"KVSTORE_TLS_CA": secured.ca, "KVSTORE_TLS_CERT": secured.of_client, "KVSTORE_TLS_KEY": secured.of_client}
    environ = {name: str(path) for name, path in own.items()} | {"KVSTORE_USER": "root", "KVSTORE_PASSWORD": PASSWORD}
    return kvstore(*words, environ=environ, stdin=PASSWORD)


def is_done(secured: Secured, what: Callable[[redis.Redis], object]) -> bool:
    """Return True if every node executes this for root."""
    try:
        return all(what(root_of(secured, node)) for node in secured.cluster.ids)
    except redis.RedisError:
        return False


@pytest.fixture(scope="module")
def founded(secured: Secured) -> Secured:
    """Found access control. No client was served before; afterwards root may read and write."""
    cluster = secured.cluster
    for node in cluster.ids:
        for one in (redis_of(secured, node), root_of(secured, node)):
            with pytest.raises(redis.RedisError, match="kvstore access found NAME"):
                one.get("a")
        cluster.wait_until(lambda node=node: secured.https(node, "/readyz") == b"ok\n", f"{node} is ready")
    with pytest.raises(NotAuthenticated, match="kvstore access found NAME"), Client(url_of(secured)) as client:
        client.get(b"a")
    where = ("--password-stdin", "--zookeeper", cluster.file.zookeeper)
    done = command(secured, "access", "found", "root", *where)
    assert done.returncode == 0, done.stderr
    cluster.wait_until(lambda: is_done(secured, lambda one: one.acl_whoami() == "root"), "root is known")
    with pytest.raises(redis.RedisError, match="lacks the right read"):
        root_of(secured, "n1").get("a")
    server = "{}:{}".format(*cluster.address("n1", "grpc"))
    for words in ("role add all", "role grant all read", "role grant all write", "user grant root all"):
        done = command(secured, *words.split(), "--server", server)
        assert done.returncode == 0, done.stderr
    cluster.wait_until(lambda: is_done(secured, lambda one: one.set("w", "1")), "root may write")
    return secured


def test_access_control_is_founded_once_and_cannot_be_switched_off(founded: Secured) -> None:
    where = ("--password-stdin", "--zookeeper", founded.cluster.file.zookeeper)
    again = command(founded, "access", "found", "mallory", *where)
    assert (again.returncode != 0, "already on" in again.stderr + again.stdout) == (True, True)
    off = command(founded, "access", "off", "--server", "{}:{}".format(*founded.cluster.address("n1", "grpc")))
    assert (off.returncode != 0, "would serve no client" in off.stderr + off.stdout) == (True, True)
    with pytest.raises(redis.RedisError):
        redis_of(founded, "n1").get("w")


class Load:
    """Work on new connections, and on one that stays. All keys begin with `prefix`."""

    def __init__(self, secured: Secured, user: str = "root", password: str = PASSWORD, prefix: bytes = b"") -> None:
        self._secured = secured
        self._login, self._prefix = {"username": user, "password": password}, prefix
        self.failures: list[Exception] = []
        self.rounds = [0, 0]

    @contextmanager
    def running(self) -> Iterator[Load]:
        with beside(partial(self._run, 0, self._anew), partial(self._run, 1, self._stay)):
            yield self

    def has_gone_on(self, before: list[int]) -> bool:
        return bool(self.failures) or all(now > was + 1 for now, was in zip(self.rounds, before, strict=True))

    def _run(self, place: int, work: Callable[[], Iterator[None]], over: threading.Event) -> None:
        try:
            for _ in work():
                self.rounds[place] += 1
                if over.wait(REST_S):
                    return
        except Exception as error:  # noqa: BLE001 - the test looks at them
            self.failures.append(error)

    def _anew(self) -> Iterator[None]:
        while True:
            for node in self._secured.cluster.ids:
                with redis_of(self._secured, node, **self._login) as one:
                    one.set(self._prefix + b"anew", self.rounds[0])
            yield

    def _stay(self) -> Iterator[None]:
        key, login = self._prefix + b"stays", Login(self._login["username"], self._login["password"].encode())
        with Client(replace(parse_url(url_of(self._secured)), login=login)) as client:
            while True:
                value = b"%d" % self.rounds[1]
                client.put(key, value)
                found = client.get(key)
                assert found is not None
                assert found.value == value
                yield


def test_certificate_replacement_under_load_fails_no_request(founded: Secured) -> None:
    cluster = founded.cluster
    with Load(founded).running() as load:
        for round_ in range(3):
            before, rounds = serial_of(founded, "n1", "resp"), list(load.rounds)
            founded.issue()
            for node in cluster.ids if round_ else ():  # the first time by looking alone
                os.kill(cluster.pid(node), signal.SIGHUP)
            for node in cluster.ids:
                for endpoint in ("resp", "grpc", "http"):
                    cluster.wait_until(
                        lambda node=node, endpoint=endpoint, before=before: (
                            serial_of(founded, node, endpoint) != before
                        ),
                        f"{node}'s {endpoint} shows the new certificate",
                    )
            cluster.wait_until(lambda rounds=rounds: load.has_gone_on(rounds), "work goes on")
    assert load.failures == []
    assert min(load.rounds) > 0
