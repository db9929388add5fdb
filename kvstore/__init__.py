"""A distributed key-value store whose only source of truth is a replicated log."""
