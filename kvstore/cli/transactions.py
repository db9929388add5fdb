"""`kvstore transaction`: ends transactions that cannot end by themselves."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.admin import ask_admin
from kvstore.cli.cluster import LOCAL, ClusterOptions, Json, confirm
from kvstore.cli.data import exact
from kvstore.cli.intents import addresses_of, standing_of
from kvstore.cli.output import as_json
from kvstore.errors import InvalidRequest, OutcomeUnknown, Unavailable
from kvstore.server.status.sizes import count

if TYPE_CHECKING:
    from kvstore.proto.admin_pb2 import TransactionReplica


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    transaction = typer.Typer(no_args_is_help=True, help="End transactions that cannot end by themselves")
    transaction.command("abandon")(abandon)
    app.add_typer(transaction, name="transaction")


def abandon(
    home: Annotated[str, typer.Argument(help="The partition that is lost for good, for example p3")],
    attempt: Annotated[str, typer.Option(help="Only this attempt, as `kvstore partition intents` shows it")] = "",
    force: Annotated[
        bool, typer.Option("--force", help="The partition is lost, even if it had a leader within the last minute")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Declare the undecided transactions of a lost partition aborted, and so free the keys that they hold.

    DATA LOSS: the lost partition may have committed some of them and acknowledged them. Of these, the parts in other
    partitions are lost, and half of the transaction remains. Serve the partition again instead, if one of its replicas
    or enough of its bookies can be started in any way. The command refuses while the partition has a leader,
    until it has had none for a minute (it may be changing leaders), and for transactions that a replica of the
    partition has decided to commit. The audit logs name the caller. Asks for confirmation.
    """
    from kvstore.proto.admin_pb2 import AbandonTransactionsRequest

    standing = standing_of(cluster)
    held = [
        (replica, intent)
        for replica in standing
        for intent in replica.intents
        if replica.is_leader and intent.home == home and attempt in ("", intent.attempt)
    ]
    _check_undecided(standing, home, {intent.attempt for _, intent in held})
    if not held:
        print(as_json({"home": home, "abandoned": []}) if json else f"no led partition has such intents of {home}")
        return
    attempts = {intent.attempt for _, intent in held}
    if not yes:
        confirm(
            f"Abort {count(len(attempts), 'transaction')} of {home}, which hold {count(len(held), 'key')}, and lose "
            f"their parts in other partitions if {home} has committed them"
        )
    request, done = AbandonTransactionsRequest(home=home, attempt=attempt, force=force), []
    silent: list[str] = []
    for node, address in sorted(addresses_of(cluster).items()):
        if not address:
            continue  # it leads nothing
        try:
            answer = ask_admin(
                ClusterOptions(server=address),
                lambda stub, within: stub.AbandonTransactions(request, timeout=2 * within),
            )
        except (Unavailable, OutcomeUnknown) as error:
            print(f"kvstore: {node} does not abandon its transactions: {error}", file=sys.stderr)
            silent.append(node)
            continue
        done += [{"attempt": each.attempt, **exact("key", each.key)} for each in answer.intents]
    if json:
        print(as_json({"home": home, "abandoned": done, "silent": silent}))
    else:
        aborted = count(len({each["attempt"] for each in done}), "transaction")
        print(f"aborted {aborted} of {home}; freed {count(len(done), 'key')}")
    if silent:
        raise Unavailable(
            f"expected every node to answer, got no answer from {', '.join(silent)}, which may lead partitions with "
            "such intents; run the command again once other nodes lead these partitions"
        )


def _check_undecided(standing: list[TransactionReplica], home: str, attempts: set[str]) -> None:
    """Raise InvalidRequest if a replica of the home has decided to commit one of the attempts."""
    decided = {each.attempt for replica in standing if replica.partition == home for each in replica.decisions}
    if committed := sorted(decided & attempts):
        raise InvalidRequest(
            f"a replica of {home} has decided to commit {', '.join(committed[:9])}: serve {home} again, for example "
            "with `kvstore partition trust`, or abandon other attempts one by one with --attempt"
        )
