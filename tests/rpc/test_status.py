"""Every error crosses a real loopback server unchanged."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvstore import errors
from kvstore.rpc.channels import channel_options, server_options
from kvstore.rpc.status import FIELDS, STATUS, abort, describe, from_rpc_error, http_status, reason_of, restore
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
    statuses = {kind: http_status(an_error(kind)) for kind in of_the_tree() if issubclass(kind, errors.Retryable)}
    assert statuses[errors.NoSuchPin] == 503
    assert set(statuses.values()) <= {429, 503}


def same(a: errors.StoreError, b: errors.StoreError) -> bool:
    return (
        type(a) is type(b)
        and str(a) == str(b)
        and all(getattr(a, n) == getattr(b, n) for n, _ in FIELDS.get(type(a), ()))
    )


@pytest.mark.parametrize("kind", sorted(STATUS, key=lambda kind: kind.__name__))
def test_error_is_restored_from_its_description(kind: type[errors.StoreError]) -> None:
    assert same(restore(*describe(an_error(kind))), an_error(kind))


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


def test_call_without_timely_answer_is_unknown() -> None:
    nothing = grpc.aio.Metadata()
    failure = grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing)
    assert type(from_rpc_error(failure)) is errors.OutcomeUnknown
