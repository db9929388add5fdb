"""The floor: three processes with the store's durability and nothing else, as a reference for measurements.

    python -m loadtest.floor --data DIR --port 24000 [--lookup]

It starts the three processes, prints the address of each Redis listener (PORT, PORT + 1, PORT + 2; with 0, any free
ports), and ends the processes at Ctrl-C or when it ends itself. The listeners know SET, GET and PING, and forward
operations on keys that another process leads.

Process n leads partition n of three, by the key's hash. Each has one journal for all three partitions: operations that
arrive while a group is synced form the next group, and an operation is answered only after two of three have synced it.
All three then write it to their RocksDB. With --lookup the leader looks up each key before it is put, and new keys get
a row for their order, as the store's own semantics need.

It is for measurements only. Nothing is recovered: DIR must be new, and a process that has ended does not return, nor
does its partition. Nothing is bounded, neither queues nor requests. Nothing is fenced, and a GET in a pipeline may
overtake the SET before it.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from kvstore.env.real import run
from kvstore.errors import ConfigError
from kvstore.loadtest.generator.options import path_word
from loadtest.floor_member import PROCESSES, Endpoint, Link, Member

HOST = "127.0.0.1"
BACKLOG = 1_024


class Place(NamedTuple):
    """The listening sockets of a process. They are made before the processes, so that a port in use is reported at once
    and no process waits until another listens."""

    endpoint: socket.socket
    links: socket.socket


def places_at(port: int) -> list[Place]:
    """Open the listening sockets. Raises ConfigError."""
    if port and not 1_024 <= port <= 65_536 - PROCESSES:
        raise ConfigError(f"expected a port from 1024 to {65_536 - PROCESSES}, or 0, got {port}")
    made: list[Place] = []
    for number in range(PROCESSES):
        at = port + number if port else 0
        try:
            endpoint = socket.create_server((HOST, at), backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {HOST}:{at}: {os.strerror(error.errno or 0)}") from error
        made.append(Place(endpoint, socket.create_server((HOST, 0))))
    return made


def new_folder(folder: Path) -> None:
    """Create the folder. Raises ConfigError if it is not empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"expected a new or empty directory, because nothing is recovered; {folder} is not empty")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error


async def serve(number: int, folder: Path, places: list[Place], *, is_looking_up: bool, parent: int) -> None:
    """Run process `number` until `parent` is readable. That happens when the parent has ended, for any reason,
    because the other end is closed then."""
    loop = asyncio.get_running_loop()
    loop.add_reader(parent, os._exit, 0)
    own = places[number]
    others = [each for each in places if each is not own]
    addresses = [each.links.getsockname() for each in places[:number]]
    for other in others:  # else one that has ended would seem to listen
        other.endpoint.close()
        other.links.close()
    member = Member(number, folder, is_looking_up=is_looking_up)
    await loop.create_server(lambda: Link(member), sock=own.links)
    for peer, (host, port) in enumerate(addresses):
        await loop.create_connection(lambda peer=peer: Link(member, peer), host, port)  # type: ignore[misc]
    await member.has_links.wait()
    await loop.create_server(lambda: Endpoint(member), sock=own.endpoint)
    await loop.create_future()


def _process(number: int, folder: Path, places: list[Place], *, is_looking_up: bool, pipe: tuple[int, int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.close(pipe[1])
    try:
        run(serve(number, folder, places, is_looking_up=is_looking_up, parent=pipe[0]))
    except OSError as error:
        sys.exit(f"floor: process {number}: {error}")


def run_floor(folder: Path, port: int, *, is_looking_up: bool) -> None:
    """Run the floor until KeyboardInterrupt, or until a process ends by itself. A process that was killed is not
    waited for. Raises ConfigError."""
    places = places_at(port)
    new_folder(folder)
    pipe = os.pipe()
    context = multiprocessing.get_context("fork")
    running = [
        context.Process(
            target=_process,
            args=(number, folder / str(number), places),
            kwargs={"is_looking_up": is_looking_up, "pipe": pipe},
        )
        for number in range(PROCESSES)
    ]
    try:
        for number, (process, place) in enumerate(zip(running, places, strict=True)):
            process.start()
            print(f"process {number}: pid {process.pid}, endpoint {HOST}:{place.endpoint.getsockname()[1]}", flush=True)
        for place in places:
            place.endpoint.close()
            place.links.close()
        while running:
            wait([process.sentinel for process in running])
            for process in [each for each in running if each.exitcode is not None]:
                running.remove(process)
                print(f"floor: pid {process.pid} has ended: {process.exitcode}", file=sys.stderr)
                if process.exitcode is not None and process.exitcode >= 0:
                    return
    finally:
        os.close(pipe[1])
        for process in running:
            if process.pid is not None:
                process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=path_word, required=True, metavar="DIR", help="a new directory, on a real disk")
    parser.add_argument("--port", type=int, default=24_000, help="of the first endpoint")
    parser.add_argument("--lookup", action="store_true", help="look each key up before it is put")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            run_floor(options.data, options.port, is_looking_up=options.lookup)
            sys.exit(1)
    except ConfigError as error:
        print(f"floor: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
