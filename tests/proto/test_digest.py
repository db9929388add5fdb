"""Entry packets, LAC packets and master keys against Apache's bytes."""

from __future__ import annotations

import pytest

from kvstore.errors import Corrupted
from kvstore.proto.digest import EntryDigest, master_key
from kvstore.types import NO_ENTRY, DigestType, EntryId, LedgerId
from tests.bits import flipped

L = LedgerId(7)
E0 = EntryId(0)
HEADER = "00000000000000070000000000000000ffffffffffffffff0000000000000005"
DIGESTS = {
    DigestType.CRC32C: "9e3e717b",
    DigestType.CRC32: "00000000b9e72242",
    DigestType.HMAC: "a70e3fe637aa968c5534e0cb7fd09df244f982c6",
    DigestType.DUMMY: "",
}


@pytest.mark.parametrize("kind", DigestType)
def test_entry_packets_match_apaches_bytes(kind: DigestType) -> None:
    packet = EntryDigest(kind).packet(L, E0, NO_ENTRY, 5, b"hello")
    assert packet.hex() == HEADER + DIGESTS[kind] + b"hello".hex()
    assert EntryDigest(kind).open(L, E0, packet) == (0, -1, 5, b"hello")


@pytest.mark.parametrize(
    ("kind", "digest"),
    [(DigestType.CRC32C, "851054f0"), (DigestType.HMAC, "3c545e5be09e4ff512aa44441c44c48e52db94b4")],
)
def test_lac_packets_match_apaches_bytes(kind: DigestType, digest: str) -> None:
    packet = EntryDigest(kind).lac_packet(L, E0)
    assert packet.hex() == "0000000000000007" + "0000000000000000" + digest
    assert EntryDigest(kind).open_lac(L, packet) == 0


@pytest.mark.parametrize(
    ("password", "key"),
    [(b"", "850bf1071c5e3d8c24235676f8816ae0cbe2f14f"), (b"passwd", "9596625852f7fafc2c9cf0f9f7f3e5995206452b")],
)
def test_master_keys_match_apaches(password: bytes, key: str) -> None:
    assert master_key(password).hex() == key


# docs/protocol.md L14
@pytest.mark.parametrize("kind", [DigestType.CRC32C, DigestType.CRC32, DigestType.HMAC])
def test_flipped_bits_are_detected(kind: DigestType) -> None:
    digest = EntryDigest(kind, b"secret")
    packet = digest.packet(L, E0, NO_ENTRY, 5, b"hello")
    lac = digest.lac_packet(L, E0)
    for bit in range(len(packet) * 8):
        with pytest.raises(Corrupted):
            digest.open(L, E0, flipped(packet, bit))
    for bit in range(len(lac) * 8):
        with pytest.raises(Corrupted):
            digest.open_lac(L, flipped(lac, bit))


def test_packet_does_not_open_with_another_password() -> None:
    packet = EntryDigest(DigestType.HMAC, b"mine").packet(L, E0, NO_ENTRY, 5, b"hello")
    with pytest.raises(Corrupted):
        EntryDigest(DigestType.HMAC, b"yours").open(L, E0, packet)


def test_packet_of_another_ledger_or_entry_is_refused() -> None:
    digest = EntryDigest(DigestType.CRC32C)
    packet = digest.packet(L, EntryId(3), NO_ENTRY, 5, b"hello")
    with pytest.raises(Corrupted, match="entry=3"):
        digest.open(L, EntryId(4), packet)
    with pytest.raises(Corrupted, match="ledger=7"):
        digest.open(LedgerId(8), EntryId(3), packet)
    assert digest.open(L, None, packet).entry == 3


@pytest.mark.parametrize("size", [0, 31, 35])
def test_short_packet_is_refused(size: int) -> None:
    with pytest.raises(Corrupted, match=f"{size} bytes"):
        EntryDigest(DigestType.CRC32C).open(L, E0, b"\0" * size)
