"""Only the certificate of a process proves its end."""

from __future__ import annotations

from kvstore.env.death.port import CERTIFICATE_BYTES, UNPROVEN, identity_of
from kvstore.wal.deaths import REMEMBERED_MAX, ProvenDeaths

ONE, OTHER = bytes(CERTIFICATE_BYTES), b"\1" * CERTIFICATE_BYTES


# docs/protocol.md G28
def test_certificate_proves_end_of_its_process_and_of_no_other() -> None:
    deaths = ProvenDeaths()
    deaths.note(ONE)
    assert deaths.is_proven(identity_of(ONE))
    assert not deaths.is_proven(identity_of(OTHER))
    assert not deaths.is_proven(ONE)


def test_unknown_process_is_never_proven_to_have_ended() -> None:
    deaths = ProvenDeaths()
    deaths.note(ONE)
    deaths.note(b"")
    assert UNPROVEN.identity == b""
    assert not deaths.is_proven(UNPROVEN.identity)


def test_proof_is_announced_once() -> None:
    deaths = ProvenDeaths()
    news = deaths.news
    deaths.note(ONE)
    assert news.is_set()
    assert not deaths.news.is_set()


def test_remembered_ends_are_bounded_and_oldest_goes_first() -> None:
    deaths = ProvenDeaths()
    for number in range(REMEMBERED_MAX):
        deaths.note(number.to_bytes(CERTIFICATE_BYTES))
    deaths.note((0).to_bytes(CERTIFICATE_BYTES))
    deaths.note(ONE[:-1] + b"\xff")
    assert deaths.is_proven(identity_of((0).to_bytes(CERTIFICATE_BYTES)))
    deaths.note(OTHER)
    assert not deaths.is_proven(identity_of((1).to_bytes(CERTIFICATE_BYTES)))
    assert deaths.is_proven(identity_of((REMEMBERED_MAX - 1).to_bytes(CERTIFICATE_BYTES)))
    assert deaths.is_proven(identity_of(OTHER))
