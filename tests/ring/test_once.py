"""Changes of the ring that are made once, however often they are requested (docs/protocol.md, H11)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import UndecodableNode
from kvstore.ring import Pace, Ring, decode, encode, operations, steps
from kvstore.ring.once import once, plan_token
from kvstore.ring.operations import FORGOTTEN_MAX, MARK_BYTES, REMEMBERED_MAX, find, mark_of
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import new_ring

ONE = new_ring([PartitionId("p1")], {ServerId("n1"): ""}, 1)


def turned(ring: Ring) -> Ring:
    return steps.set_pace(ring, Pace(paused=not ring.pace.paused))


def after(ring: Ring, count: int, name: str = "later") -> Ring:
    for number in range(count):
        ring = once(ring, f"{name}-{number}", "asked", turned)
    return ring


@pytest.mark.parametrize("others", [0, REMEMBERED_MAX - 1, REMEMBERED_MAX, 5 * REMEMBERED_MAX])
def test_operation_is_never_repeated_after_any_number_of_others(others: int) -> None:
    ring = decode(encode(after(once(ONE, "mine", "asked", turned), others)))
    if find(ring.operations, "mine"):
        assert once(ring, "mine", "asked", turned) is ring
    else:
        with pytest.raises(ValueError, match="operation mine was done too many"):
            once(ring, "mine", "asked", turned)


def test_marks_of_forgotten_operations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "FORGOTTEN_MAX", 8)
    ring = after(ONE, REMEMBERED_MAX + 20)
    assert ring.forgotten == tuple(mark_of(f"later-{number}") for number in range(12, 20))
    assert 2 * MARK_BYTES * FORGOTTEN_MAX <= 32 << 10, "of the znode's 512 KiB"


def test_forgotten_operations_do_not_change_the_plan_token() -> None:
    shown = turned(ONE)
    assert plan_token(ONE, replace(shown, forgotten=(mark_of("mine"),))) == plan_token(ONE, shown)


def test_marks_have_golden_bytes_and_are_optional() -> None:
    ring = after(ONE, REMEMBERED_MAX + 1)
    assert b'"forgotten":"%s"' % mark_of("later-0").encode() in encode(ring)
    assert mark_of("mine") == "9eee0b46"
    assert b"forgotten" not in encode(after(ONE, REMEMBERED_MAX))
    with pytest.raises(UndecodableNode, match="8 digits"):
        decode(encode(ring).replace(b'"forgotten":"', b'"forgotten":"0'))
