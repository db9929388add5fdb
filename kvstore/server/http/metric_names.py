"""The names of metrics: units, and what they mean.

Parts of the node count under short names of their own; the table gives each the name, without prefix, and the sentence
under which it is published. Counters end in `_total`, units are seconds and bytes and stand in the name. A number
without a line here is published under the name that it has.
"""

from __future__ import annotations

from kvstore.server.http.metric_names_of_health import HEALTH
from kvstore.server.http.metric_names_of_liveness import LIVENESS
from kvstore.server.http.metric_names_of_namespaces import NAMESPACES
from kvstore.server.http.metric_names_of_traces import TRACES

NAMES: dict[str, tuple[str, str]] = {
    # The process.
    "process_ready": ("process_ready", "1 if /readyz says yes."),
    "process_loop_lag_max_s": (
        "process_loop_lag_max_seconds",
        "Longest delay of the event loop since the last scrape.",
    ),
    "process_loop_starved": (
        "process_loop_starved_ratio",
        "Share of the recent time in which the event loop was ready and got no processor; from 0.1 on entries gather.",
    ),
    "process_metadata_connected": (
        "process_metadata_connected",
        "1 while the node has a session with ZooKeeper or etcd.",
    ),
    "process_draining": ("process_draining", "1 once the node hands over what it leads."),
    "process_ring_version": ("process_ring_version", "Version of the ring that this node works with."),
    "process_connections_opening": (
        "process_connections_opening",
        "Connections that wait for their TLS handshake or are in it; no listener counts them yet.",
    ),
    "process_tls_expires_s": ("process_tls_expires_seconds", "When the certificate expires, in seconds since 1970."),
    "process_tls_reads_total": ("process_tls_reads_total", "Times that certificate files were taken over."),
    "process_tls_failing": (
        "process_tls_failing",
        "1 while changed certificate files cannot be used: those read before hold.",
    ),
    "process_connections_timed_out_total": (
        "process_connections_timed_out_total",
        "Connections closed since their TLS handshake was not over in time.",
    ),
    "process_connections_gave_way_total": (
        "process_connections_gave_way_total",
        "Number of connections closed before or in their TLS handshake because the slots ran out.",
    ),
    "process_connections_refused_total": (
        "process_connections_refused_total",
        "Connections closed at once for want of descriptors: the last ones are for files.",
    ),
    "process_connections_plain_total": (
        "process_connections_plain_total",
        "Connections without TLS that were let in at all ports but that of gRPC, since `[tls] mode` is prefer.",
    ),
    "process_connections_plain_calls_total": (
        "process_connections_plain_calls_total",
        "Connections that this node has made without TLS, since the other side seemed to have none.",
    ),
    "process_grpc_connections_plain_total": (
        "process_grpc_connections_plain_total",
        "Connections without TLS that were let in at gRPC's port.",
    ),
    "process_tls_required": ("process_tls_required", "1 where nothing goes without TLS, 0 where it is only preferred."),
    "process_log_warnings_total": ("process_log_warnings_total", "Warnings for the log, those left out among them."),
    "process_log_errors_total": ("process_log_errors_total", "Errors for the log, those left out among them."),
    "process_log_lines_left_out_total": (
        "process_log_lines_left_out_total",
        "Lines left out of the log since their message came too often.",
    ),
    **LIVENESS,
    "process_snapshot_age_s": (
        "process_snapshot_age_seconds",
        "Age of the last snapshot of the cluster that was finished, wherever it is; absent while there is none.",
    ),
    "process_snapshot_rows": ("process_snapshot_rows", "Rows in it."),
    "process_snapshot_bytes": ("process_snapshot_bytes", "Size of its files."),
    # The bookie.
    "bookie_adds": ("bookie_adds_total", "Entries stored."),
    "bookie_add_bytes": ("bookie_add_bytes_total", "Bytes of the entries stored."),
    "bookie_reads": ("bookie_reads_total", "Entries asked for."),
    "bookie_read_bytes": ("bookie_read_bytes_total", "Bytes of the entries given."),
    "bookie_fences": ("bookie_fences_total", "Ledgers fenced: each is a takeover or a recovery."),
    "bookie_refused_fenced": ("bookie_refused_fenced_total", "Adds of a former leader: the ledger is fenced."),
    "bookie_refused_key": ("bookie_refused_key_total", "Requests refused since their key is not the ledger's."),
    "bookie_refused_cluster": (
        "bookie_refused_cluster_total",
        "Connections refused since the other side said that it is of another cluster.",
    ),
    "bookie_refused_plain": (
        "bookie_refused_plain_total",
        "Requests refused since they came without TLS, where the node has it.",
    ),
    "bookie_refused_user": (
        "bookie_refused_user_total",
        "Connections refused by their certificate: a user's, or none of `bookie_clients`.",
    ),
    "bookie_refused_digest": (
        "bookie_refused_digest_total",
        "Adds and explicit last-add-confirmed refused since their digest was wrong: damaged in memory or on the wire.",
    ),
    "bookie_refused_other_entry": (
        "bookie_refused_other_entry_total",
        "Number of adds refused because the bookie has another payload of the entry: an id was given twice.",
    ),
    "bookie_refused_readonly": ("bookie_refused_readonly_total", "Adds refused since the disk is full."),
    "bookie_refused_overload": ("bookie_refused_overload_total", "Requests refused since too many were under way."),
    "bookie_refused_unknown": ("bookie_refused_unknown_total", "Requests answered with: I cannot tell."),
    "bookie_syncs": ("bookie_syncs_total", "Syncs of the journal; each confirms a group of entries."),
    "bookie_synced_bytes": ("bookie_synced_bytes_total", "Bytes that these syncs made durable."),
    "bookie_filled_bytes": ("bookie_filled_bytes_total", "Zeroes written into the file ahead, for small syncs."),
    "bookie_asked_metadata": ("bookie_asked_metadata_total", "Ledgers whose metadata was read to judge a request."),
    "bookie_tombstones": ("bookie_tombstones", "Fences kept of ledgers that are deleted."),
    "bookie_ledgers": ("bookie_ledgers", "Ledgers of which something is stored here."),
    "bookie_segments": ("bookie_segments", "Files of entries."),
    "bookie_disk_bytes": ("bookie_disk_bytes", "What these files take."),
    "bookie_free_bytes": ("bookie_free_bytes", "What is free on the disk of the bookie's journal, or on all of them."),
    "bookie_live_bytes": ("bookie_live_bytes", "Entries in full files that are still wanted."),
    "bookie_index_blocks_read": ("bookie_index_blocks_read_total", "Reads of index files, for entries of full files."),
    "bookie_index_files_rebuilt": (
        "bookie_index_files_rebuilt_total",
        "Index files found damaged, and made again from the entries.",
    ),
    "bookie_index_segments_in_memory": (
        "bookie_index_segments_in_memory",
        "Full files whose index is in memory, because the disk has not taken it yet.",
    ),
    "bookie_readonly": ("bookie_readonly", "1 while the disk is full but for the reserve."),
    "bookie_limbo_ledgers": ("bookie_limbo_ledgers", "Ledgers of which entries may be missing here, until repaired."),
    "bookie_scrubbed_bytes": ("bookie_scrubbed_bytes_total", "Bytes read again in search of damage."),
    "bookie_damaged_records": ("bookie_damaged_records_total", "Records with a wrong checksum."),
    "bookie_damage_marked_total": ("bookie_damage_marked_total", "Ledgers marked because the scrub found damage."),
    "bookie_reclaimed_bytes": ("bookie_reclaimed_bytes_total", "Disk space freed."),
    "bookie_rewritten_bytes": ("bookie_rewritten_bytes_total", "Bytes moved out of sparse files to free them."),
    "bookie_unheard_ledgers": (
        "bookie_unheard_ledgers_total",
        "Times that a ledger was kept whose id the metadata store has yet to give: it is an older copy of itself.",
    ),
    "bookie_dropped_ledgers": ("bookie_dropped_ledgers_total", "Deleted ledgers that were forgotten here."),
    "bookie_new_incarnations": ("bookie_new_incarnation", "1 if this process found its directories empty: a new id."),
    "bookie_bad_requests": ("bookie_bad_requests_total", "Requests that were not the protocol."),
    "bookie_connections": ("bookie_connections", "Connections of other nodes."),
    "bookie_directories": (
        "bookie_directories",
        "Directories that its journal is spread over, failed ones too.",
    ),
    "bookie_directories_failed": (
        "bookie_directories_failed",
        "Those of them whose disk has failed since the start: what they hold is refused.",
    ),
    # The worker that makes copies again.
    "autorecovery_enabled": ("autorecovery_enabled", "1 while auto-recovery is switched on, as this worker last saw."),
    "autorecovery_ledgers_marked": (
        "autorecovery_ledgers_marked",
        "Ledgers that are marked as lacking copies: the backlog, as this worker last saw it.",
    ),
    "autorecovery_ledgers_mending": ("autorecovery_ledgers_mending", "Those that this worker repairs now."),
    "autorecovery_ledgers_unreadable": (
        "autorecovery_ledgers_unreadable",
        "Those with entries of which this worker found no good copy anywhere; its log names them.",
    ),
    "autorecovery_ledgers_mended": ("autorecovery_ledgers_mended_total", "Ledgers whose mark this worker took away."),
    "autorecovery_attempts_failed": (
        "autorecovery_attempts_failed_total",
        "Attempts that left a ledger marked, since it has a leader, no bookie is spare, or for an error.",
    ),
    "autorecovery_copies_made": ("autorecovery_copies_made_total", "Copies of entries that this worker made."),
    "autorecovery_copied_bytes": ("autorecovery_copied_bytes_total", "Bytes of these copies."),
    "autorecovery_paced_bytes": (
        "autorecovery_paced_bytes_total",
        "Bytes that this node's worker and leaders copied, or read to check them, within `[autorecovery] bytes_per_s`.",
    ),
    "autorecovery_paced_seconds": (
        "autorecovery_paced_seconds_total",
        "Seconds in which there was something to copy or check: never shorter than that rate allows for the bytes.",
    ),
    # The auditor.
    "auditor_in_office": ("auditor_in_office", "1 if this node is the auditor of the cluster."),
    "auditor_enabled": (
        "auditor_enabled",
        "1 while the auditor finds auto-recovery switched on; 0 on nodes that are not the auditor.",
    ),
    "auditor_bookies_lost": (
        "auditor_bookies_lost",
        "Bookies that ledgers name and that have been away for longer than the delay, as the auditor sees it.",
    ),
    "auditor_rounds_total": (
        "auditor_rounds_total",
        "Times that this node has looked at every ledger for bookies that are lost.",
    ),
    "auditor_round_ledgers": ("auditor_round_ledgers", "Ledgers that there were in its last such round."),
    "auditor_round_seconds": ("auditor_round_seconds", "How long that took."),
    "auditor_marked_lost_total": (
        "auditor_marked_lost_total",
        "Marks made or grown since a lost bookie has copies of the ledger.",
    ),
    "auditor_marked_entries_total": (
        "auditor_marked_entries_total",
        "Marks written since a check found that a bookie does not have an entry which it is to have.",
    ),
    "auditor_marked_placement_total": (
        "auditor_marked_placement_total",
        "Marks made or grown since copies share a zone though another bookie can take one.",
    ),
    "auditor_checked_ledgers_total": (
        "auditor_checked_ledgers_total",
        "Ledgers whose bookies were asked which entries they have.",
    ),
    "auditor_check_unanswered_total": (
        "auditor_check_unanswered_total",
        "Times that a registered bookie did not answer that.",
    ),
    # Doors and links.
    "server_resp_connections": ("server_resp_connections", "Connections to the Redis port."),
    "server_resp_commands_total": ("server_resp_commands_total", "Commands that came by it."),
    "server_resp_connections_refused_total": ("server_resp_connections_refused_total", "Connections above the limit."),
    "server_resp_silent_closed_total": (
        "server_resp_silent_closed_total",
        "Connections closed for others, at the limit: they had never sent a command, or not logged in.",
    ),
    "server_resp_connections_unknown": (
        "server_resp_connections_unknown",
        "Connections that have sent no command yet, or where clients are asked, have not logged in.",
    ),
    "server_resp_slow_readers_closed_total": (
        "server_resp_slow_readers_closed_total",
        "Connections closed since their clients did not read their replies.",
    ),
    "server_resp_replies_put_off_total": (
        "server_resp_replies_put_off_total",
        "Times that a connection's replies did not fit and were read again later.",
    ),
    "server_resp_replies_refused_total": (
        "server_resp_replies_refused_total",
        "Commands refused since no room came for their replies.",
    ),
    "server_resp_output_bytes": ("server_resp_output_bytes", "Large or unread replies held in memory."),
    "server_resp_input_bytes": ("server_resp_input_bytes", "Commands held in memory that are incomplete or wait."),
    "server_resp_commands_under_way": ("server_resp_commands_under_way", "Operations begun and not answered."),
    "server_access_on": ("server_access_on", "1 where clients are asked who they are."),
    "server_access_unfounded": (
        "server_access_unfounded",
        "1 where nobody is served: other machines reach this node, and access control is off.",
    ),
    "server_access_users": ("server_access_users", "Users in the table that this server goes by."),
    "server_access_tokens": ("server_access_tokens", "Tokens in that table, expired ones included."),
    "server_access_denied_total": (
        "server_access_denied_total",
        "Operations, calls and requests refused: nobody had said who asks, or he lacked the right.",
    ),
    "server_logins_failed_total": (
        "server_logins_failed_total",
        "Logins with a wrong user or password.",
    ),
    "server_logins_limited_total": (
        "server_logins_limited_total",
        "Logins refused unchecked: too many of their address had failed or too many waited, or no thread was left.",
    ),
    "server_login_hashes_total": (
        "server_login_hashes_total",
        "Passwords hashed; what was verified once costs no second one.",
    ),
    "server_logins_pending": (
        "server_logins_pending",
        "Logins that wait for their hash.",
    ),
    "server_slow_door_total": (
        "server_slow_door_total",
        "Operations that took longer than `[server] slow_ms` at a door: all of gRPC, and those of timed Redis rounds.",
    ),
    "server_slow_waiting_total": (
        "server_slow_waiting_total",
        "Operations that waited longer than that for a leader that can be reached.",
    ),
    "server_slow_link_total": (
        "server_slow_link_total",
        "Operations under way to another server for longer than that, by looks four times a second.",
    ),
    "server_slow_leader_total": (
        "server_slow_leader_total",
        "Operations whose leader took longer than that, here.",
    ),
    "server_slow_left_out_total": (
        "server_slow_left_out_total",
        "Slow operations that are not in the slow log, but counted: too many in one second.",
    ),
    **TRACES,
    **NAMESPACES,
    **HEALTH,
    "server_forwarded_total": (
        "server_forwarded_total",
        "Operations sent on to the server that leads their partition.",
    ),
    "server_waited_for_leader_total": ("server_waited_for_leader_total", "Operations that had to wait for a leader."),
    "server_waiting_for_leader": ("server_waiting_for_leader", "Operations that wait for a leader now."),
    "server_leader_wait_timeouts_total": (
        "server_leader_wait_timeouts_total",
        "Operations refused since no leader came in time.",
    ),
    "server_peer_links": ("server_peer_links", "Open links to other servers."),
    "server_peer_links_lost_total": ("server_peer_links_lost_total", "Links that broke."),
    "server_peer_operations_in_flight": ("server_peer_operations_in_flight", "Forwarded operations without an answer."),
    "server_peer_sessions": ("server_peer_sessions", "Links from other servers."),
    "server_session_streams": (
        "server_session_streams",
        "Python clients whose sessions are on the Redis port; they count among its connections.",
    ),
    "server_session_streams_input_bytes": (
        "server_session_streams_input_bytes",
        "What those have sent of frames that are not complete.",
    ),
    "server_peer_refused_total": (
        "server_peer_refused_total",
        "Connections of those who said that they are servers and did not prove it.",
    ),
    "server_peer_links_refused_total": (
        "server_peer_links_refused_total",
        "Links that another server refused, or over which it did not prove itself or sent what is no frame.",
    ),
    "server_ring_hints_false_total": (
        "server_ring_hints_false_total",
        "Times that somebody told of a ring which the metadata store does not have.",
    ),
    "server_peer_operations_total": ("server_peer_operations_total", "Operations that other servers sent on to here."),
    "server_redirected": ("server_redirected", "Operations that look for the new owner of their key now."),
    "server_redirected_total": ("server_redirected_total", "Operations that came where their key was not owned."),
    "server_cluster_version": ("server_cluster_version", "Version of the cluster, as this server knows it."),
    "server_servers_undecodable": ("server_servers_undecodable", "Nodes below /servers that cannot be decoded."),
    "server_steward_changes_total": ("server_steward_changes_total", "Replicas and moves that this node has directed."),
    "server_partitions_without_leader": (
        "server_partitions_without_leader",
        "Partitions that nobody leads, as far as this server knows; / and /clusterz name them.",
    ),
    "server_servers_missing": ("server_servers_missing", "Servers that hold replicas and are not up."),
    "server_date_doubtful": (
        "server_date_doubtful",
        "1 while this server is not sure of its date: it leads nothing that another could. `/`, date, says why.",
    ),
    "server_date_removes": ("server_date_removes", "1 if this server may remove logs and pins by its date."),
    "server_date_drift_s": ("server_date_drift_seconds", "How far its wall clock is ahead of its date."),
    "server_date_behind_s": ("server_date_behind_seconds", "How far a majority of wall clocks is ahead of its date."),
    "server_dates_taken_over_total": (
        "server_dates_taken_over_total",
        "Number of steps forward to another server's date, because the monotonic clock had missed time.",
    ),
    "server_watches": ("server_watches", "Watches that are open at this node."),
    "server_watches_total": ("server_watches_total", "Watches begun."),
    "server_feed_tails": ("server_feed_tails", "Logs that are tailed for those who watch."),
    "server_feed_changes_total": ("server_feed_changes_total", "Changes given to watches and readers of pages."),
    "server_feed_pages_total": ("server_feed_pages_total", "Pages of changes given."),
    "server_feed_log_reads_total": (
        "server_feed_log_reads_total",
        "Reads of a log for those who were too far behind its tail.",
    ),
    "server_watches_too_slow_total": (
        "server_watches_too_slow_total",
        "Watches ended since their clients took nothing for a minute.",
    ),
    # The engines of all replicas here.
    "engine_memory_budget_bytes": (
        "engine_memory_budget_bytes",
        "What the partitions' states may have in memory together: `[partition] memory_bytes`.",
    ),
    "engine_buffer_bytes": (
        "engine_buffer_bytes",
        "Of that, write buffers: rows that are not in a file yet, or that a pin holds. Writes wait at three quarters.",
    ),
    "engine_block_bytes": ("engine_block_bytes", "Of that, cached blocks of files."),
    "engine_index_bytes": (
        "engine_index_bytes",
        "Of that, indexes and filters of files: all of them, and beyond the budget if they do not fit.",
    ),
    "engine_flushes_for_memory": (
        "engine_flushes_for_memory_total",
        "Write buffers that became files before they were full, since all together were too large.",
    ),
    "server_http_requests": ("server_http_requests", "Requests of the HTTP gateway that are under way."),
    "server_http_watches": ("server_http_watches", "Watches that are open at the HTTP gateway."),
    "server_http_overloaded_total": (
        "server_http_overloaded_total",
        "Requests and watches that the HTTP gateway refused for want of room.",
    ),
    # One partition's replica; `leading` only where it leads.
    "partition_is_leader": ("partition_is_leader", "1 where this node leads the partition and answers for it."),
    "partition_is_in_doubt": (
        "partition_is_in_doubt",
        "1 while replicas differ and this one has to find out which are damaged; longer than a minute: `kvstore fsck`.",
    ),
    "partition_has_failed": ("partition_has_failed", "1 if the replica has stopped; /, role and failure, says why."),
    "partition_seq": ("partition_seq", "Sequence of the last mutation applied here."),
    "partition_durable_seq": ("partition_durable_seq", "Sequence up to which the state is on this disk."),
    "partition_log_version": ("partition_log_version", "Cluster version by which its log is written."),
    "partition_owns": ("partition_owns", "Ranges of tokens that the partition owns as far as it has applied."),
    "partition_epoch": ("partition_epoch", "Epoch of the last entry applied; it rises with every change of leader."),
    "partition_keys": ("partition_keys", "Keys that are there."),
    "partition_elections": ("partition_elections_total", "Times that this replica stood for leader."),
    "partition_entries_tailed": ("partition_entries_tailed_total", "Log entries that this replica read and applied."),
    "partition_snapshots_installed": ("partition_snapshots_installed_total", "Snapshots taken from another replica."),
    "partition_snapshots_served": ("partition_snapshots_served_total", "Snapshots given to another replica."),
    "partition_ledgers_trimmed": ("partition_ledgers_trimmed_total", "Ledgers that this leader dropped as not needed."),
    "partition_pins_held": ("partition_pins_held", "States that this replica keeps for pinned reads."),
    "partition_move_counts_corrected": (
        "partition_move_counts_corrected_total",
        "Counts of a range that moves away which a second count has corrected: a bug.",
    ),
    "partition_move_copies_wrong": (
        "partition_move_copies_wrong_total",
        "Copies of a range that moves away which were not what was counted twice, and were made anew.",
    ),
    "partition_moves_stuck": (
        "partition_moves_stuck",
        "Moves away from here whose copies were wrong three times: they wait for somebody to look.",
    ),
    "partition_pins_taken": ("partition_pins_taken_total", "Pins that were taken while this replica led."),
    "partition_flushes": ("partition_flushes_total", "Times that the state was synced to disk."),
    "partition_leading_epoch": ("partition_leading_epoch", "Epoch in which this node leads."),
    "partition_leading_entries": ("partition_leading_entries_total", "Log entries written in this lead."),
    "partition_leading_mutations": ("partition_leading_mutations_total", "Mutations in them."),
    "partition_leading_answers": ("partition_leading_answers_total", "Operations answered in this lead."),
    "partition_leading_refused": ("partition_leading_refused_total", "Operations refused in this lead."),
    "partition_leading_pauses": (
        "partition_leading_pauses_total",
        "Times that this leader stopped appending because its engine could not keep up with its disk.",
    ),
    "partition_leading_queued": ("partition_leading_queued", "Operations that wait for the next log entry."),
    "partition_leading_queued_bytes": ("partition_leading_queued_bytes", "Their size."),
    "partition_leading_in_flight": (
        "partition_leading_in_flight",
        "Log entries sent and not acknowledged: at most `entries_in_flight_max`, beside those of moves.",
    ),
    "partition_leading_reads_waiting": ("partition_leading_reads_waiting", "Reads that wait for an acknowledgement."),
    "partition_leading_frozen": ("partition_leading_frozen", "Writes that wait since their range is being moved."),
    "partition_leading_lease_left_s": (
        "partition_leading_lease_left_seconds",
        "How long reads may be answered alone; 0 where nothing is read.",
    ),
    "partition_leading_retry_clients": ("partition_leading_retry_clients", "Clients whose results are remembered."),
    "partition_leading_retry_bytes": (
        "partition_leading_retry_bytes",
        "What remembering them takes; from 64 MiB on new clients are refused; imports apart, never above 128 MiB.",
    ),
    "partition_load_ops_per_s": (
        "partition_load_operations_per_second",
        "Operations answered by this leader, over the last ten seconds or so.",
    ),
    "partition_load_writes_per_s": ("partition_load_writes_per_second", "Mutations among them."),
    "partition_load_written_bytes_per_s": (
        "partition_load_written_bytes_per_second",
        "Their keys and values, by a sample.",
    ),
    "partition_load_hottest_key_share": (
        "partition_load_hottest_key_share",
        "Part of the operations that one key has; `kvstore ring show` names it.",
    ),
    "partition_log_ledgers": ("partition_log_ledgers", "Ledgers in the partition's list; only its leader says it."),
    "partition_log_list_bytes": (
        "partition_log_list_bytes",
        "What that list takes in the metadata store; at 262,144 it is rolled no further, at 524,288 nobody can lead.",
    ),
    "partition_log_ledgers_lacking_copies": (
        "partition_log_ledgers_lacking_copies",
        "Those that lack copies, or whose bookies are not all up, as its leader last saw.",
    ),
    "partition_log_ledgers_undecodable": (
        "partition_log_ledgers_undecodable",
        "Ledgers of anybody whose metadata could not be read, passed over by its leader; `kvstore fsck` names them.",
    ),
    "partition_log_copies_made": (
        "partition_log_copies_made_total",
        "Copies of the open ledger that its leader made again.",
    ),
    "partition_log_ledgers_sharing_zones": (
        "partition_log_ledgers_sharing_zones",
        "Closed ones with copies of one entry in one zone, though another zone could have one; they are marked.",
    ),
    "partition_log_open_ledger_bytes": ("partition_log_open_ledger_bytes", "Size of the ledger that is being written."),
    "partition_log_trimmed_seq": ("partition_log_trimmed_seq", "Sequence below which the log was trimmed."),
    # Histograms.
    "bookie_sync_s": (
        "bookie_sync_seconds",
        "How long a sync of the journal takes, until the event loop sees its end.",
    ),
    "bookie_group_records": ("bookie_group_records", "Records confirmed by one sync."),
    "server_resp_command_s": (
        "server_resp_command_seconds",
        "From beginning a command to writing its reply, of one in 16 rounds of commands.",
    ),
    "server_grpc_call_s": (
        "server_grpc_call_seconds",
        "Calls of the KV service, from their arrival to their result; of Execute and Session, each lane of a frame.",
    ),
    "server_http_request_s": (
        "server_http_request_seconds",
        "Requests of the HTTP gateway, from their head to their result; refused ones too.",
    ),
}
