"""`python -m kvstore.loadtest`: the command `kvstore-loadtest`."""

from __future__ import annotations

from kvstore.loadtest.run import main

if __name__ == "__main__":
    main()
