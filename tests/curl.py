"""A replacement for `curl` on machines without it: `python -m tests.curl` accepts the options that the documents show,
and exits with curl's exit codes."""

from __future__ import annotations

import argparse
import base64
import netrc
import signal
import ssl
import sys
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

TIMEOUT_S = 60
REFUSED, UNREACHABLE, TIMED_OUT = 22, 7, 28


def main() -> None:
    options = _options()
    if options.config:
        _configure(options, sys.stdin.read())
    url = urlsplit(options.url)
    assert url.hostname is not None
    if options.netrc_file and (known := netrc.netrc(options.netrc_file).authenticators(url.hostname)):
        options.user = f"{known[0]}:{known[2]}"
    if options.max_time:
        signal.signal(signal.SIGALRM, lambda *_: _fail(TIMED_OUT, f"Operation timed out after {options.max_time} s"))
        signal.setitimer(signal.ITIMER_REAL, options.max_time)
    try:
        _ask(options, _connection(options), f"{url.path or '/'}{'?' * bool(url.query)}{url.query}")
    except (OSError, HTTPException) as error:
        _fail(UNREACHABLE, repr(error))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-f", dest="fails", action="store_true", help="an answer from 400 on fails, and is not shown")
    parser.add_argument("-s", action="store_true", help="no meter: there is none")
    parser.add_argument("-S", action="store_true", help="errors are told: they are")
    parser.add_argument("-N", action="store_true", help="nothing is held back: nothing is")
    parser.add_argument("-I", dest="head", action="store_true")
    parser.add_argument("-X", dest="method")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", "--data-binary", dest="body")
    parser.add_argument("-K", dest="config", choices=["-"])
    parser.add_argument("--max-time", type=float)
    for name in ("--cacert", "--cert", "--key", "--netrc-file"):
        parser.add_argument(name)
    parser.add_argument("url")
    options = parser.parse_args()
    options.user = None
    return options


def _configure(options: argparse.Namespace, lines: str) -> None:
    for line in lines.splitlines():
        name, value = (part.strip() for part in line.split("=", 1))
        value = value.removeprefix('"').removesuffix('"')
        if name == "user":
            options.user = value
        elif name == "header":
            options.headers.append(value)
        else:
            _fail(2, f"expected user or header, got {name}")


def _connection(options: argparse.Namespace) -> HTTPConnection:
    url = urlsplit(options.url)
    assert url.hostname is not None
    if url.scheme == "http":
        return HTTPConnection(url.hostname, url.port, timeout=TIMEOUT_S)
    context = ssl.create_default_context(cafile=options.cacert)
    if options.cert:
        context.load_cert_chain(options.cert, options.key)
    return HTTPSConnection(url.hostname, url.port, timeout=TIMEOUT_S, context=context)


def _ask(options: argparse.Namespace, connection: HTTPConnection, target: str) -> None:
    body = options.body
    if body is not None:
        body = Path(body[1:]).read_bytes() if body.startswith("@") else body.encode()
    headers = {name: value.strip() for name, _, value in (header.partition(":") for header in options.headers)}
    if options.user:
        headers["Authorization"] = f"Basic {base64.b64encode(options.user.encode()).decode()}"
    if body is not None:
        headers.setdefault("Content-Type", "application/x-www-form-urlencoded")
    method = options.method or ("HEAD" if options.head else "GET" if body is None else "POST")
    connection.request(method, target, body, headers)
    answer = connection.getresponse()
    if options.fails and answer.status >= 400:
        _fail(REFUSED, f"The requested URL returned error: {answer.status}")
    if options.head:
        lines = [
            f"HTTP/1.1 {answer.status} {answer.reason}",
            *(f"{name}: {value}" for name, value in answer.getheaders()),
        ]
        sys.stdout.write("".join(f"{line}\r\n" for line in [*lines, ""]))
        sys.stdout.flush()
    while piece := answer.read1():
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def _fail(code: int, why: str) -> NoReturn:
    sys.stderr.write(f"curl: ({code}) {why}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
