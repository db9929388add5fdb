"""Frames that tests/interop recorded from Apache BookKeeper's own programs."""

from __future__ import annotations

from pathlib import Path


def recorded(name: str) -> dict[str, list[bytes]]:
    """Return the payloads in a file of this directory, by name."""
    lines = (Path(__file__).parent / name).read_text().splitlines()
    pairs = (line.rpartition(": ") for line in lines if not line.startswith("#"))
    return {name: [bytes.fromhex(payload) for payload in payloads.split()] for name, _, payloads in pairs}
