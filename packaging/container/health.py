"""Asks the node in this container for one of its health pages; exit code 0 if it answers with 200.

python health.py [PATH [PORT]]        /healthz and 8401 if not said
"""

from __future__ import annotations

import http.client
import ssl
import sys

TIMEOUT_S = 2


def is_healthy(path: str, port: int) -> bool:
    """Ask without TLS, then with it: certificates name the host by which others connect, and not this loopback."""
    context = ssl._create_unverified_context()
    plain = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    for connection in (plain, http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=context)):
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
    return False


if __name__ == "__main__":
    words = sys.argv[1:]
    page, at = (words + ["/healthz", "8401"][len(words) :])[:2]
    sys.exit(0 if is_healthy(page, int(at)) else 1)
