"""`kvstore ring plan|add|remove|move|status|pause|resume|cancel|throttle`: changes of the ring while it serves."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.admin import LOOK_S, TIMEOUT_S, Patience, ask_admin
from kvstore.cli.cluster import DataDir, Json, ZooKeeper
from kvstore.cli.endpoints import Server
from kvstore.cli.operation import OperationId, asked_once, said_if_interrupted
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

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would move.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when all moves are through; show how far they are.")]
Ids = Annotated[list[str] | None, typer.Argument(help="Partition ids.")]
Plan = Annotated[str, typer.Option("--plan", help="Do exactly what a dry run has shown, or nothing.")]
COUNT_MAX, MIB_PER_S_MAX = 1_000, 1 << 20
"""What is more is a slip of the hand."""


def register_changes(ring: typer.Typer) -> None:
    """Add the commands to `kvstore ring`."""
    for command in (plan, add, remove, move, status, pause, resume, cancel, throttle):
        ring.command()(command)


def plan(
    add: Annotated[list[str] | None, typer.Option(help="Show what adding this partition would do.")] = None,
    add_count: Annotated[
        int,
        typer.Option(
            help="Show what adding so many partitions would do, under the next free names.", min=0, max=COUNT_MAX
        ),
    ] = 0,
    remove: Annotated[list[str] | None, typer.Option(help="Show what removing this partition would do.")] = None,
    replicas: Annotated[
        int, typer.Option(help="Replicas of each new partition; 0: as many as others have.", min=0, max=COUNT_MAX)
    ] = 0,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Show what adding or removing partitions would move, and change nothing. Without options: how balanced the ring
    is."""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    if (add or add_count) and remove:
        raise typer.BadParameter("want partitions to add or to remove, not both at once")
    if add and add_count:
        raise typer.BadParameter("want the ids of new partitions, or --add-count")
    request = ChangeRingRequest(dry_run=True)
    if add or add_count:
        request.MergeFrom(
            ChangeRingRequest(action=ChangeRingRequest.ADD, partitions=add, count=add_count, replicas=replicas)
        )
    elif remove:
        request.MergeFrom(ChangeRingRequest(action=ChangeRingRequest.REMOVE, partitions=remove))
    answer, loads = change_ring(request, data_dir, zookeeper, server), read_loads(data_dir, zookeeper, server)
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
            help="How many partitions to add under the next free names, in place of named ones.", min=0, max=COUNT_MAX
        ),
    ] = 0,
    replicas: Annotated[
        int, typer.Option(help="Replicas of each; 0: as many as others have.", min=0, max=COUNT_MAX)
    ] = 0,
    dry_run: DryRun = False,
    plan: Plan = "",
    operation: OperationId = "",
    wait: Wait = False,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Add partitions: each takes its share of the keys from those that own most, while they are read and written."""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    if bool(partitions) == bool(count):
        raise typer.BadParameter("want the ids of new partitions, or --count")
    request = ChangeRingRequest(
        action=ChangeRingRequest.ADD,
        partitions=partitions,
        count=count,
        replicas=replicas,
        dry_run=dry_run,
        plan=plan,
        operation=operation,
    )
    _plan_and_follow(request, data_dir, zookeeper, server, wait=wait, json=json)


def remove(
    partitions: Annotated[list[str], typer.Argument(help="Partition ids.")],
    dry_run: DryRun = False,
    plan: Plan = "",
    operation: OperationId = "",
    wait: Wait = False,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Remove partitions: all their keys go to the others, then they retire. Their ids are never used again."""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    request = ChangeRingRequest(
        action=ChangeRingRequest.REMOVE, partitions=partitions, dry_run=dry_run, plan=plan, operation=operation
    )
    _plan_and_follow(request, data_dir, zookeeper, server, wait=wait, json=json)


def move(
    target: Annotated[str, typer.Argument(help="The partition that gets the range.")],
    source: Annotated[str | None, typer.Option(help="Take from this partition ...")] = None,
    share: Annotated[float, typer.Option(help="... so much of the whole ring, for example 0.01.", min=0, max=1)] = 0.0,
    first: Annotated[
        int | None, typer.Option(help="Or move the tokens from this one ...", min=0, max=2**32 - 1)
    ] = None,
    last: Annotated[int | None, typer.Option(help="... to this one.", min=0, max=2**32 - 1)] = None,
    dry_run: DryRun = False,
    plan: Plan = "",
    operation: OperationId = "",
    wait: Wait = False,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Move a part of the ring to another partition."""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    by_share = source is not None and first is None and last is None
    by_range = source is None and first is not None and last is not None and not share
    if not (by_share or by_range):
        raise typer.BadParameter("want --source and --share, or --first and --last")
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
    _plan_and_follow(request, data_dir, zookeeper, server, wait=wait, json=json)


def status(
    wait: Wait = False,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Show the moves that are not done, how far they are, and replicas that are being replaced."""
    found = ring_status(data_dir, zookeeper, server)
    if wait and found.moves:
        found = _follow(data_dir, zookeeper, server, quiet=json)
    _show_status(found, json=json)


def pause(
    operation: OperationId = "",
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Stop moving for now. What is under way stays where it is; nothing is lost."""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    _steer(
        ChangeRingRequest(action=ChangeRingRequest.PAUSE, operation=operation), data_dir, zookeeper, server, json=json
    )


def resume(
    operation: OperationId = "",
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Go on moving."""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    _steer(
        ChangeRingRequest(action=ChangeRingRequest.RESUME, operation=operation), data_dir, zookeeper, server, json=json
    )


def cancel(
    moves: Annotated[
        list[int] | None, typer.Argument(help="Ids of moves; none: all that can be cancelled.", min=1, max=2**63)
    ] = None,
    operation: OperationId = "",
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Give moves up. Ranges that have changed hands stay with their new owner; a partition that was being added with
    nothing yet goes away again."""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    request = ChangeRingRequest(action=ChangeRingRequest.CANCEL, moves=moves, operation=operation)
    _steer(request, data_dir, zookeeper, server, json=json)


def throttle(
    mib_per_s: Annotated[float | None, typer.Option(help="What each target may copy; 0: no limit.", min=0)] = None,
    parallel: Annotated[
        int | None, typer.Option(help="Moves that each target copies at once.", min=1, max=COUNT_MAX)
    ] = None,
    operation: OperationId = "",
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Set how fast moves may go."""
    from kvstore.proto.admin_pb2 import ChangeRingRequest

    if mib_per_s is None and parallel is None:
        raise typer.BadParameter("want --mib-per-s, --parallel or both")
    if mib_per_s is not None and not 0 <= mib_per_s <= MIB_PER_S_MAX:  # also what is no number
        raise typer.BadParameter(f"want --mib-per-s from 0 to {MIB_PER_S_MAX}, got {mib_per_s}")
    bytes_per_s = None if mib_per_s is None else round(mib_per_s * (1 << 20))
    request = ChangeRingRequest(
        action=ChangeRingRequest.THROTTLE, bytes_per_s=bytes_per_s, parallel=parallel, operation=operation
    )
    _steer(request, data_dir, zookeeper, server, json=json)


# ── asking ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def change_ring(
    request: admin_pb2.ChangeRingRequest, data_dir: Path, zookeeper: str | None, server: str | None
) -> admin_pb2.ChangeRingResponse:
    """Make the change once: the request gets an id if it has none. Raises StoreError."""
    if request.dry_run or request.action == request.LOOK:
        answer: admin_pb2.ChangeRingResponse = ask_admin(
            data_dir, zookeeper, server, lambda stub, timeout_s: stub.ChangeRing(request, timeout=timeout_s)
        )
        return answer
    with asked_once(request):
        answer = ask_admin(
            data_dir, zookeeper, server, lambda stub, timeout_s: stub.ChangeRing(request, timeout=timeout_s), again=True
        )
    return answer


def ring_status(data_dir: Path, zookeeper: str | None, server: str | None) -> admin_pb2.RingStatusResponse:
    """Raises StoreError."""
    from kvstore.proto.admin_pb2 import RingStatusRequest

    answer: admin_pb2.RingStatusResponse = ask_admin(
        data_dir, zookeeper, server, lambda stub, timeout_s: stub.RingStatus(RingStatusRequest(), timeout=timeout_s)
    )
    return answer


def read_loads(
    data_dir: Path, zookeeper: str | None, server: str | None, timeout_s: float = TIMEOUT_S
) -> admin_pb2.LoadsResponse:
    """Raises StoreError."""
    from kvstore.proto.admin_pb2 import LoadsRequest

    answer: admin_pb2.LoadsResponse = ask_admin(
        data_dir, zookeeper, server, lambda stub, seconds: stub.Loads(LoadsRequest(), timeout=seconds), timeout_s
    )
    return answer


def _plan_and_follow(
    request: admin_pb2.ChangeRingRequest,
    data_dir: Path,
    zookeeper: str | None,
    server: str | None,
    *,
    wait: bool,
    json: bool,
) -> None:
    answer = change_ring(request, data_dir, zookeeper, server)
    _show_plan(answer, json=json)
    if wait and not request.dry_run:
        with said_if_interrupted("interrupted; the moves go on: `kvstore ring status --wait` waits for them"):
            _follow(data_dir, zookeeper, server, quiet=json)


def _steer(
    request: admin_pb2.ChangeRingRequest, data_dir: Path, zookeeper: str | None, server: str | None, *, json: bool
) -> None:
    answer = change_ring(request, data_dir, zookeeper, server)
    try:
        found = ring_status(data_dir, zookeeper, server)
    except StoreError as error:
        done = f"it is done, as ring version {answer.version}, and no server says how the moves are now"
        print(f"kvstore: {done}: {error or type(error).__name__}", file=sys.stderr)
        if json:
            print(as_json({"version": answer.version}))
        return
    _show_status(found, json=json)


def _follow(data_dir: Path, zookeeper: str | None, server: str | None, *, quiet: bool) -> admin_pb2.RingStatusResponse:
    """Return the status in which no move is left."""
    show, is_told = _say if sys.stderr.isatty() and not quiet else _say_nothing, False
    patience = Patience()
    while (found := patience.look(lambda: ring_status(data_dir, zookeeper, server))) is None or found.moves:
        if found is not None:
            if found.paused and not is_told:
                print("kvstore: moves are paused: they go on after `kvstore ring resume`", file=sys.stderr, flush=True)
            is_told = found.paused
            show(f"\r{progress_line(found)}\033[K")
        time.sleep(LOOK_S)
    show("\n")
    return found


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _say_nothing(_: str) -> None:
    """Not on a terminal."""


# ── showing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _show_plan(answer: admin_pb2.ChangeRingResponse, *, json: bool) -> None:
    print(as_json(plan_document(answer)) if json else plan_text(answer))


def _show_status(answer: admin_pb2.RingStatusResponse, *, json: bool) -> None:
    print(as_json(status_document(answer)) if json else status_text(answer))
