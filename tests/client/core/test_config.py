"""URLs name a cluster; errors say what is wrong with them."""

from typing import Any

import pytest

from kvstore.client.core.config import ClientConfig, as_config, parse_url
from kvstore.rpc.login import Login


def test_url_names_endpoints_and_times() -> None:
    config = parse_url("kv://a:1,b,[::1]:7402?timeout=250ms&silence=2s")
    assert config.endpoints == ("a:1", "b:7401", "[::1]:7402")
    assert (config.timeout_s, config.silence_s, config.connect_timeout_s) == (0.25, 2.0, 1.0)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("redis://a:1", "kv://"),
        ("a:7401", "like kv://host:port,host:port, got 'a:7401'"),
        ("kv://", "at least one endpoint"),
        ("kv://a:x", "host:port"),
        ("kv://a:0", "host:port"),
        ("kv://a:1/path", "only hosts"),
        ("kv://user@a:1", "user:password"),
        ("kv://kvt_0123456789ab_0@a:1", "user:password"),
        ("kv://user:@a:1", "user:password"),
        ("kv://user:secret@a:1/path", "only hosts"),
        ("kv://a:1?timeout=5", "timeout"),
        ("kv://a:1?timeout=fast", "timeout"),
        ("kv://a:1?colour=1s", "colour"),
        ("kv://a:1?timeout=0s", "more than 0"),
    ],
)
def test_wrong_url_error_says_what_is_wrong(url: str, what: str) -> None:
    with pytest.raises(ValueError, match=what) as raised:
        parse_url(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "kv://anna:se/cret@a:1",
        "kv://anna:se#cret@a:1",
        "kv://anna:se?cret@a:1",
        "kvs://anna:secret?x@a:1",
        "anna:secret@a:1",
        "kv:/anna:secret@a:1",
    ],
)
def test_error_about_an_unencoded_password_does_not_show_it(url: str) -> None:
    with pytest.raises(ValueError, match="percent-encoded") as raised:
        parse_url(url)
    assert ":se" not in str(raised.value)
    assert "cret" not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_file_name_with_an_at_sign_is_no_password() -> None:
    config = parse_url("kvs://a:1?ca=/etc/x@y.pem")
    assert config.tls is not None
    assert str(config.tls.ca) == "/etc/x@y.pem"


def test_url_names_a_user_and_hides_the_password() -> None:
    config = parse_url("kv://an%40na:s%3Acret@a:1,b:2")
    assert config.endpoints == ("a:1", "b:2")
    assert config.login == Login("an@na", b"s:cret")
    assert "cret" not in repr(config)


def test_all_wrong_times_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"timeout_s.*silence_s"):
        ClientConfig(endpoints=("a:1",), timeout_s=0, silence_s=-1)


@pytest.mark.parametrize("time_s", [float("inf"), float("nan"), 1e300])
def test_time_that_no_timer_can_hold_is_refused(time_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s: expected more than 0 and at most 1e"):
        ClientConfig(endpoints=("a:1",), timeout_s=time_s)


@pytest.mark.parametrize("time_s", ["5", None])
def test_time_that_is_no_number_is_refused(time_s: Any) -> None:
    with pytest.raises(ValueError, match=f"timeout_s: expected more than 0 and at most .*, got {time_s!r}"):
        ClientConfig(endpoints=("a:1",), timeout_s=time_s)


@pytest.mark.parametrize(
    ("endpoints", "message"),
    [
        ("a:1", "expected a tuple of host:port as endpoints, got 'a:1'"),
        (("a",), r"expected a tuple of host:port as endpoints, got \('a',\)"),
        (("a:b",), "expected host:port, got 'a:b'"),
        ((7401,), r"expected a tuple of host:port as endpoints, got \(7401,\)"),
    ],
    ids=str,
)
def test_endpoints_without_host_and_port_are_refused(endpoints: Any, message: str) -> None:
    """A client of the endpoints `a:1` asked the server `a` at port 443."""
    with pytest.raises(ValueError, match=message):
        ClientConfig(endpoints=endpoints)


@pytest.mark.parametrize("cluster", [None, b"kv://user:secret@a:1", ["a:1"]], ids=str)
def test_cluster_that_is_no_url_is_refused_by_its_type(cluster: Any) -> None:
    with pytest.raises(ValueError, match=f"expected a URL .* or a ClientConfig, got {type(cluster).__name__}$"):
        as_config(cluster)
