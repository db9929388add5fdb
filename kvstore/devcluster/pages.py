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
    return _told(address, "python", secure)


def rise_waits_for(address: str, secure: SecureFolder | None = None) -> str:
    """Ask the node that listens there why the cluster's version is below what it can do; empty if it is not, or it does
    not say so."""
    return _told(address, "cluster_version_waits_for", secure) or ""


def _told(address: str, name: str, secure: SecureFolder | None) -> str | None:
    """Return what a node's first page has under this name, if that is text."""
    with suppress(URLError, OSError, HTTPException, ValueError, AttributeError):
        page = _get(address, "/", secure)
        found = None if page is None else json.loads(page).get(name)
        return found if isinstance(found, str) else None
    return None


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
