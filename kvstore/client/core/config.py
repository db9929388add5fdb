"""The configuration of a client: where the cluster is, timeouts, TLS and login. Decides only."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstore.access.tokens import id_or_none
from kvstore.env.tls import Tls
from kvstore.rpc.login import Login

SCHEME = "kv"
TLS_SCHEME = "kvs"
DEFAULT_PORT = 7401
SECONDS_MAX = 1e9
"""Maximum of any timeout that a caller gives: 32 years. No timer can be set to infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """The configuration of a client. Times are in seconds."""

    endpoints: tuple[str, ...]
    """Addresses (`host:port`) of some servers of the cluster. One that answers is enough; it names the others."""
    timeout_s: float = 5.0
    """Maximum time for each call, retries included."""
    connect_timeout_s: float = 1.0
    """Maximum time to open one connection."""
    silence_s: float = 1.0
    """Time after which a server that owes answers and sends none is probed. After the same time again without a sign of
    life the client disconnects and asks other servers."""

    tls: Tls | None = None
    """How to verify the servers, and the client's own certificate; None: plain TCP."""
    login: Login | None = None
    """User and password, or a token without a user. None: those of the environment (KVSTORE_USER with
    KVSTORE_PASSWORD_FILE or KVSTORE_PASSWORD; KVSTORE_TOKEN_FILE or KVSTORE_TOKEN), if it has any."""
    cluster: str = ""
    """Id of the cluster, assigned when it was founded. The client uses no other cluster. Empty: the cluster whose
    server answers first."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("expected at least one endpoint, got none")
        if any(_endpoint(str(each)) != each for each in self.endpoints):  # also if it is a str, of characters
            raise ValueError(f"expected a tuple of host:port as endpoints, got {self.endpoints!r}")
        times = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_s")}
        wrong = [
            f"{name}: expected more than 0 and at most {SECONDS_MAX:g}, got {value!r}"
            for name, value in times.items()
            if not (isinstance(value, (int, float)) and 0 < value <= SECONDS_MAX)
        ]
        if wrong:
            raise ValueError("; ".join(wrong))


def as_config(cluster: object) -> ClientConfig:
    """Return the configuration that a caller gave, or the one that its URL describes. Raises ValueError."""
    if isinstance(cluster, ClientConfig):
        return cluster
    if isinstance(cluster, str):
        return parse_url(cluster)
    found = type(cluster).__name__  # without the value, which may contain a password
    raise ValueError(f"expected a URL like kv://host:port,host:port or a ClientConfig, got {found}")


def parse_url(url: str) -> ClientConfig:
    """Return the configuration that a URL describes.

    The form is `kv://[user:password@|token@]host:port,host:port[?timeout=5s&connect_timeout=500ms&silence=1s]`, or with
    TLS `kvs://host:port[?ca=FILE&cert=FILE&key=FILE]`. User and password are percent-encoded.

    Raises:
        ValueError: If the URL is malformed. The error does not show the login.
    """
    scheme, separator, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    try:
        return _parsed(scheme, separator, authority, rest)
    except ValueError:
        if "@" not in scheme + rest.removeprefix(authority):
            raise
    raise ValueError(  # without the URL: what is before the @ may be a password, or its beginning
        f"expected {SCHEME}:// or {TLS_SCHEME}:// and then user:password@ with / ? # @ percent-encoded, "
        "got an @ elsewhere"
    )


def _parsed(scheme: str, separator: str, authority: str, rest: str) -> ClientConfig:
    userinfo, at, hosts = authority.rpartition("@")
    rest = rest.removeprefix(authority)
    url = f"{scheme}{separator}{hosts}{rest}"  # as errors show it
    login = _login(userinfo) if at else None
    parts = urlsplit(f"{scheme}://hosts{rest}")  # urlsplit accepts no list with an IPv6 address
    if parts.scheme not in (SCHEME, TLS_SCHEME):
        raise ValueError(f"expected a URL like kv://host:port,host:port, got {url!r}")
    if parts.path not in ("", "/") or parts.fragment:
        raise ValueError(f"expected only hosts and options in a URL, got {url!r}")
    endpoints = tuple(_endpoint(each) for each in hosts.split(",") if each)
    pairs = dict(parse_qsl(parts.query, keep_blank_values=True))
    tls = _tls(pairs) if parts.scheme == TLS_SCHEME else None
    known = {field.name for field in fields(ClientConfig)} - {"endpoints", "tls", "login", "cluster"}
    unknown = sorted(name for name in pairs if f"{name}_s" not in known)
    if unknown:
        raise ValueError(f"unknown options {unknown} in {url!r}; expected some of {sorted(n[:-2] for n in known)}")
    options = {f"{name}_s": _seconds(name, value) for name, value in pairs.items()}
    return ClientConfig(endpoints=endpoints, tls=tls, login=login, cluster="", **options)


def _login(userinfo: str) -> Login:
    if id_or_none(userinfo.encode()) is not None:
        return Login("", userinfo.encode())
    user, colon, password = userinfo.partition(":")
    if not user or not colon or not password:
        raise ValueError(
            "expected user:password or a token before the @ of a URL; or leave both out and set them in the environment"
        )
    return Login(unquote(user), unquote(password).encode())


def _tls(pairs: dict[str, str]) -> Tls:
    """Return the TLS files among the options, and remove them from `pairs`."""
    ca, cert, key = (Path(pairs.pop(name)) if name in pairs else None for name in ("ca", "cert", "key"))
    return Tls(ca=ca, cert=cert, key=key)


def _endpoint(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"expected host:port, got {text!r}")
    return f"{host}:{port}"


def _seconds(name: str, text: str) -> float:
    for suffix, factor in (("ms", 0.001), ("s", 1.0)):
        if text.endswith(suffix):
            try:
                return float(text.removesuffix(suffix)) * factor
            except ValueError:
                break
    raise ValueError(f"{name}: expected a time like 2s or 500ms, got {text!r}")
