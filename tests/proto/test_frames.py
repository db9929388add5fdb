"""Cutting a byte stream into frames."""

from __future__ import annotations

from random import Random

import pytest

from kvstore.proto.frames import FrameReader, frame


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_complete_however_the_stream_is_cut(seed: int) -> None:
    random = Random(seed)
    payloads = [random.randbytes(random.choice([0, 1, 3, 100, 5000])) for _ in range(30)]
    stream = b"".join(frame(payload) for payload in payloads)
    reader, got = FrameReader(5000), []
    while stream:
        size = random.choice([1, 2, 7, 1000, 20000])
        got += reader.feed(stream[:size])
        stream = stream[size:]
    assert got == payloads
    assert not reader.buffered_bytes
    assert not reader.fault


@pytest.mark.parametrize("length", [b"\x00\x00\x00\x11", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"])
def test_invalid_length_ends_the_stream_after_earlier_frames(length: bytes) -> None:
    reader = FrameReader(16)
    assert reader.feed(frame(b"good") + length + b"x" * 100) == [b"good"]
    assert "at most 16 bytes" in reader.fault
    assert reader.buffered_bytes == 0


def test_frame_of_the_largest_size_is_accepted() -> None:
    assert FrameReader(16).feed(frame(b"x" * 16)) == [b"x" * 16]
