"""Attackers at every endpoint of a cluster that other machines can reach are refused, counted and audited, and delay
nobody else. Real processes."""

from __future__ import annotations

import base64
import resource
import selectors
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest
import redis

from kvstore.client import Client
from kvstore.client.core.config import parse_url
from kvstore.env.secret import read_secret
from kvstore.errors import NotAuthenticated, StoreError
from kvstore.proto import admin_pb2, admin_pb2_grpc, kv_pb2, kv_pb2_grpc
from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import Status
from kvstore.rpc.channels import open_channel
from kvstore.rpc.login import Login
from kvstore.server.access.logins import FAILURES_MAX
from tests.beside import beside
from tests.cluster.harness import Cluster
from tests.cluster.test_safe_by_default import PASSWORD, command, founded, redis_of, secured, url_of
from tests.cluster.test_tls import Secured, greeted_as_n1
from tests.waiting import PATIENCE_S

__all__ = ["founded", "secured"]
pytestmark = [pytest.mark.cluster]

HALF_OPEN = 10_000
FILES_KEPT = 1_000
"""Descriptors that the test needs for other things."""
GUESSERS = 16
"""Time limit in seconds. A check of a password takes up to seconds on a busy machine, and each guess waits for all
others."""
CANCELLED = 200
"""Number of changes whose callers do not wait. An address may cause 120 audit lines of other calls in a minute."""
CROWD = FAILURES_MAX + 2
ENDPOINTS = ("resp", "grpc", "http", "bookie")


@pytest.fixture(scope="module")
def cluster(founded: Secured) -> Cluster:
    """A cluster with the user `data`, who may do everything with keys and nothing with the cluster, and the user
    `late`, who has not logged in anywhere."""
    server = "{}:{}".format(*founded.cluster.address("n1", "grpc"))
    rights = [f"role grant data {right}" for right in ("read", "write", "watch", "backup")]
    users = [f"user add {name} --password-stdin" for name in ("data", "late")]
    for words in ("role add data", *rights, *users, "user grant data data", "user grant late data"):
        done = command(founded, *words.split(), "--server", server)
        assert done.returncode == 0, done.stderr
    found = founded.cluster
    found.wait_until(lambda: all(is_known(founded, node, "data") for node in found.ids), "data is known")
    return found


def is_known(secured: Secured, node: str, user: str) -> bool:
    with suppress(redis.RedisError), redis_of(secured, node, username=user, password=PASSWORD) as one:
        return bool(one.set("known", "1"))
    return False


def audited(cluster: Cluster, node: str) -> list[dict[str, Any]]:
    path = cluster.directory / "data" / "logs" / f"{node}.audit.jsonl"
    return [orjson.loads(line) for line in path.read_text().splitlines()]


def counted(secured: Secured, node: str, name: str) -> float:
    """Return a number of the node's metrics. A node recreates them at most once a second."""
    page = get(secured, node, "/metrics", basic("root", PASSWORD))[1]
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name)


def has_counted(secured: Secured, node: str, *names: str, more_than: float = 0) -> bool:
    """Return True if the sum of these numbers is higher; False if the node does not answer."""
    with suppress(OSError):
        return sum(counted(secured, node, name) for name in names) > more_than
    return False


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def context_of(secured: Secured) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(secured.ca))
    context.load_cert_chain(secured.of_client)
    return context


def get(secured: Secured, node: str, path: str, authorization: str = "") -> tuple[int, str]:
    """Return status and body of a page."""
    host, port = secured.cluster.address(node, "http")
    head = f"Authorization: {authorization}\r\n" if authorization else ""
    with (
        socket.create_connection((host, port), timeout=30) as plain,
        context_of(secured).wrap_socket(plain, server_hostname=host) as connection,
    ):
        connection.sendall(f"GET {path} HTTP/1.0\r\n{head}\r\n".encode())
        answer = b""
        while data := connection.recv(65536):
            answer += data
    front, _, body = answer.partition(b"\r\n\r\n")
    if not front:
        raise ConnectionError("the server has hung up")
    return int(front.split()[1]), body.decode()


@contextmanager
def channel(secured: Secured, node: str, login: Login | None = None) -> Iterator[grpc.Channel]:
    tls = parse_url(url_of(secured)).tls
    with open_channel("{}:{}".format(*secured.cluster.address(node, "grpc")), tls, login=login) as opened:
        yield opened


def refusal_of(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    code: grpc.StatusCode = failed.value.code()
    return code


@pytest.mark.parametrize("node", ["n1", "n3"])
def test_endpoints_refuse_and_audit_missing_and_wrong_logins(founded: Secured, cluster: Cluster, node: str) -> None:
    """n3 wants certificates, too; the one that is shown names no user."""
    for login, word in ((None, "NOAUTH"), (Login("data", b"wrong"), "WRONGPASS"), (Login("nobody", b"x"), "WRONGPASS")):
        said = {} if login is None else {"username": login.user, "password": login.password.decode()}
        with redis_of(founded, node, **said) as one, pytest.raises(redis.RedisError) as failed:
            one.get("w")
        assert word in str(failed.value) or "invalid username-password" in str(failed.value) or login is None
        with channel(founded, node, login) as opened:
            stub = kv_pb2_grpc.KVStub(opened)
            code = refusal_of(lambda stub=stub: stub.Get(kv_pb2.GetRequest(key=b"w"), timeout=30))
            assert code == grpc.StatusCode.UNAUTHENTICATED
        authorization = "" if login is None else basic(login.user, login.password.decode())
        for path in (
            ("/",) if login else ("/", "/metrics", "/ui", "/ui/live")
        ):  # ten wrong ones within a minute are too many
            assert get(founded, node, path, authorization)[0] == 401
    with pytest.raises(NotAuthenticated), Client(url_of(founded).replace("kvs://", "kvs://data:wrong@")) as client:
        client.get(b"w")
    for header in ("Basic !", f"Bearer kvt_{12 * 'a'}_{64 * 'b'}", "Bearer kvt_1", "Digest x", 3000 * "A"):
        assert get(founded, node, "/", header)[0] == 401
    lines = audited(cluster, node)
    assert {"NOT_AUTHENTICATED"} <= {line.get("outcome") for line in lines}
    assert {"HTTP /", "login"} <= {line.get("call") for line in lines}
    assert 64 * b"b" not in (cluster.directory / "data" / "logs" / f"{node}.audit.jsonl").read_bytes()
    if node == "n3":
        with pytest.raises((OSError, redis.RedisError)):
            cluster.redis(node, ssl=True, ssl_ca_certs=str(founded.ca), username="data", password=PASSWORD).get("w")


def test_admin_calls_by_key_users_are_refused_and_audited(founded: Secured, cluster: Cluster) -> None:
    """The calls come from the service's descriptor, so a new call is tested too."""
    methods = list(admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods)
    assert len(methods) >= 15
    with channel(founded, "n2", Login("data", PASSWORD.encode())) as opened:
        assert kv_pb2_grpc.KVStub(opened).Put(kv_pb2.PutRequest(key=b"a", value=b"1"), timeout=30)
        for method in methods:
            request = getattr(admin_pb2, method.input_type.name)()
            answer = getattr(admin_pb2, method.output_type.name)
            call = (opened.unary_stream if method.server_streaming else opened.unary_unary)(
                f"/kvstore.v1.Admin/{method.name}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )
            code = refusal_of(lambda call=call, request=request: call(request, timeout=30))
            assert code == grpc.StatusCode.PERMISSION_DENIED, method.name

    def refused() -> set[str]:
        return {line["call"] for line in audited(cluster, "n2") if line.get("outcome") == "PERMISSION_DENIED"}

    wanted = {f"Admin/{method.name}" for method in methods}
    cluster.wait_until(lambda: wanted <= refused(), "each refusal is written down")
    for path in ("/", "/ui", "/ui/node", "/ui/live"):
        assert get(founded, "n2", path, basic("data", PASSWORD))[0] == 403
    with (
        redis_of(founded, "n2", username="data", password=PASSWORD) as one,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        one.client_list()


def test_audit_log_cannot_be_silenced_by_log_levels_or_cancelled_calls(founded: Secured, cluster: Cluster) -> None:
    """Each user that is in the table afterwards was recorded, and so was the change of the level."""
    server = "{}:{}".format(*cluster.address("n2", "grpc"))
    try:
        done = command(founded, "node", "log-level", "n2", "CRITICAL", "--server", server)
        assert done.returncode == 0, done.stderr
        with channel(founded, "n2", Login("root", PASSWORD.encode())) as opened:
            admin = admin_pb2_grpc.AdminStub(opened)
            for number in range(CANCELLED):
                asked = admin_pb2.ChangeAccessRequest(add_user=admin_pb2.AccessUser(name=f"silent{number}"))
                call = admin.ChangeAccess.future(asked, timeout=30)
                threading.Event().wait(number % 10 / 1000)  # the server has begun some of them
                call.cancel()
            table = admin.Access(admin_pb2.AccessRequest(), timeout=30)
        added = {user.name for user in table.users if user.name.startswith("silent")}
        assert added, "some calls were done though they were cancelled"
        lines = [line["arguments"] for line in audited(cluster, "n2") if line.get("call") == "ChangeAccess"]
        recorded = {name for name in added if any(f'name: "{name}"' in each for each in lines)}
        assert recorded == added
        (level,) = [
            line for line in audited(cluster, "n2") if line.get("call") == "LogLevel" and line["outcome"] == "OK"
        ]
        assert 'level: "CRITICAL"' in level["arguments"]
    finally:
        command(founded, "node", "log-level", "n2", "DEFAULT", "--server", server)


def test_client_certificate_is_not_accepted_as_a_server(founded: Secured) -> None:
    """docs/protocol.md H8: not even with the cluster's secret."""
    secret = read_secret(Path(founded.cluster.file.secret_file))
    assert "not that of a server" in greeted_as_n1(founded, secret, founded.of_client)


def certificate_of(secured: Secured, user: str) -> Path:
    """Issue a certificate of the cluster's CA whose common name is a user's."""
    place = secured.ca.with_name(f"{user}.pem")
    issued = secured.authority.issue_cert(f"{user}.example", common_name=user)
    issued.private_key_and_cert_chain_pem.write_to_path(str(place))
    return place


@contextmanager
def bookie_of(secured: Secured, certificate: Path | None) -> Iterator[Callable[[bytes], wire.BookieResponse]]:
    """Connect to n3's bookie as an unauthenticated peer. Raises OSError if the bookie refuses the connection."""
    host, port = secured.cluster.address("n3", "bookie")
    with socket.create_connection((host, port), timeout=30) as plain:
        plain.sendall(wire.encode_start_tls(1))
        assert wire.decode_response(frame_of(plain)).status == Status.OK
        context = ssl.create_default_context(cafile=str(secured.ca))
        if certificate is not None:
            context.load_cert_chain(certificate)
        with context.wrap_socket(plain, server_hostname=host) as connection:

            def ask(request: bytes) -> wire.BookieResponse:
                connection.sendall(request)
                return wire.decode_response(frame_of(connection))

            yield ask


def frame_of(connection: socket.socket) -> bytes:
    def exactly(size: int) -> bytes:
        found = b""
        while len(found) < size:
            data = connection.recv(size - len(found))
            if not data:
                raise ConnectionError("the bookie has hung up")
            found += data
        return found

    return exactly(int.from_bytes(exactly(4), "big"))


def test_bookie_refuses_client_certificates_and_connections_without_one(founded: Secured) -> None:
    """docs/protocol.md B13: that takes the ledger's password. Reads take a certificate that names no user
    (docs/how-to/manage-the-cluster-secret.md)."""
    stranger, said = bytes(20), set()
    with bookie_of(founded, founded.of_client) as ask:
        for ledger in range(40):
            said.add(ask(wire.encode_add(2, ledger, 10**6, stranger, bytes(64))).status)
            said.add(ask(wire.encode_read(3, ledger, 0, fence_key=stranger)).status)
    assert Status.OK not in said
    assert Status.UNAUTHORIZED in said
    with pytest.raises((OSError, ssl.SSLError)), bookie_of(founded, None) as ask:
        ask(wire.encode_read(2, 1, 0))


def test_user_certificate_reads_at_a_server_but_not_at_a_bookie(founded: Secured, cluster: Cluster) -> None:
    """docs/protocol.md B33"""
    own = str(certificate_of(founded, "data"))
    with cluster.redis("n3", ssl=True, ssl_ca_certs=str(founded.ca), ssl_certfile=own, ssl_keyfile=own) as one:
        assert one.acl_whoami() == "data"
        assert one.get("known") == b"1"
    with pytest.raises((OSError, ssl.SSLError)), bookie_of(founded, Path(own)) as ask:
        ask(wire.encode_read(2, 1, 0))
    cluster.wait_until(lambda: has_counted(founded, "n3", "kvstore_bookie_refused_user_total"), "it is counted")


class Speaker:
    """A Redis client with its own address. All addresses of 127.0.0.0/8 are this machine's."""

    def __init__(self, secured: Secured, node: str, source: str) -> None:
        host, port = secured.cluster.address(node, "resp")
        plain = socket.create_connection((host, port), timeout=PATIENCE_S, source_address=(source, 0))
        self.connection = context_of(secured).wrap_socket(plain, server_hostname=host)

    def ask(self, *words: bytes) -> bytes:
        self.say(*words)
        return self.answer()

    def say(self, *words: bytes) -> None:
        self.connection.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words))

    def answer(self) -> bytes:
        answer = b""
        while not answer.endswith(b"\r\n"):
            data = self.connection.recv(4096)
            if not data:
                raise ConnectionError("the server has hung up")
            answer += data
        return answer

    def close(self) -> None:
        self.connection.close()


class Guessers:
    """Clients at many addresses that guess passwords as fast as they get replies."""

    def __init__(self, secured: Secured, node: str) -> None:
        self._secured, self._node = secured, node
        self._over = threading.Event()
        self._speakers: list[Speaker] = []
        self.answers: list[bytes] = []

    @contextmanager
    def running(self) -> Iterator[Guessers]:
        with beside(*(partial(self._guess, f"127.0.1.{n + 1}") for n in range(GUESSERS))):
            try:
                yield self
            finally:
                self._over.set()
                for one in self._speakers:
                    with suppress(OSError):  # whose guess waits for its turn need not have it
                        socket.socket.shutdown(one.connection, socket.SHUT_RDWR)

    def _guess(self, address: str, _: threading.Event) -> None:
        number = 0
        with closing(Speaker(self._secured, self._node, address)) as one:
            one.connection.settimeout(None)  # until the end of the `with`
            self._speakers.append(one)
            while not self._over.is_set():
                number += 1
                try:
                    self.answers.append(one.ask(b"AUTH", b"late", b"guess-%d" % number))
                except OSError:
                    assert self._over.is_set()


def guess_at_once(secured: Secured, node: str, address: str) -> list[bytes]:
    """Guess more often than one address may fail, all at once and each time another word. Return the answers up to
    the first one that says so. That answer comes at once, because guesses count when they are made, however long
    each then takes."""
    answers: list[bytes] = []
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for number in range(CROWD):
            one = stack.enter_context(closing(Speaker(secured, node, address)))
            selector.register(one.connection, selectors.EVENT_READ, one)
            one.say(b"AUTH", b"late", b"crowd-%d" % number)
            one.connection.setblocking(False)  # what is readable may be TLS's own
        while not any(b"too many failed" in each for each in answers):
            ready = selector.select(PATIENCE_S)
            assert ready, f"no more answers after {answers}"
            for key, _ in ready:
                with suppress(ssl.SSLWantReadError):
                    answers.append(key.data.connection.recv(4096))
                    selector.unregister(key.fileobj)
    return answers


def test_password_guessing_fails_and_does_not_delay_other_users(founded: Secured, cluster: Cluster) -> None:
    """Not even the user whose password is guessed is delayed, because the first login from that address was before."""
    before = counted(founded, "n1", "kvstore_server_logins_limited_total")
    with redis_of(founded, "n1", username="data", password=PASSWORD) as known:
        known.set("during", "0")
        with Guessers(founded, "n1").running() as guessers:
            cluster.wait_until(lambda: guessers.answers, "they guess", PATIENCE_S)
            for number in range(50):
                known.set("during", str(number))
            with closing(Speaker(founded, "n1", "127.0.2.1")) as late:
                assert late.ask(b"AUTH", b"late", PASSWORD.encode()) == b"+OK\r\n"
                assert late.ask(b"GET", b"during").startswith(b"$")
            crowd = guess_at_once(founded, "n1", "127.0.3.1")
            assert known.get("during") == b"49"
    assert {each.split()[0] for each in (*guessers.answers, *crowd)} <= {b"-WRONGPASS", b"-TRYAGAIN"}
    limited = "kvstore_server_logins_limited_total"
    cluster.wait_until(lambda: has_counted(founded, "n1", limited, more_than=before), "the refusals are counted")
    lines = [line for line in audited(cluster, "n1") if "127.0.3.1" in line.get("from", "")]
    assert "too many failed logins" in " ".join(line.get("why", "") for line in lines)


class HalfOpen:
    """Connections that do not begin or do not finish a TLS handshake."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        self.sockets = []
        self._selector = selectors.DefaultSelector()
        for number in range(count):
            sock = socket.socket()
            sock.setblocking(False)
            with suppress(BlockingIOError):
                sock.connect(address)
            self.sockets.append(sock)
            if number % 2:
                self._selector.register(sock, selectors.EVENT_WRITE)
        for key, _ in self._selector.select(0.0):
            with suppress(OSError):
                key.fileobj.send(b"\x16\x03\x01\x02\x00")  # type: ignore[union-attr]
        self._selector.close()
        self._ended = 0
        self._open = selectors.DefaultSelector()
        for sock in self.sockets:
            self._open.register(sock, selectors.EVENT_READ)

    def ended(self) -> int:
        """Return the number of connections that the server has closed."""
        for key, _ in self._open.select(0.0):
            try:
                is_over = key.fileobj.recv(1) == b""  # type: ignore[union-attr]
            except BlockingIOError:
                continue
            except OSError:
                is_over = True
            if is_over:
                self._open.unregister(key.fileobj)
                self._ended += 1
        return self._ended

    def close(self) -> None:
        self._open.close()
        for sock in self.sockets:
            sock.close()


def is_served(secured: Secured, node: str, endpoint: str) -> bool:
    """Return True if a new client is served."""
    with suppress(OSError, StoreError, redis.RedisError, grpc.RpcError):
        if endpoint == "resp":
            with redis_of(secured, node, username="data", password=PASSWORD) as one:
                return one.get("known") == b"1"
        if endpoint == "grpc":
            with channel(secured, node, Login("data", PASSWORD.encode())) as opened:
                return bool(kv_pb2_grpc.KVStub(opened).Get(kv_pb2.GetRequest(key=b"known"), timeout=10))
        if endpoint == "http":
            return get(secured, node, "/readyz")[0] == 200
        with bookie_of(secured, secured.of_client):
            return True
    return False


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_10_000_half_open_connections_are_closed_while_others_are_served(
    founded: Secured, cluster: Cluster, endpoint: str
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(HALF_OPEN, hard - FILES_KEPT)
    node, pid = "n3", cluster.pid("n3")
    own = ("timed_out", "gave_way", "refused")
    names = [f"kvstore_process_connections_{each}_total" for each in own]
    before = sum(counted(founded, node, name) for name in names)
    try:
        with redis_of(founded, node, username="data", password=PASSWORD, socket_timeout=60) as known:
            known.set("known", "1")
            with closing(HalfOpen(cluster.address(node, endpoint), count)) as crowd:
                for number in range(30):
                    known.set("during", str(number))
                cluster.wait_until(lambda: is_served(founded, node, endpoint), "one who comes new is served", 120)
                cluster.wait_until(lambda: crowd.ended() >= count // 4, "they are ended, one after the other", 180)
                assert known.get("during") == b"29"
        if endpoint != "grpc":  # which accepts by itself, and tells no numbers
            cluster.wait_until(lambda: has_counted(founded, node, *names, more_than=before), "they are counted")
        assert cluster.pid(node) == pid
        assert cluster.is_running(node)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
