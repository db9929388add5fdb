"""The options of both ends of a channel agree."""

import pytest

from kvstore.rpc.channels import (
    MESSAGE_BYTES_MAX,
    TIMEOUT_DEFAULT_MS,
    TIMEOUT_MAX_MS,
    channel_options,
    open_channel,
    server_options,
    timeout_s,
    warn_of_plain_login,
)
from kvstore.rpc.login import Login
from kvstore.server.grpc.encode import MESSAGE_BYTES, RESULT_BYTES_MAX

CLIENT, SERVER = dict(channel_options()), dict(server_options())


def test_client_pings_no_more_often_than_server_allows() -> None:
    """Otherwise the server closes the connection because of too many pings."""
    assert CLIENT["grpc.keepalive_time_ms"] > SERVER["grpc.http2.min_ping_interval_without_data_ms"]
    assert CLIENT["grpc.keepalive_permit_without_calls"] == SERVER["grpc.keepalive_permit_without_calls"] == 1


def test_both_ends_limit_messages_in_both_directions() -> None:
    for ends in (CLIENT, SERVER):
        assert ends["grpc.max_receive_message_length"] == ends["grpc.max_send_message_length"] == MESSAGE_BYTES_MAX


def test_server_batches_fit_into_a_message() -> None:
    assert MESSAGE_BYTES + RESULT_BYTES_MAX < MESSAGE_BYTES_MAX


def test_timeout_has_default_and_maximum() -> None:
    assert timeout_s(0) == TIMEOUT_DEFAULT_MS / 1000
    assert timeout_s(250) == 0.25
    assert timeout_s(10**9) == TIMEOUT_MAX_MS / 1000


@pytest.mark.parametrize(
    ("address", "warned"), [("192.0.2.1:7401", True), ("127.0.0.1:7401", False), ("[::1]:7401", False)]
)
def test_login_without_tls_is_warned_of_beyond_loopback(
    address: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_plain_login.cache_clear()
    for _ in range(2):
        with open_channel(address, None, login=Login("anna", b"secret")):
            pass
    said = [record.getMessage() for record in caplog.records if "without TLS" in record.getMessage()]
    assert len(said) == warned
    assert "secret" not in caplog.text
