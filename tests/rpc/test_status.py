"""Every error crosses a real loopback server unchanged."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvstore import errors
from kvstore.rpc.channels import channel_options, server_options
from kvstore.rpc.status import (
    FIELDS,
    STATUS,
    abort,
    connection_fault,
    describe,
    from_rpc_error,
    http_status,
    reason_of,
    restore,
)
from tests.waiting import PATIENCE_S


def descendants(kind: type) -> set[type]:
    return {kind}.union(*(descendants(each) for each in kind.__subclasses__()))


def of_the_tree() -> set[type[errors.StoreError]]:
    return {kind for kind in descendants(errors.StoreError) if kind.__module__ == errors.__name__}


def an_error(kind: type[errors.StoreError]) -> errors.StoreError:
    samples = {
        errors.NotLeader: errors.NotLeader("p1", "n2", "127.0.0.1:7402"),
        errors.Moved: errors.Moved("p9", 17),
        errors.ConditionFailed: errors.ConditionFailed(42),
        errors.QuotaExceeded: errors.QuotaExceeded("shop", "keys", 40, 41, 2),
        errors.RateExceeded: errors.RateExceeded("shop", 100, 33, 12),
        errors.PositionTrimmed: errors.PositionTrimmed("p1", 41, 99),
    }
    return samples.get(kind) or kind(f"what {kind.__name__} says: key ü, 7 of 9")


def test_every_error_has_a_status() -> None:
    assert set(STATUS) == of_the_tree()


def test_error_with_fields_is_listed_in_fields() -> None:
    """An error with more than its message must be in FIELDS, or its hint would not be transferred."""
    with_fields = {kind for kind in of_the_tree() if "__init__" in vars(kind)}
    assert set(FIELDS) == with_fields


def test_http_status_is_429_or_503_for_retryable_errors() -> None:
    """A conflict is another matter: not the request has to be sent again, but the transaction run again."""
    statuses = {kind: http_status(an_error(kind)) for kind in of_the_tree() if issubclass(kind, errors.Retryable)}
    assert statuses.pop(errors.Conflict) == 409
    assert statuses[errors.NoSuchPin] == 503
    assert set(statuses.values()) <= {429, 503}


def same(a: errors.StoreError, b: errors.StoreError) -> bool:
    return (
        type(a) is type(b)
        and str(a) == str(b)
        and all(getattr(a, n) == getattr(b, n) for n, _ in FIELDS.get(type(a), ()))
    )


@pytest.mark.parametrize("kind", sorted(of_the_tree(), key=str))
def test_error_is_restored_from_its_description(kind: type[errors.StoreError]) -> None:
    assert same(restore(*describe(an_error(kind))), an_error(kind))


@pytest.mark.parametrize("key", [b"k", b"\xff\0/%", b"x" * 1_024])
def test_condition_of_a_transaction_names_its_key(key: bytes) -> None:
    restored = restore(*describe(errors.ConditionFailed(7, key)))
    assert isinstance(restored, errors.ConditionFailed)
    assert (restored.version, restored.key) == (7, key)
    assert repr(key)[:90] in str(restored)


def test_condition_without_a_key_is_sent_as_before() -> None:
    assert describe(errors.ConditionFailed(7)).metadata == {"version": "7"}
    too_long = describe(errors.ConditionFailed(7, b"x" * 1_025))
    assert too_long.metadata == {"version": "7"}, "trailing metadata is limited to 8 KiB"


def test_unknown_subclass_is_sent_as_nearest_known_class() -> None:
    class Stranger(errors.Overloaded):
        pass

    assert type(restore(*describe(Stranger("full")))) is errors.Overloaded


@pytest.mark.parametrize(
    ("reason", "metadata"), [("FROM_THE_FUTURE", {}), ("MOVED", {}), ("MOVED", {"ring_version": "x"})]
)
def test_unknown_reason_says_nothing_about_the_outcome(reason: str, metadata: dict[str, str]) -> None:
    assert type(restore(reason, "?", metadata)) is errors.OutcomeUnknown


class Raising(grpc.GenericRpcHandler):
    """Answers each call with the error that its request names."""

    def service(self, details: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            kind = next(kind for kind in STATUS if reason_of(kind) == request.decode())
            await abort(context, an_error(kind))

        return grpc.unary_unary_rpc_method_handler(answer) if details.method == "/test/Raise" else None


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(handlers=[Raising()], options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as opened:
        yield opened
    await server.stop(0)


async def test_every_error_crosses_a_server_unchanged(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary("/test/Raise")
    for kind in STATUS:
        with pytest.raises(grpc.RpcError) as caught:
            await call(reason_of(kind).encode(), timeout=PATIENCE_S)
        failure: Any = caught.value
        assert failure.code() is STATUS[kind]
        assert same(from_rpc_error(failure), an_error(kind))


async def test_unknown_method_is_refused(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await channel.unary_unary("/test/Nothing")(b"", timeout=PATIENCE_S)
    failure: Any = caught.value
    assert type(from_rpc_error(failure)) is errors.InvalidRequest


async def test_call_that_reached_no_server_was_not_sent() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1", options=channel_options()) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary("/test/Raise")(b"", timeout=PATIENCE_S)
    failure: Any = caught.value
    error = from_rpc_error(failure)
    assert type(error) is errors.Unavailable
    assert str(error) == "no connection to 127.0.0.1:1: Connection refused"


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 82)", "name the gRPC port"),
        ("Tls handshake failed: error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER", "does not use TLS"),
        ("Cannot check peer: missing selected ALPN property.", "name the gRPC port"),
        ("Socket closed", "if the port requires TLS, use kvs://"),
        ("CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate: OK", "ca=FILE, or KVSTORE_TLS_CA"),
        ("CERTIFICATE_VERIFY_FAILED: self signed certificate in certificate chain: OK", "ca=FILE, or KVSTORE_TLS_CA"),
        ("Failed to create security handshaker.", "in PEM format"),
    ],
)
def test_connection_to_another_kind_of_port_gets_a_hint(reason: str, hint: str) -> None:
    text = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:6401: {reason}"
    fault = connection_fault(text)
    assert fault.startswith(f"no connection to 127.0.0.1:6401: {reason.removesuffix('.')}; ")
    assert hint in fault


async def test_error_of_a_tls_client_says_that_the_server_uses_no_tls() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    credentials = grpc.ssl_channel_credentials()
    try:
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=channel_options()) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                await channel.unary_unary("/test/Raise")(b"", timeout=PATIENCE_S)
    finally:
        await server.stop(None)
    failure: Any = caught.value
    assert "the port does not use TLS" in str(from_rpc_error(failure))


def test_call_without_timely_answer_is_unknown() -> None:
    nothing = grpc.aio.Metadata()
    failure = grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing)
    assert type(from_rpc_error(failure)) is errors.OutcomeUnknown
