"""The rules of transactions over partitions, each of which the model of tests/models/txn.py can leave out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """The rules of the model. A rule that is False is not kept."""

    attempt_joined: bool = True
    """Tx2: a request that comes again during an attempt joins the attempt."""
    result_with_decide: bool = True
    """Tx2: DECIDE contains the request's result."""
    prepared_named: bool = True
    """Tx3: PREPARED counts for its own attempt only."""
    dropped_with_lead: bool = True
    """Tx3: a leader drops its attempts when it stops leading, and does not continue them when it leads again."""
    compare: bool = True
    """Tx4: PREPARE and DECIDE compare versions."""
    exclude: bool = True
    """Tx4: an intent of another attempt refuses PREPARE and DECIDE."""
    shared: bool = True
    """Tx4: a key that is only read gets a shared intent."""
    shared_logged: bool = True
    """Tx4: shared intents are in the log, not only in the leader's memory."""
    count_sent: bool = True
    """Tx4: PREPARE, DECIDE and writes are decided against everything that was sent."""
    prepared_acked: bool = True
    """Tx4: PREPARED is said once the intent is acknowledged."""
    refusal_acked: bool = True
    """Tx4: a failed CHECK is reported once the write that made it fail is acknowledged."""
    intents_first: bool = True
    """Tx4: a PREPARE that meets an exclusive intent reports Conflict, not a failed CHECK."""
    home_checks: bool = True
    """Tx5: home checks its own part in the step that sends DECIDE, not when the attempt begins."""
    home_owns: bool = True
    """Tx5: home owns all keys of its own part in the step that sends DECIDE."""
    commit_acked: bool = True
    """Tx5: COMMITTED is said once DECIDE is acknowledged."""
    all_prepared: bool = True
    """Tx5: DECIDE needs PREPARED of every participant."""
    dropped_first: bool = True
    """Tx6: home says ABORTED of an attempt only after it has dropped the attempt."""
    sent_is_not_absent: bool = True
    """Tx6: home does not say ABORTED while DECIDE is in flight."""
    unsent_only: bool = True
    """Tx6: without a proof, a leader says ABORTED only of its own attempt for which it never sent DECIDE."""
    asked: bool = True
    """Tx6: a leader that meets an intent asks home."""
    owner_says: bool = True
    """Tx6: only the owner of the home key says ABORTED."""
    aborted_proved: bool = True
    """Tx6: the owner proves that it leads, by an append after the question, before it says ABORTED."""
    home_word: bool = True
    """Tx6: an intent is removed by home's answer only, never by its age."""
    abandoned_when_lost: bool = True
    """Tx15: an operator abandons the intents of a home only if home is lost for good."""
    outcome_named: bool = True
    """Tx7: an outcome names the intent, not only the attempt."""
    resolved_behind: bool = True
    """Tx8: a leader that says RESOLVED because it has no such intent has applied the intent's sequence."""
    raised: bool = True
    """Tx8, M9: sequences rise along the owners of a key."""
    end_last: bool = True
    """Tx8: the decision stays until all have resolved."""
    reads_wait: bool = True
    """Tx9: a read that meets an exclusive intent waits."""
    sending_noted: bool = True
    """Tx9: a read passes an exclusive intent only until the leader sends PREPARED."""
    assumed_sent: bool = True
    """Tx9: a new leader counts PREPARED of all intents in its log as sent."""
    forgotten_at_release: bool = True
    """Tx9, Tx14: a leader forgets with RELEASE that it has not sent PREPARED of the range's intents."""
    writes_wait: bool = True
    """Tx9: a write that meets any intent waits."""
    expiry_waits: bool = True
    """Tx9: a key under any intent does not expire."""
    expired_reads_wait: bool = True
    """Tx9: a read does not show a key under an intent as expired either."""
    silent_in_wait: bool = True
    """Tx10: a new leader says no outcome before its takeover wait is over."""
    ro_twice: bool = True
    """Tx11: a read transaction looks at each key twice."""
    ro_all_first: bool = True
    """Tx11: the second look begins when the first one has ended for all keys."""
    ro_minds: bool = True
    """Tx11: the second look does not pass an exclusive intent."""
    ro_absent: bool = True
    """Tx11: absent keys are looked at again at one moment, before the second look at the other keys."""
    replica_minds: bool = True
    """Tx12: a replica with an exclusive intent on the key does not answer a session read."""
    token_of_prepare: bool = True
    """Tx12: the client's session token covers the intents."""
    mark_decide: bool = True
    """Tx13: DECIDE is logged behind the pin that PREPARED names."""
    mark_resolve: bool = True
    """Tx13: RESOLVE is logged behind the pin that the outcome names."""
    mark_end: bool = True
    """Tx13: END is logged behind the pin that RESOLVED names."""
    mark_rises: bool = True
    """Tx13: a leader refuses a pin that is older than the last one."""
    one_owner: bool = True
    """Tx13, K4: a pin counts if each token has one owner in it."""
    none_planned: bool = True
    """Tx13, K4: a pin counts if no move was planned while it was taken."""
    targets_pinned: bool = True
    """Tx13, K4: a pin counts if the targets of open moves keep it, even if they own nothing."""
    view_resolves: bool = True
    """Tx13: a reader of a pinned intent asks home's pinned view for the decision."""
    changes_resolved: bool = True
    """Tx13: the changes up to a pin include those of the intents that are committed at the pin."""
    intents_move: bool = True
    """Tx14: intents move with their range."""
    decisions_move: bool = True
    """Tx14: decisions move with the range of the home key."""
    results_move: bool = True
    """Tx14, M4: results move with the range of the home key."""
    frozen: bool = True
    """Tx14: all records of a transaction count as writes of their keys, so none is logged behind FREEZE."""
    die_at_release: bool = True
    """Tx14: home's attempts end when home sends RELEASE of the home key."""
