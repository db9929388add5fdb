"""The program of the death watch: a small process beside a node, which outlives the node by two seconds at most. It
waits until the kernel reports that the node's process has ended. Then it sends the node's last message to the other
nodes.

It runs by its path in an isolated interpreter without site packages, so it imports the standard library only. The
first argument is a pidfd of the node's process. Each line of standard input is a JSON object: `message` in hexadecimal
digits, `addresses`, and optionally `tls` with the paths `ca`, `cert`, `key` and the flag `prefers`. The last complete
line counts.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

ATTEMPT_S = 0.5
"""Seconds for one attempt to reach an address."""
AGAIN_S = 0.05
GIVE_UP_S = 1.0
"""Seconds after which no further attempt begins. The process ends ATTEMPT_S later at the latest."""
READ_BYTES = 64 << 10
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT, signal.SIGUSR1, signal.SIGUSR2)
"""Supervisors and terminals send these to all processes of a service. systemd sends SIGABRT if a node hangs. By default
SIGQUIT and SIGABRT would also write the certificate into a core file while the node runs."""


def last_words(pidfd: int) -> dict[str, Any]:
    """Wait for the end of the process, and return what it wants to be sent; empty if it has left nothing.

    A pidfd becomes readable when all threads of the process have ended. The end of standard input proves nothing,
    because a process can close a file and live on.
    """
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(pidfd, select.POLLIN)
    line, rest = b"", b""
    while True:
        ready = dict(poll.poll())
        if 0 in ready:  # first, because the process may have written just before its end
            data = os.read(0, READ_BYTES)
            if not data:
                poll.unregister(0)
            *lines, rest = (rest + data).split(b"\n")
            line = lines[-1] if lines else line
        elif pidfd in ready:
            return dict(json.loads(line)) if line else {}


def send(words: dict[str, Any]) -> None:
    """Send the message to all addresses at once."""
    message = bytes.fromhex(words["message"])
    senders = [
        threading.Thread(target=_send_to, args=(address, message, words.get("tls")), daemon=True)
        for address in words["addresses"]
    ]
    for sender in senders:
        sender.start()
    until = time.monotonic() + GIVE_UP_S + ATTEMPT_S
    for sender in senders:
        sender.join(max(0.0, until - time.monotonic()))


def _send_to(address: str, message: bytes, tls: dict[str, Any] | None) -> None:
    host, _, port = address.rpartition(":")
    until = time.monotonic() + GIVE_UP_S
    while True:
        for is_tls in (False,) if tls is None else (True, False) if tls["prefers"] else (True,):
            try:
                with socket.create_connection((host.strip("[]"), int(port)), timeout=ATTEMPT_S) as plain:
                    stream = _wrapped(plain, host.strip("[]"), tls) if is_tls and tls is not None else plain
                    stream.sendall(message)
                    if stream.recv(1):  # the other node has read the message
                        return
            except OSError:
                continue
        if time.monotonic() > until:
            return
        time.sleep(AGAIN_S)


def _wrapped(plain: socket.socket, host: str, tls: dict[str, Any]) -> socket.socket:
    import ssl  # costs memory, which nodes without TLS save

    context = ssl.create_default_context(cafile=tls["ca"])
    if tls["cert"] is not None:
        context.load_cert_chain(tls["cert"], tls["key"])
    return context.wrap_socket(plain, server_hostname=host)


def main() -> None:
    for each in IGNORED:
        signal.signal(each, signal.SIG_IGN)
    words = last_words(int(sys.argv[1]))
    if words:
        send(words)


if __name__ == "__main__":
    main()
