"""Auto-recovery: the auditor finds ledgers that lack copies and marks them, workers make the copies again."""
