"""Splits a byte stream into length-prefixed frames: 4 bytes big-endian, then that many bytes."""

from __future__ import annotations

from struct import Struct

_LENGTH = Struct(">i")


def frame(payload: bytes) -> bytes:
    """Put the length in front of `payload`."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Splits what a connection delivers into frames. Once `fault` is set, no more frames follow and the connection must
    close."""

    __slots__ = ("_chunks", "_have", "_need", "_payload_max", "fault")

    def __init__(self, payload_max: int) -> None:
        self._payload_max = payload_max
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = 4
        self.fault = ""

    @property
    def buffered_bytes(self) -> int:
        """Bytes of an incomplete frame; at most the largest frame and one delivery."""
        return self._have

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads of the frames that `data` completes, in order."""
        end = len(data)
        if not self._chunks and end >= 4 and not self.fault:
            (size,) = _LENGTH.unpack_from(data)
            if end == 4 + size <= 4 + self._payload_max:
                return [data[4:]]  # the common case: exactly one frame
        if self._chunks:
            self._chunks.append(data)
            self._have += len(data)
            if self._have < self._need:
                return []
            data = b"".join(self._chunks)
            self._chunks.clear()
            end = len(data)
        frames: list[bytes] = []
        at = 0
        self._need = 4
        while end - at >= 4 and not self.fault:
            (size,) = _LENGTH.unpack_from(data, at)
            stop = at + 4 + size
            if not 0 <= size <= self._payload_max:
                self.fault = f"expected a frame of at most {self._payload_max} bytes, got {size}"
            elif stop > end:
                self._need = 4 + size
                break
            else:
                frames.append(data[at + 4 : stop])
                at = stop
        self._have = 0 if self.fault else end - at
        if self._have:
            self._chunks.append(data[at:])
        return frames
