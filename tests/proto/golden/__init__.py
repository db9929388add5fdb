"""Frames that were recorded from Apache BookKeeper's own programs by tests/interop."""

from __future__ import annotations

from pathlib import Path


def recorded(name: str) -> dict[str, list[bytes]]:
    """The payloads in a file of this directory, by their name."""
    lines = (Path(__file__).parent / name).read_text().splitlines()
    pairs = (line.rpartition(": ") for line in lines if not line.startswith("#"))
    return {name: [bytes.fromhex(payload) for payload in payloads.split()] for name, _, payloads in pairs}
