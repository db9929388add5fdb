"""Commands about ledgers that lack copies."""

from kvstore.cli.recovery.autorecovery import register

__all__ = ["register"]
