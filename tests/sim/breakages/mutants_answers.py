"""Ways to break the answers to clients. A whole cluster must notice each. They show because the explorers
(tests/sim/asking/explorers.py) issue every operation, and because every answer and every refusal is judged.

Whole clusters rarely meet some cases: a failed condition is reported too early or without a lease, a proof is used
twice, a leader answers after its release, the wall clock makes a key absent. tests/partition/leading/test_mutants.py
breaks these.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import InvalidRequest, LedgerFenced, NotLeader
from kvstore.partition.leading import evaluate, leader, plain_puts, queries, range_reads
from kvstore.partition.leading.answers import ResultDelivery
from kvstore.partition.leading.range_reads import ScanPage
from kvstore.partition.partition import Partition
from kvstore.partition.state import operations
from kvstore.partition.state.commands import Meta
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.overlay import UNTOUCHED, Overlay
from kvstore.partition.state.retry_table import RetryTable
from kvstore.server.routing.router import Router
from tests.sim.breakages.catalogue import mutant
from tests.sim.stories.stories_of_leads import fenced_with_a_write_under_way

BUSY: dict[str, Any] = {"load__explorers": 4, "load__pause_s": 0.03}
ZOMBIES = ("metadata_cut", "session_expiry", "isolate")
LOSSES = ("kill_leader", "resets", "cut_a_link")


# ── P7, P11: decisions in columns and in batches ──────────────────────────────────────────────────────────────────────


@mutant("columns follow the engine alone", **BUSY)
def _engine_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plain_puts, "_follow", lambda *_: True)


@mutant("`created` is the engine's, not the latest's", **BUSY)
def _created_by_engine(patch: pytest.MonkeyPatch) -> None:
    follow = plain_puts._follow

    def by_engine(created: list[int], keys: list[bytes], draft: Any, overlay: Any) -> bool:
        stored = list(created)
        if not follow(created, keys, draft, overlay):
            return False
        for place, key in enumerate(keys):
            if overlay.find(key) is not UNTOUCHED and keys.index(key) == place:
                created[place] = stored[place]
        return True

    patch.setattr(plain_puts, "_follow", by_engine)


@mutant("columns take each key for another", **BUSY)
def _all_new(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plain_puts, "_are_new", lambda *_: True)


@mutant("decisions ignore what is in flight", **BUSY)
def _no_overlay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Overlay, "find", lambda self, key: UNTOUCHED)
    patch.setattr(Overlay, "touched_of", lambda self, keys: set())


@mutant("a refused batch leaves half of it", **BUSY)
def _not_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Draft, "undo", lambda self, mark: setattr(self, "_undo", None))


@mutant("a CHECK fails by itself in an independent batch", **BUSY)
def _lone_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations, "Check", None)


@mutant("a condition is not asked for", **BUSY)
def _no_condition(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations, "is_met", lambda flags, version, row: True)


@mutant("KEEP_TTL drops the expiry", **BUSY)
def _dropped_ttl(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations, "_KEEP_TTL", 0)


@mutant("RETURN_OLD answers nothing", **BUSY)
def _no_old(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations, "_record", lambda row: None)


@mutant("EXPIRE sets whatever the condition says", **BUSY)
def _any_expiry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations, "_may_set_expiry", lambda *_: True)


@mutant("a delete of a range leaves out what is in flight", **BUSY)
def _range_without_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evaluate, "written_between", lambda *_: [])


@mutant("a delete of a range stops after its first entry", **BUSY)
def _range_cut_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evaluate, "cut", lambda keys, following, size: (keys[:2], None))


# ── P12 to P15: retries ───────────────────────────────────────────────────────────────────────────────────────────────


@mutant("retry without what is in flight", *LOSSES, "slow_disk", "slow_links", **BUSY)
def _no_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Overlay, "find_request", lambda self, request, hash_of_key: UNTOUCHED)


@mutant("columns take every request for new", *LOSSES, **BUSY)
def _requests_new(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RetryTable, "are_new", lambda *_: True)


@mutant("a request that changes nothing is forgotten", *LOSSES, **BUSY)
def _not_noted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Draft, "note", lambda self, key: 0)


@mutant("a request is refused as too old before its time", *LOSSES, **BUSY)
def _too_old(patch: pytest.MonkeyPatch) -> None:
    find = RetryTable.find

    def impatient(self: Any, request: Any, hash_of_key: int, now_ms: int) -> Any:
        return find(self, request, hash_of_key, now_ms + self._window_ms)

    patch.setattr(RetryTable, "find", impatient)


# ── P8, P9: when and how operations are answered ──────────────────────────────────────────────────────────────────────


@mutant("lost writes are told as refused", story=fenced_with_a_write_under_way, lead_back_s=100.0)
def _lost_is_refused(patch: pytest.MonkeyPatch) -> None:
    def refused(replies: Any, partition: Any) -> Any:
        return [(sink, token, NotLeader(partition)) for sink, token, _ in replies]

    patch.setattr(leader, "lost", refused)


@mutant("clients hear of a fence", story=fenced_with_a_write_under_way, lead_back_s=100.0)
def _fence_told(patch: pytest.MonkeyPatch) -> None:
    def fenced(replies: Any, partition: Any) -> Any:
        return [(sink, token, LedgerFenced("another writer")) for sink, token, _ in replies]

    patch.setattr(leader, "lost", fenced)


@mutant("who has no leader is refused for good", *ZOMBIES, **BUSY)
def _for_good(patch: pytest.MonkeyPatch) -> None:
    fail_all = ResultDelivery.fail_all

    def permanently(self: Any, items: Any, error: Any) -> None:
        fail_all(self, items, InvalidRequest(str(error)))

    patch.setattr(ResultDelivery, "fail_all", permanently)


@mutant("a scan that waits is refused at every change of the topology", "kill_leader", **BUSY)
def _scans_moved(patch: pytest.MonkeyPatch) -> None:
    changed = Router._topology_changed

    def misfiled(self: Any, topology: Any) -> None:
        changed(self, topology)
        self._is_grouping_stale = True

    patch.setattr(Router, "_topology_changed", misfiled)


# ── P19, P21, P22, P27: reads ─────────────────────────────────────────────────────────────────────────────────────────


@mutant("a replica answers before it has come to its start", "kill", "wipe", load__readers=2, **BUSY)
def _early_replica(patch: pytest.MonkeyPatch) -> None:
    async def at_once(self: Any) -> None:
        self._is_behind_start = False

    patch.setattr(Partition, "_catch_up_at_start", at_once)


@mutant("a page leaves out its last key", **BUSY)
def _short_page(patch: pytest.MonkeyPatch) -> None:
    scan = range_reads.scan

    def short(*args: Any) -> Any:
        page = scan(*args)
        return (
            ScanPage(page.items[:-1], page.next)
            if isinstance(page, ScanPage) and isinstance(page.items, list)
            else page
        )

    patch.setattr(range_reads, "scan", short)


@mutant("a page goes on behind its next key", **BUSY)
def _skipping_page(patch: pytest.MonkeyPatch) -> None:
    keys_in = range_reads.keys_in

    def skipping(*args: Any, **more: Any) -> Any:
        keys, following = keys_in(*args, **more)
        return keys, None if following is None else following + b"\xff"

    patch.setattr(range_reads, "keys_in", skipping)


@mutant("META answers with the length of the key", **BUSY)
def _wrong_meta(patch: pytest.MonkeyPatch) -> None:
    find = queries.find

    def wrong(state: Any, ops: Any, now_ms: int, readable: Any) -> Any:
        answers = find(state, ops, now_ms, readable)
        metas = [isinstance(op, Meta) and isinstance(each, tuple) for op, each in zip(ops, answers, strict=True)]
        return [
            (len(op.key), *each[1:]) if is_meta and len(each) > 1 else each
            for op, each, is_meta in zip(ops, answers, metas, strict=True)
        ]

    patch.setattr(queries, "find", wrong)
