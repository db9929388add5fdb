"""Plans, moves and loads of the ring as documents and as text for people. Decides only: prints nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.cli.output import as_table
from kvstore.server.status.sizes import count

if TYPE_CHECKING:
    from kvstore.proto import admin_pb2

MOVES_SHOWN_MAX = 40
COPIED = ("keys_copied", "bytes_copied")
"""Additional columns of a move in progress."""
_PAUSED = " (paused: `kvstore ring resume`)"


def plan_document(answer: admin_pb2.ChangeRingResponse) -> dict[str, Any]:
    """Return a plan as --json shows it."""
    return {
        "version_before": answer.version_before,
        "version": answer.version or None,
        "plan": answer.plan or None,
        "was_done": answer.was_done,
        "moves": [_move_row(each) for each in answer.moves],
        "keys": answer.keys,
        "bytes": answer.bytes,
        "balance_before": round(answer.balance_before, 4),
        "balance": round(answer.balance, 4),
        "partitions": [
            {
                "id": each.id,
                "state": each.state,
                "share_before": round(each.share_before, 6),
                "share": round(each.share, 6),
                "keys": each.keys if each.HasField("keys") else None,
            }
            for each in answer.partitions
        ],
    }


def plan_text(answer: admin_pb2.ChangeRingResponse) -> str:
    """Return a plan as text."""
    document = plan_document(answer)
    parts = []
    if answer.moves:
        parts += [_table(document["moves"]), ""]
        size = f"about {count(answer.keys, 'key')} and {answer.bytes / (1 << 20):,.1f} MiB"
        done = f"planned as ring version {answer.version}" if answer.version else "nothing has changed yet"
        parts += [f"{count(len(answer.moves), 'move')}, {size}; {done}"]
    if answer.was_done:
        parts += [f"this change was made before, as ring version {answer.version}; the moves listed are still open"]
    if answer.plan and answer.moves:
        parts += [f"to do exactly this, add --plan {answer.plan}"]
    parts += [f"largest share / mean: {answer.balance_before:.3f} now, {answer.balance:.3f} afterwards", ""]
    return "\n".join([*parts, as_table(document["partitions"])])


def loads_document(answer: admin_pb2.LoadsResponse) -> dict[str, Any]:
    """Return the document of the partitions' loads, as --json shows it."""
    return {
        "loads": [
            {
                "id": each.id,
                "ops_per_s": round(each.ops_per_s, 1),
                "writes_per_s": round(each.writes_per_s, 1),
                "written_bytes_per_s": round(each.written_bytes_per_s),
                "hot_keys": [{"key": hot.key, "share": round(hot.share, 4)} for hot in each.hot_keys],
            }
            for each in answer.partitions
        ],
        "suggestions": [
            {
                "source": each.source,
                "target": each.target or None,
                "first": each.first,
                "last": each.last,
                "ops_per_s": round(each.ops_per_s),
                "text": each.text,
            }
            for each in answer.suggestions
        ],
    }


def status_document(answer: admin_pb2.RingStatusResponse) -> dict[str, Any]:
    """Return the state of all moves as --json shows it."""
    return {
        "version": answer.version,
        "paused": answer.paused,
        "bytes_per_s": answer.bytes_per_s,
        "parallel": answer.parallel,
        "moves_planned": answer.moves_planned,
        "moves_done": answer.moves_done,
        "progress": round(answer.progress, 4),
        "eta_s": round(answer.eta_s, 1) if answer.HasField("eta_s") else None,
        "moves": [_move_row(each, *COPIED) for each in answer.moves],
        "replacing": [
            {
                "partition": each.partition,
                "newcomer": each.newcomer,
                "leaving": each.leaving,
                "sequence": each.newcomer_sequence if each.HasField("newcomer_sequence") else None,
                "leader_sequence": each.leader_sequence if each.HasField("leader_sequence") else None,
            }
            for each in answer.replacing
        ],
        "draining": list(answer.draining),
        "homeless": list(answer.homeless),
    }


def status_text(answer: admin_pb2.RingStatusResponse) -> str:
    """Return the state of all moves as text."""
    document = status_document(answer)
    limit = f"{answer.bytes_per_s / (1 << 20):g} MiB/s" if answer.bytes_per_s else "no limit"
    parts = [f"ring version {answer.version}; each target copies {count(answer.parallel, 'move')} at once, {limit}"]
    parts += [progress_line(answer), ""] if answer.moves else [f"no moves{_PAUSED if answer.paused else ''}"]
    if answer.moves:
        parts += [_table(document["moves"])]
    if answer.replacing:
        parts += ["", "replicas being replaced:", as_table(document["replacing"])]
    if answer.draining:
        parts += ["", f"drained servers: {', '.join(answer.draining)}"]
    if answer.homeless:
        parts += [f"no other server can take the replicas of {', '.join(answer.homeless)}; start another server"]
    return "\n".join(parts)


def progress_line(answer: admin_pb2.RingStatusResponse) -> str:
    """Return the progress of all moves in one line."""
    eta = f", about {answer.eta_s:.0f} s left" if answer.HasField("eta_s") else ""
    paused = _PAUSED if answer.paused else ""
    return f"{answer.progress:.0%} moved, {answer.moves_done} of {answer.moves_planned} moves done{eta}{paused}"


def _move_row(move: admin_pb2.MoveStatus, *more: str) -> dict[str, Any]:
    return {
        "id": move.id,
        "source": move.source,
        "target": move.target,
        "first": move.first,
        "last": move.last,
        "state": move.state,
        "keys": move.keys,
        "bytes": move.bytes,
        **{name: getattr(move, name) for name in more},
    }


def _table(rows: list[dict[str, Any]]) -> str:
    shown = as_table(rows[:MOVES_SHOWN_MAX])
    more = len(rows) - MOVES_SHOWN_MAX
    return f"{shown}\n… and {more} more (--json shows all)" if more > 0 else shown
