"""Checks that the ports of a local cluster are free, and advises what to do if they are not."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from kvstore.devcluster.zookeeper import outgoing_ports


def is_free(address: str) -> bool:
    """Return True if a process could listen on the address now."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
    return True


def taken_message(taken: Sequence[str], free_offset: int | None) -> str:
    """Return the error for taken ports, each as `host:port (what)`. It names the offset if one is free. The kernel may
    have given one of the ports to an outgoing connection; then no listening process shows up in `ss -ltn`."""
    advice = f", for example {free_offset}" if free_offset is not None else ""
    text = f"taken by another process: {', '.join(taken)}; choose other ports with --port-offset{advice}"
    outgoing = outgoing_ports()
    if any(int(each.partition(" ")[0].rpartition(":")[2]) in outgoing for each in taken):
        text += (
            f". The kernel gives ports from {outgoing[0]} to {outgoing[-1]} to outgoing connections, so one of these "
            "ports may be in use although nothing listens on it; choose an offset that keeps all ports below that range"
        )
    return text
