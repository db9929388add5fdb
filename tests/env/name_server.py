"""A scripted name server on loopback, and the shell commands that make the system use it."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter

A, AAAA = 1, 28
ASK_IT = """
ip link set lo up
printf 'nameserver 127.0.0.1\\noptions timeout:5 attempts:2\\n' > "$1/resolv.conf"
printf 'hosts: files dns\\n' > "$1/nsswitch.conf"
mount --bind "$1/resolv.conf" /etc/resolv.conf
mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf
"""
_NO_SUCH_NAME = 3


class NameServer:
    """Answers 127.0.0.1 for every name, in the families that it answers. `mode`: "A only" never answers questions about
    IPv6 addresses; "both" answers that there are none; "silent" answers nothing; "no such name" answers that."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.asked: Counter[tuple[bytes, int]] = Counter()
        """Number of questions by name and family."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 53))
        self._socket.settimeout(0.1)

    def run(self, over: threading.Event) -> None:
        while not over.is_set():
            try:
                question, asker = self._socket.recvfrom(4096)
            except TimeoutError:
                continue
            name_end = question.index(b"\0", 12)
            (kind,) = struct.unpack_from(">H", question, name_end + 1)
            self.asked[question[12:name_end], kind] += 1
            if self.mode == "silent" or (self.mode == "A only" and kind != A):
                continue
            self._socket.sendto(self._answer(question, name_end + 5, kind), asker)

    def asked_of(self, host: str) -> int:
        """Return how often the family of this name was asked for that was asked for most often."""
        name = b"".join(bytes([len(label)]) + label.encode() for label in host.split("."))
        return max(self.asked[name, A], self.asked[name, AAAA])

    def _answer(self, question: bytes, end: int, kind: int) -> bytes:
        if self.mode == "no such name":
            return question[:2] + struct.pack(">HHHHH", 0x8180 | _NO_SUCH_NAME, 1, 0, 0, 0) + question[12:end]
        records = [struct.pack(">HHHIH", 0xC00C, A, 1, 0, 4) + socket.inet_aton("127.0.0.1")] if kind == A else []
        head = question[:2] + struct.pack(">HHHHH", 0x8180, 1, len(records), 0, 0)
        return head + question[12:end] + b"".join(records)
