"""The ports of the outside world and their production adapters."""

from kvstore.env.ports import Clock, Disk, Env, File, Listener, Nursery, Prelude, Stream, StreamHandler, Task, Transport

__all__ = [
    "Clock",
    "Disk",
    "Env",
    "File",
    "Listener",
    "Nursery",
    "Prelude",
    "Stream",
    "StreamHandler",
    "Task",
    "Transport",
]
