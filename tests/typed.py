"""`kvstore` as a program on a shell's PATH, for tests that run documented commands. Each command is a separate process
with the shell's arguments, streams, folder and environment. It is forked from a process that has loaded the code,
because loading takes half a second of processor time."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import shlex
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import kvstore.cli
import kvstore.client
from kvstore.__main__ import main
from tests.source import ROOT
from tests.stand_ins import ensure_programs

BROKEN = 70
"""Exit code of a command that ended without its own exit code."""
ASK = """\
import os, socket, struct, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = repr((sys.argv[1:], os.getcwd(), dict(os.environ))).encode()
socket.send_fds(server, [struct.pack(">I", len(asked))], [0, 1, 2])
server.sendall(asked)
code = server.recv(1)
sys.exit(code[0] if code else {broken})
"""


@contextmanager
def programs(folder: Path) -> Iterator[Path]:
    """Create a folder for a shell's PATH below this one. Its commands that still run at the end are killed."""
    found, address = folder / "bin", f"\0kvstore-typed-{uuid.uuid4()}"
    found.mkdir()
    program = found / "kvstore"
    ask = folder / "ask.py"
    ask.write_text(ASK.format(address=address, broken=BROKEN))
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(str(ask))} "$@"\n')
    program.chmod(0o700)
    ensure_programs(found)
    command = [sys.executable, "-c", f"from tests.typed import serve; serve({address!r})"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, start_new_session=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield found
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def serve(address: str) -> None:
    """Fork a process for each command that a program asks for, until this one is killed."""
    for package in (kvstore.cli, kvstore.client):
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(each.name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(100)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            asking, _ = listener.accept()
            with asking:
                if os.fork() == 0:
                    listener.close()
                    run(asking)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def run(asking: socket.socket) -> None:
    """Run the requested command to its end in this process."""
    code: object = BROKEN
    try:
        size, streams, _, _ = socket.recv_fds(asking, 4, 3)
        words, folder, environ = ast.literal_eval(exactly(asking, int.from_bytes(size, "big")).decode())
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = ["kvstore", *words]
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
    finally:
        with suppress(OSError):  # nobody may read on
            sys.stdout.flush()
        sys.stderr.flush()
        asking.sendall(bytes([code if isinstance(code, int) else 1]))
        os._exit(0)


def exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += connection.recv(size - len(found))
    return found
