"""The HTTP port of a node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from kvstore.bookie import BookieState
from kvstore.devcluster.zookeeper import free_port
from kvstore.env.beat import Beat
from kvstore.env.certificates import Certificates
from kvstore.env.histogram import Histogram
from kvstore.env.log_output import Output
from kvstore.env.logs.audit_lines import AuditLines
from kvstore.env.networks import KnownNetworks
from kvstore.env.real import transport_of
from kvstore.env.tls import Tls
from kvstore.env.transport import TcpTransport
from kvstore.errors import MetadataUnavailable, PermissionDenied
from kvstore.meta.bookie_summary import BookieSummary
from kvstore.rpc.http import connection
from kvstore.rpc.http.messages import HttpRequest, HttpResponse, text_response
from kvstore.server.config import NodeConfig
from kvstore.server.http import listener as http_listener
from kvstore.server.http.listener import HttpListener
from kvstore.server.http.metric_table import DECLARED, METRICS, MetricKind, declared
from kvstore.server.http.metrics import metrics_of
from kvstore.server.http.own_names import check_name
from kvstore.server.node import Process
from kvstore.server.ui.pages import DETAILS, FILES, KEYS
from tests.waiting import PATIENCE_S


class Shown:
    faults: tuple[str, ...] = ()
    faults_of_life: tuple[str, ...] = ()
    without_leader: tuple[str, ...] = ()
    down: tuple[str, ...] = ()

    def status(self) -> dict[str, Any]:
        return {"id": "n1", "odd": object()}

    def not_live(self) -> list[str]:
        return list(self.faults_of_life)

    def not_ready(self) -> list[str]:
        return list(self.faults)

    def leaderless(self) -> list[str]:
        return list(self.without_leader)

    def bookie_state(self) -> BookieState | None:
        return BookieState(is_running=True)

    def bookie_space(self) -> tuple[int, int]:
        return 100, 30

    async def cluster_info(self) -> BookieSummary:
        raise MetadataUnavailable("not connected")

    async def unserved(self) -> list[str]:
        return list(self.down)

    def statistics(self) -> dict[str, Any]:
        return {
            "server": {"resp_commands_total": 5, "links": {"open": 2}, "name": "text"},
            "partitions": {"p1": {"seq": 7, "role": "serving"}, "p2": {"seq": 8, "leading": {"queued": 1}}},
        }


@pytest.fixture
async def url() -> AsyncIterator[str]:
    address = f"127.0.0.1:{free_port()}"
    listener = HttpListener(Shown(), TcpTransport(), Beat())
    await listener.open(address)
    yield f"http://{address}"
    await listener.close()


async def fetch(url: str, **options: Any) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.request("GET", url, **options) as answer:
        return answer.status, await answer.read()


async def test_health_readiness_and_status(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await fetch(f"{url}/healthz") == (200, b"ok\n")
    assert await fetch(f"{url}/readyz") == (200, b"ok\n")
    monkeypatch.setattr(Shown, "faults", ("no other server can be reached", "draining"))
    assert await fetch(f"{url}/readyz") == (503, b"no other server can be reached\ndraining\n")
    assert (await fetch(f"{url}/healthz"))[0] == 200
    monkeypatch.setattr(Shown, "faults_of_life", ("the disk hangs",))
    assert await fetch(f"{url}/healthz") == (503, b"the disk hangs\n")
    status, page = await fetch(url)
    assert status == 200
    assert orjson.loads(page)["id"] == "n1"
    assert (await fetch(f"{url}/nothing"))[0] == 404


async def test_partition_without_a_leader_is_reported_but_the_node_stays_ready(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await fetch(f"{url}/clusterz") == (200, b"ok\n")
    monkeypatch.setattr(Shown, "without_leader", ("p7",))
    assert await fetch(f"{url}/readyz") == (200, b"ok\n")
    assert await fetch(f"{url}/clusterz") == (503, b"partition p7 has no leader\n")
    monkeypatch.setattr(Shown, "faults", ("draining",))
    assert await fetch(f"{url}/clusterz") == (503, b"draining\npartition p7 has no leader\n")


async def test_metrics_are_readable_and_partitions_are_a_label(url: str) -> None:
    _, page = await fetch(f"{url}/metrics")
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }
    assert found["kvstore_server_resp_commands_total",] == 5
    assert found["kvstore_server_links_open",] == 2
    assert found["kvstore_partition_seq", "p1"] == 7
    assert found["kvstore_partition_leading_queued", "p2"] == 1
    assert ("kvstore_partition_leading_queued", "p1") not in found


class AsksNobody:
    """An authenticator with access control off or on."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on

    async def refusal_or_none(self, request: HttpRequest) -> HttpResponse | None:
        return None


EVERY_PAGE = (
    *("/", "/ui", "/ui/", "/ui/live", "/ui/node", "/ui/series", *(f"/ui/{name}" for name in (*DETAILS, *KEYS, *FILES))),
    *("/metrics", "/v1/cluster", "/v1/keys/k", "/api/v1/bookie/info", "/api/v1/bookie/cluster_info"),
)


@pytest.mark.parametrize("doorman", [None, AsksNobody(is_on=False)])
async def test_rebound_host_name_gets_only_health(doorman: AsksNobody | None) -> None:
    """A page of that name could make its reader's browser read the responses (DNS rebinding), and access control is
    off."""
    address = f"127.0.0.1:{free_port()}"
    listener = HttpListener(Shown(), TcpTransport(), Beat())
    listener.authenticator = doorman
    await listener.open(address)
    try:
        assert {*EVERY_PAGE} >= {
            each for each in listener.paths() if each not in http_listener.HEALTH and not each.startswith("/v1")
        }
        for path in EVERY_PAGE:
            for host in ("evil.example", f"evil.example:{address.rpartition(':')[2]}", "localhost.evil.example", "["):
                status, text = await fetch(f"http://{address}{path}", headers={"Host": host})
                assert (status, b"expected this machine's address" in text) == (403, True), (path, host)
            assert (await fetch(f"http://{address}{path}"))[0] in (200, 503), path  # by its address, as always
        for path in http_listener.HEALTH:
            assert (await fetch(f"http://{address}{path}", headers={"Host": "evil.example"}))[0] == 200
    finally:
        await listener.close()


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8401", "n1.localhost", "[::1]:8401", "10.0.0.9:8401", "kv.example:8401", "KV.example."],
)
async def test_address_and_name_of_the_node_are_accepted_as_host(url: str, host: str) -> None:
    assert (await fetch(f"{url}/metrics", headers={"Host": host}))[0] == (200 if "kv.ex" not in host.lower() else 403)
    check_name(host, "127.0.0.1", {"kv.example"})


def test_calls_from_other_machines_may_use_any_host_name() -> None:
    """Prometheus uses the name of a service, a probe an address."""
    check_name("metrics.kvstore.svc:8401", "10.1.2.3", ())
    check_name(None, "127.0.0.1", ())  # HTTP/1.0
    with pytest.raises(PermissionDenied):
        check_name("metrics.kvstore.svc:8401", "::1", ())


def test_node_is_known_by_its_advertised_names_while_it_starts(tmp_path: Path) -> None:
    files = {"data_dir": tmp_path, "secret_file": tmp_path / "secret"}
    endpoints = {"http": "inner:8401", "advertise": "KV.example", "zookeeper": "zk:2181"}
    config = NodeConfig(id="n1", insecure=True, **files, **endpoints)  # type: ignore[arg-type]  # paths and texts by name
    clock = SimpleNamespace(now=float, date_ms=int)
    env: Any = SimpleNamespace(clock=clock, audit=AuditLines())
    names = Process(config, env, None, Output(config.log_output)).own_names()
    assert names >= {"kv.example", "inner", socket.gethostname().lower()}
    check_name("kv.example:8401", "127.0.0.1", names)


async def test_host_name_is_not_checked_when_access_control_is_on() -> None:
    address = f"127.0.0.1:{free_port()}"
    listener = HttpListener(Shown(), TcpTransport(), Beat())
    listener.authenticator = AsksNobody(is_on=True)
    await listener.open(address)
    try:
        assert (await fetch(f"http://{address}/metrics", headers={"Host": "behind.a.proxy"}))[0] == 200
    finally:
        await listener.close()


async def test_oversized_request_is_refused_and_the_port_stays_open(url: str) -> None:
    status, _ = await fetch(f"{url}/{'x' * 20_000}")
    assert status == 400
    assert (await fetch(f"{url}/healthz"))[0] == 200


REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def connected(address: str, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    return reader, writer


@pytest.mark.parametrize("asked", [REQUEST, b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n", b"no HTTP\r\n\r\n"])
async def test_responses_name_no_versions_of_libraries(asked: bytes) -> None:
    address = f"127.0.0.1:{free_port()}"
    listener = HttpListener(Shown(), TcpTransport(), Beat())
    await listener.open(address)
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await connected(address, asked)
        head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await listener.close()
    assert [line for line in head.split(b"\r\n") if line.startswith(b"Server:")] == [b"Server: kvstore"]


async def test_idle_connections_give_way() -> None:
    address = f"127.0.0.1:{free_port()}"
    listener = HttpListener(Shown(), TcpTransport(), Beat(), connections_max=2)
    await listener.open(address)
    async with asyncio.timeout(PATIENCE_S):
        asks, asking = await connected(address, REQUEST)
        assert (await asks.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
        silent, idle = await connected(address, b"GET /healthz HT")
        asking.write(REQUEST)
        await asks.readuntil(b"ok\n")
        late, later = await connected(address, REQUEST)
        await late.readuntil(b"ok\n")
        with contextlib.suppress(ConnectionError):
            assert await silent.read() == b"", "closed: it was the longest without a whole request"
        asking.write(REQUEST)
        await asks.readuntil(b"ok\n")
    for writer in (asking, idle, later):
        writer.close()
    await listener.close()


async def test_idle_connections_of_the_fullest_network_give_way() -> None:
    """A probe keeps its connection, however many an unauthenticated peer elsewhere opens."""
    port = free_port()
    listener = HttpListener(Shown(), TcpTransport(), Beat(), connections_max=3)
    await listener.open(f"127.0.0.1:{port}")
    async with asyncio.timeout(PATIENCE_S):
        probe, probing = await connected(f"127.0.0.1:{port}", REQUEST)
        await probe.readuntil(b"ok\n")
        others = []
        for _ in range(12):
            others.append(await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.1.1", 0)))
        for reader, _ in others[:10]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        probing.write(REQUEST)
        await probe.readuntil(b"ok\n")
    for writer in (probing, *(each for _, each in others)):
        writer.close()
    await listener.close()


async def test_probe_of_an_unknown_network_is_answered_when_known_ones_fill_it() -> None:
    """A kubelet never logs in. It was refused once clients that had logged in kept every connection open."""
    port, known = free_port(), KnownNetworks()
    known.note("ipv4:127.0.1.1")
    listener = HttpListener(Shown(), TcpTransport(), Beat(), connections_max=3, known=known)
    await listener.open(f"127.0.0.1:{port}")
    async with asyncio.timeout(PATIENCE_S):
        clients = []
        for _ in range(3):
            clients.append(await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.1.1", 0)))
            clients[-1][1].write(REQUEST)
            await clients[-1][0].readuntil(b"ok\n")
        probe, probing = await connected(f"127.0.0.1:{port}", REQUEST)
        await probe.readuntil(b"ok\n")
    for writer in (probing, *(each for _, each in clients)):
        writer.close()
    await listener.close()


async def test_busy_connections_give_way_last() -> None:
    """A request at the gateway may take long. However many do, health checks are answered."""

    class Slow:
        def __init__(self) -> None:
            self.begun, self.resume = asyncio.Event(), asyncio.Event()

        async def answer(self, request: HttpRequest) -> None:
            self.begun.set()
            await self.resume.wait()
            await request.respond(text_response("done\n"))

    address = f"127.0.0.1:{free_port()}"
    listener = HttpListener(Shown(), TcpTransport(), Beat(), connections_max=2)
    listener.gateway = slow = Slow()
    await listener.open(address)
    async with asyncio.timeout(PATIENCE_S):
        first, held = await connected(address, REQUEST.replace(b"/healthz", b"/v1/keys/k"))
        await slow.begun.wait()
        for _ in range(3):
            asks, asking = await connected(address, REQUEST)
            await asks.readuntil(b"ok\n")
        slow.resume.set()
        assert await first.readuntil(b"done\n")
    for writer in (held, asking):
        writer.close()
    await listener.close()


async def test_connection_without_a_complete_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENT_S", 0.1)
    port = free_port()
    listener = HttpListener(Shown(), TcpTransport(), Beat())
    await listener.open(f"127.0.0.1:{port}")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost:")
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    writer.close()
    await listener.close()


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /\0 HTTP/1.1\r\nHost: n1\r\n\r\n",
        b"GET /one two HTTP/1.1\r\nHost: n1\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: n1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 1_000 + b"\r\n",
        b"POST / HTTP/1.1\r\nHost: n1\r\nContent-Length: -1\r\n\r\n",
    ],
    ids=["path", "url", "long", "headers", "length"],
)
async def test_malformed_request_is_answered_and_not_logged(
    url: str, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Each malformed request left a traceback of a kilobyte in the node's log."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request_)
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readline()).split()[1] in (b"400", b"431")
    writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


async def test_internal_error_is_logged(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Shown) -> list[str]:
        raise ValueError("broken")

    monkeypatch.setattr(Shown, "not_ready", fail)
    assert (await fetch(f"{url}/readyz"))[0] == 500
    assert "broken" in caplog.text


async def test_only_get_and_head_are_allowed(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/metrics", data=b"x") as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "GET,HEAD")
        async with session.head(f"{url}/healthz") as answer:
            assert answer.status == 200


@pytest.mark.parametrize("accepted", ["application/json", "*/*", ""])
async def test_root_page_is_json_for_programs(url: str, accepted: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(url, headers={"Accept": accepted}) as answer:
        assert (answer.status, answer.content_type) == (200, "application/json")
        assert orjson.loads(await answer.read())["id"] == "n1"


@pytest.mark.parametrize("path", ["", "/", "/ui/"])
async def test_root_page_redirects_browsers_to_the_dashboard(url: str, path: str) -> None:
    accepted = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}{path}", headers=accepted, allow_redirects=False) as answer,
    ):
        assert (answer.status, answer.headers["Location"]) == (303, "/ui")
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def samples(part: str, values: dict[str, Any]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in metrics_of(part, values)
        for sample in metric.samples
    }


def test_counters_and_units_follow_prometheus_names() -> None:
    found = samples("bookie", {"adds": 3, "readonly": True, "disk_bytes": 7})
    assert found == {
        ("kvstore_bookie_adds_total",): 3,
        ("kvstore_bookie_readonly",): 1,
        ("kvstore_bookie_disk_bytes",): 7,
    }


def test_declared_metrics_follow_the_conventions_of_prometheus() -> None:
    every = [each for part in METRICS.values() for each in part]
    assert [each.name for each in every if each.name.endswith(("_s", "_ms"))] == []
    assert [each.name for each in every if not each.text.endswith(".")] == []
    assert [each.name for each in every if (each.kind is MetricKind.COUNTER) != each.name.endswith("_total")] == []
    assert len(DECLARED) == len(every)
    by_table = {
        part: {each.label for each in every if each.name.startswith(part)} for part in ("partition", "namespace")
    }
    assert by_table == {part: {part} for part in by_table}, "a table of tables is labelled by its part"


def test_every_source_is_published_as_one_metric() -> None:
    """Two metrics with one source would take the number from each other."""
    taken = Counter(source for each in DECLARED.values() for source in each.sources if source not in DECLARED)
    assert [source for source, count in taken.items() if count > 1] == []
    assert (declared("bookie_adds"), declared("server_watches")) == (
        DECLARED["bookie_adds_total"],
        DECLARED["server_watches"],
    )
    assert "no_such_total" in declared("no_such_total").text


def test_histogram_is_published_in_seconds_with_cumulative_buckets() -> None:
    sync = Histogram(1e-6)
    for seconds in (0.0001, 0.001, 0.001, 100.0):
        sync.add(seconds)
    found = samples("bookie", {"sync_s": sync, "sync_s_count": 4, "sync_s_p99": 1.0})
    assert ("kvstore_bookie_sync_s_p99",) not in found
    assert found["kvstore_bookie_sync_seconds_count",] == 4
    assert found["kvstore_bookie_sync_seconds_sum",] == pytest.approx(100.0021)
    buckets = {name[1]: value for name, value in found.items() if name[0].endswith("_bucket")}
    assert buckets["0.000128"] == 1
    assert buckets["0.001024"] == 3
    assert buckets["16.7772"] == 3
    assert buckets["+Inf"] == 4
    assert list(buckets.values()) == sorted(buckets.values())


def test_every_endpoint_has_its_own_histogram_label() -> None:
    found = samples("server", {"resp_command_s": {"GET": Histogram(1e-6)}, "grpc_call_s": {"Get": Histogram(1e-6)}})
    assert found["kvstore_server_resp_command_seconds_count", "GET"] == 0
    assert found["kvstore_server_grpc_call_seconds_count", "Get"] == 0
    labels = {
        tuple(sample.labels)
        for each in metrics_of("server", {"grpc_call_s": {"Get": Histogram(1e-6)}})
        for sample in each.samples
    }
    assert labels == {("method", "le"), ("method",)}


def test_leading_or_stopped_replica_is_published_as_numbers() -> None:
    rows = {"p1": {"role": "serving", "failure": None}, "p2": {"role": "following", "failure": "its state differs"}}
    found = samples("partitions", rows)
    assert (found["kvstore_partition_is_leader", "p1"], found["kvstore_partition_is_leader", "p2"]) == (1, 0)
    assert (found["kvstore_partition_has_failed", "p1"], found["kvstore_partition_has_failed", "p2"]) == (0, 1)


def test_move_adds_no_metric_of_its_own_name() -> None:
    """Each move had a new name, which nothing documents and no alert can know."""
    with_move = {"p1": {"role": "serving", "seq": 7, "moves": {"12": {"rows": 3, "bytes": 400}}}}
    without = {"p1": {"role": "serving", "seq": 7, "moves": {}}}
    assert samples("partitions", with_move) == samples("partitions", without)


def test_no_numbers_make_no_metrics() -> None:
    assert list(metrics_of("server", {})) == []
    assert list(metrics_of("server", {"name": "text"})) == []


@pytest.mark.parametrize(("costs_s", "old_s"), [(0.3, 3.0), (0.02, 1.0), (0.001, 1.0)])
def test_costly_page_is_made_rarely(costs_s: float, old_s: float) -> None:
    """The page takes at most a tenth of the event loop, and is made at most once a second."""
    now, made = 0.0, 0

    def make() -> bytes:
        nonlocal now, made
        now, made = now + costs_s, made + 1
        return b"%.3f" % now

    page = http_listener.ThrottledPage(make, lambda: now)
    assert page.take() == page.take() == b"%.3f" % costs_s
    for _ in range(10_000):
        page.take()
        now += 0.001
    assert made * costs_s <= now / 10 + costs_s
    assert made <= now + 1
    assert now - float(page.take()) <= old_s, "it is not old"


async def test_only_probes_need_no_certificate(tmp_path: Path) -> None:
    authority, address = trustme.CA(), f"127.0.0.1:{free_port()}"
    issued = authority.issue_cert("127.0.0.1")
    ca, cert, key, other = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem", "other.pem"))
    authority.cert_pem.write_to_path(str(ca))
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))
    trustme.CA().issue_cert("a.example").private_key_and_cert_chain_pem.write_to_path(str(other))
    certificates = Certificates(Tls(ca=ca, cert=cert, key=key, verify_clients=True))
    refused: list[str] = []
    listener = HttpListener(
        Shown(),
        transport_of(certificates),
        Beat(),
        wants_certificate=True,
        note_refused=lambda request, error: refused.append(f"{request.path} {error}"),
    )
    await listener.open(address)
    stranger, known, another = (ssl.create_default_context(cafile=str(ca)) for _ in range(3))
    known.load_cert_chain(cert, key)
    another.load_cert_chain(other)
    url = f"https://{address}"
    for round_ in range(2):  # the second connection uses certificates that were read again
        for path in http_listener.HEALTH:
            assert (await fetch(f"{url}{path}", ssl=stranger))[0] == 200, round_
        for path in ("/", "/metrics"):
            assert (await fetch(f"{url}{path}", ssl=stranger))[0] == 403, round_
            assert (await fetch(f"{url}{path}", ssl=known))[0] == 200, round_
        with pytest.raises((aiohttp.ClientError, OSError)):
            await fetch(f"{url}/healthz", ssl=another)
        cert.touch()
        assert certificates.poll()
    text = "expected a client certificate, got none; without one only the health pages are available"
    assert refused == [f"{path} {text}" for path in ("/", "/metrics")] * 2
    silent = await transport_of(certificates).listen("127.0.0.1:0", asyncio.Protocol)  # type: ignore[arg-type]
    host, _, port = silent.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=stranger)
    with pytest.raises((OSError, asyncio.IncompleteReadError)):  # TLS 1.3 reports it with the first bytes
        await asyncio.wait_for(reader.readexactly(1), PATIENCE_S)
    writer.transport.abort()
    silent.close()
    await listener.close()
