"""Jobs to start from."""
