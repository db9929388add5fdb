"""Requests HTTP pages of the nodes of a local cluster. Blocking."""

from __future__ import annotations

import json
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from kvstore.devcluster.secure_folder import SecureFolder

_TIMEOUT_S = 2
_BODY_BYTES_MAX = 500


def http_ok(address: str, path: str, secure: SecureFolder | None = None) -> bool:
    """Return True if the node at the address answers with 200."""
    try:
        return _get(address, path, secure) is not None
    except (URLError, OSError, HTTPException):  # HTTPException: another program uses the port
        return False


def refusal(address: str, path: str, secure: SecureFolder | None = None) -> str:
    """Return the reply of the node at the address, if it is not 200, in one line; empty without a reply."""
    try:
        _get(address, path, secure)
    except HTTPError as error:
        with suppress(OSError, HTTPException), error:
            return " ".join(error.read(_BODY_BYTES_MAX).decode(errors="replace").split())
    except (URLError, OSError, HTTPException):
        pass
    return ""


def is_login_rejected(address: str, secure: SecureFolder) -> bool:
    """Return True if the node at the address rejects the folder's user and password."""
    try:
        _get(address, "/", secure)
    except HTTPError as error:
        with error:
            return error.code == HTTPStatus.UNAUTHORIZED
    except (URLError, OSError, HTTPException):
        pass
    return False


def python_of(address: str, secure: SecureFolder | None = None) -> str | None:
    """Return the Python version that the node at the address runs on, or None if it does not answer."""
    return _text(_first_page(address, secure).get("python")) or None


def unsettled(address: str, secure: SecureFolder | None = None) -> tuple[str, str]:
    """Return two temporary conditions after a start of the node at the address: why the cluster's version, or that of a
    log which the node leads, is below what the node supports, and why the node is not sure of its clock. Each is empty
    if there is none, or without a reply."""
    page = _first_page(address, secure)
    date = page.get("date")
    doubt = date.get("doubt") if isinstance(date, dict) else None
    return _text(page.get("cluster_version_waits_for")) or _logs_behind(page), _text(doubt)


# docs/protocol.md V4
def _logs_behind(page: dict[str, object]) -> str:
    """Return which logs that the node leads are not written by the cluster's version yet; empty if there are none."""
    version, replicas = page.get("cluster_version"), page.get("partitions")
    if not isinstance(version, int) or not isinstance(replicas, dict):
        return ""
    behind = [
        name
        for name, replica in sorted(replicas.items())
        if replica.get("role") == "serving" and replica.get("log_version", version) < version
    ]
    return f"the logs of {', '.join(behind)} follow within seconds" if behind else ""


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
    """Return the page, or None if the status is not 200. A secure cluster is never asked without TLS. Raises OSError,
    HTTPException."""
    scheme, context, headers = "http", None, {}
    if secure is not None:
        scheme, context = "https", secure.tls.client_context()
        headers["authorization"] = secure.login().header
    request = Request(f"{scheme}://{address}{path}", headers=headers)
    # Never use the environment's http_proxy: a proxy's loopback is another machine.
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
    with opener.open(request, timeout=_TIMEOUT_S) as answer:
        page: bytes = answer.read()
        return page if answer.status == 200 else None
