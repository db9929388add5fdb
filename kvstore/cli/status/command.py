"""`kvstore status`: the state of a cluster as one of its nodes sees it, with the others' answers within a second."""

from __future__ import annotations

import json as json_text
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.cluster import LOCAL, TIMEOUT_S_MAX, ClusterOptions, Json
from kvstore.cli.endpoints import config_of
from kvstore.cli.output import as_json, as_table
from kvstore.cli.own_command import how_to_start
from kvstore.cli.status.known import ASK_S, cluster_report
from kvstore.env.clock import SystemClock
from kvstore.errors import StoreError, Unavailable

if TYPE_CHECKING:
    from kvstore.proto.admin_pb2 import ClusterReport

UNKNOWN = 3
"""Exit code if nothing could be learned: there is no such cluster, or it does not answer."""
_CLEAR = "\x1b[H\x1b[2J"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(status)


def status(
    cluster: ClusterOptions = LOCAL,
    watch: Annotated[
        bool, typer.Option("--watch", help="Continue: redraw on a terminal, print a line per change in a pipe")
    ] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between two polls of --watch", min=0.5, max=TIMEOUT_S_MAX)
    ] = 2.0,
    json: Json = False,
) -> None:
    """Show the state of the cluster: nodes, disks, leaders, lag, repairs, and what to do about problems.

    Exit code 0: healthy; 1: degraded, but everything is served; 2: something is not served, or no node answers;
    3: unknown. The command needs no metadata store: with --server, and for a local cluster, nodes report what they
    know.
    """
    try:
        if not watch:
            raise typer.Exit(_show_once(cluster, json=json))
        _follow(cluster, interval, json=json)
    except BrokenPipeError:
        raise  # the output pipe was closed, which is no failure
    except (StoreError, OSError) as error:
        print(f"kvstore: {error or type(error).__name__}", file=sys.stderr)
        raise typer.Exit(UNKNOWN) from None


class ClusterView:
    """The state of the cluster at one moment, as far as it is known."""

    def __init__(self, cluster: ClusterOptions) -> None:
        """Raises StoreError if nothing can be learned."""
        server = cluster.server
        if cluster.metadata is not None:
            server = ",".join(config_of(cluster, ASK_S).endpoints)
        self.local: dict[str, Any] | None = None
        self.hint = ""
        if server is None:
            from kvstore.devcluster.local import LocalCluster

            self.local = LocalCluster(cluster.data_dir).status()
            self.hint = how_to_start(cluster.data_dir)
        self.report: ClusterReport | None = None
        self.why_not = ""
        self._is_silent = False
        try:
            self.report = cluster_report(ClusterOptions(cluster.data_dir, server=server))
        except StoreError as error:
            if self.local is None and not isinstance(error, Unavailable):
                raise
            self.why_not = str(error) or type(error).__name__
            self._is_silent = isinstance(error, Unavailable)

    @property
    def exit_code(self) -> int:
        """The exit code of `status`."""
        own = int(self.is_store_down or bool(self.unready))
        if self.report is None:
            return 2 if self._is_silent else max(own, UNKNOWN)
        return max(own, int(self.report.health.grade))

    @property
    def processes(self) -> list[dict[str, Any]]:
        """The processes of a local cluster."""
        return self.local["nodes"] if self.local is not None else []

    @property
    def unready(self) -> list[str]:
        return [node["id"] for node in self.processes if not node["ready"]]

    @property
    def is_store_down(self) -> bool:
        """True if this local cluster's own metadata store is down. An external store is not checked."""
        store = self.local["zookeeper"] if self.local is not None else None
        return store is not None and store["own"] and not store["running"]

    def document(self) -> dict[str, Any]:
        from kvstore.cli.status.views import status_document

        if self.report is not None:
            found = status_document(self.report, self.processes)
        else:
            found = {"health": {"grade": "down" if self._is_silent else "unknown", "text": self._headline()}}
            found["nodes"] = self.processes
        return found | ({"zookeeper": self.local["zookeeper"]} if self.local is not None else {})

    def text(self) -> str:
        from kvstore.cli.status.views import status_text
        from kvstore.meta.address import parse

        parts = [status_text(self.report, self.processes)] if self.report is not None else [self._headline()]
        if self.report is None and self.processes:
            parts += ["", as_table(self.processes)]
        if self.local is not None and not self.local["zookeeper"]["running"]:
            store = self.local["zookeeper"]
            state = "is down" if store["own"] else "is not a process of this cluster"
            parts += ["", f"{parse(store['address']).kind.shown} {store['address']} {state}"]
        if self.is_store_down or not all(node["running"] for node in self.processes):
            parts += [f"To start everything that is down, run: {self.hint}"]
        return "\n".join(parts)

    def line(self) -> str:
        """One dated line about health, for output to a pipe."""
        from kvstore.cli.status.views import dated_line

        if self.report is not None:
            return dated_line(self.report.date_ms, self.report.health.text)
        return dated_line(SystemClock().wall_ms(), self._headline())

    def _headline(self) -> str:
        if self._is_silent:
            return f"down: no node answers: {self.why_not}"
        return f"unknown: the nodes do not report the state of the cluster: {self.why_not}"


class FailedPoll:
    """The result of a poll that failed: health is unknown."""

    report = None
    exit_code = UNKNOWN

    def __init__(self, why_not: Exception) -> None:
        self._headline = f"unknown: {why_not or type(why_not).__name__}"

    def document(self) -> dict[str, Any]:
        return {"health": {"grade": "unknown", "text": self._headline}}

    def text(self) -> str:
        return self._headline

    def line(self) -> str:
        from kvstore.cli.status.views import dated_line

        return dated_line(SystemClock().wall_ms(), self._headline)


def _show_once(cluster: ClusterOptions, *, json: bool) -> int:
    """Print the status once. Return the exit code."""
    view = ClusterView(cluster)
    print(as_json(view.document()) if json else view.text())
    return view.exit_code


def _follow(cluster: ClusterOptions, interval_s: float, *, json: bool) -> None:
    """Poll until interrupted, then exit with the code of the last poll. Raises StoreError, OSError if the first poll
    learns nothing. Later failures are shown and polling continues, because that is when somebody watches."""
    from kvstore.cli.status.views import what_matters

    is_screen = is_terminal() and not json
    before: Any = None
    code = UNKNOWN
    try:
        while True:
            view: ClusterView | FailedPoll
            try:
                view = ClusterView(cluster)
            except (StoreError, OSError) as error:
                if before is None:
                    raise
                view = FailedPoll(error)
            code = view.exit_code
            seen = what_matters(view.report) if view.report is not None else ("", view.exit_code)
            if is_screen:
                print(f"{_CLEAR}{view.text()}", flush=True)
            elif seen != before:
                line = json_text.dumps(view.document(), default=_shown) if json else view.line()
                print(line, flush=True)
            before = seen
            time.sleep(interval_s)
    except KeyboardInterrupt:
        raise typer.Exit(code) from None


def is_terminal() -> bool:
    """Return True if standard output is a terminal."""
    return sys.stdout.isatty()


def _shown(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
