"""`kvstore ring plan|add|remove|move|status|pause|resume|cancel|throttle`: changes of the ring while it serves."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.admin import POLL_S, TIMEOUT_S, OutageTolerance, ask_admin
from kvstore.cli.cluster import LOCAL, ClusterOptions, Json
from kvstore.cli.operation import OperationId, asked_once, reporting_interrupt
from kvstore.cli.output import as_json
from kvstore.cli.ring_views import (
    loads_document,
    plan_document,
    plan_text,
    progress_line,
    status_document,
    status_text,
)
from kvstore.errors import StoreError

if TYPE_CHECKING:
    from kvstore.proto import admin_pb2

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would move")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until all moves are done, and show progress")]
Ids = Annotated[list[str] | None, typer.Argument(help="Ids of partitions")]
Plan = Annotated[str, typer.Option("--plan", help="Do exactly what a dry run has shown, or nothing")]
COUNT_MAX, MIB_PER_S_MAX = 1_000, 1 << 20
"""Higher values are taken for typing errors."""


def register_changes(ring: typer.Typer) -> None:
    """Add the commands to `kvstore ring`."""
    for command in (plan, add, remove, move, status, pause, resume, cancel, throttle):
        ring.command()(command)


def plan(
    add: Annotated[list[str] | None, typer.Option(help="Show the effect of adding this partition")] = None,
    add_count: Annotated[
        int,
        typer.Option(
            help="Show the effect of adding so many partitions under the next free names", min=0, max=COUNT_MAX
        ),
    ] = 0,
    remove: Annotated[list[str] | None, typer.Option(help="Show the effect of removing this partition")] = None,
    replicas: Annotated[
        int, typer.Option(help="Replicas of each new partition; 0 means as many as others have", min=0, max=COUNT_MAX)
    ] = 0,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Show what adding or removing partitions would move, and change nothing. Without options, show the balance of the
    ring."""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    if (add or add_count) and remove:
        raise typer.BadParameter("expected partitions to add or to remove, got both")
    if add and add_count:
        raise typer.BadParameter("expected --add or --add-count, got both")
    request = ChangeRingRequest(dry_run=True)
    if add or add_count:
        request.MergeFrom(
            ChangeRingRequest(action=ChangeRingRequest.ADD, partitions=add, count=add_count, replicas=replicas)
        )
    elif remove:
        request.MergeFrom(ChangeRingRequest(action=ChangeRingRequest.REMOVE, partitions=remove))
    answer, loads = change_ring(request, cluster), read_loads(cluster)
    if json:
        print(as_json({**plan_document(answer), **loads_document(loads)}))
        return
    print(plan_text(answer))
    for suggestion in loads.suggestions:
        print(f"\n{suggestion.text}")


def add(
    partitions: Ids = None,
    count: Annotated[
        int,
        typer.Option(
            help="Number of partitions to add under the next free names, instead of ids", min=0, max=COUNT_MAX
        ),
    ] = 0,
    replicas: Annotated[
        int, typer.Option(help="Replicas of each partition; 0 means as many as others have", min=0, max=COUNT_MAX)
    ] = 0,
    dry_run: DryRun = False,
    plan: Plan = "",
    operation: OperationId = "",
    wait: Wait = False,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Add partitions. Each takes its share of the keys from the partitions that own most, while they are in use."""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    if bool(partitions) == bool(count):
        raise typer.BadParameter("expected either ids of new partitions or --count")
    request = ChangeRingRequest(
        action=ChangeRingRequest.ADD,
        partitions=partitions,
        count=count,
        replicas=replicas,
        dry_run=dry_run,
        plan=plan,
        operation=operation,
    )
    _plan_and_follow(request, cluster, wait=wait, json=json)


def remove(
    partitions: Annotated[list[str], typer.Argument(help="Ids of partitions")],
    dry_run: DryRun = False,
    plan: Plan = "",
    operation: OperationId = "",
    wait: Wait = False,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Remove partitions. Their keys move to the others, then they retire. Their ids are never used again."""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    request = ChangeRingRequest(
        action=ChangeRingRequest.REMOVE, partitions=partitions, dry_run=dry_run, plan=plan, operation=operation
    )
    _plan_and_follow(request, cluster, wait=wait, json=json)


def move(
    target: Annotated[str, typer.Argument(help="Partition that gets the range")],
    source: Annotated[str | None, typer.Option(help="Partition that loses the range; with --share")] = None,
    share: Annotated[float, typer.Option(help="Share of the whole ring to move, for example 0.01", min=0, max=1)] = 0.0,
    first: Annotated[
        int | None, typer.Option(help="First token of the range to move; with --last", min=0, max=2**32 - 1)
    ] = None,
    last: Annotated[int | None, typer.Option(help="Last token of the range to move", min=0, max=2**32 - 1)] = None,
    dry_run: DryRun = False,
    plan: Plan = "",
    operation: OperationId = "",
    wait: Wait = False,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Move a part of the ring to another partition"""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    by_share = source is not None and first is None and last is None
    by_range = source is None and first is not None and last is not None and not share
    if not (by_share or by_range):
        raise typer.BadParameter("expected --source and --share, or --first and --last")
    request = ChangeRingRequest(
        action=ChangeRingRequest.MOVE,
        source=source or "",
        target=target,
        share=share,
        first=first,
        last=last,
        dry_run=dry_run,
        plan=plan,
        operation=operation,
    )
    _plan_and_follow(request, cluster, wait=wait, json=json)


def status(
    wait: Wait = False,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Show moves in progress, and replicas that are being replaced"""
    found = ring_status(cluster)
    if wait and found.moves:
        found = _follow(cluster, quiet=json)
    _show_status(found, json=json)


def pause(
    operation: OperationId = "",
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Pause all moves. Nothing is lost; `kvstore ring resume` continues them."""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    _steer(ChangeRingRequest(action=ChangeRingRequest.PAUSE, operation=operation), cluster, json=json)


def resume(
    operation: OperationId = "",
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Resume paused moves"""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    _steer(ChangeRingRequest(action=ChangeRingRequest.RESUME, operation=operation), cluster, json=json)


def cancel(
    moves: Annotated[
        list[int] | None, typer.Argument(help="Ids of moves; default: all that can be cancelled", min=1, max=2**63)
    ] = None,
    operation: OperationId = "",
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Cancel moves. Ranges that have already moved stay with their new owner. A partition that was being added and owns
    nothing yet is removed."""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    request = ChangeRingRequest(action=ChangeRingRequest.CANCEL, moves=moves, operation=operation)
    _steer(request, cluster, json=json)


def throttle(
    mib_per_s: Annotated[
        float | None, typer.Option(help="Maximum MiB per second that each target copies; 0 means no limit", min=0)
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(help="Maximum number of moves that each target copies at once", min=1, max=COUNT_MAX)
    ] = None,
    operation: OperationId = "",
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Limit the speed of moves"""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    if mib_per_s is None and parallel is None:
        raise typer.BadParameter("expected --mib-per-s, --parallel or both, got neither")
    if mib_per_s is not None and not 0 <= mib_per_s <= MIB_PER_S_MAX:  # also NaN
        raise typer.BadParameter(f"expected --mib-per-s from 0 to {MIB_PER_S_MAX}, got {mib_per_s}")
    bytes_per_s = None if mib_per_s is None else round(mib_per_s * (1 << 20))
    request = ChangeRingRequest(
        action=ChangeRingRequest.THROTTLE, bytes_per_s=bytes_per_s, parallel=parallel, operation=operation
    )
    _steer(request, cluster, json=json)


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def change_ring(request: admin_pb2.ChangeRingRequest, cluster: ClusterOptions) -> admin_pb2.ChangeRingResponse:
    """Make the change once. The request gets an id if it has none. Raises StoreError."""
    if request.dry_run or request.action == request.SHOW:
        return ask_admin(cluster, lambda stub, timeout_s: stub.ChangeRing(request, timeout=timeout_s))
    with asked_once(request):
        answer = ask_admin(cluster, lambda stub, timeout_s: stub.ChangeRing(request, timeout=timeout_s), again=True)
    return answer


def ring_status(cluster: ClusterOptions) -> admin_pb2.RingStatusResponse:
    """Return the status of the ring. Raises StoreError."""
    from kvstore.proto.admin_pb2 import RingStatusRequest

    return ask_admin(cluster, lambda stub, timeout_s: stub.RingStatus(RingStatusRequest(), timeout=timeout_s))


def read_loads(cluster: ClusterOptions, timeout_s: float = TIMEOUT_S) -> admin_pb2.LoadsResponse:
    """Return the loads of the partitions. Raises StoreError."""
    from kvstore.proto.admin_pb2 import LoadsRequest

    return ask_admin(cluster, lambda stub, seconds: stub.Loads(LoadsRequest(), timeout=seconds), timeout_s)


def _plan_and_follow(
    request: admin_pb2.ChangeRingRequest,
    cluster: ClusterOptions,
    *,
    wait: bool,
    json: bool,
) -> None:
    answer = change_ring(request, cluster)
    _show_plan(answer, json=json)
    if wait and not request.dry_run:
        with reporting_interrupt("interrupted; the moves continue: wait for them with `kvstore ring status --wait`"):
            _follow(cluster, quiet=json)


def _steer(request: admin_pb2.ChangeRingRequest, cluster: ClusterOptions, *, json: bool) -> None:
    answer = change_ring(request, cluster)
    try:
        found = ring_status(cluster)
    except StoreError as error:
        done = f"the change is made as ring version {answer.version}, but no server reports the moves"
        print(f"kvstore: {done}: {error or type(error).__name__}", file=sys.stderr)
        if json:
            print(as_json({"version": answer.version}))
        return
    _show_status(found, json=json)


def _follow(cluster: ClusterOptions, *, quiet: bool) -> admin_pb2.RingStatusResponse:
    """Wait until no move is left. Return the status."""
    show, is_reported = _print if sys.stderr.isatty() and not quiet else _print_nothing, False
    tolerance = OutageTolerance()
    while (found := tolerance.poll(lambda: ring_status(cluster))) is None or found.moves:
        if found is not None:
            if found.paused and not is_reported:
                print(
                    "kvstore: moves are paused; continue them with `kvstore ring resume`", file=sys.stderr, flush=True
                )
            is_reported = found.paused
            show(f"\r{progress_line(found)}\033[K")
        time.sleep(POLL_S)
    show("\n")
    return found


def _print(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _print_nothing(_: str) -> None:
    """Print nothing, because standard error is not a terminal."""


# ── output ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _show_plan(answer: admin_pb2.ChangeRingResponse, *, json: bool) -> None:
    print(as_json(plan_document(answer)) if json else plan_text(answer))


def _show_status(answer: admin_pb2.RingStatusResponse, *, json: bool) -> None:
    print(as_json(status_document(answer)) if json else status_text(answer))
