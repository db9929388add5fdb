"""Where the cluster is and how patient a client is. Decides only."""

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
"""Of any time that a caller gives: 32 years. No clock could be set to infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Times are in seconds."""

    endpoints: tuple[str, ...]
    """`host:port` of some servers of the cluster. One that answers is enough; it tells of the others."""
    timeout_s: float = 5.0
    """For each call, retries included."""
    connect_timeout_s: float = 1.0
    """For one connection."""
    silence_s: float = 1.0
    """A server that owes answers and has sent none for this long is asked whether it is alive; without an answer in the
    same time again it is given up, and what it owes is asked of others."""

    tls: Tls | None = None
    """How to verify the servers, and who this client is; None: plain TCP."""
    login: Login | None = None
    """The user and his password, or a token and no user; None: those of the environment (KVSTORE_USER,
    KVSTORE_PASSWORD_FILE or KVSTORE_PASSWORD; KVSTORE_TOKEN_FILE or KVSTORE_TOKEN), if it names any."""
    cluster: str = ""
    """The id of the cluster that is meant, of its founding: no other one is asked for anything. Empty: the one whose
    server answers first."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("want at least one endpoint")
        times = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_s")}
        wrong = [
            f"{name}: want more than 0 and at most {SECONDS_MAX:g}, got {value}"
            for name, value in times.items()
            if not 0 < value <= SECONDS_MAX
        ]
        if wrong:
            raise ValueError("; ".join(wrong))


def parse_url(url: str) -> ClientConfig:
    """`kv://[user:password@|token@]host:port,host:port[?timeout=5s&connect_timeout=500ms&silence=1s]`, or with TLS
    `kvs://host:port[?ca=FILE&cert=FILE&key=FILE]`. User and password are percent-encoded; errors do not show them.
    Raises ValueError."""
    scheme, _, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    try:
        return _parsed(scheme, authority, rest)
    except ValueError:
        if "@" not in scheme + rest.removeprefix(authority):
            raise
    raise ValueError(  # and shows nothing: what is before the @ may be a password, or its beginning
        f"want {SCHEME}:// or {TLS_SCHEME}:// and then user:password@ with / ? # @ percent-encoded, got an @ elsewhere"
    )


def _parsed(scheme: str, authority: str, rest: str) -> ClientConfig:
    said, at, hosts = authority.rpartition("@")
    rest = rest.removeprefix(authority)
    url = f"{scheme}://{hosts}{rest}"  # as errors show it
    login = _login(said) if at else None
    parts = urlsplit(f"{scheme}://hosts{rest}")  # it takes no list with an IPv6 address
    if parts.scheme not in (SCHEME, TLS_SCHEME):
        raise ValueError(f"want a URL like kv://host:port,host:port, got {url!r}")
    if parts.path not in ("", "/") or parts.fragment:
        raise ValueError(f"want only hosts and options in a URL, got {url!r}")
    endpoints = tuple(_endpoint(each) for each in hosts.split(",") if each)
    pairs = dict(parse_qsl(parts.query, keep_blank_values=True))
    tls = _tls(pairs) if parts.scheme == TLS_SCHEME else None
    known = {field.name for field in fields(ClientConfig)} - {"endpoints", "tls", "login", "cluster"}
    unknown = sorted(name for name in pairs if f"{name}_s" not in known)
    if unknown:
        raise ValueError(f"unknown options {unknown} in {url!r}; want some of {sorted(n[:-2] for n in known)}")
    options = {f"{name}_s": _seconds(name, value) for name, value in pairs.items()}
    return ClientConfig(endpoints=endpoints, tls=tls, login=login, cluster="", **options)


def _login(said: str) -> Login:
    if id_or_none(said.encode()) is not None:
        return Login("", said.encode())
    user, colon, password = said.partition(":")
    if not user or not colon or not password:
        raise ValueError(
            "want user:password, or a token, before the @ of a URL; or neither, and name both in the environment"
        )
    return Login(unquote(user), unquote(password).encode())


def _tls(pairs: dict[str, str]) -> Tls:
    """The files among the options, which are taken out of `pairs`."""
    ca, cert, key = (Path(pairs.pop(name)) if name in pairs else None for name in ("ca", "cert", "key"))
    return Tls(ca=ca, cert=cert, key=key)


def _endpoint(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"want host:port, got {text!r}")
    return f"{host}:{port}"


def _seconds(name: str, text: str) -> float:
    for suffix, factor in (("ms", 0.001), ("s", 1.0)):
        if text.endswith(suffix):
            try:
                return float(text.removesuffix(suffix)) * factor
            except ValueError:
                break
    raise ValueError(f"{name}: want a time like 2s or 500ms, got {text!r}")
