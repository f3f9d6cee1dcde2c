"""Which threads are inside a manager now.

A destructor may run at any allocation, in any thread, also between two steps of a change to an index.  What it asks of
the manager has to wait until its thread is outside again.
"""

from __future__ import annotations

import threading


class Here(threading.local):
    """How deep this thread is inside; threads of the background pool always are."""

    depth = 0


HERE = Here()


class Inside:
    """A context: this thread is inside."""

    def __enter__(self) -> None:
        HERE.depth += 1

    def __exit__(self, *_: object) -> None:
        HERE.depth -= 1


INSIDE = Inside()
