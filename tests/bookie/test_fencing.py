"""Who may write, and what may be denied: every case."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from kvstore.bookie.fencing import (
    WriteVerdict,
    judge_add,
    judge_by_metadata,
    judge_key,
    judge_key_by_metadata,
    may_deny,
)
from kvstore.bookie.ledger import Ledger
from kvstore.proto.digest import master_key
from kvstore.types import LedgerId, LedgerState
from tests.bookie.support import KEY, ME, OTHERS, metadata

L = LedgerId(7)


# docs/protocol.md L6
@pytest.mark.parametrize("case", list(product([False, True], repeat=5)))
def test_add_needs_the_key_and_only_recovery_passes_a_fence(case: tuple[bool, ...]) -> None:
    is_tombstoned, is_fenced, is_admitted, has_key, recovery = case
    ledger = Ledger(L, KEY)
    ledger.is_fenced, ledger.is_admitted = is_fenced, is_admitted
    verdict = judge_add(ledger, key=KEY if has_key else b"other", recovery=recovery, is_tombstoned=is_tombstoned)
    if is_tombstoned:
        assert verdict is WriteVerdict.FENCED
    elif not has_key:
        assert verdict is WriteVerdict.WRONG_KEY
    elif recovery:
        assert verdict is WriteVerdict.ADMIT
    elif is_fenced:
        assert verdict is WriteVerdict.FENCED
    else:
        assert verdict is (WriteVerdict.ADMIT if is_admitted else WriteVerdict.ASK)


def test_add_to_an_unknown_ledger_is_judged_by_metadata_even_in_recovery() -> None:
    for recovery in (False, True):
        assert judge_add(None, key=KEY, recovery=recovery, is_tombstoned=False) is WriteVerdict.ASK
        assert judge_add(None, key=KEY, recovery=recovery, is_tombstoned=True) is WriteVerdict.FENCED


def test_unrecorded_key_cannot_be_set_by_presenting_it() -> None:
    """docs/protocol.md, B13: the first key that a bookie hears may be a stranger's."""
    assert judge_key(None, KEY) is WriteVerdict.ASK
    assert judge_key(Ledger(L, b""), KEY) is WriteVerdict.ASK, "it was lost with its record"
    assert judge_key(Ledger(L, KEY), KEY) is WriteVerdict.ADMIT
    assert judge_key(Ledger(L, KEY), b"other") is WriteVerdict.WRONG_KEY
    for recovery in (False, True):
        assert judge_add(Ledger(L, b""), key=KEY, recovery=recovery, is_tombstoned=False) is WriteVerdict.ASK


def test_writer_is_admitted_only_to_an_open_ledger_that_names_this_bookie() -> None:
    assert judge_by_metadata(metadata(L), ME, KEY) is WriteVerdict.ADMIT
    assert judge_by_metadata(metadata(L, *OTHERS), ME, KEY) is WriteVerdict.UNKNOWN
    for state in (LedgerState.IN_RECOVERY, LedgerState.CLOSED):
        assert judge_by_metadata(metadata(L, state=state), ME, KEY) is WriteVerdict.FENCED
    assert judge_by_metadata(None, ME, KEY) is WriteVerdict.FENCED


def test_key_is_derived_from_the_password_in_the_metadata() -> None:
    for state in LedgerState:
        with_password = replace(metadata(L, state=state), password=b"secret")
        assert judge_key_by_metadata(with_password, master_key(b"secret")) is WriteVerdict.ADMIT
        assert judge_key_by_metadata(with_password, KEY) is WriteVerdict.WRONG_KEY
        assert judge_by_metadata(with_password, ME, KEY) is WriteVerdict.WRONG_KEY
    assert judge_key_by_metadata(metadata(L), KEY) is WriteVerdict.ADMIT, "a ledger of before"
    assert judge_key_by_metadata(None, KEY) is WriteVerdict.UNKNOWN


def test_bookie_denies_nothing_of_an_unfinished_ledger_not_naming_it() -> None:
    for state in (LedgerState.OPEN, LedgerState.IN_RECOVERY):
        assert not may_deny(metadata(L, *OTHERS, state=state), ME)
        assert may_deny(metadata(L, state=state), ME)
    assert may_deny(metadata(L, *OTHERS, state=LedgerState.CLOSED), ME)
    assert may_deny(None, ME)
