"""Sessions: whose blocks they are.

A session references the blocks that its requests used or stored.  A block that several sessions reference is charged to
each and kept until the last of them lets it go; what only one references goes with it.
"""

from .book import SessionBook
from .keeper import Keeper, Remote
from .model import Session
from .scope import History, SessionScope, current_history, current_session
from .settings import SessionSettings

__all__ = [
    "History",
    "Keeper",
    "Remote",
    "Session",
    "SessionBook",
    "SessionScope",
    "SessionSettings",
    "current_history",
    "current_session",
]
