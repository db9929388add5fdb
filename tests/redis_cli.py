"""A replacement for `redis-cli` on machines without it: it sends one command and prints the reply as plain text.
`python -m tests.redis_cli` accepts the options of redis-cli that the documents show."""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import sys
from typing import Any

import hiredis

TIMEOUT_S = 30


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", dest="host", default="127.0.0.1")
    parser.add_argument("-p", dest="port", type=int, default=6379)
    parser.add_argument("-e", dest="fails", action="store_true", help="a command that is refused fails")
    parser.add_argument("--tls", action="store_true")
    for name in ("--cacert", "--cert", "--key"):
        parser.add_argument(name)
    parser.add_argument("--user", default="default")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()

    with _connected(options) as connection:
        if password := os.environ.get("REDISCLI_AUTH"):
            refused = _asked(connection, "AUTH", options.user, password)
            if isinstance(refused, hiredis.ReplyError):
                sys.stderr.write(f"AUTH failed: {refused}\n")
        reply = _asked(connection, *options.command)
    sys.stdout.write(f"{reply.decode() if isinstance(reply, bytes) else reply}\n")
    sys.exit(options.fails and isinstance(reply, hiredis.ReplyError))


def _connected(options: argparse.Namespace) -> socket.socket:
    connection = socket.create_connection((options.host, options.port), TIMEOUT_S)
    if not options.tls:
        return connection
    context = ssl.create_default_context(cafile=options.cacert)
    context.load_cert_chain(options.cert, options.key)
    return context.wrap_socket(connection, server_hostname=options.host)


def _asked(connection: socket.socket, *words: str) -> Any:
    connection.sendall(hiredis.pack_command(words))
    reader = hiredis.Reader()
    while (reply := reader.gets()) is False:
        got = connection.recv(1 << 16)
        if not got:
            sys.exit("Error: Server closed the connection")
        reader.feed(got)
    return reply


if __name__ == "__main__":
    main()
