"""Length-prefixed frames: 4 bytes big-endian, then that many bytes. Cuts a byte stream into them."""

from __future__ import annotations

from struct import Struct

_LENGTH = Struct(">i")


def frame(payload: bytes) -> bytes:
    """`payload` with its length in front."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts what a connection delivers into frames. Once `fault` says why, no frames follow and the connection must
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
        """Bytes of a frame that is not complete yet; at most the largest frame and one delivery."""
        return self._have

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the frames that `data` completes, in order."""
        end = len(data)
        if not self._chunks and end >= 4 and not self.fault:
            (size,) = _LENGTH.unpack_from(data)
            if end == 4 + size <= 4 + self._payload_max:
                return [data[4:]]  # one frame and nothing else, as mostly
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
                self.fault = f"a frame of {size} bytes; the largest is {self._payload_max}"
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
