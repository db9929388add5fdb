"""Auto-recovery: the auditor finds under-replicated ledgers and marks them; replication workers make the missing
copies."""
