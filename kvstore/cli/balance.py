"""`kvstore balance explain`: what the balancer would do next, and why."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from kvstore.cli.admin import ask_admin
from kvstore.cli.cluster import LOCAL, ClusterOptions, Json
from kvstore.cli.node.commands import ask_node
from kvstore.cli.output import as_json, as_table
from kvstore.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from kvstore.proto.admin_pb2 import BalanceResponse, BalanceServer, BalanceStep
    from kvstore.proto.admin_pb2_grpc import AdminStub

MADE_SHOWN_MAX = 10


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    balance = typer.Typer(no_args_is_help=True, help="Show what the balancer does")
    balance.callback()(lambda: None)  # keeps the name of the only command
    balance.command()(explain)
    app.add_typer(balance, name="balance")


def explain(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """Show the balancer's next step, the reasons for it and against it, and the steps that were made.

    Changes nothing, whatever `[balance] mode` is. The step is computed from one observation; the balancer makes a step
    only if the imbalance lasts. The server that balances answers, by its own settings.
    """
    answer = ask_admin(cluster, _asked)
    if answer.balancer:
        try:
            answer = ask_node(answer.balancer, cluster, _asked)
        except (ConfigError, StoreError) as error:
            why = f"{answer.balancer}, which balances the cluster, does not answer ({error})"
            print(f"kvstore: {why}; the settings shown are those of another server", file=sys.stderr)
    print(as_json(_document(answer)) if json else _text(answer))


def _asked(stub: AdminStub, within: float) -> BalanceResponse:
    from kvstore.proto.admin_pb2 import BalanceRequest

    found: BalanceResponse = stub.Balance(BalanceRequest(), timeout=within)
    return found


def _document(answer: BalanceResponse) -> dict[str, Any]:
    return {
        "mode": answer.mode,
        "balancer": answer.balancer or None,
        "step": _step(answer.step) if answer.HasField("step") else None,
        "waits": list(answer.waits),
        "goals": {each.goal: each.text for each in answer.notes},
        "servers": [_server(each) for each in answer.servers],
        "made": [{"age_s": round(each.age_s), "by": each.by, **_step(each.step)} for each in answer.made],
        "budget_left": answer.budget_left,
        "moves_per_hour": answer.moves_per_hour,
        "window": answer.window or None,
        "settle_s": answer.settle_s,
    }


def _step(step: BalanceStep) -> dict[str, Any]:
    return {
        "goal": step.goal,
        "partition": step.partition,
        "source": step.source,
        "target": step.target,
        "first": step.first if step.HasField("first") else None,
        "last": step.last if step.HasField("last") else None,
        "reason": step.reason,
        "command": step.command,
    }


def _server(each: BalanceServer) -> dict[str, Any]:
    return {
        "server": each.id,
        "leads": each.leads,
        "replicas": each.replicas,
        "work_per_s": round(each.work_per_s),
        "disk_used": round(each.disk_used, 3) if each.HasField("disk_used") else None,
    }


def _text(answer: BalanceResponse) -> str:
    does = {"off": "observes nothing", "suggest": "suggests steps", "auto": "makes steps"}.get(answer.mode, "")
    window = f", from {answer.window} UTC" if answer.window else ""
    left = f"{answer.budget_left} of {answer.moves_per_hour} steps are left within the hour"
    parts = [f"mode {answer.mode}: {answer.balancer or 'no server'} {does}{window}; {left}", ""]
    if answer.HasField("step"):
        lasts = f"makes it if the imbalance lasts for {answer.settle_s:g} s"
        then = lasts if answer.mode == "auto" else "does not make it by itself"
        parts += [f"next step: {answer.step.command}", f"   {answer.step.reason}"]
        parts += [f"   waits: {each}" for each in answer.waits] or [f"   the balancer {then}"]
    else:
        parts += ["nothing to do", *(f"   {each}" for each in answer.waits)]
    parts += ["", *(f"{each.goal}: {each.text}" for each in answer.notes)]
    parts += ["", as_table([_server(each) for each in answer.servers])]
    if answer.made:
        rows = [
            {"minutes_ago": round(each.age_s / 60), "goal": each.step.goal, "command": each.step.command}
            for each in answer.made[:MADE_SHOWN_MAX]
        ]
        parts += ["", "steps that were made:", as_table(rows)]
    return "\n".join(parts)
