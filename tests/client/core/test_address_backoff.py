"""The backoff of an address grows with each broken connection, and ends when there is one."""

from kvstore.client.core.address_backoff import KEPT_S, MAX_S, MIN_S, AddressBackoff


def test_unknown_address_has_no_backoff() -> None:
    assert not AddressBackoff().is_backing_off("a:1", 100.0)


def test_backoff_doubles_up_to_a_bound() -> None:
    rests, now, lengths = AddressBackoff(), 100.0, []
    for _ in range(8):
        rests.note_failure("a:1", now)
        length_s = MIN_S
        while rests.is_backing_off("a:1", now + length_s):
            length_s *= 2
        lengths.append(length_s)
        now += length_s
    assert lengths[:3] == [MIN_S, 2 * MIN_S, 4 * MIN_S]
    rests.note_failure("a:1", now)
    assert rests.is_backing_off("a:1", now + MAX_S * 0.99)
    assert not rests.is_backing_off("a:1", now + MAX_S)
    assert not rests.is_backing_off("b:1", now)


def test_first_backoff_after_a_connection_is_short() -> None:
    rests = AddressBackoff()
    for _ in range(5):
        rests.note_failure("a:1", 100.0)
    rests.reset("a:1")
    assert not rests.is_backing_off("a:1", 100.0)
    rests.note_failure("a:1", 100.0)
    assert not rests.is_backing_off("a:1", 100.0 + MIN_S)


def test_unused_addresses_are_forgotten() -> None:
    rests = AddressBackoff()
    for number in range(100):
        rests.note_failure(f"a:{number}", 100.0 + number * KEPT_S)
    assert len(rests._retries) <= 2
