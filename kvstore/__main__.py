"""`python -m kvstore` and the `kvstore` command."""

from kvstore.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
