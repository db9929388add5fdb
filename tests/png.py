"""Small PNG files of pictures that have few colours: a byte for each pixel (ISO/IEC 15948, colour type 3)."""

from __future__ import annotations

import zlib
from collections import Counter
from struct import pack

COLOURS_MAX = 240
"""The most frequent ones; each other becomes the nearest of them."""
SIGNATURE = b"\x89PNG\r\n\x1a\n"
OF_A_PALETTE = 3


def small_png(pixels: bytes, width: int) -> bytes:
    """A file of these pixels: red, green, blue and opacity, of which the last counts for nothing, row by row."""
    height, rest = divmod(len(pixels), 4 * width)
    assert rest == 0, f"expected whole rows of {width} pixels, got {len(pixels)} bytes"
    colours = [pixels[place : place + 3] for place in range(0, len(pixels), 4)]
    palette = [colour for colour, _ in Counter(colours).most_common(COLOURS_MAX)]
    places = {colour: nearest(colour, palette) for colour in set(colours)}
    indexed = bytes(map(places.__getitem__, colours))
    rows = b"".join(b"\0" + indexed[row * width : (row + 1) * width] for row in range(height))
    header = pack(">IIBBBBB", width, height, 8, OF_A_PALETTE, 0, 0, 0)
    return SIGNATURE + b"".join(
        (
            chunk(b"IHDR", header),
            chunk(b"PLTE", b"".join(palette)),
            chunk(b"IDAT", zlib.compress(rows, 9)),
            chunk(b"IEND", b""),
        )
    )


def nearest(colour: bytes, palette: list[bytes]) -> int:
    """The place of that colour of the palette which differs least."""
    red, green, blue = colour
    return min(
        range(len(palette)),
        key=lambda place: (
            (palette[place][0] - red) ** 2 + (palette[place][1] - green) ** 2 + (palette[place][2] - blue) ** 2
        ),
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    return pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data))
