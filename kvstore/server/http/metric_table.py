"""Declarations of the metrics of a node: name, type, labels and description of each. Decides only.

metrics.py publishes the numbers of a node as these metrics; `make reference` writes docs/reference/metrics.md.

Names follow the conventions of Prometheus: counters end in `_total`, and units are seconds or bytes and are part of the
name. A part of the node may count under a shorter name: `_s` for `_seconds`, `_per_s` for `_per_second`, and a counter
without `_total`. Any other name is the `source` of the declaration.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class MetricKind(Enum):
    """The type of a metric, as Prometheus calls it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Declaration(NamedTuple):
    """The declaration of a metric: its name, kind, help text and sources."""

    name: str
    """Without the prefix `kvstore_`."""
    kind: MetricKind
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
        return {name, short, *([short.removesuffix("_total")] if self.kind is MetricKind.COUNTER else [])}


def counter(name: str, text: str, label: str = "", *, source: str = "") -> Declaration:
    """Declare a number that only rises while the process lives."""
    return Declaration(name, MetricKind.COUNTER, text, label, source)


def gauge(name: str, text: str, label: str = "", *, source: str = "") -> Declaration:
    """Declare a number that rises and falls."""
    return Declaration(name, MetricKind.GAUGE, text, label, source)


def histogram(name: str, text: str, label: str = "") -> Declaration:
    """Declare a distribution (`kvstore.env.histogram.Histogram`)."""
    return Declaration(name, MetricKind.HISTOGRAM, text, label)


UNDECLARED = "No declaration in kvstore/server/http/metric_table.py: {}."

METRICS: dict[str, tuple[Declaration, ...]] = {
    "Process": (
        gauge("process_ready", "1 if the node is ready, as /readyz reports it."),
        gauge("process_loop_lag_max_seconds", "Longest delay of the event loop since the last scrape."),
        gauge(
            "process_loop_starved_ratio",
            "Share of recent time in which the event loop was ready and had no processor; from 0.1, leaders batch "
            "longer.",
            source="process_loop_starved",
        ),
        gauge("process_metadata_connected", "1 while the node has a session with ZooKeeper or etcd."),
        gauge("process_draining", "1 while the node is draining: it hands over its partitions."),
        gauge("process_ring_version", "Version of the ring that this node uses."),
        gauge(
            "process_connections_opening",
            "Connections before or in their TLS handshake; the listeners do not count them yet.",
        ),
        gauge("process_tls_expires_seconds", "Time at which the certificate expires, in seconds since 1970."),
        counter("process_tls_reads_total", "Number of times that certificate files were read and used."),
        gauge(
            "process_tls_failing", "1 while changed certificate files cannot be used and the previous ones stay in use."
        ),
        counter(
            "process_connections_timed_out_total",
            "Number of connections closed because their TLS handshake took too long.",
        ),
        counter(
            "process_connections_gave_way_total",
            "Number of connections closed before or in their TLS handshake because the slots ran out.",
        ),
        counter(
            "process_connections_refused_total",
            "Number of connections closed at once because file descriptors ran out; the last ones are kept for files.",
        ),
        counter(
            "process_connections_plain_total",
            "Number of connections accepted without TLS, on all ports except gRPC, because `[tls] mode` is prefer.",
        ),
        counter(
            "process_connections_plain_calls_total",
            "Number of connections that this node opened without TLS because the other side seemed to have none.",
        ),
        counter(
            "process_handshakes_unknown_total",
            "Number of TLS handshakes that began for networks that had not authenticated, on all ports except gRPC.",
        ),
        counter("process_grpc_connections_plain_total", "Number of connections accepted without TLS on the gRPC port."),
        gauge("process_tls_required", "1 if TLS is required, 0 if it is preferred."),
        counter("process_log_warnings_total", "Number of warnings logged, including omitted ones."),
        counter("process_log_errors_total", "Number of errors logged, including omitted ones."),
        counter(
            "process_log_lines_left_out_total", "Number of log lines omitted because their message was too frequent."
        ),
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
            "Longest time, over all data directories, for which a pending write has not been completed.",
        ),
        counter(
            "process_log_lines_dropped_total",
            "Number of log lines dropped because standard error or the log's disk did not take them fast enough.",
        ),
        gauge(
            "process_snapshot_age_seconds",
            "Age of the last finished snapshot of the cluster, wherever it is stored; absent while there is none.",
        ),
        gauge("process_snapshot_rows", "Rows in the last finished snapshot."),
        gauge("process_snapshot_bytes", "Size of the files of the last finished snapshot."),
    ),
    "Bookie": (
        counter("bookie_adds_total", "Number of entries stored."),
        counter("bookie_add_bytes_total", "Number of bytes of the entries stored."),
        counter("bookie_reads_total", "Number of entries requested by readers."),
        counter("bookie_read_bytes_total", "Number of bytes of the entries returned to readers."),
        counter("bookie_fences_total", "Number of ledgers fenced, each by a takeover or a recovery."),
        counter(
            "bookie_refused_fenced_total",
            "Number of adds refused because the ledger is fenced: they come from a former leader.",
        ),
        counter(
            "bookie_refused_key_total", "Number of requests refused because their key does not match the ledger's."
        ),
        counter(
            "bookie_refused_cluster_total",
            "Number of connections refused because the other side belongs to another cluster.",
        ),
        counter(
            "bookie_refused_plain_total",
            "Number of requests refused because they arrived without TLS although the node has TLS.",
        ),
        counter(
            "bookie_refused_user_total",
            "Number of connections refused because their certificate is a user's, or is not in `bookie_clients`.",
        ),
        counter(
            "bookie_refused_digest_total",
            "Number of adds and explicit LACs refused because their digest was wrong: memory or the wire damaged them.",
        ),
        counter(
            "bookie_refused_other_entry_total",
            "Number of adds refused because the bookie has another payload of the entry: an id was given twice.",
        ),
        counter("bookie_refused_readonly_total", "Number of adds refused because the disk is full."),
        counter("bookie_refused_overload_total", "Number of requests refused because too many were in flight."),
        counter("bookie_refused_unknown_total", "Number of requests answered with an unknown result."),
        counter("bookie_syncs_total", "Number of syncs of the journal; each confirms a group of entries."),
        counter("bookie_synced_bytes_total", "Number of bytes that syncs of the journal made durable."),
        counter(
            "bookie_filled_bytes_total",
            "Number of zero bytes written ahead into the journal file, to make syncs cheaper.",
        ),
        counter(
            "bookie_asked_metadata_total", "Number of times that a ledger's metadata was read to decide on a request."
        ),
        gauge("bookie_tombstones", "Fences kept for deleted ledgers."),
        gauge("bookie_ledgers", "Ledgers with entries on this bookie."),
        gauge("bookie_segments", "Entry log files."),
        gauge("bookie_disk_bytes", "Size of the entry log files."),
        gauge(
            "bookie_free_bytes",
            "Free bytes on the disk of the bookie's journal, or on all its disks that have not failed.",
        ),
        gauge("bookie_live_bytes", "Bytes of entries in full files whose ledgers still exist."),
        counter("bookie_index_blocks_read_total", "Number of reads of index files, for entries of full files."),
        counter(
            "bookie_index_files_rebuilt_total", "Number of index files that were damaged and rebuilt from the entries."
        ),
        gauge(
            "bookie_index_segments_in_memory",
            "Full files whose index is in memory because it is not on disk yet.",
        ),
        gauge("bookie_readonly", "1 while the bookie is read-only because its disk is full."),
        gauge("bookie_limbo_ledgers", "Ledgers whose entries may be missing here until they are repaired."),
        counter("bookie_scrubbed_bytes_total", "Number of bytes that the scrub read in search of damage."),
        counter("bookie_damaged_records_total", "Number of records found with a wrong checksum."),
        counter("bookie_damage_marked_total", "Number of ledgers marked because the scrub found damage."),
        counter("bookie_reclaimed_bytes_total", "Number of bytes of disk space freed."),
        counter("bookie_rewritten_bytes_total", "Number of bytes moved out of sparse files to free them."),
        counter(
            "bookie_unassigned_ledgers_total",
            "Number of times that a ledger was kept whose id the metadata store has yet to assign: the store is an "
            "older copy.",
        ),
        counter("bookie_dropped_ledgers_total", "Number of deleted ledgers dropped from this bookie."),
        gauge(
            "bookie_new_incarnation",
            "1 if this process started with empty directories, and so with a new bookie id.",
            source="bookie_new_incarnations",
        ),
        counter("bookie_bad_requests_total", "Number of malformed requests."),
        gauge("bookie_connections", "Open connections to the bookie."),
        gauge("bookie_directories", "Directories of the bookie, including failed ones."),
        gauge(
            "bookie_directories_failed",
            "Directories whose disk has failed since the start; requests for their ledgers are refused.",
        ),
        histogram("bookie_sync_seconds", "Duration of a sync of the journal, until the event loop sees its end."),
        histogram("bookie_group_records", "Records confirmed by one sync of the journal."),
    ),
    "Auto-recovery worker": (
        gauge("autorecovery_enabled", "1 if auto-recovery was enabled when this worker last read the setting."),
        gauge(
            "autorecovery_ledgers_marked",
            "Ledgers marked as under-replicated when this worker last read the marks: the backlog.",
        ),
        gauge("autorecovery_ledgers_repairing", "Marked ledgers that this worker is repairing."),
        gauge(
            "autorecovery_ledgers_unreadable",
            "Marked ledgers with entries of which this worker found no intact copy; its log names them.",
        ),
        counter("autorecovery_ledgers_repaired_total", "Number of ledgers whose mark this worker removed."),
        counter(
            "autorecovery_attempts_failed_total",
            "Number of attempts that left a ledger marked: it has a leader, no bookie is spare, or an error occurred.",
        ),
        counter("autorecovery_copies_made_total", "Number of copies of entries that this worker made."),
        counter("autorecovery_copied_bytes_total", "Number of bytes of the copies that this worker made."),
        counter(
            "autorecovery_paced_bytes_total",
            "Number of bytes that this node's worker and leaders copied or checked within `[autorecovery] "
            "bytes_per_s`.",
        ),
        counter(
            "autorecovery_paced_seconds_total",
            "Number of seconds spent copying or checking: at least as many as that rate needs for these bytes.",
        ),
    ),
    "Auditor": (
        gauge("auditor_active", "1 if this node is the auditor of the cluster."),
        gauge(
            "auditor_enabled",
            "1 while the auditor sees auto-recovery enabled; 0 on nodes that are not the auditor.",
        ),
        gauge(
            "auditor_bookies_lost",
            "Bookies that ledgers name and that have been missing for longer than the delay, as the auditor sees it.",
        ),
        counter("auditor_rounds_total", "Number of rounds in which this node checked every ledger for lost bookies."),
        gauge("auditor_round_ledgers", "Ledgers in the last round for lost bookies."),
        gauge("auditor_round_seconds", "Duration of the last round for lost bookies."),
        counter(
            "auditor_marked_lost_total",
            "Number of marks made or extended because a lost bookie has copies of the ledger.",
        ),
        counter(
            "auditor_marked_entries_total",
            "Number of marks written because a check found that a bookie misses an entry that it should have.",
        ),
        counter(
            "auditor_marked_placement_total",
            "Number of marks made or extended because copies share a zone although a bookie of another zone could "
            "take one.",
        ),
        counter("auditor_checked_ledgers_total", "Number of ledgers whose bookies were asked which entries they have."),
        counter(
            "auditor_check_unanswered_total", "Number of times that a registered bookie did not answer such a check."
        ),
    ),
    "Server": (
        gauge("server_resp_connections", "Open connections to the Redis port."),
        counter("server_resp_commands_total", "Number of commands received at the Redis port."),
        counter(
            "server_resp_connections_refused_total",
            "Number of connections refused, or closed for a network with fewer, because the limit of connections was "
            "reached.",
        ),
        counter(
            "server_resp_silent_closed_total",
            "Number of connections closed at the limit to admit others: they had sent no command, or had not "
            "authenticated.",
        ),
        gauge(
            "server_resp_connections_unknown",
            "Connections that have sent no command yet or, with access control, have not authenticated.",
        ),
        counter(
            "server_resp_slow_readers_closed_total",
            "Number of connections closed because their clients did not read their replies.",
        ),
        counter(
            "server_resp_replies_put_off_total",
            "Number of times that a connection's replies did not fit and were read again later.",
        ),
        counter(
            "server_resp_replies_refused_total",
            "Number of commands refused because no memory became free for their replies.",
        ),
        gauge("server_resp_output_bytes", "Bytes of large or unread replies held in memory."),
        gauge("server_resp_input_bytes", "Bytes of incomplete or waiting commands and of watched keys held in memory."),
        gauge("server_resp_commands_under_way", "Operations of Redis commands in flight."),
        gauge("server_resp_channels", "Pub/Sub channels that have subscribers at this node, not counting patterns."),
        gauge("server_resp_subscriptions", "Subscriptions to channels and patterns at this node."),
        gauge("server_resp_patterns", "Different patterns to which clients of this node subscribe."),
        counter("server_resp_messages_published_total", "Number of Pub/Sub messages published at this node."),
        counter("server_resp_messages_delivered_total", "Number of Pub/Sub messages sent to subscribers."),
        counter(
            "server_resp_slow_subscribers_closed_total",
            "Number of connections closed because a subscriber did not read its messages.",
        ),
        counter(
            "server_channel_messages_dropped_total",
            "Number of Pub/Sub messages that may not have reached another node, counted once per node.",
        ),
        gauge("server_access_on", "1 if access control is on."),
        gauge(
            "server_access_unfounded",
            "1 if no client is served because other machines can reach this node and access control is off.",
        ),
        gauge("server_access_users", "Users in the access table that this server uses."),
        gauge("server_access_tokens", "Tokens in the access table, including expired ones."),
        counter(
            "server_access_denied_total",
            "Number of operations, calls and requests refused because of missing authentication or a missing right.",
        ),
        counter("server_logins_failed_total", "Number of logins with a wrong user or password."),
        counter(
            "server_logins_limited_total",
            "Number of logins refused unchecked: too many of their address failed, too many waited, or no thread "
            "started.",
        ),
        counter("server_login_hashes_total", "Number of passwords hashed. A verified login is not hashed again."),
        gauge("server_logins_pending", "Logins that wait for their password to be hashed."),
        counter(
            "server_slow_endpoint_total",
            "Number of gRPC and timed Redis operations that took longer than `[server] slow_ms` at their front end.",
        ),
        counter(
            "server_slow_waiting_total",
            "Number of operations that waited longer than `[server] slow_ms` for a reachable leader.",
        ),
        counter(
            "server_slow_link_total",
            "Number of operations in flight to another server for longer than `[server] slow_ms`, checked four times "
            "a second.",
        ),
        counter(
            "server_slow_leader_total",
            "Number of operations that took longer than `[server] slow_ms` at their leader on this node.",
        ),
        counter(
            "server_slow_left_out_total",
            "Number of slow operations that are counted but not in the slow log, because one second had too many.",
        ),
        counter("server_traces_sampled_total", "Number of operations and calls that this node sampled for tracing."),
        counter(
            "server_traces_left_out_total",
            "Number of operations and calls not sampled because that second already had 500.",
        ),
        counter("server_traces_spans_exported_total", "Number of spans that the collector accepted."),
        counter(
            "server_traces_spans_dropped_total", "Number of spans dropped because 4,096 were waiting for the collector."
        ),
        counter(
            "server_traces_spans_refused_total", "Number of spans that the collector did not accept in time, or at all."
        ),
        counter("server_forwarded_total", "Number of operations forwarded to the server that leads their partition."),
        counter("server_waited_for_leader_total", "Number of operations that had to wait for a leader."),
        gauge("server_waiting_for_leader", "Operations that wait for a leader."),
        counter(
            "server_leader_wait_timeouts_total", "Number of operations refused because no leader was found in time."
        ),
        gauge("server_peer_links", "Open links to other servers."),
        counter("server_peer_links_lost_total", "Number of links to other servers that broke."),
        gauge("server_peer_operations_in_flight", "Forwarded operations in flight."),
        gauge("server_peer_sessions", "Open links from other servers."),
        gauge(
            "server_session_streams",
            "Sessions of asyncio clients on the Redis port; its connections include them.",
        ),
        gauge(
            "server_session_streams_input_bytes",
            "Bytes of incomplete and waiting frames of these sessions held in memory.",
        ),
        counter("server_peer_refused_total", "Number of connections that claimed to be servers and did not prove it."),
        counter(
            "server_peer_links_refused_total",
            "Number of links on which the other server refused, failed to prove its identity, or sent a malformed "
            "frame.",
        ),
        counter(
            "server_ring_hints_false_total",
            "Number of times that a peer or client reported a ring version that the metadata store does not have.",
        ),
        counter("server_peer_operations_total", "Number of operations that other servers forwarded to this node."),
        gauge("server_redirected", "Operations that are being redirected to the new owner of their key."),
        counter(
            "server_redirected_total", "Number of operations that reached a partition that does not own their key."
        ),
        gauge("server_cluster_version", "Cluster version, as this server knows it."),
        gauge("server_servers_undecodable", "Metadata nodes below /servers that cannot be decoded."),
        counter(
            "server_steward_changes_total", "Number of changes to replicas and moves that this node made as steward."
        ),
        counter("server_balance_steps_total", "Number of steps that this node made as balancer."),
        gauge("server_balance_step_pending", "1 if the balancer has found a step. Only at the node that balances."),
        gauge("server_balance_waits", "Reasons why the balancer waits. Only at the node that balances."),
        gauge(
            "server_balance_budget_left",
            "Steps that the balancer may make within the hour. Only at the node that balances.",
        ),
        gauge(
            "server_partitions_without_leader",
            "Partitions without a leader, as far as this server knows; / and /clusterz name them.",
        ),
        gauge("server_servers_missing", "Servers that hold replicas and are down."),
        gauge(
            "server_date_doubtful",
            "1 while this server doubts its date and leads only what no other server can; `date` on the status page "
            "says why.",
        ),
        gauge("server_date_removes", "1 if this server may remove logs and pins based on its date."),
        gauge("server_date_drift_seconds", "Seconds by which the wall clock is ahead of the server's date."),
        gauge(
            "server_date_behind_seconds", "Seconds by which a majority of wall clocks is ahead of the server's date."
        ),
        counter(
            "server_dates_taken_over_total",
            "Number of steps forward to another server's date, because the monotonic clock had missed time.",
        ),
        gauge("server_watches", "Open watches at this node."),
        counter("server_watches_total", "Number of watches begun."),
        gauge("server_feed_tails", "Logs that this node tails for watches."),
        counter("server_feed_changes_total", "Number of changes delivered to watches and readers of the feed."),
        counter("server_feed_pages_total", "Number of pages of changes delivered."),
        counter("server_feed_log_reads_total", "Number of reads of a log for readers too far behind its tail."),
        counter(
            "server_watches_too_slow_total", "Number of watches ended because their clients read nothing for a minute."
        ),
        gauge("server_http_requests", "Requests in flight at the HTTP gateway."),
        gauge("server_http_watches", "Open watches at the HTTP gateway."),
        counter(
            "server_http_overloaded_total",
            "Number of requests and watches that the HTTP gateway refused because it was at its limits.",
        ),
        histogram(
            "server_resp_command_seconds",
            "Time from the start of a Redis command to its reply, for one in 16 rounds of commands.",
            "command",
        ),
        histogram(
            "server_grpc_call_seconds",
            "Duration of calls to the KV service. Execute and Session count each lane of a frame.",
            "method",
        ),
        histogram(
            "server_http_request_seconds",
            "Duration of requests to the HTTP gateway, from their headers to their result, including refused ones.",
            "route",
        ),
    ),
    "Storage engines": (
        gauge(
            "engine_memory_budget_bytes",
            "Memory that the states of all partitions may use: `[partition] memory_bytes`.",
        ),
        gauge(
            "engine_buffer_bytes",
            "Memory of write buffers: rows not in a file yet, or held by a pin. Writes wait at three quarters of the "
            "budget.",
        ),
        gauge("engine_block_bytes", "Memory of cached file blocks."),
        gauge(
            "engine_index_bytes",
            "Memory of the indexes and filters of all files; it may exceed the budget.",
        ),
        counter(
            "engine_flushes_for_memory_total",
            "Number of write buffers flushed before they were full because all buffers together were too large.",
        ),
    ),
    "Partitions": (
        gauge("partition_is_leader", "1 if this node leads the partition and serves it.", "partition"),
        gauge(
            "partition_is_in_doubt",
            "1 while replicas differ and this replica determines which are damaged. After a minute run `kvstore fsck`.",
            "partition",
        ),
        gauge(
            "partition_has_failed", "1 if the replica has stopped; `failure` on the status page says why.", "partition"
        ),
        gauge("partition_seq", "Sequence of the last mutation that this replica applied.", "partition"),
        gauge("partition_durable_seq", "Sequence up to which the replica's state is on disk.", "partition"),
        gauge("partition_log_version", "Cluster version that the partition's log is written in.", "partition"),
        gauge("partition_owns", "Token ranges that the partition owns, as of the last applied entry.", "partition"),
        gauge("partition_epoch", "Epoch of the last applied entry; it rises with every change of leader.", "partition"),
        gauge("partition_keys", "Keys of the partition.", "partition"),
        counter("partition_elections_total", "Number of times that this replica ran for election.", "partition"),
        counter(
            "partition_entries_tailed_total", "Number of log entries that this replica read and applied.", "partition"
        ),
        counter(
            "partition_snapshots_installed_total", "Number of snapshots installed from another replica.", "partition"
        ),
        counter("partition_snapshots_served_total", "Number of snapshots sent to another replica.", "partition"),
        counter(
            "partition_ledgers_trimmed_total",
            "Number of ledgers that this leader trimmed because they were no longer needed.",
            "partition",
        ),
        gauge("partition_pins_held", "Pinned views that this replica keeps.", "partition"),
        counter(
            "partition_move_counts_corrected_total",
            "Number of counts of a moving range that a second count corrected; it indicates a bug.",
            "partition",
        ),
        counter(
            "partition_move_copies_wrong_total",
            "Number of copies of a moving range that differed from its count and were repeated.",
            "partition",
        ),
        gauge(
            "partition_moves_stuck",
            "Moves from this partition whose copies were wrong three times; they wait for an operator.",
            "partition",
        ),
        counter("partition_pins_taken_total", "Number of pins taken while this replica led.", "partition"),
        counter("partition_flushes_total", "Number of times that the state was synced to disk.", "partition"),
        gauge("partition_leading_epoch", "Epoch in which this node leads the partition.", "partition"),
        counter("partition_leading_entries_total", "Number of log entries written in this leadership.", "partition"),
        counter("partition_leading_mutations_total", "Number of mutations written in this leadership.", "partition"),
        counter("partition_leading_answers_total", "Number of operations answered in this leadership.", "partition"),
        counter("partition_leading_refused_total", "Number of operations refused in this leadership.", "partition"),
        counter(
            "partition_leading_pauses_total",
            "Number of times that this leader paused appends because its engine fell behind its disk.",
            "partition",
        ),
        gauge("partition_leading_queued", "Operations that wait for the next log entry.", "partition"),
        gauge(
            "partition_leading_queued_bytes", "Bytes of the operations that wait for the next log entry.", "partition"
        ),
        gauge(
            "partition_leading_in_flight",
            "Log entries sent and not acknowledged: at most `entries_in_flight_max`, plus those of moves.",
            "partition",
        ),
        gauge("partition_leading_reads_waiting", "Reads that wait for an acknowledged append.", "partition"),
        gauge("partition_leading_frozen", "Writes that wait because their range is moving.", "partition"),
        gauge(
            "partition_leading_lease_left_seconds",
            "Remaining time of the log lease, in which the leader may answer reads alone; 0 without reads.",
            "partition",
        ),
        gauge("partition_leading_locked", "Writes that wait because a transaction holds their keys.", "partition"),
        gauge("partition_leading_reads_held", "Reads that wait because a transaction holds their keys.", "partition"),
        gauge(
            "partition_leading_intents",
            "Intents of transactions on keys of the partition: the transactions are not yet known to have ended.",
            "partition",
        ),
        gauge(
            "partition_leading_decisions",
            "Committed transactions of which some participant has not yet confirmed that it knows.",
            "partition",
        ),
        gauge("partition_leading_oldest_intent_seconds", "Age of the oldest intent; 0 if there is none.", "partition"),
        gauge(
            "partition_leading_oldest_decision_seconds", "Age of the oldest decision; 0 if there is none.", "partition"
        ),
        gauge(
            "partition_leading_transactions_running",
            "Transactions over several partitions whose home is here and that are not decided.",
            "partition",
        ),
        gauge(
            "partition_leading_transactions_outcomes",
            "Committed transactions of which this leader informs the participants now.",
            "partition",
        ),
        gauge(
            "partition_leading_transactions_questions",
            "Questions to other partitions about the outcome of transactions, in flight.",
            "partition",
        ),
        counter(
            "partition_leading_transactions_attempts_total",
            "Number of transactions over several partitions begun here in this leadership.",
            "partition",
        ),
        counter(
            "partition_leading_transactions_committed_total",
            "Number of transactions over several partitions committed here in this leadership.",
            "partition",
        ),
        counter(
            "partition_leading_transactions_dropped_total",
            "Number of transactions over several partitions aborted here in this leadership, for any reason.",
            "partition",
        ),
        counter(
            "partition_leading_transactions_conflicts_total",
            "Number of those that were aborted because another transaction held a key.",
            "partition",
        ),
        counter(
            "partition_leading_transactions_resolved_total",
            "Number of intents of the partition that were resolved in this leadership.",
            "partition",
        ),
        counter(
            "partition_leading_transactions_asked_total",
            "Number of questions sent to other partitions about the outcome of transactions.",
            "partition",
        ),
        gauge("partition_leading_retry_clients", "Clients in the retry table.", "partition"),
        gauge(
            "partition_leading_retry_bytes",
            "Size of the retry table. At 64 MiB new clients are refused; except for imports it stays below 128 MiB.",
            "partition",
        ),
        gauge(
            "partition_load_operations_per_second",
            "Operations per second that this leader answered in the last ten seconds, approximately.",
            "partition",
            source="partition_load_ops_per_s",
        ),
        gauge(
            "partition_load_writes_per_second",
            "Mutations per second that this leader answered in the last ten seconds, approximately.",
            "partition",
        ),
        gauge(
            "partition_load_written_bytes_per_second",
            "Bytes of written keys and values per second, estimated from a sample.",
            "partition",
        ),
        gauge(
            "partition_load_hottest_key_share",
            "Share of the operations on the most used key; `kvstore ring show` names it.",
            "partition",
        ),
        gauge("partition_log_ledgers", "Ledgers in the partition's list; reported only by its leader.", "partition"),
        gauge(
            "partition_log_list_bytes",
            "Size of that list in the metadata store. At 262,144 the log stops rolling; at 524,288 no server can lead.",
            "partition",
        ),
        gauge(
            "partition_log_ledgers_lacking_copies",
            "Ledgers of the log that were under-replicated or had a bookie down when the leader last checked.",
            "partition",
        ),
        gauge(
            "partition_log_ledgers_at_risk",
            "Ledgers of the log with an entry that had fewer copies than the ack quorum when the leader last checked.",
            "partition",
        ),
        gauge(
            "partition_log_ledgers_undecodable",
            "Ledgers of any writer that the leader skipped because their metadata cannot be decoded; see `kvstore "
            "fsck`.",
            "partition",
        ),
        counter(
            "partition_log_copies_made_total",
            "Number of entry copies of the open ledger that its leader recreated.",
            "partition",
        ),
        gauge(
            "partition_log_ledgers_sharing_zones",
            "Closed ledgers with copies that share a zone although another zone could take one; they are marked.",
            "partition",
        ),
        gauge("partition_log_open_ledger_bytes", "Size of the open ledger.", "partition"),
        gauge("partition_log_trimmed_seq", "Sequence below which the log has been trimmed.", "partition"),
    ),
    "Namespaces": (
        gauge(
            "namespace_keys",
            "Keys of the namespace in partitions led by this node; the sum over all nodes is the cluster's.",
            "namespace",
        ),
        gauge("namespace_bytes", "Bytes of these keys and their values.", "namespace"),
        gauge("namespace_keys_max", "Quota of keys for the whole cluster; 0: none.", "namespace"),
        gauge("namespace_bytes_max", "Quota of bytes for the whole cluster; 0: none.", "namespace"),
        gauge(
            "namespace_rate_max",
            "Rate limit for the whole cluster in operations per second; 0: none.",
            "namespace",
        ),
        counter(
            "namespace_operations_total",
            "Number of operations admitted for clients of this node, if the namespace has a rate limit.",
            "namespace",
        ),
        counter(
            "namespace_refused_keys_total",
            "Number of writes that this node refused because of the quota of keys.",
            "namespace",
        ),
        counter(
            "namespace_refused_bytes_total",
            "Number of writes that this node refused because of the quota of bytes.",
            "namespace",
        ),
        counter(
            "namespace_refused_operations_total",
            "Number of operations that this node refused because of the rate limit.",
            "namespace",
        ),
    ),
    "Cluster": (
        gauge(
            "cluster_grade",
            "Health of the cluster as this node finds it every 15 s: 0 healthy, 1 degraded, 2 not all keys are served.",
        ),
        gauge(
            "cluster_ledgers_lacking_copies", "Under-replicated ledgers of any writer, as `kvstore status` shows them."
        ),
        gauge(
            "cluster_ledgers_at_risk",
            "Ledgers of any writer with fewer copies than an ack quorum on running bookies.",
        ),
        gauge(
            "cluster_copies_counted",
            "1 if a server counted the copies of all ledgers in the last 3 h; 0 if only leaders and marks are known.",
        ),
        gauge("cluster_survey_age_seconds", "Age of the survey behind the metrics of the cluster's health."),
        gauge(
            "cluster_findings",
            "Findings of `kvstore status` by their code; a code without findings is absent.",
            "finding",
            source="finding_count",
        ),
    ),
}
"""Metrics by the part of the node that counts them: the sections of docs/reference/metrics.md."""
DECLARED = {each.name: each for part in METRICS.values() for each in part}
_BY_SOURCE = {source: each for each in DECLARED.values() for source in each.sources} | DECLARED


def declared(source: str) -> Declaration:
    """Return the declaration of the number that the node counts under `source`. A number without a declaration is
    published under the name that it has, and a test names it."""
    if found := _BY_SOURCE.get(source):
        return found
    make = counter if source.endswith("_total") else gauge
    return make(source, UNDECLARED.format(source))
