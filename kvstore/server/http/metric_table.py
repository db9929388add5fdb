"""Declarations of the metrics of a node: name, type, labels and description of each. Decides only.

metrics.py publishes the numbers of a node as these metrics; `make reference` writes docs/reference/metrics.md.

Names follow the conventions of Prometheus: counters end in `_total`, and units are seconds or bytes and stand in the
name. A part of the node may count under a shorter name: `_s` for `_seconds`, `_per_s` for `_per_second`, and a counter
without `_total`. Any other name is the `source` of the declaration.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The type of a metric, as Prometheus calls it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Declaration(NamedTuple):
    """A metric."""

    name: str
    """Without the prefix `kvstore_`."""
    kind: Kind
    text: str
    label: str = ""
    """Empty if the metric has one series."""
    source: str = ""
    """Name under which the node counts, with the name of its part in front; empty if it follows from `name`."""

    @property
    def sources(self) -> set[str]:
        """Names under which the node may count."""
        name = self.source or self.name
        short = name.removesuffix("econds") if name.endswith("_seconds") else name
        short = short.removesuffix("econd") if short.endswith("_per_second") else short
        return {name, short, *([short.removesuffix("_total")] if self.kind is Kind.COUNTER else [])}


def counter(name: str, text: str, label: str = "", *, source: str = "") -> Declaration:
    """Declare a number that only rises while the process lives."""
    return Declaration(name, Kind.COUNTER, text, label, source)


def gauge(name: str, text: str, label: str = "", *, source: str = "") -> Declaration:
    """Declare a number that rises and falls."""
    return Declaration(name, Kind.GAUGE, text, label, source)


def histogram(name: str, text: str, label: str = "") -> Declaration:
    """Declare a distribution (`kvstore.env.histogram.Histogram`)."""
    return Declaration(name, Kind.HISTOGRAM, text, label)


UNDECLARED = "No declaration in kvstore/server/http/metric_table.py: {}."

METRICS: dict[str, tuple[Declaration, ...]] = {
    "Process": (
        gauge("process_ready", "1 if /readyz says yes."),
        gauge("process_loop_lag_max_seconds", "Longest delay of the event loop since the last scrape."),
        gauge(
            "process_loop_starved_ratio",
            "Share of recent time in which the event loop was ready and got no processor; from 0.1 on, entries gather.",
            source="process_loop_starved",
        ),
        gauge("process_metadata_connected", "1 while the node has a session with ZooKeeper or etcd."),
        gauge("process_draining", "1 once the node hands over what it leads."),
        gauge("process_ring_version", "Version of the ring that this node works with."),
        gauge(
            "process_connections_opening",
            "Connections that wait for their TLS handshake or are in it; no listener counts them yet.",
        ),
        gauge("process_tls_expires_seconds", "When the certificate expires, in seconds since 1970."),
        counter("process_tls_reads_total", "Times that certificate files were taken over."),
        gauge("process_tls_failing", "1 while changed certificate files cannot be used: those read before hold."),
        counter(
            "process_connections_timed_out_total", "Connections closed since their TLS handshake was not over in time."
        ),
        counter(
            "process_connections_gave_way_total",
            "Number of connections closed before or in their TLS handshake because the slots ran out.",
        ),
        counter(
            "process_connections_refused_total",
            "Connections closed at once for want of descriptors: the last ones are for files.",
        ),
        counter(
            "process_connections_plain_total",
            "Connections without TLS that were let in at all ports but that of gRPC, since `[tls] mode` is prefer.",
        ),
        counter(
            "process_connections_plain_calls_total",
            "Connections that this node has made without TLS, since the other side seemed to have none.",
        ),
        counter("process_grpc_connections_plain_total", "Connections without TLS that were let in at gRPC's port."),
        gauge("process_tls_required", "1 where nothing goes without TLS, 0 where it is only preferred."),
        counter("process_log_warnings_total", "Warnings for the log, those left out among them."),
        counter("process_log_errors_total", "Errors for the log, those left out among them."),
        counter("process_log_lines_left_out_total", "Lines left out of the log since their message came too often."),
        gauge(
            "process_liveness_failing",
            "1 while the node has no metadata session because its event loop or a disk hangs.",
        ),
        counter(
            "process_liveness_failures_total",
            "Number of times the node ended its metadata session because its event loop or a disk hung.",
        ),
        gauge("process_loop_silence_seconds", "Time since the event loop last turned."),
        gauge(
            "process_disk_silence_seconds",
            "Longest time of a data directory in which its disk has not completed a pending write.",
        ),
        counter(
            "process_log_lines_dropped_total",
            "Number of log lines dropped because standard error or the log's disk did not take them fast enough.",
        ),
        gauge(
            "process_snapshot_age_seconds",
            "Age of the last snapshot of the cluster that was finished, wherever it is; absent while there is none.",
        ),
        gauge("process_snapshot_rows", "Rows in it."),
        gauge("process_snapshot_bytes", "Size of its files."),
    ),
    "Bookie": (
        counter("bookie_adds_total", "Entries stored."),
        counter("bookie_add_bytes_total", "Bytes of the entries stored."),
        counter("bookie_reads_total", "Entries asked for."),
        counter("bookie_read_bytes_total", "Bytes of the entries given."),
        counter("bookie_fences_total", "Ledgers fenced: each is a takeover or a recovery."),
        counter("bookie_refused_fenced_total", "Adds of a former leader: the ledger is fenced."),
        counter("bookie_refused_key_total", "Requests refused since their key is not the ledger's."),
        counter(
            "bookie_refused_cluster_total",
            "Connections refused since the other side said that it is of another cluster.",
        ),
        counter("bookie_refused_plain_total", "Requests refused since they came without TLS, where the node has it."),
        counter(
            "bookie_refused_user_total",
            "Connections refused by their certificate: a user's, or none of `bookie_clients`.",
        ),
        counter(
            "bookie_refused_digest_total",
            "Number of adds and explicit LACs refused because their digest was wrong: memory or the wire damaged them.",
        ),
        counter(
            "bookie_refused_other_entry_total",
            "Number of adds refused because the bookie has another payload of the entry: an id was given twice.",
        ),
        counter("bookie_refused_readonly_total", "Adds refused since the disk is full."),
        counter("bookie_refused_overload_total", "Requests refused since too many were under way."),
        counter("bookie_refused_unknown_total", "Requests answered with: I cannot tell."),
        counter("bookie_syncs_total", "Syncs of the journal; each confirms a group of entries."),
        counter("bookie_synced_bytes_total", "Bytes that these syncs made durable."),
        counter("bookie_filled_bytes_total", "Zeroes written into the file ahead, for small syncs."),
        counter("bookie_asked_metadata_total", "Ledgers whose metadata was read to judge a request."),
        gauge("bookie_tombstones", "Fences kept of ledgers that are deleted."),
        gauge("bookie_ledgers", "Ledgers of which something is stored here."),
        gauge("bookie_segments", "Files of entries."),
        gauge("bookie_disk_bytes", "What these files take."),
        gauge("bookie_free_bytes", "What is free on the disk of the bookie's journal, or on all of them."),
        gauge("bookie_live_bytes", "Entries in full files that are still wanted."),
        counter("bookie_index_blocks_read_total", "Reads of index files, for entries of full files."),
        counter("bookie_index_files_rebuilt_total", "Index files found damaged, and made again from the entries."),
        gauge(
            "bookie_index_segments_in_memory",
            "Full files whose index is in memory, because the disk has not taken it yet.",
        ),
        gauge("bookie_readonly", "1 while the disk is full but for the reserve."),
        gauge("bookie_limbo_ledgers", "Ledgers of which entries may be missing here, until repaired."),
        counter("bookie_scrubbed_bytes_total", "Bytes read again in search of damage."),
        counter("bookie_damaged_records_total", "Records with a wrong checksum."),
        counter("bookie_damage_marked_total", "Ledgers marked because the scrub found damage."),
        counter("bookie_reclaimed_bytes_total", "Disk space freed."),
        counter("bookie_rewritten_bytes_total", "Bytes moved out of sparse files to free them."),
        counter(
            "bookie_unheard_ledgers_total",
            "Times that a ledger was kept whose id the metadata store has yet to give: it is an older copy of itself.",
        ),
        counter("bookie_dropped_ledgers_total", "Deleted ledgers that were forgotten here."),
        gauge(
            "bookie_new_incarnation",
            "1 if this process found its directories empty: a new id.",
            source="bookie_new_incarnations",
        ),
        counter("bookie_bad_requests_total", "Requests that were not the protocol."),
        gauge("bookie_connections", "Connections of other nodes."),
        gauge("bookie_directories", "Directories that its journal is spread over, failed ones too."),
        gauge(
            "bookie_directories_failed",
            "Those of them whose disk has failed since the start: what they hold is refused.",
        ),
        histogram("bookie_sync_seconds", "How long a sync of the journal takes, until the event loop sees its end."),
        histogram("bookie_group_records", "Records confirmed by one sync."),
    ),
    "Auto-recovery worker": (
        gauge("autorecovery_enabled", "1 while auto-recovery is switched on, as this worker last saw."),
        gauge(
            "autorecovery_ledgers_marked",
            "Ledgers that are marked as lacking copies: the backlog, as this worker last saw it.",
        ),
        gauge("autorecovery_ledgers_mending", "Those that this worker repairs now."),
        gauge(
            "autorecovery_ledgers_unreadable",
            "Those with entries of which this worker found no good copy anywhere; its log names them.",
        ),
        counter("autorecovery_ledgers_mended_total", "Ledgers whose mark this worker took away."),
        counter(
            "autorecovery_attempts_failed_total",
            "Attempts that left a ledger marked, since it has a leader, no bookie is spare, or for an error.",
        ),
        counter("autorecovery_copies_made_total", "Copies of entries that this worker made."),
        counter("autorecovery_copied_bytes_total", "Bytes of these copies."),
        counter(
            "autorecovery_paced_bytes_total",
            "Bytes that this node's worker and leaders copied or read for checks within `[autorecovery] bytes_per_s`.",
        ),
        counter(
            "autorecovery_paced_seconds_total",
            "Seconds in which there was something to copy or check: never shorter than that rate allows for the bytes.",
        ),
    ),
    "Auditor": (
        gauge("auditor_in_office", "1 if this node is the auditor of the cluster."),
        gauge(
            "auditor_enabled",
            "1 while the auditor finds auto-recovery switched on; 0 on nodes that are not the auditor.",
        ),
        gauge(
            "auditor_bookies_lost",
            "Bookies that ledgers name and that have been away for longer than the delay, as the auditor sees it.",
        ),
        counter("auditor_rounds_total", "Times that this node has looked at every ledger for bookies that are lost."),
        gauge("auditor_round_ledgers", "Ledgers that there were in its last such round."),
        gauge("auditor_round_seconds", "How long that took."),
        counter("auditor_marked_lost_total", "Marks made or grown since a lost bookie has copies of the ledger."),
        counter(
            "auditor_marked_entries_total",
            "Marks written since a check found that a bookie does not have an entry which it is to have.",
        ),
        counter(
            "auditor_marked_placement_total",
            "Marks made or grown since copies share a zone though another bookie can take one.",
        ),
        counter("auditor_checked_ledgers_total", "Ledgers whose bookies were asked which entries they have."),
        counter("auditor_check_unanswered_total", "Times that a registered bookie did not answer that."),
    ),
    "Server": (
        gauge("server_resp_connections", "Connections to the Redis port."),
        counter("server_resp_commands_total", "Commands that came by it."),
        counter("server_resp_connections_refused_total", "Connections above the limit."),
        counter(
            "server_resp_silent_closed_total",
            "Connections closed for others, at the limit: they had never sent a command, or not logged in.",
        ),
        gauge(
            "server_resp_connections_unknown",
            "Connections that have sent no command yet, or where clients are asked, have not logged in.",
        ),
        counter(
            "server_resp_slow_readers_closed_total",
            "Connections closed since their clients did not read their replies.",
        ),
        counter(
            "server_resp_replies_put_off_total",
            "Times that a connection's replies did not fit and were read again later.",
        ),
        counter("server_resp_replies_refused_total", "Commands refused since no room came for their replies."),
        gauge("server_resp_output_bytes", "Large or unread replies held in memory."),
        gauge("server_resp_input_bytes", "Commands held in memory that are incomplete or wait."),
        gauge("server_resp_commands_under_way", "Operations begun and not answered."),
        gauge("server_access_on", "1 where clients are asked who they are."),
        gauge(
            "server_access_unfounded",
            "1 where nobody is served: other machines reach this node, and access control is off.",
        ),
        gauge("server_access_users", "Users in the table that this server goes by."),
        gauge("server_access_tokens", "Tokens in that table, expired ones included."),
        counter(
            "server_access_denied_total",
            "Operations, calls and requests refused: nobody had said who asks, or he lacked the right.",
        ),
        counter("server_logins_failed_total", "Logins with a wrong user or password."),
        counter(
            "server_logins_limited_total",
            "Logins refused unchecked: too many of their address had failed or too many waited, or no thread was left.",
        ),
        counter("server_login_hashes_total", "Passwords hashed; what was verified once costs no second one."),
        gauge("server_logins_pending", "Logins that wait for their hash."),
        counter(
            "server_slow_door_total",
            "Number of gRPC and timed Redis operations that took longer than `[server] slow_ms` at their front end.",
        ),
        counter(
            "server_slow_waiting_total", "Operations that waited longer than that for a leader that can be reached."
        ),
        counter(
            "server_slow_link_total",
            "Operations under way to another server for longer than that, by looks four times a second.",
        ),
        counter("server_slow_leader_total", "Operations whose leader took longer than that, here."),
        counter(
            "server_slow_left_out_total",
            "Slow operations that are not in the slow log, but counted: too many in one second.",
        ),
        counter("server_traces_sampled_total", "Operations and calls that were sampled here."),
        counter("server_traces_left_out_total", "Those left out: 500 had been in that second."),
        counter("server_traces_spans_exported_total", "Spans that the collector has taken."),
        counter("server_traces_spans_dropped_total", "Spans that were dropped since 4,096 waited for the collector."),
        counter("server_traces_spans_refused_total", "Spans that the collector has not taken in time, or at all."),
        counter("server_forwarded_total", "Operations sent on to the server that leads their partition."),
        counter("server_waited_for_leader_total", "Operations that had to wait for a leader."),
        gauge("server_waiting_for_leader", "Operations that wait for a leader now."),
        counter("server_leader_wait_timeouts_total", "Operations refused since no leader came in time."),
        gauge("server_peer_links", "Open links to other servers."),
        counter("server_peer_links_lost_total", "Links that broke."),
        gauge("server_peer_operations_in_flight", "Forwarded operations without an answer."),
        gauge("server_peer_sessions", "Links from other servers."),
        gauge(
            "server_session_streams",
            "Python clients whose sessions are on the Redis port; they count among its connections.",
        ),
        gauge("server_session_streams_input_bytes", "What those have sent of frames that are not complete."),
        counter(
            "server_peer_refused_total", "Connections of those who said that they are servers and did not prove it."
        ),
        counter(
            "server_peer_links_refused_total",
            "Links that another server refused, or over which it did not prove itself or sent what is no frame.",
        ),
        counter(
            "server_ring_hints_false_total",
            "Times that somebody told of a ring which the metadata store does not have.",
        ),
        counter("server_peer_operations_total", "Operations that other servers sent on to here."),
        gauge("server_redirected", "Operations that look for the new owner of their key now."),
        counter("server_redirected_total", "Operations that came where their key was not owned."),
        gauge("server_cluster_version", "Version of the cluster, as this server knows it."),
        gauge("server_servers_undecodable", "Nodes below /servers that cannot be decoded."),
        counter("server_steward_changes_total", "Replicas and moves that this node has directed."),
        gauge(
            "server_partitions_without_leader",
            "Partitions that nobody leads, as far as this server knows; / and /clusterz name them.",
        ),
        gauge("server_servers_missing", "Servers that hold replicas and are not up."),
        gauge(
            "server_date_doubtful",
            "1 while this server is not sure of its date: it leads nothing that another could. `/`, date, says why.",
        ),
        gauge("server_date_removes", "1 if this server may remove logs and pins by its date."),
        gauge("server_date_drift_seconds", "How far its wall clock is ahead of its date."),
        gauge("server_date_behind_seconds", "How far a majority of wall clocks is ahead of its date."),
        counter(
            "server_dates_taken_over_total",
            "Number of steps forward to another server's date, because the monotonic clock had missed time.",
        ),
        gauge("server_watches", "Watches that are open at this node."),
        counter("server_watches_total", "Watches begun."),
        gauge("server_feed_tails", "Logs that are tailed for those who watch."),
        counter("server_feed_changes_total", "Changes given to watches and readers of pages."),
        counter("server_feed_pages_total", "Pages of changes given."),
        counter("server_feed_log_reads_total", "Reads of a log for those who were too far behind its tail."),
        counter("server_watches_too_slow_total", "Watches ended since their clients took nothing for a minute."),
        gauge("server_http_requests", "Requests of the HTTP gateway that are under way."),
        gauge("server_http_watches", "Watches that are open at the HTTP gateway."),
        counter("server_http_overloaded_total", "Requests and watches that the HTTP gateway refused for want of room."),
        histogram(
            "server_resp_command_seconds",
            "From beginning a command to writing its reply, of one in 16 rounds of commands.",
            "command",
        ),
        histogram(
            "server_grpc_call_seconds",
            "Duration of calls to the KV service. Execute and Session count each lane of a frame.",
            "method",
        ),
        histogram(
            "server_http_request_seconds",
            "Requests of the HTTP gateway, from their head to their result; refused ones too.",
            "route",
        ),
    ),
    "Storage engines": (
        gauge(
            "engine_memory_budget_bytes",
            "What the partitions' states may have in memory together: `[partition] memory_bytes`.",
        ),
        gauge(
            "engine_buffer_bytes",
            "Of that, write buffers: rows not yet in a file, or held by a pin. Writes wait at three quarters.",
        ),
        gauge("engine_block_bytes", "Of that, cached blocks of files."),
        gauge(
            "engine_index_bytes",
            "Of that, indexes and filters of files: all of them, and beyond the budget if they do not fit.",
        ),
        counter(
            "engine_flushes_for_memory_total",
            "Write buffers that became files before they were full, since all together were too large.",
        ),
    ),
    "Partitions": (
        gauge("partition_is_leader", "1 where this node leads the partition and answers for it.", "partition"),
        gauge(
            "partition_is_in_doubt",
            "1 while replicas differ and this replica determines which are damaged. After a minute run `kvstore fsck`.",
            "partition",
        ),
        gauge("partition_has_failed", "1 if the replica has stopped; /, role and failure, says why.", "partition"),
        gauge("partition_seq", "Sequence of the last mutation applied here.", "partition"),
        gauge("partition_durable_seq", "Sequence up to which the state is on this disk.", "partition"),
        gauge("partition_log_version", "Cluster version by which its log is written.", "partition"),
        gauge("partition_owns", "Ranges of tokens that the partition owns as far as it has applied.", "partition"),
        gauge("partition_epoch", "Epoch of the last entry applied; it rises with every change of leader.", "partition"),
        gauge("partition_keys", "Keys that are there.", "partition"),
        counter("partition_elections_total", "Times that this replica stood for leader.", "partition"),
        counter("partition_entries_tailed_total", "Log entries that this replica read and applied.", "partition"),
        counter("partition_snapshots_installed_total", "Snapshots taken from another replica.", "partition"),
        counter("partition_snapshots_served_total", "Snapshots given to another replica.", "partition"),
        counter("partition_ledgers_trimmed_total", "Ledgers that this leader dropped as not needed.", "partition"),
        gauge("partition_pins_held", "States that this replica keeps for pinned reads.", "partition"),
        counter(
            "partition_move_counts_corrected_total",
            "Counts of a range that moves away which a second count has corrected: a bug.",
            "partition",
        ),
        counter(
            "partition_move_copies_wrong_total",
            "Copies of a range that moves away which were not what was counted twice, and were made anew.",
            "partition",
        ),
        gauge(
            "partition_moves_stuck",
            "Moves away from here whose copies were wrong three times: they wait for somebody to look.",
            "partition",
        ),
        counter("partition_pins_taken_total", "Pins that were taken while this replica led.", "partition"),
        counter("partition_flushes_total", "Times that the state was synced to disk.", "partition"),
        gauge("partition_leading_epoch", "Epoch in which this node leads.", "partition"),
        counter("partition_leading_entries_total", "Log entries written in this lead.", "partition"),
        counter("partition_leading_mutations_total", "Mutations in them.", "partition"),
        counter("partition_leading_answers_total", "Operations answered in this lead.", "partition"),
        counter("partition_leading_refused_total", "Operations refused in this lead.", "partition"),
        counter(
            "partition_leading_pauses_total",
            "Times that this leader stopped appending because its engine could not keep up with its disk.",
            "partition",
        ),
        gauge("partition_leading_queued", "Operations that wait for the next log entry.", "partition"),
        gauge("partition_leading_queued_bytes", "Their size.", "partition"),
        gauge(
            "partition_leading_in_flight",
            "Log entries sent and not acknowledged: at most `entries_in_flight_max`, beside those of moves.",
            "partition",
        ),
        gauge("partition_leading_reads_waiting", "Reads that wait for an acknowledgement.", "partition"),
        gauge("partition_leading_frozen", "Writes that wait since their range is being moved.", "partition"),
        gauge(
            "partition_leading_lease_left_seconds",
            "How long reads may be answered alone; 0 where nothing is read.",
            "partition",
        ),
        gauge("partition_leading_retry_clients", "Clients whose results are remembered.", "partition"),
        gauge(
            "partition_leading_retry_bytes",
            "What remembering them takes; from 64 MiB on new clients are refused; imports apart, never above 128 MiB.",
            "partition",
        ),
        gauge(
            "partition_load_operations_per_second",
            "Operations answered by this leader, over the last ten seconds or so.",
            "partition",
            source="partition_load_ops_per_s",
        ),
        gauge(
            "partition_load_writes_per_second",
            "Mutations among them.",
            "partition",
        ),
        gauge(
            "partition_load_written_bytes_per_second",
            "Their keys and values, by a sample.",
            "partition",
        ),
        gauge(
            "partition_load_hottest_key_share",
            "Part of the operations that one key has; `kvstore ring show` names it.",
            "partition",
        ),
        gauge("partition_log_ledgers", "Ledgers in the partition's list; only its leader says it.", "partition"),
        gauge(
            "partition_log_list_bytes",
            "Size of that list in the metadata store: at 262,144 it rolls no further; at 524,288 no server can lead.",
            "partition",
        ),
        gauge(
            "partition_log_ledgers_lacking_copies",
            "Those that lack copies, or whose bookies are not all up, as its leader last saw.",
            "partition",
        ),
        gauge(
            "partition_log_ledgers_undecodable",
            "Ledgers of any writer whose metadata the leader could not read and skipped; see `kvstore fsck`.",
            "partition",
        ),
        counter(
            "partition_log_copies_made_total", "Copies of the open ledger that its leader made again.", "partition"
        ),
        gauge(
            "partition_log_ledgers_sharing_zones",
            "Closed ones with copies of one entry in one zone, though another zone could have one; they are marked.",
            "partition",
        ),
        gauge("partition_log_open_ledger_bytes", "Size of the ledger that is being written.", "partition"),
        gauge("partition_log_trimmed_seq", "Sequence below which the log was trimmed.", "partition"),
    ),
    "Namespaces": (
        gauge(
            "namespace_keys",
            "Keys of the namespace in the partitions that are led here: the sum over all nodes is the cluster's.",
            "namespace",
        ),
        gauge("namespace_bytes", "Bytes of these keys and their values.", "namespace"),
        gauge("namespace_keys_max", "Quota of keys, of the whole cluster; 0: none.", "namespace"),
        gauge("namespace_bytes_max", "Quota of bytes, of the whole cluster; 0: none.", "namespace"),
        gauge(
            "namespace_rate_max",
            "Operations per second that the namespace may have in the whole cluster; 0: any number.",
            "namespace",
        ),
        counter(
            "namespace_operations_total",
            "Operations that clients of this node asked for and that were let through, where the namespace has a rate.",
            "namespace",
        ),
        counter("namespace_refused_keys_total", "Writes refused here for the quota of keys.", "namespace"),
        counter("namespace_refused_bytes_total", "Writes refused here for the quota of bytes.", "namespace"),
        counter("namespace_refused_operations_total", "Operations refused here for the rate.", "namespace"),
    ),
    "Cluster": (
        gauge(
            "cluster_grade",
            "Health of the cluster as this node finds it every 15 s: 0 healthy, 1 degraded, 2 not all keys are served.",
        ),
        gauge(
            "cluster_ledgers_lacking_copies", "Ledgers of any writer that lack copies, as `kvstore status` shows them."
        ),
        gauge(
            "cluster_ledgers_at_risk",
            "Ledgers of any writer that have fewer copies than an ack quorum on bookies that are up.",
        ),
        gauge(
            "cluster_copies_counted",
            "1 if a server has counted the copies of all ledgers in the last 3 h; 0 if only leaders and marks tell.",
        ),
        gauge("cluster_survey_age_seconds", "Age of what the metrics of the cluster's health say."),
        gauge(
            "cluster_findings",
            "Number of findings of `kvstore status`, by their code; a code without a finding is absent.",
            "finding",
            source="finding_count",
        ),
    ),
}
"""By the part of the node that counts: the sections of docs/reference/metrics.md."""
DECLARED = {each.name: each for part in METRICS.values() for each in part}
_BY_SOURCE = {source: each for each in DECLARED.values() for source in each.sources} | DECLARED


def declared(source: str) -> Declaration:
    """Return the declaration of the number that the node counts under `source`. A number without one is published under
    the name that it has, and a test names it."""
    if found := _BY_SOURCE.get(source):
        return found
    make = counter if source.endswith("_total") else gauge
    return make(source, UNDECLARED.format(source))
