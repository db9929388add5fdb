"""gRPC gets addresses instead of names, and certificates are still verified against the names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import trustme

from kvstore.env.dns.names import NAMES
from kvstore.env.tls import Tls
from kvstore.errors import Unavailable
from kvstore.rpc.channels import open_aio_channel, open_channel
from kvstore.rpc.status import from_rpc_error
from kvstore.rpc.targets import NamedChannel, needs_lookup, target_of
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("address", ["127.0.0.1:7401", "[::1]:7401", "no port", "unix:/tmp/x"])
def test_address_without_name_is_passed_to_grpc_unchanged(address: str) -> None:
    assert not needs_lookup(address)
    assert target_of(address, ()) == (address, ())


def test_name_is_passed_to_grpc_as_addresses_of_one_family() -> None:
    keeps = (("grpc.default_authority", "n1.test:7401"), ("grpc.ssl_target_name_override", "n1.test"))
    assert target_of("n1.test:7401", ["10.0.0.1", "10.0.0.2"]) == ("ipv4:10.0.0.1:7401,10.0.0.2:7401", keeps)
    assert target_of("n1.test:7401", ["fe80::1%10"]) == ("ipv6:[fe80::1%2510]:7401", keeps)  # a target is a URI
    assert target_of("n1.test:7401", ["::1", "10.0.0.1"]) == ("ipv6:[::1]:7401,[::ffff:10.0.0.1]:7401", keeps)


@pytest.fixture
def served(tmp_path: Path) -> Any:
    """Run a server with a certificate for n1.test; yield its port, and the means to verify it."""
    authority = trustme.CA()
    made = authority.issue_cert("n1.test")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    pair = made.private_key_pem.bytes(), b"".join(each.bytes() for each in made.cert_chain_pems)
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Echo": handler}),))
        secure = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        plain = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield secure, plain, Tls(ca=tmp_path / "ca.pem")
        server.stop(None).wait()


def blocking(address: str, tls: Tls | None) -> bytes:
    with open_channel(address, tls) as channel:
        answer: bytes = channel.unary_unary("/test.Test/Echo")(b"hello", timeout=PATIENCE_S)
        return answer


def future(address: str, tls: Tls | None) -> bytes:
    with open_channel(address, tls) as channel:
        answer: bytes = channel.unary_unary("/test.Test/Echo").future(b"hello", timeout=PATIENCE_S).result()
        return answer


def on_asyncio(address: str, tls: Tls | None) -> bytes:
    async def ask() -> bytes:
        async with await open_aio_channel(address, tls) as channel:
            answer: bytes = await channel.unary_unary("/test.Test/Echo")(b"hello", timeout=PATIENCE_S)
            return answer

    return asyncio.run(ask())


WAYS = [blocking, future, on_asyncio]


@pytest.fixture(params=[["127.0.0.1"], ["::1", "127.0.0.1"]], ids=["IPv4", "both"])
def named(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Resolve every name under .test to this machine."""
    places = request.param

    def lookup(host: str, family: Any) -> list[str]:
        return (
            [each for each in places if (":" in each) == (family.name == "AF_INET6")] if host.endswith(".test") else []
        )

    monkeypatch.setattr(NAMES, "_lookup", lookup)
    NAMES.after_fork_in_child()
    yield
    NAMES.after_fork_in_child()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("named")
def test_certificate_is_verified_against_the_name(served: Any, way: Callable[[str, Tls | None], bytes]) -> None:
    secure, plain, tls = served
    assert way(f"n1.test:{secure}", tls) == b"hello"
    assert way(f"n2.test:{plain}", None) == b"hello"
    with pytest.raises(grpc.RpcError, match="Hostname Verification Check failed"):
        way(f"n2.test:{secure}", tls)


@pytest.mark.parametrize("way", [blocking, future])
@pytest.mark.usefixtures("named")
def test_call_without_address_fails_as_not_sent(served: Any, way: Callable[[str, Tls | None], bytes]) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        way("n1.nowhere:1", None)
    found = from_rpc_error(raised.value)  # type: ignore[arg-type]
    assert isinstance(found, Unavailable)
    assert "n1.nowhere: no such host" in str(found)


@pytest.mark.usefixtures("named")
def test_closed_channel_makes_no_calls(served: Any) -> None:
    channel = open_channel(f"n1.test:{served[1]}", None)
    channel.close()
    with pytest.raises(ValueError, match="closed channel"):
        channel.unary_unary("/test.Test/Echo")(b"hello", timeout=PATIENCE_S)


def test_method_is_not_made_for_a_channel_that_another_thread_closes() -> None:
    """gRPC crashes the process if a method is made for a closed channel."""
    has_come, made, closing = threading.Event(), list[bool](), list[Future[None]]()
    calling = threading.current_thread()

    class Channel:
        is_closed = False

        @property
        def unary_unary(self) -> Callable[..., Any]:
            closing.append(threads.submit(named.close))
            assert has_come.wait(PATIENCE_S)
            return self._make

        def _make(self, *_: Any, **__: Any) -> Callable[..., None]:
            made.append(self.is_closed)
            return lambda *_, **__: None

        def close(self) -> None:
            self.is_closed = True
            has_come.set()

    class Lock:
        """A lock that reports the thread that closes the channel, which has to wait."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if threading.current_thread() is not calling:
                has_come.set()
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    inner = Channel()
    named = NamedChannel("localhost:1", lambda places: cast("grpc.Channel", inner))
    named._lock = cast("threading.Lock", Lock())
    with ThreadPoolExecutor(1) as threads:
        named.unary_unary("/test.Test/Echo")(b"", timeout=PATIENCE_S)
        closing[0].result(PATIENCE_S)
    assert made == [False]
    assert inner.is_closed
