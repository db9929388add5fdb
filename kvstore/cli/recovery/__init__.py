"""Commands about under-replicated ledgers."""

from kvstore.cli.recovery.autorecovery import register

__all__ = ["register"]
