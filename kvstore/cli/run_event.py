"""The notification at the end of `kvstore snapshot nightly`: one OpenLineage run event, sent by HTTP POST.

https://openlineage.io/docs/spec describes the event. The facet `kvstore_nightly` has the command's result. The event
is a message to people and catalogues, not part of the snapshot: it is sent once, within SEND_S, and an error of the
receiver is only reported.
"""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

SEND_S = 10.0
"""Maximum seconds for name resolution, connection, request and reply together."""
SCHEMA = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
_FACETS = "https://openlineage.io/spec/facets"
_RUN_FACET = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunFacet"
_TYPES = {"done": "COMPLETE", "interrupted": "ABORT"}


def event_of(result: Mapping[str, Any], cluster: str) -> dict[str, Any]:
    """Return the event of a result of `nightly`. `cluster` is the id of the cluster, empty if it did not answer."""
    producer = f"https://pypi.org/project/kvstore-log/{version('kvstore-log')}"
    facets: dict[str, Any] = {"kvstore_nightly": {"_producer": producer, "_schemaURL": _RUN_FACET, **result}}
    if result["error"]:
        facets["errorMessage"] = {
            "_producer": producer,
            "_schemaURL": f"{_FACETS}/1-0-0/ErrorMessageRunFacet.json",
            "message": result["error"],
            "programmingLanguage": "python",
        }
    return {
        "eventType": _TYPES.get(result["outcome"], "FAIL"),
        "eventTime": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "producer": producer,
        "schemaURL": SCHEMA,
        "run": {"runId": str(uuid4()), "facets": facets},
        "job": {"namespace": f"kvstore://{cluster or 'unknown'}", "name": "snapshot.nightly"},
        "inputs": [{"namespace": f"kvstore://{cluster}", "name": "records"}] if cluster else [],
        "outputs": [_output(each, producer) for each in result["snapshots"]],
    }


def _output(snapshot: Mapping[str, Any], producer: str) -> dict[str, Any]:
    parts = urlsplit(snapshot["path"])
    if parts.scheme:
        namespace, name = f"{parts.scheme}://{parts.netloc}", parts.path.strip("/")
    else:
        namespace, name = f"file://{socket.gethostname()}", snapshot["path"]
    return {
        "namespace": namespace,
        "name": name,
        "outputFacets": {
            "outputStatistics": {
                "_producer": producer,
                "_schemaURL": f"{_FACETS}/1-0-2/OutputStatisticsOutputDatasetFacet.json",
                "rowCount": snapshot["rows"],
                "size": snapshot["bytes"],
                "fileCount": snapshot["files"],
            }
        },
    }


def send_or_fault(url: str, event: Mapping[str, Any]) -> str | None:
    """Post the event once. Returns None if the receiver has accepted it within SEND_S, otherwise the reason, which
    names the host only, because the rest of such a URL is often a secret."""
    found: list[str | None] = []
    sender = threading.Thread(target=lambda: found.append(_posted(url, event)), name="notify", daemon=True)
    sender.start()
    sender.join(SEND_S)
    host = urlsplit(url).hostname
    if not found:
        return f"{host} did not answer within {SEND_S:g} s"
    return f"{host}: {found[0]}" if found[0] else None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would turn the POST into a GET without the event."""

    def redirect_request(self, *_: object) -> None:
        return None


def _posted(url: str, event: Mapping[str, Any]) -> str | None:
    request = urllib.request.Request(
        url, json.dumps(event).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=SEND_S):
            return None
    except urllib.error.HTTPError as error:
        return f"expected status 2xx, got {error.code}"
    except urllib.error.URLError as error:
        return str(error.reason)
    except Exception as error:  # noqa: BLE001 - the snapshot does not depend on any error of the receiver
        return f"{type(error).__name__}: {error}".replace(url, "")


def url_fault(url: str) -> str | None:
    """Return the reason why the event cannot be sent to this URL; None if it can."""
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.username
        _ = parts.port
    except ValueError:
        is_right = False
    return None if is_right else "expected http://… or https://… without a user or password"
