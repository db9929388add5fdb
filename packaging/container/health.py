"""Asks the node in this container for one of its health pages; exit code 0 if it answers with 200.

python health.py [PATH [PORT [HOST]]]        /healthz, 8401 and loopback, of IPv4 or IPv6, if not said
"""

from __future__ import annotations

import http.client
import ssl
import sys

TIMEOUT_S = 2
LOOPBACKS = ("127.0.0.1", "::1")


def is_healthy(path: str, port: int, host: str) -> bool:
    """Ask without TLS, then with it: certificates name the host by which others connect, and not this loopback."""
    context = ssl._create_unverified_context()
    plain = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    for connection in (plain, http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)):
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
    sys.exit(0 if any(is_healthy(page, int(at), host) for host in words[2:3] or LOOPBACKS) else 1)
