"""Asks the nodes of a local cluster for their HTTP pages. Blocking."""

from __future__ import annotations

import json
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from kvstore.devcluster.secure_folder import SecureFolder

_TIMEOUT_S = 2
_SAID_BYTES_MAX = 500


def http_ok(address: str, path: str, secure: SecureFolder | None = None) -> bool:
    """Whether the node that listens there answers with 200."""
    try:
        return _get(address, path, secure) is not None
    except (URLError, OSError, HTTPException):  # the last: somebody else's port, who speaks something else
        return False


def why_not(address: str, path: str, secure: SecureFolder | None = None) -> str:
    """Return in a line what the node that listens there says in place of 200; empty if it says nothing."""
    try:
        _get(address, path, secure)
    except HTTPError as error:
        with suppress(OSError, HTTPException), error:
            return " ".join(error.read(_SAID_BYTES_MAX).decode(errors="replace").split())
    except (URLError, OSError, HTTPException):
        pass
    return ""


def is_stranger(address: str, secure: SecureFolder) -> bool:
    """Whether the node that listens there says that it does not know the folder's user by this password."""
    try:
        _get(address, "/", secure)
    except HTTPError as error:
        with error:
            return error.code == HTTPStatus.UNAUTHORIZED
    except (URLError, OSError, HTTPException):
        pass
    return False


def python_of(address: str, secure: SecureFolder | None = None) -> str | None:
    """Ask the node that listens there what it runs on; None if it does not say so."""
    return _text(_first_page(address, secure).get("python")) or None


def unsettled(address: str, secure: SecureFolder | None = None) -> tuple[str, str]:
    """Ask the node that listens there for what passes by itself after a start: why the cluster's version is below what
    the node can do, and why the node is not sure of its date. Each is empty if nothing is wrong or it does not say."""
    page = _first_page(address, secure)
    date = page.get("date")
    doubt = date.get("doubt") if isinstance(date, dict) else None
    return _text(page.get("cluster_version_waits_for")), _text(doubt)


def _first_page(address: str, secure: SecureFolder | None) -> dict[str, object]:
    with suppress(URLError, OSError, HTTPException, ValueError):
        page = _get(address, "/", secure)
        found = None if page is None else json.loads(page)
        if isinstance(found, dict):
            return found
    return {}


def _text(found: object) -> str:
    return found if isinstance(found, str) else ""


def _get(address: str, path: str, secure: SecureFolder | None) -> bytes | None:
    """The page; None if it is not 200. Of a secure cluster never without TLS. Raises OSError, HTTPException."""
    scheme, context, headers = "http", None, {}
    if secure is not None:
        scheme, context = "https", secure.tls.client_context()
        headers["authorization"] = secure.login().header
    request = Request(f"{scheme}://{address}{path}", headers=headers)
    # Never by the environment's http_proxy: that machine's loopback is another one.
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
    with opener.open(request, timeout=_TIMEOUT_S) as answer:
        page: bytes = answer.read()
        return page if answer.status == 200 else None
